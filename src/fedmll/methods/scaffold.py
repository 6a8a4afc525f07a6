"""SCAFFOLD — Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020.

Control variates: c of the server, c_i of every client, gradients both. A client's steps are w ← w − lr (g_i(w) + c −
c_i) (Eq. 3); after τ of them (Eq. 4, option II; Eq. 5)

    c_i⁺ = c_i − c + (w_g − w_i)/(τ lr),   c ← c + (1/N) Σ (c_i⁺ − c_i),   w as FedAvg,

with N all clients, also those that did not take part. Parameters only. (w_g − w_i)/(τ lr) is the mean gradient of
plain SGD. With momentum ρ it is up to 1/(1 − ρ) times too long, and of Adam's steps it has no scale at all: both are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fedmll.client import Work
from fedmll.errors import ConfigError
from fedmll.message import Tensors
from fedmll.methods.contract import Like, Merger, Part, Sum, together
from fedmll.methods.expected import LARGEST_GROWTH
from fedmll.methods.method import Method
from fedmll.task import Task

if TYPE_CHECKING:
    from fedmll.experiment import Experiment


class ControlVariates(Part):
    """Every gradient + c − c_i (Eq. 3–5)."""

    name = "control-variates"
    every_class = True
    common = True
    sends = ("c",)

    def __init__(self, task: Task, options: Any, beside: Mapping[str, type[Part]]) -> None:
        super().__init__(task, options, beside)
        self.clients = task.clients  # N

    @classmethod
    def check(cls, options: Any, experiment: Experiment, where: str) -> None:
        training = experiment.training
        if training.optimizer != "sgd" or training.momentum:
            now = "momentum" if training.optimizer == "sgd" else f"'{training.optimizer}'"
            raise ConfigError(
                f"SCAFFOLD (the part '{cls.name}') reads the mean gradient of a round off the way of plain SGD, and "
                f"that of {now} is no such mean. Set training.optimizer = 'sgd' (with a larger training.lr) and "
                "training.momentum = 0."
            )

    def start(self) -> Tensors:
        return {"c": torch.zeros(self.weights.parameter_end)}

    def prepare(self, work: Work) -> tuple[Tensor, Tensor, Tensor]:
        """c, c_i and w_g."""
        c = work.received(self.name)["c"]
        own = work.memory(self.name).get("c", torch.zeros_like(c))
        return c, own, work.client.weights.parameter_vector.clone()

    @together
    def adjust(self, work: Work, mine: tuple[Tensor, Tensor, Tensor]) -> None:
        c, own, _ = mine
        work.client.weights.add_gradient(c - own)

    def finish(self, work: Work, mine: tuple[Tensor, Tensor, Tensor]) -> Tensors:
        c, own, start = mine
        moved = start - work.client.weights.parameter_vector
        change = moved / (work.steps * self.task.experiment.training.lr) - c
        work.memory(self.name)["c"] = own + change
        return {"change": change}

    def expects(self, sent: Tensors, round: int) -> dict[str, Like]:
        """No longer than what the weights that are believed allow in one step."""
        longest = (LARGEST_GROWTH + 1) * (1 + float(sent["weights"].norm())) / self.task.experiment.training.lr
        return {"change": Like(tuple(sent["c"].shape), norm=longest + float(sent["c"].norm()))}

    def merger(self, state: Tensors, round: int, beside: Mapping[str, Merger]) -> Merger:
        return Sum("change", lambda total: {"c": (state["c"] + total / self.clients).float()})


class Scaffold(Method):
    name = "scaffold"
    summary = "FedAvg whose clients correct each gradient by c − c_i; plain SGD"
    paper = "Karimireddy et al., ICML 2020"
    setting = ("skew",)
    up = "the change of its control variate (as large as the model)"
    down = "the server's control variate (as large as the model)"
    remembers = "its control variate"
    parts = (*Method.parts, ControlVariates)
    published: ClassVar[dict[str, Any]] = {"training.optimizer": "sgd"}
