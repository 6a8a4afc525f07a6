"""FedMLP's second stage against NumPy and hand-worked cases: tags (Eq. 7–9), and the loss with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fedmlp_builders import LABELS, bce, make, move, one_batch, remembered, seen_by, stage_two, tags_of
from scipy.special import expit

from fedmll.core.errors import ClientError
from fedmll.methods.parts.missing_label_detection import tag
from fedmll.testing import compute_loss, make_reply, start_round

# Eq. 7–9


def test_tags_over_rounds_worked_out_by_hand() -> None:
    z = torch.tensor([[0.5, 0.1, 0.0, 0.3, 0.2, -0.1, -0.6, -0.2]]).T
    tags, carry = torch.full((8, 1), -1, dtype=torch.int8), torch.zeros(2, 1, dtype=torch.float64)
    half = torch.tensor([0.5], dtype=torch.float64)
    #   z ≥ 0: 0.25 of 5, 4, 3 open samples, with the fraction of before: 1.25, 1.25, 1
    #   z < 0: 0.25 of 3, 3, 2: 0.75, 1.5, 1
    wanted = [
        [0, -1, -1, -1, -1, -1, -1, -1],
        [0, -1, -1, 0, -1, -1, 1, -1],
        [0, -1, -1, 0, 0, -1, 1, 1],
    ]
    fractions = [(0.25, 0.75), (0.25, 0.5), (0.0, 0.0)]
    for tagged, fraction in zip(wanted, fractions, strict=True):
        tag(tags, carry, z, tags < 0, half, (0.5, 0.5))
        assert tags.flatten().tolist() == tagged
        assert tuple(carry.flatten().tolist()) == fraction


def test_tags_by_rate_and_difficulty_of_each_class() -> None:
    """Many classes at once, against a loop in NumPy; nothing known or tagged before is touched."""
    rng = np.random.default_rng(3)
    z = rng.normal(size=(200, 6)).astype(np.float32)
    start = rng.choice([-1, -1, -1, 0, 1], size=(200, 6)).astype(np.int8)
    known = rng.random((200, 6)) < 0.2
    difficulty, shares = rng.random(6), (0.05, 0.1)
    tags = torch.from_numpy(start.copy())
    open_entries = (tags < 0) & ~torch.from_numpy(known)
    carry = torch.zeros(2, 6, dtype=torch.float64)
    tag(tags, carry, torch.from_numpy(z), open_entries, torch.from_numpy(difficulty), shares)
    expected = start.copy()
    for c in range(6):
        free = np.flatnonzero((start[:, c] < 0) & ~known[:, c])
        likely = {0: free[z[free, c] >= 0], 1: free[z[free, c] < 0]}
        for label, rows in likely.items():
            count = int(np.floor(difficulty[c] * shares[label] * len(rows)))
            nearest = rows[np.argsort(-np.abs(z[rows, c]))][:count]
            expected[nearest, c] = label
    np.testing.assert_array_equal(tags.numpy(), expected)
    assert (expected != start).sum() > 10


def test_a_client_tags_by_the_cosines_of_eq_7() -> None:
    labels = np.full((40, 3), -1)
    labels[:, 0] = np.arange(40) % 2
    labels[:4, 2] = 1  # known here and there: these entries stay as they are
    _, client_round, prototypes = stage_two(labels)
    features = seen_by(client_round.client)[0].astype(np.float64)

    def cosine(p: np.ndarray) -> np.ndarray:
        return features @ p / np.linalg.norm(features, axis=1) / np.linalg.norm(p)

    expected = np.full((40, 3), -1)
    for c, share in ((1, 0.25), (2, 0.5)):
        z = cosine(prototypes[0, c]) - cosine(prototypes[1, c])
        free = np.flatnonzero(labels[:, c] < 0)
        for label, rows in ((0, free[z[free] >= 0]), (1, free[z[free] < 0])):
            expected[rows[np.argsort(-np.abs(z[rows]))][: int(share * len(rows))], c] = label
    np.testing.assert_array_equal(tags_of(client_round), expected)
    np.testing.assert_array_equal(client_round.targets.numpy(), np.where(labels >= 0, labels, expected))
    assert (expected >= 0).sum() > 10


def test_tags_stay_as_they_are_and_are_counted() -> None:
    """Tags that contradict the prototypes of this round are not changed; the reply counts tags 0 and 1."""
    labels = np.full((40, 3), -1)
    labels[:, 0] = np.arange(40) % 2
    _, fresh, _ = stage_two(labels, T0=1.0, T1=1.0)
    wrong = np.where(tags_of(fresh) >= 0, 1 - tags_of(fresh), -1).astype(np.int8)
    wrong[20:] = -1
    assert (wrong == 0).any() and (wrong == 1).any()
    trainer, client_round, _ = stage_two(labels, wrong.copy(), T0=1.0, T1=1.0)
    found = tags_of(client_round)
    np.testing.assert_array_equal(found[wrong >= 0], wrong[wrong >= 0])
    assert (found >= 0).sum() > (wrong >= 0).sum()
    assert make_reply(trainer, client_round)["tags/made"].tolist() == [(found == 0).sum(), (found == 1).sum()]
    assert (found == 0).sum() != (found == 1).sum()


def test_classes_without_prototypes_are_not_tagged() -> None:
    _, client_round, _ = stage_two(np.where(np.arange(3) == 0, 1, np.full((20, 3), -1)), votes=False)
    assert (tags_of(client_round) == -1).all()


def test_changed_data_is_an_error() -> None:
    with pytest.raises(ClientError, match="has tags for 7 samples and now has 20"):
        stage_two(np.full((20, 3), -1), np.zeros((7, 3), np.int8))


# The loss


TAUGHT = np.where(LABELS >= 0, LABELS, remembered(LABELS))
ODDS = np.log(np.array([1 / 2, 1 / 5, 1 / 2]))  # π = 2/6, 1/6 (the tagged positives of the missing class), 2/6


def test_second_stage_loss() -> None:
    """WPC over true and tagged entries, MSE to the teacher's p over the rest: one mean over batch × classes."""
    trainer, client_round, _ = stage_two(LABELS, remembered(LABELS), T0=0.0, T1=0.0)
    _, teacher = seen_by(client_round.client)
    move(client_round.client)
    again = one_batch(client_round.client)
    rows = again.rows.numpy()
    labels = TAUGHT[rows]
    z = client_round.model(again.view("weak")).detach().double().numpy()
    entries = np.where(labels >= 0, bce(z + ODDS, labels == 1), (expit(z) - teacher[rows]) ** 2)
    np.testing.assert_allclose(compute_loss(trainer, client_round).item(), entries.mean(), rtol=1e-5)
    assert (labels < 0).sum() == 4


def test_consistency_acts_on_untagged_missing_entries_only() -> None:
    trainer, client_round, _ = stage_two(LABELS, remembered(LABELS), T0=0.0, T1=0.0)
    teacher, losses = client_round.round_states["consistency"], []
    for wrong in (0.0, 0.3):
        client_round.round_states["consistency"] = teacher + wrong * (client_round.targets >= 0)
        losses.append(compute_loss(trainer, client_round).item())
    assert losses[0] == losses[1]
    client_round.round_states["consistency"] = teacher + 0.3
    assert compute_loss(trainer, client_round).item() > losses[0]


def test_without_consistency_untagged_missing_entries_are_left_out() -> None:
    trainer, client_round, _ = stage_two(LABELS, remembered(LABELS), T0=0.0, T1=0.0, cr=False)
    again = one_batch(client_round.client)
    labels = TAUGHT[again.rows.numpy()]
    z = client_round.model(again.view("weak")).detach().numpy()
    entries = bce(z + ODDS, labels == 1) * (labels >= 0)
    np.testing.assert_allclose(compute_loss(trainer, client_round).item(), entries.mean(), rtol=1e-5)


def test_without_wpc_missing_entries_are_zero_and_tags_count() -> None:
    trainer, client_round, _ = stage_two(LABELS, remembered(LABELS), T0=0.0, T1=0.0, cr=False, wpc=False)
    again = one_batch(client_round.client)
    labels = TAUGHT[again.rows.numpy()]
    z = client_round.model(again.view("none")).detach().numpy()
    np.testing.assert_allclose(compute_loss(trainer, client_round).item(), bce(z, labels == 1).mean(), rtol=1e-5)


def test_without_wpc_consistency_takes_the_untagged_missing_entries() -> None:
    trainer, client_round, _ = stage_two(LABELS, remembered(LABELS), T0=0.0, T1=0.0, wpc=False)
    _, teacher = seen_by(client_round.client)
    move(client_round.client)
    again = one_batch(client_round.client)
    rows = again.rows.numpy()
    z = client_round.model(again.view("none")).detach().double().numpy()
    entries = np.where(TAUGHT[rows] >= 0, bce(z, TAUGHT[rows] == 1), (expit(z) - teacher[rows]) ** 2)
    np.testing.assert_allclose(compute_loss(trainer, client_round).item(), entries.mean(), rtol=1e-5)


def test_warmup_consistency_uses_the_teacher_in_the_first_stage() -> None:
    trainer, client = make({"warmup_consistency": True})
    client_round = start_round(trainer, client)
    assert client_round.unknown_targets_taught and client_round.round_states["consistency"] is not None
    assert client_round.round_states["prior-adjusted"][1] == 2
    compute_loss(trainer, client_round).backward()
    assert client.model.head.weight.grad[1].any()
