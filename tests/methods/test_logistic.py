"""The exact logistic head against scikit-learn's LogisticRegression on pooled, masked data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from fedmll.core.message import Message, Tensors
from fedmll.methods.parts import logistic_head
from fedmll.methods.parts.logistic_head import LogisticHead
from fedmll.testing import make_client_info


def pooled(features: np.ndarray, targets: np.ndarray, strength: float, balanced: bool = False) -> np.ndarray:
    """Rows [w, b], class by class, on the samples that know the class."""
    scaler = StandardScaler().fit(features)
    x, rows = scaler.transform(features), []
    for c in range(targets.shape[1]):
        known = targets[:, c] >= 0
        y = targets[known, c]
        if len(set(y.tolist())) < 2:
            rate = (y.sum() + 0.5) / (len(y) + 1)
            rows.append(np.append(np.zeros(x.shape[1]), np.log(rate / (1 - rate))))
            continue
        found = LogisticRegression(
            C=1 / (strength * len(y)),
            tol=1e-10,
            max_iter=10_000,
            class_weight="balanced" if balanced else None,
        ).fit(x[known], y)
        w = found.coef_[0] / scaler.scale_
        rows.append(np.append(w, found.intercept_ - w @ scaler.mean_))
    return np.array(rows)


class FederatedFit:
    """The part with clients that are arrays, without a model: the rows of the head after every round."""

    def __init__(self, clients: list[tuple[np.ndarray, np.ndarray]], **options: Any) -> None:
        self.clients = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in clients]
        self.classes = self.clients[0][1].shape[1]
        task = SimpleNamespace(classes=range(self.classes), rounds=99, min_group_size=1)
        self.part = LogisticHead(task, LogisticHead.Options(**options), {})  # type: ignore[arg-type]
        self.part.write_rows = lambda merged, rows: merged.update(rows=rows)  # type: ignore[method-assign]
        self.state: Tensors = {}
        self.rows = torch.zeros(0)
        self.records: dict[str, Any] = {}

    def held_out(self, samples: int) -> torch.Tensor:
        return torch.arange(samples) % 5 == 0

    def reply(self, features: torch.Tensor, targets: torch.Tensor, round: int) -> Tensors:
        folds = None
        if self.part.chooses(round):
            folds = logistic_head.split_folds(targets, self.held_out(len(targets)), 1)
        if round == 0:
            return logistic_head.opening_sums(features, targets, folds)
        sent = [self.state[name] for name in ("rows", "basis", "weights")]
        return logistic_head.round_sums(features, targets, *sent, folds)

    def run(self) -> np.ndarray:
        for round in range(LogisticHead.rounds(self.part.options) + 1):
            aggregator = self.part.aggregator(self.state, round, {})
            assert aggregator is not None
            for index, client in enumerate(self.clients):
                aggregator.add(make_client_info(index, self.classes), Message(self.reply(*client, round)))
            merged: Tensors = {}
            self.state, self.records = aggregator.result(merged)
            self.rows = merged["rows"]
        return self.rows.numpy()


def drawn(seed: int, kind: str, classes: int, width: int = 6, samples: int = 80) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(samples, width)) * rng.uniform(0.1, 30, width) + rng.normal(size=width) * 5
    scores = StandardScaler().fit_transform(features) @ rng.normal(size=(width, classes)) + rng.normal(size=classes)
    targets = (rng.random((samples, classes)) < 1 / (1 + np.exp(-scores))).astype(np.int8)
    if kind == "entries":
        targets[rng.random(targets.shape) < 0.3] = -1
    elif kind == "empty":
        targets[:, 0] = -1
    elif kind == "rare":  # one positive, and a class that has none
        targets[:, 0], targets[7, 0], targets[:, -1] = 0, 1, 0
    elif kind == "separable":
        targets[:, 0] = features[:, 0] > np.median(features[:, 0])
    return features, targets


KINDS = ["all", "classes", "entries", "empty", "rare", "separable"]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000), clients=st.integers(1, 5), classes=st.integers(1, 5),
    strength=st.floats(1e-3, 3), kind=st.sampled_from(KINDS), balanced=st.booleans(),
)  # fmt: skip
def test_the_sums_give_the_pooled_masked_regression(
    seed: int, clients: int, classes: int, strength: float, kind: str, balanced: bool
) -> None:
    features, targets = drawn(seed, kind, classes)
    rng = np.random.default_rng(seed)
    owner = rng.integers(0, clients, len(features))
    if kind == "classes":
        targets[~(rng.random((clients, classes)) < 0.6)[owner]] = -1
    own = [(features[owner == c], targets[owner == c]) for c in rng.permutation(clients) if (owner == c).any()]
    rows = FederatedFit(own, logistic=strength, logistic_balanced=balanced).run()
    expected = pooled(features, targets, strength, balanced)
    np.testing.assert_allclose(rows, expected, atol=1e-5 * max(1, np.abs(expected).max()))
    one = FederatedFit([(features, targets)], logistic=strength, logistic_balanced=balanced).run()
    np.testing.assert_allclose(rows, one, atol=1e-9 * max(1, np.abs(expected).max()))
