"""Evaluation between machines from counts: what sites send, what the server refuses, and what it makes of the sum."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from flwr.app import Message as FlowerMessage
from sites import CLASSES, NAMES, NOT_ANNOTATED, Consortium
from sklearn.metrics import average_precision_score, roc_auc_score
from test_flower import FakeNode, Hear, consortium, make_grid, quick  # noqa: F401  (fixtures)

from fedmll.client import Peer
from fedmll.deploy import serving, site_worker
from fedmll.deploy.flower import evaluating
from fedmll.deploy.flower.records import from_records, to_records
from fedmll.deploy.flower.site_app import EVALUATE, TRAIN
from fedmll.deploy.introduction import Introduction
from fedmll.deploy.serving import Server
from fedmll.deploy.site import Site
from fedmll.deploy.site_worker import recall_site, remember_site
from fedmll.evaluation.histograms import BINS, histograms
from fedmll.message import Message
from fedmll.methods.contract import Like
from fedmll.methods.expected import refuse_classes, refuse_names, refuse_tensors
from fedmll.running import loop

Seen = list[tuple[np.ndarray, np.ndarray]]
Spoil = Callable[[str, str, Message], Message]  # kind, site, its reply


def untouched(kind: str, name: str, message: Message) -> Message:
    return message


def federation(
    consortium: Consortium,  # noqa: F811
    folder: Path,
    classes: Sequence[str] = CLASSES,
    spoil: Spoil = untouched,
    min_count: int = 10,
    server: Mapping[str, Any] = MappingProxyType({}),
    change: Callable[[Site], Site] = lambda site: site,
    **changes: Any,
) -> tuple[loop.Result, Hear]:
    """A server without data, one round unless told; `spoil` changes what a site sends, `change` the site."""
    grid, hear = make_grid(consortium, folder), Hear()
    for node in grid.nodes:
        here = recall_site(node.site_file)
        remember_site(change(replace(here, limits=replace(here.limits, min_count=min_count))), node.site_file)

    def tamper(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        message, about = from_records(reply.content)
        changed = spoil(sent.metadata.message_type, node.name, message)
        return reply if changed is message else FlowerMessage(to_records(changed, about), reply_to=sent)

    grid.tamper = tamper
    own = {"data.size": 8, "sites.classes": list(classes), "sites.channels": 1, "partition.holdout": 0.4}
    experiment = consortium.experiment("none", **{"training__rounds": 1, **changes}).changed(own)
    loop.create(folder / "out", experiment)
    usual = {"min_clients": 2, "round_timeout": 5, "join_timeout": 2, "keys": str(consortium.keys), "run": "run1"}
    return serving.drive(grid, experiment, Server(NAMES, **usual | server), folder / "out", hear), hear


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The scores and labels of each site's test, in the order of NAMES."""
    found: Seen = []

    def recorded(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
        found.append((scores, targets))
        return histograms(scores, targets)

    monkeypatch.setattr(site_worker, "histograms", recorded)
    return found


@pytest.mark.parametrize("method", ["fedavg", "private-fedavg"])
def test_a_server_without_data_has_metrics_of_all_held_out_images_together(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    seen: Seen,
    method: str,
) -> None:
    private = method == "private-fedavg"
    classes = CLASSES[::-1]  # not the order of a private client's rows
    changes = {"method__loss": "sigmoid"} if private else {}
    longer = {"training__rounds": 8, "training__lr": 0.03}  # so that scores are not all near 0.5
    result, hear = federation(consortium, tmp_path, classes, min_count=1, method__name=method, **changes, **longer)
    assert not [text for text in hear.said if "refused" in text or "no counts" in text]
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
    """Nobody holds ten images of a digit out; the averages are there all the same."""
    sent: list[Tensor] = []

    def listen(kind: str, name: str, message: Message) -> Message:
        sent.extend([message["counts"]] if kind == EVALUATE else [])
        return message

    result, hear = federation(consortium, tmp_path, spoil=listen, training__rounds=2)
    assert len(sent) == 6
    assert not any(counts[0].any() for counts in sent)  # where there is no positive, the many negatives are no secret
    (line,) = [text for text in hear.said if text.startswith("site-c sends no counts")]  # once
    assert sent[2][1].sum(1).tolist() == [0, 20, 0, 0, 0, 0, 0, 0, 0, 0]  # site-c holds no digit-1 out
    known = "digit-0, digit-3, digit-4, digit-6, digit-8, digit-9"
    assert line == f"site-c sends no counts of {known}: it holds out fewer than 10 images with, or without, them"
    assert line in (tmp_path / "out" / "log.txt").read_text()
    said = [text for text in capsys.readouterr().out.splitlines() if text.startswith("tests: no counts leave of")]
    assert f"of {known}: fewer than 10" in said[-1]
    assert np.isnan(result.metrics["pooled_macro_auc"])
    assert np.isfinite(result.metrics["sites_macro_auc"])
    assert result.summary["left_out"]["auc"] == tuple(CLASSES)


PEER = Peer(0, "s", torch.tensor([True, False, True]))
TOLD = Introduction(9, 5, ("z", "a"), "0" * 32, min_count=3)


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
        (counts(p0_7=3, n0_8=3), "counts are of more images than the 5 that it holds out"),
        (counts(p0_7=-1), r"counts holds values outside [0, 5]"),
        (counts(p0_7=6), r"counts holds values outside [0, 5]"),
        (counts(n0_7=2**31 - 1), r"counts holds values outside [0, 5]"),
        (counts(n1_7=1), "counts speaks of classes that it does not annotate"),
        (counts()[:, :2], "counts is torch.int32 (2, 2, 2048), not torch.int32 (2, 3, 2048)"),
        (counts().long(), "counts is torch.int64 (2, 3, 2048), not torch.int32 (2, 3, 2048)"),
    ],
)
def test_counts_that_cannot_be_are_refused(tensor: Tensor, reason: str | None) -> None:
    expected, reply = evaluating.expected_of(PEER, TOLD, private=False), Message({"counts": tensor})
    found = refuse_tensors(expected, reply)
    assert (found or refuse_classes(expected, reply, PEER.owned)) == reason


def test_a_private_client_sends_its_own_classes() -> None:
    expected = evaluating.expected_of(PEER, TOLD, private=True)
    assert expected["counts"].shape == (2, 2, BINS)
    assert refuse_names(expected, Message()) == "it lacks counts"
    reply = Message({"counts": counts(p0_7=1, n1_8=2)[:, :2]})
    assert refuse_classes(expected, reply, PEER.owned) is None
    found = evaluating.counted([(PEER, reply)], {"s": TOLD}, ["z", "y", "a"], private=True)["s"]
    assert (found.test[0, 2, 7], found.test[1, 0, 8], found.test.sum()) == (1, 2, 3)  # by name: a, then z
    assert found.not_sent == {"test": ()}
    assert evaluating.not_sent("s", found) == []


def test_classes_without_counts_are_named_if_they_are_annotated() -> None:
    reply = Message({"counts": counts(p2_7=1), "validation-counts": counts(p0_7=1)})
    found = evaluating.counted([(PEER, reply)], {"s": TOLD}, ["z", "y", "a"], private=False)["s"]
    assert found.test[0, 2, 7] == found.test.sum() == 1
    assert found.not_sent == {"test": ("z",), "validation": ("a",)}
    why = "it holds out fewer than 3 images with, or without, them"
    assert evaluating.not_sent("s", found) == [
        f"s sends no counts of z: {why}",
        f"s sends no counts for thresholds of a: {why}",
    ]


def test_rows_for_thresholds_have_counts_of_their_own() -> None:
    expected = evaluating.expected_of(PEER, replace(TOLD, validation=2), private=False)
    assert {name: like.high for name, like in expected.items()} == {"counts": 3, "validation-counts": 2}
    good, bad = Message({"counts": counts(p0_7=3), "validation-counts": counts(n2_7=2)}), counts(p0_7=1, n0_7=2)
    assert refuse_tensors(expected, good) is None
    reason = refuse_tensors(expected, Message(good.tensors | {"validation-counts": bad}))
    assert reason == "validation-counts are of more images than the 2 that it holds out"


def test_only_what_is_by_class_is_looked_at_by_class() -> None:
    votes = torch.tensor([[True, False, False], [False, True, False]])
    owned = torch.tensor([True, False, True])
    assert Like((2, 3), torch.bool).refuse_classes("v", votes, owned) is None
    assert Like((2, 3), torch.bool, by_class=1).refuse_classes("v", votes, torch.ones(3, dtype=torch.bool)) is None
    assert "does not annotate" in str(Like((2, 3), torch.bool, by_class=1).refuse_classes("v", votes, owned))
    assert Like((2, 3), torch.bool, by_class=0).refuse_classes("v", votes[:, :1], torch.tensor([True, False])) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda counts: {"counts": counts + 1}, "counts are of more images than the 28 that it holds out"),
        (lambda counts: {}, "it lacks counts"),
        (lambda counts: {"counts": counts, "more": counts}, "it holds the unknown key more"),
    ],
)
def test_bad_counts_are_refused_by_name_and_the_others_count(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    seen: Seen,
    change: Callable[[Tensor], Any],
    reason: str,
) -> None:
    def spoil(kind: str, name: str, message: Message) -> Message:
        bad = kind == EVALUATE and name == "site-b"
        return Message(change(message["counts"]), message.numbers) if bad else message

    result, hear = federation(consortium, tmp_path, spoil=spoil, min_count=1)
    assert [text for text in hear.said if "refused" in text] == [f"round 1: the reply of site-b is refused: {reason}"]
    assert result.per_class["known"].tolist() == [36 + (0 if n in NOT_ANNOTATED["site-c"] else 20) for n in range(10)]


def test_votes_for_classes_that_a_site_does_not_annotate_are_refused(
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
    _, hear = federation(consortium, tmp_path, spoil=spoil, **fedmlp)
    refusal = "the reply of site-c is refused: tags/votes speaks of classes that it does not annotate"
    assert [text for text in hear.said if "refused" in text] == [f"round {number}: {refusal}" for number in (1, 2)]
