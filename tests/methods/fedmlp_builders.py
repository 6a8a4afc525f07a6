"""What the tests of FedMLP share: a client with given targets, in either stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.special import expit

from fedmll.config.experiment import Experiment
from fedmll.core.message import Message
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.client_round import Batch, Client, ClientRound
from fedmll.testing import make_client, make_trainer, start_round

LABELS = np.array([[1, -1, 0], [0, -1, 0], [0, -1, 1], [1, -1, 0], [0, -1, -1], [0, -1, 1]])
EARLY = {  # tags from round 2 on, at once and many
    "method__name": "fedmlp",
    "method__t1": 1,
    "method__T0": 0.2,
    "method__T1": 0.2,
    "method__L": 0.5,
    "method__R": 0.5,
    "annotation__kind": "missing",
    "annotation__missing": 5,
}


def make(
    options: dict[str, Any], labels: np.ndarray = LABELS, round: int = 1, seed: int = 0, norm: str = "group"
) -> tuple[Trainer, Client]:
    """A learner and a client with random 8×8 images and these targets; the network has no batch statistics."""
    count, classes = labels.shape
    experiment = Experiment.make(
        {
            "method": {"name": "fedmlp", **options},
            "model": {"channels": (4, 6), "norm": norm},
            "training": {"batch_size": count, "rounds": 9},
            "partition": {"clients": 2},
        }
    )
    trainer = make_trainer(experiment, tuple(f"k{i}" for i in range(classes)))
    return trainer, make_client(trainer, labels, round=round, seed=seed)


def stage_two(
    labels: np.ndarray, tags: np.ndarray | None = None, votes: bool = True, **options: Any
) -> tuple[Trainer, ClientRound, np.ndarray]:
    """A client's round 2 in a federation with t1 = 1, with what it remembers; the prototypes are two random directions
    a class, and given too."""
    trainer, client = make({"t1": 1, "T0": 0.5, "T1": 0.5, **options}, labels, round=2)
    prototypes = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(5))
    difficulty = torch.tensor([1.0, 0.5, 1.0])
    message = sent(prototypes=prototypes, votes=torch.full((2, 3), votes), difficulty=difficulty)
    memory = {} if tags is None else {"tags/tags": torch.from_numpy(tags)}
    return trainer, start_round(trainer, client, message, memory), prototypes.numpy().astype(np.float64)


def sent(**tensors: torch.Tensor) -> Message:
    """By the server's side of the tags."""
    return Message({f"tags/{name}": tensor for name, tensor in tensors.items()})


def remembered(labels: np.ndarray) -> np.ndarray:
    """Tags for some of the missing entries; with T0 = T1 = 0 round 2 adds none of its own."""
    tags = np.full(labels.shape, -1, np.int8)
    tags[0, 1], tags[1, 1], tags[4, 2] = 1, 0, 0
    return tags


def tags_of(client_round: ClientRound) -> np.ndarray:
    """What the client remembers."""
    return client_round.client_states["tags"]["tags"].numpy()


def expected_keys(trainer: Trainer, round: int) -> set[str]:
    """What a reply of the round must hold."""
    method, weights = trainer.method, {"weights": torch.zeros(3)}
    return {
        method.tensor_name(part, name)
        for part in method.replying_parts(round)
        for name in part.reply_spec(method.tensors_of(part, weights), round)
    }


def move(client: Client) -> None:
    """The student leaves the teacher."""
    with torch.no_grad():
        for parameter in client.weights.parameters:
            parameter.add_(0.1)


def one_batch(client: Client) -> Batch:
    """The round's first, with its views drawn again from the start."""
    return next(iter(client.batches()))


def seen_by(client: Client) -> tuple[np.ndarray, np.ndarray]:
    """Features and p of all its samples, of the model as it is now in evaluation mode."""
    model: Any = client.model.eval()
    with torch.no_grad():
        features = model.backbone(next(client.evaluation_batches()).images).mean((2, 3))
        return features.numpy(), torch.sigmoid(model.head(features)).numpy()


def bce(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    p = expit(z.astype(np.float64))
    return -(y * np.log(p) + (1 - y) * np.log(1 - p))
