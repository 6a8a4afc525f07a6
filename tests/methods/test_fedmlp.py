"""FedMLP against NumPy and hand-worked cases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from safetensors.torch import load_file
from scipy.special import expit
from torch.nn import functional as F

from fedmll import resume, run
from fedmll.client import Batch, Client, Peer, Task
from fedmll.data.dataset import Dataset
from fedmll.errors import ClientError, ConfigError
from fedmll.experiment import Experiment
from fedmll.message import Message, Tensors
from fedmll.methods import fedmlp
from fedmll.methods.fedmlp import FedMLP
from fedmll.models.flat import FlatWeights
from fedmll.runs.folder import Row
from fedmll.runs.observers import Observer

OFF = {"method__mld": False, "method__wpc": False, "method__cr": False, "method__st": False}
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


def make(options: dict[str, Any], labels: np.ndarray, round: int = 1, seed: int = 0) -> tuple[FedMLP, Client]:
    """A method and a client with random 8×8 images and these targets; the network has no batch statistics."""
    count, classes = labels.shape
    experiment = Experiment.make(
        {
            "method": {"name": "fedmlp", **options},
            "model": {"channels": (4, 6), "norm": "group"},
            "training": {"batch_size": count, "rounds": 9},
            "partition": {"clients": 2},
        }
    )
    images = np.random.default_rng(seed).integers(0, 256, (count, 1, 8, 8), dtype=np.uint8)
    names = tuple(f"k{i}" for i in range(classes))
    task = Task(experiment, names, (1, 8, 8), 2, torch.device("cpu"))
    method = FedMLP(task)
    model = method.model()
    known = torch.from_numpy((labels >= 0).any(0))
    data = Dataset(images, labels.astype(np.int8), names)
    return method, Client(task, "a", round, data, known, known, model, FlatWeights(model))


def one_batch(client: Client) -> Batch:
    return next(iter(client.batches()))


def bce(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    p = expit(z.astype(np.float64))
    return -(y * np.log(p) + (1 - y) * np.log(1 - p))


# Eq. 3 and 4


@pytest.mark.parametrize("positives", [1, 37, 99])
def test_prior_in_logit_space_is_the_ratio_of_eq_3(positives: int) -> None:
    z = np.linspace(-8, 8, 41)
    p, prior = expit(z), positives / 100
    ratio = p * prior / (p * prior + (1 - p) * (1 - prior))
    moved = expit(z + fedmlp.log_prior_odds(torch.tensor([positives]), torch.tensor([100]), 100).double().numpy())
    np.testing.assert_allclose(moved, ratio, rtol=1e-5)


def test_prior_is_finite_at_the_extremes() -> None:
    odds = fedmlp.log_prior_odds(torch.tensor([0, 10]), torch.tensor([10, 10]), 10)
    np.testing.assert_allclose(odds.numpy(), [np.log(1 / 19), np.log(19)], rtol=1e-5)  # π = 1/20 and 19/20
    for z in (-50.0, 50.0):
        for y in (0.0, 1.0):
            logits = (odds + z).requires_grad_()
            loss = F.binary_cross_entropy_with_logits(logits, torch.full((2,), y))
            loss.backward()
            assert torch.isfinite(loss)
            assert torch.isfinite(logits.grad).all()


LABELS = np.array([[1, -1, 0], [0, -1, 0], [0, -1, 1], [1, -1, 0], [0, -1, -1], [0, -1, 1]])


def test_wpc_loss_over_the_known_entries_of_two_views() -> None:
    method, client = make({}, LABELS)
    local = method.prepare(client, Message(), {})
    batch, again = one_batch(client), one_batch(client)
    loss = method.loss(client.model, batch, local)
    labels = LABELS[batch.rows.numpy()]
    prior = np.array([2 / 6, 1 / 12, 2 / 5])  # the last class has a blank: over the five that are known
    entries = []
    for _ in range(2):
        z = client.model(again.view("weak")).detach().numpy()
        entries.append(bce(z + np.log(prior / (1 - prior)), labels == 1) * (labels >= 0))
    assert not np.allclose(entries[0], entries[1])  # the views differ
    np.testing.assert_allclose(loss.item(), np.mean(entries), rtol=1e-5)


def test_an_unknown_class_gets_no_gradient_in_the_first_stage() -> None:
    method, client = make({}, LABELS)
    local = method.prepare(client, Message(), {})
    method.loss(client.model, one_batch(client), local).backward()
    gradient = client.model.head.weight.grad
    assert not gradient[1].any()
    assert gradient[0].any()


# Eq. 5, 6 and 10


def test_local_prototypes() -> None:
    features = np.random.default_rng(1).normal(size=(6, 5)).astype(np.float32)
    labels = np.array([[1, 0, -1], [0, 0, -1], [-1, 0, -1], [1, 0, -1], [0, 0, -1], [0, 0, -1]])
    prototypes, votes = fedmlp.local_prototypes(torch.from_numpy(features), torch.from_numpy(labels))
    np.testing.assert_allclose(prototypes[1, 0], features[[0, 3]].mean(0), rtol=1e-5)
    np.testing.assert_allclose(prototypes[0, 0], features[[1, 4, 5]].mean(0), rtol=1e-5)
    np.testing.assert_allclose(prototypes[0, 1], features.mean(0), rtol=1e-4, atol=1e-6)
    assert votes.tolist() == [[True, True, False], [True, False, False]]


def uploads(sizes: list[int], prototypes: np.ndarray, votes: np.ndarray, difficulty: np.ndarray) -> list[Any]:
    """Replies of clients: (client, 2, class, width), (client, 2, class), (client, class)."""
    return [
        (
            Peer(i, f"c{i}", torch.ones(votes.shape[2], dtype=torch.bool)),
            Message(
                {
                    "weights": torch.full((3,), float(i)),
                    "prototypes": torch.tensor(prototypes[i], dtype=torch.float32),
                    "votes": torch.tensor(votes[i]),
                    "difficulty": torch.tensor(difficulty[i], dtype=torch.float32),
                },
                {"samples": size, "loss": 1.0},
            ),
        )
        for i, size in enumerate(sizes)
    ]


def test_server_means() -> None:
    method, _ = make({"t1": 1}, LABELS)
    rng = np.random.default_rng(2)
    prototypes = rng.normal(size=(3, 2, 3, 4))
    votes = np.ones((3, 2, 3), bool)
    votes[1, 1, 0] = False  # client 1 knows class 0 and has no positive of it
    votes[:, :, 2] = False  # nobody speaks of class 2
    difficulty = np.array([[0.5, -1, -1], [-1, 0.2, -1], [0.8, 0.6, -1]])
    state = method.merge({"weights": torch.zeros(3)}, uploads([10, 20, 30], prototypes, votes, difficulty), 1)
    assert state["votes"].tolist() == [[True, True, False]] * 2
    np.testing.assert_allclose(state["prototypes"][1, 0], prototypes[[0, 2], 1, 0].mean(0), rtol=1e-5)
    np.testing.assert_allclose(state["prototypes"][0, 0], prototypes[:, 0, 0].mean(0), rtol=1e-5)
    np.testing.assert_allclose(state["prototypes"][:, 1], prototypes[:, :, 1].mean(0), rtol=1e-5)
    expected = [(10 * 0.5 + 30 * 0.8) / 40, (20 * 0.2 + 30 * 0.6) / 50, 1]
    np.testing.assert_allclose(state["difficulty"], expected, rtol=1e-6)
    np.testing.assert_allclose(state["weights"], [(20 * 1 + 30 * 2) / 60] * 3)
    np.testing.assert_allclose(method.records["difficulty"], expected, rtol=1e-6)


def test_prototypes_nobody_sent_stay_and_momentum_mixes() -> None:
    method, _ = make({"t1": 1, "momentum": 0.25}, LABELS)
    prototypes = np.arange(24.0).reshape(1, 2, 3, 4)
    votes = np.ones((1, 2, 3), bool)
    votes[0, :, 2] = False
    old = torch.full((2, 3, 4), 100.0)
    state = {"weights": torch.zeros(3), "prototypes": old, "votes": torch.tensor([[True, False, True]] * 2)}
    merged = method.merge(state, uploads([5], prototypes, votes, np.full((1, 3), -1.0)), 2)
    np.testing.assert_allclose(merged["prototypes"][:, 0], 25 + 0.75 * prototypes[0, :, 0])
    np.testing.assert_allclose(merged["prototypes"][:, 1], prototypes[0, :, 1])
    np.testing.assert_allclose(merged["prototypes"][:, 2], 100)
    assert merged["difficulty"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("kind", "sent"), [("negative", [False, True, False]), ("active", [True, False, True])])
def test_difficulty_of_a_client(kind: str, sent: list[bool]) -> None:
    _, client = make({}, LABELS)
    client.model.eval()
    with torch.no_grad():
        p = torch.sigmoid(client.model(next(client.scan()).images)).numpy()
    low, high = (float(bound) for bound in (np.sort(p[:, 0])[1:3].mean(), np.sort(p[:, 1])[3:5].mean()))
    method, client = make({"t1": 1, "difficulty": kind, "L": min(low, high), "R": max(low, high)}, LABELS)
    reply = Message()
    method.finish(client, {}, reply, {})
    share = ((p < min(low, high)) | (p > max(low, high))).mean(0)
    assert len(set(share.tolist())) > 1  # the bounds tell samples apart
    np.testing.assert_allclose(reply["difficulty"], np.where(sent, share, -1), rtol=1e-6)


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
        fedmlp.tag(tags, carry, z, tags < 0, half, (0.5, 0.5))
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
    fedmlp.tag(tags, carry, torch.from_numpy(z), open_entries, torch.from_numpy(difficulty), shares)
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


def stage_two(labels: np.ndarray, memory: Tensors, votes: bool = True, **options: Any) -> tuple[Any, ...]:
    """A client in round 2 of a federation with t1 = 1; the prototypes are two random directions a class."""
    method, client = make({"t1": 1, "T0": 0.5, "T1": 0.5, **options}, labels, round=2)
    prototypes = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(5))
    spoken = torch.full((2, 3), votes)
    message = Message({"prototypes": prototypes, "votes": spoken, "difficulty": torch.tensor([1.0, 0.5, 1.0])})
    local = method.prepare(client, message, memory)
    return method, client, local, prototypes.numpy().astype(np.float64)


def features_of(client: Client) -> np.ndarray:
    client.model.eval()
    with torch.no_grad():
        return client.model.features(next(client.scan()).images).double().numpy()


def test_a_client_tags_by_the_cosines_of_eq_7() -> None:
    labels = np.full((40, 3), -1)
    labels[:, 0] = np.arange(40) % 2
    labels[:4, 2] = 1  # known here and there: these entries stay as they are
    memory: Tensors = {}
    _, client, local, prototypes = stage_two(labels, memory)
    features = features_of(client)

    def cosine(p: np.ndarray) -> np.ndarray:
        return features @ p / np.linalg.norm(features, axis=1) / np.linalg.norm(p)

    expected = np.full((40, 3), -1)
    for c, share in ((1, 0.25), (2, 0.5)):
        z = cosine(prototypes[0, c]) - cosine(prototypes[1, c])
        free = np.flatnonzero(labels[:, c] < 0)
        for label, rows in ((0, free[z[free] >= 0]), (1, free[z[free] < 0])):
            expected[rows[np.argsort(-np.abs(z[rows]))][: int(share * len(rows))], c] = label
    np.testing.assert_array_equal(memory["tags"].numpy(), expected)
    np.testing.assert_array_equal(local["labels"].numpy(), np.where(labels >= 0, labels, expected))
    assert (expected >= 0).sum() > 10


def test_classes_without_prototypes_are_not_tagged() -> None:
    memory: Tensors = {}
    stage_two(np.where(np.arange(3) == 0, 1, np.full((20, 3), -1)), memory, votes=False)
    assert (memory["tags"] == -1).all()


def test_changed_data_is_noticed() -> None:
    with pytest.raises(ClientError, match="remembers tags for 7 samples and has 20"):
        stage_two(np.full((20, 3), -1), {"tags": torch.zeros(7, 3, dtype=torch.int8)})


def remembered(labels: np.ndarray) -> Tensors:
    """Tags for some of the missing entries, so many that round 2 adds none of its own (T0 = T1 = 0)."""
    tags = np.full(labels.shape, -1, np.int8)
    tags[0, 1], tags[1, 1], tags[4, 2] = 1, 0, 0
    return {"tags": torch.from_numpy(tags)}


def test_second_stage_loss() -> None:
    """WPC over true and tagged entries, MSE to the teacher's p over the rest: one mean over batch × classes."""
    _, client, _, _ = stage_two(LABELS, remembered(LABELS), T0=0.0, T1=0.0)
    method, client, local, _ = stage_two(LABELS, remembered(LABELS), T0=0.0, T1=0.0)
    client.model.eval()
    with torch.no_grad():
        teacher = torch.sigmoid(client.model(next(client.scan()).images)).double().numpy()
        for parameter in client.weights.parameters:  # the student moves away from the teacher
            parameter.add_(0.1)
    batch, again = one_batch(client), one_batch(client)
    rows = batch.rows.numpy()
    labels = np.where(LABELS >= 0, LABELS, remembered(LABELS)["tags"].numpy())[rows]
    prior = np.array([2 / 6, 1 / 6, 2 / 6])  # of the missing class: its tagged positives over all samples
    z = client.model(again.view("weak")).detach().double().numpy()
    entries = np.where(labels >= 0, bce(z + np.log(prior / (1 - prior)), labels == 1), (expit(z) - teacher[rows]) ** 2)
    loss = method.loss(client.model, batch, local).item()
    np.testing.assert_allclose(loss, entries.mean(), rtol=1e-5)
    assert (labels < 0).sum() == 4


def test_consistency_acts_on_untagged_missing_entries_only() -> None:
    method, client, local, _ = stage_two(LABELS, remembered(LABELS), T0=0.0, T1=0.0)
    losses = []
    for wrong in (0.0, 0.3):
        shifted = local | {"teacher": local["teacher"] + wrong * (local["labels"] >= 0)}
        losses.append(method.loss(client.model, one_batch(client), shifted).item())
    assert losses[0] == losses[1]
    shifted = local | {"teacher": local["teacher"] + 0.3}
    assert method.loss(client.model, one_batch(client), shifted).item() > losses[0]


def test_without_consistency_untagged_missing_entries_are_left_out() -> None:
    method, client, local, _ = stage_two(LABELS, remembered(LABELS), T0=0.0, T1=0.0, cr=False)
    batch, again = one_batch(client), one_batch(client)
    labels = np.where(LABELS >= 0, LABELS, remembered(LABELS)["tags"].numpy())[batch.rows.numpy()]
    prior = np.array([2 / 6, 1 / 6, 2 / 6])
    z = client.model(again.view("weak")).detach().numpy()
    entries = bce(z + np.log(prior / (1 - prior)), labels == 1) * (labels >= 0)
    np.testing.assert_allclose(method.loss(client.model, batch, local).item(), entries.mean(), rtol=1e-5)


def test_without_wpc_missing_entries_are_zero_and_tags_count() -> None:
    method, client, local, _ = stage_two(LABELS, remembered(LABELS), T0=0.0, T1=0.0, cr=False, wpc=False)
    batch, again = one_batch(client), one_batch(client)
    labels = np.where(LABELS >= 0, LABELS, remembered(LABELS)["tags"].numpy())[batch.rows.numpy()]
    z = client.model(again.view("none")).detach().numpy()
    expected = bce(z, labels == 1).mean()
    np.testing.assert_allclose(method.loss(client.model, batch, local).item(), expected, rtol=1e-5)


# Switches and the schedule


def test_everything_off_is_fedavg_bit_for_bit() -> None:
    common = {"annotation__kind": "missing", "annotation__missing": 6, "training__rounds": 3}
    plain = run(small(**common))
    off = run(small(method__name="fedmlp", method__t1=1, **OFF, **common))
    assert all(torch.equal(plain.weights[name], off.weights[name]) for name in plain.weights)
    assert [row["bytes_up"] for row in off.rows] == [row["bytes_up"] for row in plain.rows]


def test_what_is_fixed_in_a_round_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[tuple[int, str]] = []
    real = fedmlp.look
    monkeypatch.setattr(fedmlp, "look", lambda client: looks.append((client.round, client.name)) or real(client))
    run(small(**EARLY | {"method__t1": 2, "training__rounds": 3, "training__local_epochs": 3}))
    assert [sum(number == r for number, _ in looks) for r in (1, 2, 3)] == [0, 4, 8]  # four clients
    looks.clear()
    result = run(small(method__name="fedmlp", method__t1=1, method__mld=False, method__cr=False))  # WPC only
    assert not looks
    assert "tags_0" not in result.rows[-1]


def test_warmup_consistency_uses_the_teacher_in_the_first_stage() -> None:
    method, client = make({"warmup_consistency": True}, LABELS)
    local = method.prepare(client, Message(), {})
    assert local["consistency"]
    assert local["views"] == 2
    loss = method.loss(client.model, one_batch(client), local)
    loss.backward()
    assert client.model.head.weight.grad[1].any()


def test_a_class_that_nobody_knows_is_named_at_the_start() -> None:
    method, _ = make({}, LABELS)
    peers = [Peer(0, "a", torch.tensor([True, False, False])), Peer(1, "b", torch.tensor([True, False, True]))]
    with pytest.raises(ConfigError, match="No client annotates k1"):
        method.begin(peers)


def test_bounds_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.low = 0\.8"):
        small(method__name="fedmlp", method__L=0.8)


# The server's checks, and the audit


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"difficulty": torch.tensor([0.1, -0.5, -1])}, "no shares"),
        ({"difficulty": torch.tensor([0.1, 1.5, -1])}, "difficulty holds values outside [-1, 1]"),
        ({"prototypes": torch.full((2, 3, 6), 1e5)}, None),
        ({"prototypes": torch.full((2, 3, 6), -1e7)}, "prototypes holds values outside"),
        ({"difficulty": torch.tensor([0.1, 0.5])}, "difficulty is"),
        ({"prototypes": torch.zeros(2, 3, 7)}, "prototypes is"),
        ({"prototypes": torch.full((2, 3, 6), torch.nan)}, "NaN"),
        ({"votes": torch.ones(2, 3)}, "votes is"),
        ({"weights": torch.zeros(3)}, "weights is"),
        ({"surprise": torch.zeros(3)}, "surprise"),
    ],
)
def test_replies_that_are_refused(change: Tensors, reason: str | None) -> None:
    method, _ = make({}, LABELS)
    sent = Message({"weights": torch.zeros(5)})
    good = {"weights": torch.zeros(5), "prototypes": torch.zeros(2, 3, 6),
            "votes": torch.ones(2, 3, dtype=torch.bool), "difficulty": torch.tensor([-1.0, 0.0, 1.0])}  # fmt: skip
    answer = method.refuse(sent, Message(good | change, {"samples": 3}), 1)
    assert answer is None if reason is None else reason in str(answer)


def test_a_reply_that_lacks_a_part_of_its_upload_is_refused() -> None:
    method, _ = make({}, LABELS)
    reply = Message({"weights": torch.zeros(5), "prototypes": torch.zeros(2, 3, 6)}, {"samples": 3})
    assert "lacks difficulty, votes" in str(method.refuse(Message({"weights": torch.zeros(5)}), reply, 1))


def test_audit_counts_true_tags() -> None:
    method, _ = make({}, LABELS)
    tags = torch.tensor([[1, -1, 0], [1, 0, -1], [0, -1, 1]], dtype=torch.int8)
    truth = torch.tensor([[1, 1, 0], [0, 0, 1], [1, 0, -1]], dtype=torch.int8)  # an unknown truth is not judged
    records = method.audit([(tags_and := {"tags": tags}, truth), ({}, truth), (tags_and, truth)])
    assert records["tag_precision_1"] == 50
    np.testing.assert_allclose(records["tag_precision_0"], 100 * 2 / 3)
    np.testing.assert_allclose(records["tag_precision"], 60)
    assert records["tags_made"].tolist() == [[2, 2, 2], [4, 0, 0]]
    assert records["tags_true"].tolist() == [[0, 2, 2], [2, 0, 0]]
    assert method.audit([({}, truth)]) == {}


# Runs


class Watching(Observer):
    """Reads the clients' memories after every round, and may stop a run."""

    def __init__(self, out: Path, stop_after: int | None = None) -> None:
        self.out, self.stop_after, self.tags = out, stop_after, []

    def round_done(self, row: Row) -> None:
        newest: dict[str, Path] = {path.name[:6]: path for path in sorted(memory_files(self.out))}
        self.tags.append({client: load_file(path)["tags"] for client, path in newest.items()})
        if row["round"] == self.stop_after:
            raise KeyboardInterrupt


def memory_files(out: Path) -> list[Path]:
    return list((out / "checkpoint" / "memory").glob("*.safetensors"))


def latest_memories(out: Path) -> dict[str, Tensors]:
    return {path.name[:6]: load_file(path) for path in sorted(memory_files(out))}


def assert_same(first: Path, second: Path) -> None:
    ours, theirs = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    mine, yours = latest_memories(first), latest_memories(second)
    assert all((memory["tags"] >= 0).any() for memory in mine.values())
    assert mine.keys() == yours.keys()
    assert all(torch.equal(mine[c][name], yours[c][name]) for c in mine for name in ("tags", "carry"))


def test_tags_are_permanent_and_survive_an_interruption(tmp_path: Path) -> None:
    experiment = small(**EARLY | {"training__rounds": 5})
    whole = Watching(tmp_path / "whole")
    result = run(experiment, tmp_path / "whole", observer=whole)
    for before, after in zip(whole.tags, whole.tags[1:], strict=False):
        for client, tags in before.items():
            assert torch.equal(after[client][tags >= 0], tags[tags >= 0])
    made = [row.get("tags_0", 0) + row.get("tags_1", 0) for row in result.rows]
    assert made[0] == 0 < made[1] < made[2] < made[4]
    assert 0 < result.rows[-1]["tag_precision"] <= 100
    recorded = load_file(tmp_path / "whole" / "records" / "000005.safetensors")
    assert recorded["tags_made"].sum() == made[4]

    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "stopped", observer=Watching(tmp_path / "stopped", stop_after=3))
    resume(tmp_path / "stopped")
    assert_same(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.slow
def test_a_killed_run_has_the_same_tags_and_weights(tmp_path: Path) -> None:
    experiment = small(**EARLY | {"training__rounds": 12, "engine__workers": 1})
    file = tmp_path / "experiment.toml"
    file.write_text(experiment.to_toml())
    run(experiment, tmp_path / "whole")
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-c", "from fedmll.cli.main import main; main()", "run", str(file), "--out", str(killed)],
        stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    rows = killed / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (rows.exists() and rows.read_text().count("\n") >= 4):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (killed / "summary.json").exists()
    resume(killed)
    assert_same(tmp_path / "whole", killed)
