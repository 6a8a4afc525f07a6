"""What the tests of the semi-supervised methods share: a client with missing entries, its network's logits, runs that
are stopped and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedmll import resume, run
from fedmll.core.message import Message
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.client_round import Client
from fedmll.runs.run_folder import MetricsRow
from fedmll.testing import experiment, make_client, make_trainer
from fedmll.training.callbacks import Callback

LABELS = np.array([[1, -1, 0], [0, -1, 0], [0, -1, 1], [1, -1, 0], [0, -1, -1], [-1, -1, 1]])
ANNOTATED = {"annotation__kind": "missing", "annotation__missing": 5, "training__rounds": 3, "training__lr": 0.01}


def learner_for(name: str, client: np.ndarray | None = None, round: int = 1, rounds: int = 9, **options: Any) -> Any:
    """A learner whose network has no batch statistics; and with labels a client of one batch, in this round."""
    training = options.pop("training", {})
    made = experiment(
        method__name=name, model__channels=(4, 6), model__norm="group", training__rounds=rounds,
        training__batch_size=8, **{f"method__{key}": value for key, value in options.items()},
        **{f"training__{key}": value for key, value in training.items()},
    )  # fmt: skip
    trainer = make_trainer(made)
    head: Any = trainer.model.head
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for parameter in trainer.weights.parameters:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        head.weight.mul_(40)  # so that samples differ
    if client is None:
        return trainer
    found = make_client(trainer, client, round=round)
    with torch.no_grad():
        head.bias.sub_(trainer.model(next(found.evaluation_batches()).images).mean(0))
    return trainer, found


def batch_of(client: Client) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the round's first batch, and the network's logits of them without augmentation."""
    batch = next(iter(client.batches()))
    with torch.no_grad():
        return batch.rows.numpy(), client.model(batch.view("none")).double().numpy()


def logits_of(trainer: Trainer, client: Client, weights: torch.Tensor | None = None) -> np.ndarray:
    """Of all the client's samples in order, by the network with these weights; it has its own afterwards."""
    before = trainer.weights.vector.clone()
    with torch.no_grad():
        if weights is not None:
            trainer.weights.vector.copy_(weights)
        found = client.model(next(client.evaluation_batches()).images).double().numpy()
        trainer.weights.vector.copy_(before)
    return found


def numbered(number: int) -> Message:
    return Message({"weights": torch.full((number + 2,), float(number))}, {"samples": 1.0})


class Stopping(Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_round_end(self, row: MetricsRow) -> None:
        if row["round"] == self.after:
            raise KeyboardInterrupt


def stopped_and_resumed(name: str, folder: Path, *remembered: str, **changes: Any) -> None:
    """Twelve clients, some of which take part: the same bits after an interruption, also of what clients remember."""
    made = experiment(
        **ANNOTATED | {"method__name": name, "partition__clients": 12, "data__limit": 240, "partition__minimum": 6,
                       "participation__fraction": 0.7, "training__rounds": 4} | changes
    )  # fmt: skip
    whole, stopped = folder / "whole", folder / "stopped"
    run(made.changed({"engine.workers": 2}), whole)
    with pytest.raises(KeyboardInterrupt):
        run(made, stopped, callback=Stopping(2))
    resume(stopped)
    ours, theirs = load_file(whole / "model.safetensors"), load_file(stopped / "model.safetensors")
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    round_state, yours = (
        {path.name[:6]: load_file(path) for path in sorted((out / "checkpoint" / "client_state").glob("*.safetensors"))}
        for out in (whole, stopped)
    )
    assert round_state.keys() == yours.keys()
    for key in remembered:
        assert round_state and all(torch.equal(round_state[client][key], yours[client][key]) for client in round_state)
