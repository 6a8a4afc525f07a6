"""Evaluation at the sites: the histograms that they send, those that the server rejects, and the metrics of the sum."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import CLASSES, NAMES, NOT_ANNOTATED, Consortium
from evaluation_federation import ScoresAndLabels, run_without_server_data
from fake_grid import consortium, fast_polling  # noqa: F401  (fixtures)
from sklearn.metrics import average_precision_score, roc_auc_score

from fedmll.core.message import Message
from fedmll.deploy.flower import site_evaluation
from fedmll.deploy.flower.client_app import EVALUATE, TRAIN
from fedmll.deploy.introduction import Introduction
from fedmll.deploy.site import worker
from fedmll.evaluation.histograms import BINS, score_histograms
from fedmll.methods.framework.allowed_replies import find_class_problem, find_name_problem, find_tensor_problem
from fedmll.methods.framework.base import TensorSpec
from fedmll.methods.framework.client_round import ClientInfo


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> ScoresAndLabels:
    """The scores and labels of each site's test, in the order of NAMES."""
    found: ScoresAndLabels = []

    def recorded(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
        found.append((scores, targets))
        return score_histograms(scores, targets)

    monkeypatch.setattr(worker, "score_histograms", recorded)
    return found


@pytest.mark.parametrize("method", ["fedavg", "private-fedavg"])
def test_a_server_without_data_has_metrics_of_all_held_out_images_together(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    seen: ScoresAndLabels,
    method: str,
) -> None:
    private = method == "private-fedavg"
    classes = CLASSES[::-1]  # not the order of a private client's rows
    changes = {"method__loss": "sigmoid"} if private else {}
    longer = {"training__rounds": 8, "training__lr": 0.03}  # so that scores are not all near 0.5
    result, hear = run_without_server_data(
        consortium, tmp_path, classes, min_count=1, method__name=method, **changes, **longer
    )
    assert not [text for text in hear.said if "rejected" in text or "no counts" in text]
    with (tmp_path / "out" / "per_class.csv").open() as file:
        table = {row["class"]: row for row in csv.DictReader(file)}
    assert list(table) == classes
    own = {name: [c for c in CLASSES if int(c[-1]) not in NOT_ANNOTATED.get(name, ())] for name in NAMES}
    aucs = []
    for label in classes:
        scores, targets = [], []
        for name, (p, y) in zip(NAMES, seen[-3:], strict=True):
            columns = own[name] if private else classes
            if label in own[name]:
                scores.append(p[:, columns.index(label)])
                targets.append(y[:, columns.index(label)])
        p, y = np.concatenate(scores), np.concatenate(targets)
        row = {name: float(value) for name, value in table[label].items() if name != "class"}
        assert (row["positives"], row["known"]) == (y.sum(), len(y))
        assert abs(row["auc"] - 100 * roc_auc_score(y, p)) <= row["auc_error"] + 2e-4  # the table has four digits
        assert abs(row["ap"] - 100 * average_precision_score(y, p)) <= row["ap_error"] + 2e-4
        assert row["auc_error"] < 5
        aucs.append(row["auc"])
    assert result.metrics["pooled_macro_auc"] == pytest.approx(np.mean(aucs))
    assert result.metrics["pooled_macro_auc"] != result.metrics["sites_macro_auc"]
    assert "macro_auc" not in result.metrics
    line = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(line)["pooled_map"] == result.metrics["pooled_map"]


def test_counts_of_few_images_stay_at_the_site_and_are_named(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nobody holds ten images of a digit out: no metric of such a class leaves, nor an average over it."""
    sent: list[Tensor] = []
    ranked: list[float] = []

    def listen(kind: str, name: str, message: Message) -> Message:
        if kind == EVALUATE:
            sent.append(message["counts"])
            ranked.extend(message.numbers[metric] for metric in ("macro_auc", "micro_auc", "map", "macro_f1", "o_ap"))
        return message

    result, hear = run_without_server_data(consortium, tmp_path, change_reply=listen, training__rounds=2)
    assert len(sent) == 6
    assert np.isnan(ranked).all()
    assert not any(counts[0].any() for counts in sent)  # where there is no positive, the many negatives are no secret
    (line,) = [text for text in hear.said if text.startswith("site-c sends no counts")]  # once
    assert sent[2][1].sum(1).tolist() == [0, 20, 0, 0, 0, 0, 0, 0, 0, 0]  # site-c holds no digit-1 out
    known = "digit-0, digit-3, digit-4, digit-6, digit-8, digit-9"
    assert line == f"site-c sends no counts of {known}: it holds out fewer than 10 positive or negative images of them"
    assert line in (tmp_path / "out" / "log.txt").read_text()
    said = [text for text in capsys.readouterr().out.splitlines() if text.startswith("tests: nothing leaves about")]
    assert f"about {known}: fewer than 10" in said[-1]
    assert np.isnan(result.metrics["pooled_macro_auc"])
    assert np.isnan(result.metrics["sites_macro_auc"])
    assert result.summary["left_out"]["auc"] == tuple(CLASSES)


PEER = ClientInfo(0, "s", torch.tensor([True, False, True]))
TOLD = Introduction(samples=9, held_out=5, classes=("z", "a"), digest="0" * 32, min_count=3)


def counts(**cells: int) -> Tensor:
    """`p0_7=2`: two positives of class 0 in bin 7."""
    tensor = torch.zeros(2, 3, BINS, dtype=torch.int32)
    for name, count in cells.items():
        place, column = name[1:].split("_")
        tensor["pn".index(name[0]), int(place), int(column)] = count
    return tensor


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (counts(p0_7=2, n0_7=3, p2_0=5), None),  # all five images in each class that it annotates
        (counts(p0_7=3, n0_8=3), "counts count more images than the 5 that it holds out"),
        (counts(p0_7=-1), r"counts holds values outside [0, 5]"),
        (counts(p0_7=6), r"counts holds values outside [0, 5]"),
        (counts(n0_7=2**31 - 1), r"counts holds values outside [0, 5]"),
        (counts(n1_7=1), "counts has values for classes that the client does not annotate"),
        (counts()[:, :2], "counts is torch.int32 (2, 2, 2048), not torch.int32 (2, 3, 2048)"),
        (counts().long(), "counts is torch.int64 (2, 3, 2048), not torch.int32 (2, 3, 2048)"),
    ],
)
def test_impossible_counts_are_rejected(tensor: Tensor, reason: str | None) -> None:
    expected, reply = site_evaluation.evaluation_specs(PEER, TOLD, private=False), Message({"counts": tensor})
    found = find_tensor_problem(expected, reply)
    problem = found or find_class_problem(expected, reply, PEER.owned)
    assert (None if problem is None else problem.text) == reason


def test_a_private_client_sends_its_own_classes() -> None:
    expected = site_evaluation.evaluation_specs(PEER, TOLD, private=True)
    assert expected["counts"].shape == (2, 2, BINS)
    assert str(find_name_problem(expected, Message())) == "it lacks counts"
    reply = Message({"counts": counts(p0_7=1, n1_8=2)[:, :2]})
    assert find_class_problem(expected, reply, PEER.owned) is None
    found = site_evaluation.collect_histograms(
        [(PEER, reply)], {"s": TOLD}, ["z", "y", "a"], private=True, weights={"s": 5}
    )["s"]
    assert (found.test[0, 2, 7], found.test[1, 0, 8], found.test.sum()) == (1, 2, 3)  # by name: a, then z
    assert found.not_sent == {"test": ()}
    assert site_evaluation.describe_withheld("s", found) == []


def test_classes_without_counts_are_named_if_they_are_annotated() -> None:
    reply = Message({"counts": counts(p2_7=1), "validation-counts": counts(p0_7=1)})
    found = site_evaluation.collect_histograms(
        [(PEER, reply)], {"s": TOLD}, ["z", "y", "a"], private=False, weights={"s": 5}
    )["s"]
    assert found.test[0, 2, 7] == found.test.sum() == 1
    assert found.not_sent == {"test": ("z",), "validation": ("a",)}
    why = "it holds out fewer than 3 positive or negative images of them"
    assert site_evaluation.describe_withheld("s", found) == [
        f"s sends no counts of z: {why}",
        f"s sends no counts for thresholds of a: {why}",
    ]


def test_rows_for_thresholds_have_counts_of_their_own() -> None:
    expected = site_evaluation.evaluation_specs(PEER, replace(TOLD, validation=2), private=False)
    assert {name: like.high for name, like in expected.items()} == {"counts": 3, "validation-counts": 2}
    good, bad = Message({"counts": counts(p0_7=3), "validation-counts": counts(n2_7=2)}), counts(p0_7=1, n0_7=2)
    assert find_tensor_problem(expected, good) is None
    reason = find_tensor_problem(expected, Message(good.tensors | {"validation-counts": bad}))
    assert str(reason) == "validation-counts count more images than the 2 that it holds out"


def test_only_tensors_by_class_are_checked_by_class() -> None:
    votes = torch.tensor([[True, False, False], [False, True, False]])
    owned = torch.tensor([True, False, True])
    assert TensorSpec((2, 3), torch.bool).find_class_problem("v", votes, owned) is None
    assert (
        TensorSpec((2, 3), torch.bool, by_class=1).find_class_problem("v", votes, torch.ones(3, dtype=torch.bool))
        is None
    )
    assert "does not annotate" in str(TensorSpec((2, 3), torch.bool, by_class=1).find_class_problem("v", votes, owned))
    assert (
        TensorSpec((2, 3), torch.bool, by_class=0).find_class_problem("v", votes[:, :1], torch.tensor([True, False]))
        is None
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda counts: {"counts": counts + 1}, "counts count more images than the 28 that it holds out"),
        (lambda counts: {}, "it lacks counts"),
        (lambda counts: {"counts": counts, "more": counts}, "it holds an unknown key"),
    ],
)
def test_invalid_counts_are_rejected_and_the_others_are_used(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    seen: ScoresAndLabels,
    change: Callable[[Tensor], Any],
    reason: str,
) -> None:
    def spoil(kind: str, name: str, message: Message) -> Message:
        bad = kind == EVALUATE and name == "site-b"
        return Message(change(message["counts"]), message.numbers) if bad else message

    result, hear = run_without_server_data(consortium, tmp_path, change_reply=spoil, min_count=1)
    assert [text for text in hear.said if "rejected" in text] == [f"round 1: the reply of site-b is rejected: {reason}"]
    assert result.per_class["known"].tolist() == [36 + (0 if n in NOT_ANNOTATED["site-c"] else 20) for n in range(10)]


def test_votes_for_classes_that_a_site_does_not_annotate_are_rejected(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
) -> None:
    def spoil(kind: str, name: str, message: Message) -> Message:
        if kind != TRAIN or name != "site-c":
            return message
        votes = message["tags/votes"].clone()
        votes[0, NOT_ANNOTATED["site-c"][0]] = True
        return Message(message.tensors | {"tags/votes": votes}, message.numbers)

    fedmlp = {"method__name": "fedmlp", "method__first_stage": 1, "training__rounds": 2}
    _, hear = run_without_server_data(consortium, tmp_path, change_reply=spoil, **fedmlp)
    refusal = "the reply of site-c is rejected: tags/votes has values for classes that the client does not annotate"
    assert [text for text in hear.said if "rejected" in text] == [f"round {number}: {refusal}" for number in (1, 2)]
