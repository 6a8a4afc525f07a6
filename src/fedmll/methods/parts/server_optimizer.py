"""FedOpt — Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, "Adaptive Federated Optimization", ICLR
2021: the server takes a step with its own optimizer instead of replacing its model by the average.

Δ is the average of the clients' models minus the global model w at the start of the round. In every round (Alg. 2)

    m ← β1 m + (1 − β1) Δ                                  m = 0 before round 1
    adagrad   v ← v + Δ²                                   v = τ² before round 1
    yogi      v ← v − (1 − β2) Δ² sign(v − Δ²)
    adam      v ← β2 v + (1 − β2) Δ²
    w ← w + η m / (√v + τ)

and `sgd` is the momentum of FedAvgM (Hsu, Qi and Brown, 2019): m ← β1 m + Δ, w ← w + η m. With η = 1 and β1 = 0 it is
the plain average. Any average can be used: Δ is computed from its result. The optimizer moves the parameters only;
running statistics of BatchNorm are averaged, because an optimizer could make a variance negative.

The paper has β1 = 0.9 (0 for Adagrad), β2 = 0.99 and τ = 1e-3, and tunes η for each task. η is 1 for `sgd` and 0.01 for
the others, unless it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from fedmll.config.experiment import Experiment
from fedmll.core.message import Tensors
from fedmll.methods.framework.base import AUTO, Aggregator, PartOptions, Records, Resolved, ServerOnlyPart, option


class ServerOptimizer(ServerOnlyPart):
    """FedOpt: the server takes an optimizer step along the average update instead of taking the average."""

    name = "server-optimizer"
    conflicts = frozenset({"local-models"})

    class Options(PartOptions):
        server_optimizer: Literal["sgd", "adam", "yogi", "adagrad"] = option("adam", "the server's optimizer")
        server_lr: Annotated[float, Field(gt=0)] | Literal["auto"] = option(
            "auto", "η: learning rate of the server; auto: 1 for sgd, 0.01 for the others"
        )
        server_beta1: Annotated[float, Field(ge=0, lt=1)] | Literal["auto"] = option(
            "auto", "β1: momentum; auto: 0.9, and 0 for adagrad"
        )
        server_beta2: float = option(0.99, "β2: decay of the squared updates (adam, yogi)", ge=0, lt=1)
        server_tau: float = option(1e-3, "τ: the smallest divisor of an update (adam, yogi, adagrad)", gt=0)

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> Resolved:
        kind = options.server_optimizer
        decided = {"server_lr": 1.0 if kind == "sgd" else 0.01, "server_beta1": 0.0 if kind == "adagrad" else 0.9}
        return {name: (value, f"for {kind}") for name, value in decided.items() if getattr(options, name) == AUTO}

    def initial_state(self) -> Tensors:
        zeros = torch.zeros(self.weights.parameter_end)
        squares = {} if self.options.server_optimizer == "sgd" else {"v": zeros + self.options.server_tau**2}
        return {"m": zeros} | squares

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        return ServerOptimizerAggregator(self, state)


class ServerOptimizerAggregator(Aggregator):
    """One step, in float64."""

    def __init__(self, part: ServerOptimizer, state: Tensors) -> None:
        self.options, self.state, self.end = part.options, state, part.weights.parameter_end

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        kind, beta1, beta2 = self.options.server_optimizer, self.options.server_beta1, self.options.server_beta2
        state = {name: tensor.double() for name, tensor in self.state.items()}
        before, average = self.global_weights["weights"][: self.end].double(), merged["weights"][: self.end].double()
        change = average - before
        if kind == "sgd":
            step = state["m"] = beta1 * state["m"] + change
        else:
            square, v = change.square(), state["v"]
            state["m"] = beta1 * state["m"] + (1 - beta1) * change
            state["v"] = {
                "adagrad": v + square,
                "yogi": v - (1 - beta2) * square * torch.sign(v - square),
                "adam": beta2 * v + (1 - beta2) * square,
            }[kind]
            step = state["m"] / (state["v"].sqrt() + self.options.server_tau)
        step = self.options.server_lr * step
        merged["weights"] = torch.cat([(before + step).float(), merged["weights"][self.end :]])
        return {name: tensor.float() for name, tensor in state.items()}, {"server_step": float(step.norm())}
