"""Clients whose losses are quadratic, and where they meet: a line through one point a client, with the real learner.

The squared error of a linear model without a backbone; all samples of a client are one and the same, so every batch has
the client's whole gradient, and clients differ in how many steps they take.
"""

from __future__ import annotations

import numpy as np
import torch

from fedmll.core.message import Tensors
from fedmll.data.dataset import Dataset
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.client_round import Client
from fedmll.testing import aggregate, client_with, experiment, make_client_info, make_trainer

X = np.array([-1.0, 0.5, 1.5])
Y = np.array([[1, 0], [0, 0], [1, 1]])  # (clients, classes): no line goes through all
SIZES = (16, 32, 64)
STEPS = (1, 2, 4)  # with batches of 16


def trainer(parts: list[str], average: str, lr: float) -> Trainer:
    made = experiment(data__name="features:points.npz", model__channels=()).changed(
        {
            "method": {"name": "compose", "head": "linear", "parts": ["squared-error", *parts], "average": average},
            "training.rounds": 1000,
            "training.optimizer": "sgd",
            "training.lr": lr,
            "training.weight_decay": 0.0,
        }
    )
    return make_trainer(made, ("a", "b"), (1,), clients=3)


def client(trainer: Trainer, index: int, round: int) -> Client:
    size, task = SIZES[index], trainer.task
    data = Dataset(
        np.full((size, 1), X[index], np.float32), np.repeat(Y[index : index + 1], size, 0).astype(np.int8), task.classes
    )
    return client_with(trainer, data, round=round, name=f"c{index:03d}")


def optimum(shares: np.ndarray) -> np.ndarray:
    """Rows (slope, intercept) of the logits that minimise Σ shares_i (z/4 + ½ − y)²."""
    root = np.sqrt(shares)[:, None]
    design = np.stack([X, np.ones(3)], 1)
    return np.linalg.lstsq(root * design, root * 4 * (Y - 0.5), rcond=None)[0].T


def resting(shares: np.ndarray, lr: float, *, normalised: bool) -> np.ndarray:
    """Where the average of clients that take 1, 2 and 4 steps of this length comes to rest: each client's move is
    affine, (I − (I − lr H_i)^τ_i)(w_i* − w), and divided by τ_i if normalised."""
    left, right = np.zeros((2, 2)), np.zeros((2, 2))
    for x, y, share, steps in zip(X, Y, shares, STEPS, strict=True):
        design = np.array([x, 1.0])
        hessian = np.outer(design, design) / 16  # of the mean over two classes of (z/4 + ½ − y)²
        moves = np.eye(2) - np.linalg.matrix_power(np.eye(2) - lr * hessian, steps)
        own = np.outer(design, 4 * (y - 0.5)) / (design @ design)
        weight = share / steps if normalised else share
        left += weight * moves
        right += weight * moves @ own
    return np.linalg.solve(left, right).T


def settled(trainer: Trainer, rounds: int, weights: str = "size") -> np.ndarray:
    """The rows after so many rounds."""
    trainer.method.average_part.options.weighting = weights
    state, memories = trainer.method.initial_state(), [dict[str, torch.Tensor]() for _ in SIZES]
    for number in range(1, rounds + 1):
        replies = []
        for index, memory in enumerate(memories):
            sent = trainer.method.send(state, make_client_info(index, 2), number)
            replies.append((make_client_info(index, 2), trainer.train(client(trainer, index, number), sent, memory)))
        state, _ = aggregate(trainer.method, state, replies, number)
    return rows(trainer, state)


def rows(trainer: Trainer, state: Tensors) -> np.ndarray:
    named = trainer.weights.named(state)
    return np.concatenate([named["head.weight"].numpy(), named["head.bias"].numpy()[:, None]], 1)
