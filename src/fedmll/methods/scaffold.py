"""SCAFFOLD — Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020.

Control variates are estimates of gradients: c at the server and c_i at every client. A client's steps are
w ← w − lr (g_i(w) + c − c_i) (Eq. 3). After τ steps (Eq. 4–5)

    option I    c_i⁺ = g_i(w_g), the gradient at the received weights over all data of the client
    option II   c_i⁺ = c_i − c + (w_g − w_i)/(τ lr)
    c ← c + (1/N) Σ (c_i⁺ − c_i),   w as FedAvg,

where N is the number of all clients, also of those that did not take part. Option II, the default, is the one of the
paper's experiments and costs nothing; option I is more stable and costs one more pass over the data. It applies to
parameters only, not to buffers. (w_g − w_i)/(τ lr) is the mean gradient only for plain SGD, so momentum and other
optimizers are refused.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.core.message import Tensors
from fedmll.methods.framework.allowed_replies import LARGEST_GROWTH
from fedmll.methods.framework.base import Part, PartOptions, Records, TensorSpec, option, vectorized
from fedmll.methods.framework.client_round import ClientRound
from fedmll.methods.framework.method import Method


class ControlVariates(Part):
    """Adds c − c_i to every gradient (Eq. 3–5)."""

    name = "control-variates"
    conflicts = frozenset({"private-labels", "local-models"})
    sends = ("c",)
    sums = ("change",)

    class Options(PartOptions):
        control_update: Literal["II", "I"] = option(
            "II", "c_i⁺ (Eq. 4): II: the mean gradient of the round; I: the gradient at the received weights"
        )

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        training = experiment.training
        if training.optimizer != "sgd" or training.momentum:
            now = "momentum" if training.optimizer == "sgd" else f"'{training.optimizer}'"
            raise ConfigError(
                f"SCAFFOLD (the part '{cls.name}') computes the mean gradient of a round from the update of plain SGD, "
                f"which is not possible with {now}. Set training.optimizer = 'sgd' (with a larger training.lr) and "
                "training.momentum = 0."
            )

    def initial_state(self) -> Tensors:
        return {"c": torch.zeros(self.weights.parameter_end)}

    def on_round_start(self, client_round: ClientRound) -> tuple[Tensor, Tensor, Tensor]:
        """c, c_i and w_g."""
        c = self.received(client_round)["c"]
        own = self.client_state(client_round).get("c", torch.zeros_like(c))
        return c, own, client_round.weights.parameter_vector.clone()

    @vectorized
    def on_gradients(self, client_round: ClientRound, round_state: tuple[Tensor, Tensor, Tensor]) -> None:
        c, own, _ = round_state
        client_round.weights.add_gradient(c - own)

    def on_round_end(self, client_round: ClientRound, round_state: tuple[Tensor, Tensor, Tensor]) -> Tensors:
        c, own, start = round_state
        if self.options.control_update == "I":
            change = self.gradient(client_round, start) - own
        else:
            moved = start - client_round.weights.parameter_vector
            change = moved / (client_round.steps * self.task.experiment.training.lr) - c
        self.client_state(client_round)["c"] = own + change
        return {"change": change}

    def gradient(self, client_round: ClientRound, start: Tensor) -> Tensor:
        """g_i(w_g), the mean over the first epoch of the round. The model has its trained weights afterwards."""
        client, weights, training = client_round.client, client_round.weights, self.task.experiment.training
        trained, counters = weights.vector.clone(), weights.counters.clone()
        weights.parameter_vector.copy_(start)
        client_round.model.train()
        total, samples = training.weight_decay * start, len(client.data)  # SGD adds the weight decay to the gradient
        for batch in islice(client.batches(), training.batches(samples)):
            found = torch.autograd.grad(client_round.batch_loss(batch), weights.parameters, materialize_grads=True)
            total.add_(torch.cat([gradient.flatten() for gradient in found]), alpha=len(batch) / samples)
        weights.vector.copy_(trained)
        weights.counters.copy_(counters)
        return total

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        """The norm is bounded by the largest update of the weights that is accepted, as if made in one step."""
        longest = (LARGEST_GROWTH + 1) * (1 + float(sent["weights"].norm())) / self.task.experiment.training.lr
        return {"change": TensorSpec(tuple(sent["c"].shape), norm=longest + float(sent["c"].norm()))}

    def update_state(self, state: Tensors, sums: Tensors, round: int) -> tuple[Tensors, Records]:
        return {"c": (state["c"] + sums["change"] / self.task.clients).float()}, {}


class Scaffold(Method):
    name = "scaffold"
    summary = "FedAvg with control variates that correct each gradient by c − c_i; only for plain SGD"
    paper = "Karimireddy et al., ICML 2020"
    up = "the change of its control variate (as large as the model)"
    down = "the server's control variate (as large as the model)"
    remembers = "its control variate (as large as the model)"
    parts = (*Method.parts, ControlVariates)
    published: ClassVar[dict[str, Any]] = {"training.optimizer": "sgd"}
