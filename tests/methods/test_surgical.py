"""Surgical Aggregation: classifier rows against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import small

from fedmll import run
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message
from fedmll.testing import aggregate, make_client_info, make_trainer

FEW = {"data__limit": 80, "partition__clients": 2, "training__rounds": 1}
# The clients' sizes and the classes that they annotate: class a is shared by all, b by two, c has one owner, d none.
OWNED = {0: (10.0, (0, 1)), 1: (30.0, (0,)), 2: (20.0, (0, 1, 2))}


@pytest.mark.parametrize("weights", ["size", "equal"])
def test_rows_by_hand(weights: str) -> None:
    trainer = make_trainer(small(method__name="surgical", method__weighting=weights), ("a", "b", "c", "d"))
    state = trainer.method.initial_state()
    named = trainer.weights.named(state)
    models = {index: {name: tensor + 1.0 * (index + 1) ** 2 for name, tensor in named.items()} for index in OWNED}
    replies = []
    for index, (samples, owned) in OWNED.items():
        trainer.weights.load_named(models[index])
        replies.append((make_client_info(index, 4, owned), Message(trainer.weights.dump(), {"samples": samples})))
    after = trainer.weights.named(aggregate(trainer.method, state, replies, 1)[0])
    share = {index: samples if weights == "size" else 1.0 for index, (samples, _) in OWNED.items()}

    def mean(*owners: int) -> float:
        """How far the average over these owners is from the start."""
        return sum(share[k] * (k + 1) ** 2 for k in owners) / sum(share[k] for k in owners)

    for row, moved in enumerate((mean(0, 1, 2), mean(0, 2), 9.0, 0.0)):
        torch.testing.assert_close(after["head.weight"][row], named["head.weight"][row] + moved)
        torch.testing.assert_close(after["head.bias"][row], named["head.bias"][row] + moved)
    for name in named:
        if not name.startswith("head") and named[name].is_floating_point():
            torch.testing.assert_close(after[name], named[name] + mean(0, 1, 2))
        elif not name.startswith("head"):
            assert not after[name].any()  # how many batches a client trained on is not told
    assert mean(0, 1, 2) != mean(0, 2)


def test_every_client_has_and_sends_all_rows() -> None:
    trainer = make_trainer(small(method__name="surgical"), ("a", "b", "c", "d"))
    state = trainer.method.initial_state()
    sent = trainer.method.send(state, make_client_info(0, 4, (1,)), 1)
    assert torch.equal(sent["weights"], state["weights"])
    assert trainer.method.find_problem(sent, Message(dict(state), {"samples": 1.0}), 1) is None
    assert not trainer.method.has("private-labels")


def test_complete_annotation_is_fedavg_pl_bit_for_bit() -> None:
    for changes in ({}, {"method__weighting": "equal"}):
        plain, surgical = (
            run(small(**FEW, method__name=name, **changes)).weights for name in ("fedavg-pl", "surgical")
        )
        assert all(torch.equal(plain[name], surgical[name]) for name in plain)
    missing = {"annotation__kind": "missing", "annotation__missing": 5}
    plain, surgical = (run(small(**FEW, method__name=name, **missing)).weights for name in ("fedavg-pl", "surgical"))
    assert not torch.equal(plain["head.weight"], surgical["head.weight"])


def test_a_head_without_rows_is_refused() -> None:
    fusion = {"method": {"name": "compose", "head": "ctran", "parts": ["masked"], "average": "surgical"}}
    with pytest.raises(ConfigError, match="'surgical' requires a linear classifier with one row"):
        small().changed(fusion)
    assert np.isfinite(run(small(**FEW).changed(fusion | {"method.head": "linear-by-name"})).metrics["macro_auc"])
