"""FedMLP against NumPy and hand-worked cases: the first stage's loss, prototypes and difficulty, the server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from fedmlp_builders import LABELS, bce, make, one_batch, seen_by
from scipy.special import expit
from torch.nn import functional as F

from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.methods.parts.missing_label_detection import MissingLabelTags, local_prototypes
from fedmll.methods.parts.semi_supervised import log_prior_odds
from fedmll.testing import aggregate, compute_loss, first_step, make_client_info, make_reply, start_round

# Eq. 3 and 4


@pytest.mark.parametrize("positives", [1, 37, 99])
def test_prior_in_logit_space_is_the_ratio_of_eq_3(positives: int) -> None:
    z = np.linspace(-8, 8, 41)
    p, prior = expit(z), positives / 100
    ratio = p * prior / (p * prior + (1 - p) * (1 - prior))
    moved = expit(z + log_prior_odds(torch.tensor([positives]), torch.tensor([100]), 100).double().numpy())
    np.testing.assert_allclose(moved, ratio, rtol=1e-5)


def test_prior_is_finite_at_the_extremes() -> None:
    odds = log_prior_odds(torch.tensor([0, 10]), torch.tensor([10, 10]), 10)
    np.testing.assert_allclose(odds.numpy(), [np.log(1 / 19), np.log(19)], rtol=1e-5)  # π = 1/20 and 19/20
    for z in (-50.0, 50.0):
        for y in (0.0, 1.0):
            logits = (odds + z).requires_grad_()
            loss = F.binary_cross_entropy_with_logits(logits, torch.full((2,), y))
            loss.backward()
            assert torch.isfinite(loss)
            assert torch.isfinite(logits.grad).all()


def test_wpc_loss_over_the_known_entries_of_two_views() -> None:
    trainer, client = make({})
    step = first_step(trainer, client_round := start_round(trainer, client))
    loss = compute_loss(trainer, client_round, step)
    again = one_batch(client)
    labels = LABELS[again.rows.numpy()]
    prior = np.array([2 / 6, 1 / 12, 2 / 5])  # the last class has a blank: over the five that are known
    entries = []
    for _ in range(2):
        z = client.model(again.view("weak")).detach().numpy()
        entries.append(bce(z + np.log(prior / (1 - prior)), labels == 1) * (labels >= 0))
    assert len(step.images) == 2 * len(LABELS)
    assert not np.allclose(entries[0], entries[1])  # the views differ
    np.testing.assert_allclose(loss.item(), np.mean(entries), rtol=1e-5)


def test_an_unknown_class_gets_no_gradient_in_the_first_stage() -> None:
    trainer, client = make({})
    compute_loss(trainer, start_round(trainer, client)).backward()
    gradient = client.model.head.weight.grad
    assert not gradient[1].any()
    assert gradient[0].any()


# Eq. 5, 6 and 10


def test_local_prototypes() -> None:
    features = np.random.default_rng(1).normal(size=(6, 5)).astype(np.float32)
    labels = np.array([[1, 0, -1], [0, 0, -1], [-1, 0, -1], [1, 0, -1], [0, 0, -1], [0, 0, -1]])
    prototypes, votes = local_prototypes(torch.from_numpy(features), torch.from_numpy(labels))
    np.testing.assert_allclose(prototypes[1, 0], features[[0, 3]].mean(0), rtol=1e-5)
    np.testing.assert_allclose(prototypes[0, 0], features[[1, 4, 5]].mean(0), rtol=1e-5)
    np.testing.assert_allclose(prototypes[0, 1], features.mean(0), rtol=1e-4, atol=1e-6)
    assert votes.tolist() == [[True, True, False], [True, False, False]]
    single, _ = local_prototypes(torch.from_numpy(features), torch.tensor([[1], [0], [0], [0], [0], [0]]))
    np.testing.assert_allclose(single[1, 0], features[0], rtol=1e-6)  # the mean of one sample


def uploads(sizes: list[int], prototypes: np.ndarray, votes: np.ndarray, difficulty: np.ndarray) -> list[Any]:
    """Replies of clients: (client, 2, class, width), (client, 2, class), (client, class)."""
    return [
        (
            make_client_info(i, votes.shape[2]),
            Message(
                {
                    "weights": torch.full((3,), float(i)),
                    "tags/prototypes": torch.tensor(prototypes[i], dtype=torch.float32),
                    "tags/votes": torch.tensor(votes[i]),
                    "tags/difficulty": torch.tensor(difficulty[i], dtype=torch.float32),
                    "tags/made": torch.tensor([5 + i, 2 * i]),
                },
                {"samples": size, "loss": 1.0},
            ),
        )
        for i, size in enumerate(sizes)
    ]


def test_server_means() -> None:
    trainer, _ = make({"t1": 1})
    rng = np.random.default_rng(2)
    prototypes = rng.normal(size=(3, 2, 3, 4))
    votes = np.ones((3, 2, 3), bool)
    votes[1, 1, 0] = False  # client 1 knows class 0 and has no positive of it
    votes[:, :, 2] = False  # nobody speaks of class 2
    difficulty = np.array([[0.5, -1, -1], [-1, 0.2, -1], [0.8, 0.6, -1]])
    replies = uploads([10, 20, 30], prototypes, votes, difficulty)
    state, records = aggregate(trainer.method, {"weights": torch.zeros(3)}, replies, 1)
    assert state["tags/votes"].tolist() == [[True, True, False]] * 2
    np.testing.assert_allclose(state["tags/prototypes"][1, 0], prototypes[[0, 2], 1, 0].mean(0), rtol=1e-5)
    np.testing.assert_allclose(state["tags/prototypes"][0, 0], prototypes[:, 0, 0].mean(0), rtol=1e-5)
    np.testing.assert_allclose(state["tags/prototypes"][:, 1], prototypes[:, :, 1].mean(0), rtol=1e-5)
    expected = [(10 * 0.5 + 30 * 0.8) / 40, (20 * 0.2 + 30 * 0.6) / 50, 1]
    np.testing.assert_allclose(state["tags/difficulty"], expected, rtol=1e-6)
    np.testing.assert_allclose(state["weights"], [(20 * 1 + 30 * 2) / 60] * 3)
    np.testing.assert_allclose(records["difficulty"], expected, rtol=1e-6)
    assert "tags_0" not in records  # the first stage
    _, records = aggregate(trainer.method, state, replies, 2)
    assert (records["tags_0"], records["tags_1"]) == (5 + 6 + 7, 2 + 4)


def test_prototypes_that_nobody_sent_are_kept_and_momentum_mixes() -> None:
    trainer, _ = make({"t1": 1, "momentum": 0.25})
    prototypes = np.arange(24.0).reshape(1, 2, 3, 4)
    votes = np.ones((1, 2, 3), bool)
    votes[0, :, 2] = False
    old = {"tags/prototypes": torch.full((2, 3, 4), 100.0), "tags/votes": torch.tensor([[True, False, True]] * 2)}
    replies = uploads([5], prototypes, votes, np.full((1, 3), -1.0))
    merged, _ = aggregate(trainer.method, {"weights": torch.zeros(3)} | old, replies, 2)
    np.testing.assert_allclose(merged["tags/prototypes"][:, 0], 25 + 0.75 * prototypes[0, :, 0])
    np.testing.assert_allclose(merged["tags/prototypes"][:, 1], prototypes[0, :, 1])
    np.testing.assert_allclose(merged["tags/prototypes"][:, 2], 100)
    assert merged["tags/difficulty"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("kind", "sent"), [("negative", [False, True, False]), ("active", [True, False, True])])
def test_difficulty_of_a_client(kind: str, sent: list[bool]) -> None:
    _, client = make({})
    _, p = seen_by(client)
    low, high = (float(bound) for bound in (np.sort(p[:, 0])[1:3].mean(), np.sort(p[:, 1])[3:5].mean()))
    trainer, client = make({"t1": 1, "difficulty": kind, "L": min(low, high), "R": max(low, high)})
    reply = make_reply(trainer, start_round(trainer, client))
    share = ((p < min(low, high)) | (p > max(low, high))).mean(0)
    assert len(set(share.tolist())) > 1  # the bounds tell samples apart
    np.testing.assert_allclose(reply["tags/difficulty"], np.where(sent, share, -1), rtol=1e-6)


# The server's checks, and the audit


def test_class_that_no_client_annotates_is_named_before_training() -> None:
    trainer, _ = make({})
    with pytest.raises(ConfigError, match=r"there is none for k1\."):
        trainer.method.validate_clients([make_client_info(0, 3, [0]), make_client_info(1, 3, [0, 2])])


def test_bounds_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.low = 0\.8"):
        small(method__name="fedmlp", method__L=0.8)


GOOD = {
    "weights": torch.zeros(5), "tags/prototypes": torch.zeros(2, 3, 6),
    "tags/votes": torch.ones(2, 3, dtype=torch.bool), "tags/difficulty": torch.tensor([-1.0, 0.0, 1.0]),
    "tags/made": torch.tensor([3, 0]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"tags/difficulty": torch.tensor([0.1, -0.5, -1])}, "not shares"),
        ({"tags/difficulty": torch.tensor([0.1, 1.5, -1])}, "difficulty holds values outside [-1, 1]"),
        ({"tags/prototypes": torch.full((2, 3, 6), 9e3)}, None),
        ({"tags/prototypes": torch.full((2, 3, 6), -2e4)}, "prototypes holds values outside"),
        ({"tags/difficulty": torch.tensor([0.1, 0.5])}, "difficulty is"),
        ({"tags/prototypes": torch.zeros(2, 3, 7)}, "prototypes is"),
        ({"tags/prototypes": torch.full((2, 3, 6), torch.nan)}, "NaN"),
        ({"tags/votes": torch.ones(2, 3)}, "votes is"),
        ({"tags/made": torch.tensor([3, -1])}, "made holds values outside"),
        ({"tags/made": torch.tensor([3, 2**62])}, "made holds values outside"),
        ({"tags/made": torch.tensor([3.0, 1.0])}, "made is"),
        ({"weights": torch.zeros(3)}, "weights is"),
        ({"surprise": torch.zeros(3)}, "surprise"),
        ({"tags/surprise": torch.zeros(3)}, "surprise"),
    ],
)
def test_implausible_replies_are_rejected(change: Tensors, reason: str | None) -> None:
    trainer, _ = make({})
    answer = trainer.method.find_problem(
        Message({"weights": torch.zeros(5)}), Message(GOOD | change, {"samples": 3}), 1
    )
    assert answer is None if reason is None else reason in str(answer)


def test_reply_without_a_tensor_is_rejected() -> None:
    trainer, _ = make({})
    reply = Message({"weights": torch.zeros(5), "tags/prototypes": torch.zeros(2, 3, 6)}, {"samples": 3})
    answer = str(trainer.method.find_problem(Message({"weights": torch.zeros(5)}), reply, 1))
    assert "lacks tags/difficulty, tags/made, tags/votes" in answer


def test_audit_counts_correct_tags() -> None:
    trainer, _ = make({})
    tags = torch.tensor([[1, -1, 0], [1, 0, -1], [0, -1, 1]], dtype=torch.int8)
    truth = torch.tensor([[1, 1, 0], [0, 0, 1], [1, 0, -1]], dtype=torch.int8)  # an unknown truth is not judged
    part = trainer.method.part(MissingLabelTags)
    counts = part.count_correct({"tags": tags}, truth)
    assert counts is not None and part.count_correct({}, truth) is None
    records = part.audit_records(counts + counts)
    assert records["tag_precision_1"] == 50
    np.testing.assert_allclose(records["tag_precision_0"], 100 * 2 / 3)
    np.testing.assert_allclose(records["tag_precision"], 60)
    assert records["tags_made"].tolist() == [[2, 2, 2], [4, 0, 0]]
    assert records["tags_true"].tolist() == [[0, 2, 2], [2, 0, 0]]
    assert part.audit_records(torch.zeros_like(counts)) == {}
