"""A curious server tries to read single patients out of what leaves a site. Every attack succeeds with k = 1, as in a
simulation, and fails with k = 5, as at a site."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedmll.core import small_groups
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.client_round import Client
from fedmll.methods.parts.ridge_head import sums_of
from fedmll.testing import experiment, make_client, make_client_info, make_trainer

FROZEN: dict[str, Any] = {
    "method__name": "fed-ridge",
    "model__freeze": "backbone",
    "model__weights": "random",
    "model__channels": (6, 10),
}
SAMPLES, PATIENT = 40, 7


def labels_of(*columns: np.ndarray) -> np.ndarray:
    return np.stack(columns, axis=1).astype(np.int8)


def positives(count: int, start: int = 0) -> np.ndarray:
    found = np.zeros(SAMPLES, dtype=np.int8)
    found[start : start + count] = 1
    return found


def blank(column: np.ndarray, *rows: int) -> np.ndarray:
    found = column.copy()
    found[list(rows)] = -1
    return found


def only(*rows: int) -> np.ndarray:
    found = np.zeros(SAMPLES, dtype=np.int8)
    found[list(rows)] = 1
    return found


def site(smallest: int, labels: np.ndarray, round: int = 1, **changes: Any) -> tuple[Trainer, Client]:
    names = tuple("abcdefgh"[: labels.shape[1]])
    trainer = make_trainer(experiment(**changes), names)
    trainer = Trainer(replace(trainer.task, min_group_size=smallest))
    return trainer, make_client(trainer, labels, round=round)


def replied(smallest: int, labels: np.ndarray, round: int = 1, **changes: Any) -> tuple[Message, Tensor]:
    """What the site replies, and the patients' features after it has trained, if it does."""
    trainer, client = site(smallest, labels, round, **changes)
    sent = trainer.method.send(trainer.method.initial_state(), make_client_info(0, labels.shape[1]), round)
    reply = trainer.train(client, sent, {})
    assert trainer.method.find_problem(sent, reply, round) is None
    with torch.no_grad():
        features = client.model.eval().features(trainer.task.model_inputs(client.data, slice(None)))
    return reply, features.double()


# ---- (a) the ridge's sums


def patients_in(reply: Message, part: str = "ridge") -> list[Tensor]:
    """Feature vectors that a server finds: differences of two sums whose counts differ by one, and sums over one."""
    grams = [gram[-1] for gram in reply[f"{part}/gram"]]  # (sum, count) of a group
    found = [*grams, *reply[f"{part}/cross"]]
    count, total, _ = reply[f"{part}/all"]
    found.append(torch.cat([total, count[:1]]))
    found.append(torch.zeros_like(found[0]))
    differences = (one - other for one, other in itertools.permutations(found, 2))
    return [difference[:-1] for difference in differences if float(difference[-1]) == 1]


def reads(reply: Message, features: Tensor, part: str = "ridge") -> bool:
    """Whether some vector that the server finds is the patient's."""
    return any(torch.allclose(vector, features[PATIENT], atol=1e-5) for vector in patients_in(reply, part))


COMMON = positives(12, 20)
RIDGE_ATTACKS = {
    "one positive": labels_of(COMMON, only(PATIENT), COMMON),
    "one negative": labels_of(COMMON, 1 - only(PATIENT), COMMON),
    "one blank": labels_of(COMMON, blank(COMMON, PATIENT), COMMON),
    "two known-sets that differ by one": labels_of(
        blank(COMMON, *range(6)), blank(COMMON, *range(6), PATIENT), blank(COMMON, *range(6))
    ),
    "nested positives": labels_of(COMMON, COMMON | only(PATIENT), positives(9, 4)),
    "positives that are what is known of another, and one more": labels_of(
        COMMON | only(PATIENT), COMMON - 1, positives(9, 4)
    ),
}


@pytest.mark.parametrize("name", RIDGE_ATTACKS)
@pytest.mark.parametrize("balanced", [False, True])
def test_differences_of_ridge_sums_show_no_single_patient(name: str, balanced: bool) -> None:
    labels = RIDGE_ATTACKS[name]
    options = FROZEN | {"method__ridge_balanced": balanced}
    assert reads(*replied(1, labels, 0, **options))
    kept, features = replied(5, labels, 0, **options)
    assert not reads(kept, features)
    assert kept["ridge/cross"][0].any() or kept["ridge/cross"][2].any()  # other classes are still there


def test_gram_matrices_of_two_groups_show_no_single_patient() -> None:
    """As it was found: G of all but one patient, from G of all, is f fᵀ."""
    labels = RIDGE_ATTACKS["one blank"]
    reply, features = replied(1, labels, 0, **FROZEN)
    first, second = reply["ridge/gram"]
    found = (first - second).abs()[:-1, :-1]
    torch.testing.assert_close(found, torch.outer(features[PATIENT], features[PATIENT]), atol=1e-5, rtol=0)
    assert len(replied(5, labels, 0, **FROZEN)[0]["ridge/gram"]) == 1


def test_spherefed_calibration_withholds_small_groups() -> None:
    labels = RIDGE_ATTACKS["one blank"]
    options: dict[str, Any] = {"method__name": "spherefed", "training__rounds": 1}
    assert reads(*replied(1, labels, 2, **options), part="calibration")
    assert not reads(*replied(5, labels, 2, **options), part="calibration")


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), classes=st.integers(1, 6), smallest=st.integers(2, 6), share=st.floats(0, 1))
def test_released_groups_do_not_differ_by_a_small_group(seed: int, classes: int, smallest: int, share: float) -> None:
    """By sets, one pair after the other. Classes are made from each other, so that many nearly agree."""
    rng = np.random.default_rng(seed)
    targets = np.repeat(rng.integers(-1, 2, (30, 1)), classes, axis=1)
    changed = rng.random(targets.shape) < share * rng.random(classes)
    targets[changed] = rng.integers(-1, 2, int(changed.sum()))
    shown = small_groups.mask_columns(targets, smallest)
    assert (shown[:, ~small_groups.releasable_columns(shown, smallest)] == -1).all()
    assert ((shown == targets) | (shown == -1)).all()
    strict: list[set[int]] = [set(range(30))]
    strict += [set(np.flatnonzero(group).tolist()) for column in shown.T for group in (column >= 0, column == 1)]
    absent: list[set[int]] = [set(np.flatnonzero(column == 0).tolist()) for column in shown.T]
    fine = {0, *range(smallest, 31)}
    assert {len(group) for group in [*strict, *absent]} <= fine
    assert {len(one - other) for one, other in itertools.permutations(strict, 2)} <= fine
    for one, other in itertools.product(absent, [*absent, *strict]):
        assert one == other or max(len(one - other), len(other - one)) >= smallest
    assert np.array_equal(shown, small_groups.mask_columns(targets, smallest))
    assert small_groups.releasable_columns(targets, 1).all()
    assert np.array_equal(small_groups.mask_columns(targets, 1), targets)


def test_withheld_classes_and_reasons() -> None:
    known = labels_of(COMMON, COMMON, only(1), COMMON * 0, COMMON * 0 - 1, blank(positives(9, 4), 30), positives(9, 4))
    assert small_groups.releasable_columns(known, 5).tolist() == [True, True, False, True, True, False, True]
    assert not small_groups.releasable_columns(known[:4], 5).any()  # four patients in all
    targets = torch.from_numpy(known)
    kept = small_groups.mask_small_groups(targets, 5)
    assert kept[:, [2, 5]].eq(-1).all()
    assert torch.equal(kept[:, [0, 1, 3, 4, 6]], targets[:, [0, 1, 3, 4, 6]])
    assert small_groups.mask_small_groups(targets, 1) is targets
    assert small_groups.releasable_classes(targets, 1).tolist() == [True] * 7
    assert sums_of(torch.randn(SAMPLES, 3).double(), kept)["group"].tolist() == [0, 0, -1, 0, -1, -1, 0]


def test_with_scattered_blanks_samples_are_left_out_instead_of_classes() -> None:
    rng = np.random.default_rng(0)
    targets = (rng.random((2000, 8)) < 0.2).astype(np.int8)
    blanks = rng.random(targets.shape) < 0.002
    targets[blanks] = -1
    assert small_groups.releasable_columns(targets, 5).sum() < 8
    shown = small_groups.mask_columns(targets, 5)
    complete = ~blanks.any(axis=1)
    assert np.array_equal(shown[complete], targets[complete])
    assert (shown[~complete] == -1).all()
    one = (rng.random((2000, 8)) < 0.2).astype(np.int8)
    one[3, 2] = -1  # to leave one sample out would show it as well
    assert (small_groups.mask_columns(one, 5)[:, [0, 1, 3, 4, 5, 6, 7]] == one[:, [0, 1, 3, 4, 5, 6, 7]]).all()
    assert (small_groups.mask_columns(one, 5)[:, 2] == -1).all()


def test_groups_are_counted_exactly_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = np.random.default_rng(0).integers(-1, 2, (50, 4))
    whole = small_groups._group_overlaps(targets)
    monkeypatch.setattr(small_groups, "CHUNK", 7)
    assert np.array_equal(whole, small_groups._group_overlaps(targets))
    assert whole[0, 0] == 50
    assert whole[1, 5] == (targets[:, 0] == 1).sum()


# ---- (b) FedMLP's prototypes


def test_absent_prototype_does_not_show_the_only_positive() -> None:
    """The mean of all (another class's absent side) less the mean of the absent, by their counts, is the patient."""
    labels = labels_of(COMMON * 0, only(PATIENT), COMMON)
    options: dict[str, Any] = {"method__name": "fedmlp", "method__first_stage": 1, "training__rounds": 3}

    def attacked(smallest: int) -> tuple[bool, Message]:
        reply, features = replied(smallest, labels, 1, **options)
        prototypes, votes = reply["tags/prototypes"].double(), reply["tags/votes"]
        found = SAMPLES * prototypes[0, 0] - (SAMPLES - 1) * prototypes[0, 1]
        return bool(votes[0, 1]) and torch.allclose(found, features[PATIENT], atol=1e-3), reply

    assert attacked(1)[0]
    found, reply = attacked(5)
    assert not found
    assert reply["tags/votes"].T.tolist() == [[True, False], [False, False], [True, True]]
    assert not reply["tags/prototypes"][:, 1].any()


# ---- (c) Platt's sums


def test_platt_sums_leave_out_what_the_ridge_withholds() -> None:
    """A server that sends a = 0 and, as the negatives' target, σ(b) hears of the positives alone: of a single one the
    gradient by a is (σ(b) − t) z, that by b σ(b) − t, and z is their ratio."""
    labels = labels_of(COMMON, only(PATIENT), COMMON)

    def attacked(smallest: int) -> tuple[Tensor, Tensor]:
        trainer, client = site(smallest, labels, 1, **FROZEN, method__calibrate="platt")
        sent = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1)
        sent.tensors["platt/tried"] = torch.tensor([[[0.0] * 3, [1.0] * 3]], dtype=torch.float64)
        sent.tensors["platt/targets"] = torch.sigmoid(torch.tensor([[1.0] * 3, [0.0] * 3], dtype=torch.float64))
        sums = trainer.train(client, sent, {})["platt/sums"][0]
        logits = torch.logit(trainer.predict(client.data, PATIENT, PATIENT + 1))
        return sums, logits[0].double()

    sums, logits = attacked(1)
    torch.testing.assert_close(sums[1, 1] / sums[2, 1], logits[1], atol=1e-4, rtol=0)
    sums, _ = attacked(5)
    assert not sums[:, 1].any()
    assert sums[:, [0, 2]].any()


def test_platt_sums_are_not_a_scan_of_all_scores() -> None:
    """With a very steep a, the gradient by b counts the images with a score above −b/a. A server that asks for
    thousands of candidates would learn the score of every image."""
    trainer, client = site(5, labels_of(COMMON, COMMON, COMMON), 1, **FROZEN, method__calibrate="platt")
    sent = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1)
    steep = torch.tensor([[1e7] * 3, [0.0] * 3], dtype=torch.float64)
    for count in (4, 5):
        sent.tensors["platt/tried"] = steep.expand(count, 2, 3).clone()
        if count == 4:
            assert len(trainer.train(client, sent, {})["platt/sums"]) == 4
        else:
            with pytest.raises(ConfigError, match="the sums of 5 candidates of Platt's calibration"):
                trainer.train(client, sent, {})


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        (
            "platt/targets",
            torch.full((2, 3), 1e6, dtype=torch.float64),
            "targets of Platt's calibration are not from 0",
        ),
        ("platt/targets", torch.full((2, 1), 0.5, dtype=torch.float64), "has wrong tensors"),
        ("platt/leverage", torch.zeros(3, dtype=torch.float64), "has wrong tensors"),
        ("platt/more", torch.zeros(3, dtype=torch.float64), "has wrong tensors"),
    ],
)
def test_platt_request_has_the_tensors_of_a_calibration(name: str, tensor: torch.Tensor, problem: str) -> None:
    trainer, client = site(5, labels_of(COMMON, COMMON, COMMON), 1, **FROZEN, method__calibrate="platt")
    sent = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1)
    sent.tensors[name] = tensor
    with pytest.raises(ConfigError, match=problem):
        trainer.train(client, sent, {})


# ---- (d) FedIRM's relations


def test_fedirm_row_is_not_the_logits_of_one_patient() -> None:
    labels = labels_of(COMMON, only(PATIENT), COMMON)
    options: dict[str, Any] = {
        "method__name": "fedirm", "method__first_stage": 1, "training__rounds": 3, "training__lr": 1e-9,
        "training__augment": "none", "model__norm": "group",
    }  # fmt: skip

    def attacked(smallest: int) -> tuple[bool, Message]:
        reply, _ = replied(smallest, labels, 1, **options)
        trainer, client = site(smallest, labels, 1, **options)
        trainer.receive(trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1))
        scores = trainer.predict(client.data, PATIENT, PATIENT + 1)[0]
        logits = 2 * torch.logit(reply["relation-matching/relations"][1])
        return torch.allclose(torch.sigmoid(logits), scores, atol=1e-4), reply

    assert attacked(1)[0]
    found, reply = attacked(5)
    assert not found
    assert reply["relation-matching/votes"].tolist() == [True, False, True]
    assert reply["relation-matching/relations"][1].tolist() == [0.5] * 3


# ---- what else leaves


def test_correlations_do_not_show_the_other_labels_of_a_single_patient() -> None:
    labels = labels_of(COMMON, only(PATIENT), positives(9, 4))
    options: dict[str, Any] = {"method__name": "fedharmony", "training__rounds": 2}
    assert replied(1, labels, **options)[0]["correlation/correlation"].ne(0).all()
    found = replied(5, labels, **options)[0]["correlation/correlation"]
    assert found.ne(0).tolist() == [[True, False, True], [False] * 3, [True, False, True]]


def test_curvature_does_not_show_the_features_of_a_single_patient() -> None:
    """In the head's row of the class, over the same of the bias, are the squares of the features."""
    labels = labels_of(COMMON, blank(COMMON * 0, *(set(range(SAMPLES)) - {PATIENT})), COMMON)
    options: dict[str, Any] = {"method__name": "fedcurv", "model__channels": (6, 10)}

    def attacked(smallest: int) -> tuple[Tensor, Tensor]:
        reply, features = replied(smallest, labels, **options)
        rows, bias = reply["curvature/u"][-33:-3].view(3, 10), reply["curvature/u"][-3:]
        return rows[1] / bias[1], features[PATIENT].square().float()

    torch.testing.assert_close(*attacked(1), atol=1e-4, rtol=1e-3)
    assert attacked(5)[0].isnan().all()  # 0 / 0


@pytest.mark.parametrize(("blanks", "told"), [((), 40), ((1, 2), 40), (range(5), 35), (range(37), 0)])
def test_cbafed_shares_do_not_show_small_counts(blanks: Any, told: int) -> None:
    labels = labels_of(COMMON, blank(COMMON, *blanks), COMMON)
    for smallest, expected in ((1, SAMPLES - len(list(blanks))), (5, told)):
        used = replied(smallest, labels, method__name="cbafed", training__rounds=10)[0]["labels-used/used"]
        assert (SAMPLES * used[1]).item() == pytest.approx(expected)
