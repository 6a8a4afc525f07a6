# ruff: noqa: F811 (fixtures)
"""A server that asks a site again and again: one setup per join is answered, label counts are told once, and a study is
approved by its digest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import Consortium
from site_helpers import consortium, fresh_client_app, make_setup, make_site_c, send_to_site  # noqa: F401 (fixtures)
from typer.testing import CliRunner

from fedmll.cli.main import app as command
from fedmll.core.errors import ConfigError
from fedmll.data.dataset import PRESENT
from fedmll.deploy import label_counts
from fedmll.deploy.error_codes import SiteError, SiteErrorCode
from fedmll.deploy.experiment_for_sites import StudySetup, parse_digest
from fedmll.deploy.flower import client_app
from fedmll.deploy.flower.client_app import BYE, EVALUATE, HELLO, MODEL, TRAIN, join_state
from fedmll.deploy.flower.records import from_records
from fedmll.deploy.site import approval, released_counts, site_data
from fedmll.deploy.site import worker as worker_module
from fedmll.deploy.site.site_config import Site, SiteLimits, read_site_file, write_site_file
from fedmll.deploy.site.worker import SiteWorker

HOLDOUTS = [number / 50 for number in range(1, 21)]  # every one leaves one image fewer to train on


def heard(kind: str, setup: StudySetup, file: Path) -> dict[str, Any]:
    return from_records(send_to_site(kind, {"setup": setup.to_json(), "round": 1}, file).content)[1]


def audit_of(where: Site, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (where.state_dir / "audit.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def joined(where: Site, file: Path) -> Path:
    write_site_file(where, file)
    return file


def recovered(answers: Sequence[dict[str, Any]], wanted: Sequence[NDArray[np.int64]]) -> int:
    """Of how many images the labels are the difference between two answers, class by class."""
    present = [np.array([row[0] for row in told["labels"].values()]) for told in answers]
    differences = [np.abs(one - other) for one, other in pairwise(present)]
    return sum(any(np.array_equal(labels, found) for found in differences) for labels in wanted)


def test_twenty_introductions_with_other_holdouts_get_one_answer(
    consortium: Consortium,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attack: the labels of one patient are the difference of two counts, 19 patients from 20 greetings."""
    where = make_site_c(consortium, tmp_path, limits=SiteLimits(min_count=1))
    setups = [make_setup(consortium, partition__holdout=share) for share in HOLDOUTS]
    data = [
        site_data.load_site_data(where, setup.classes, setup.shape, 3, share)
        for setup, share in zip(setups, HOLDOUTS, strict=True)
    ]
    exact = [(each.train.labels == PRESENT)[:, each.annotated].sum(axis=0) for each in data]
    patients = [one - other for one, other in pairwise(exact)]
    assert all(
        patient.sum() <= 1 and patient.min() >= 0 for patient in patients
    )  # one digit each, or none it annotates
    assert recovered([{"labels": {n: (c, 0, 0) for n, c in enumerate(counts)}} for counts in exact], patients) == 19

    file = joined(where, tmp_path / "site.json")
    replies = [heard(HELLO, setup, file) for setup in setups]
    assert "labels" in replies[0]
    assert [reply for reply in replies[1:] if reply != {"error": SiteErrorCode.SETUP, "name": where.name}] == []
    refusals = audit_of(where, "rejected")
    assert [line["study"] for line in refusals] == [setup.digest for setup in setups[1:]]
    assert {line["code"] for line in refusals} == {SiteErrorCode.SETUP}
    assert len(audit_of(where, "left")) == 1
    assert not join_state.not_approved  # the join goes on with the study that it has answered
    for kind in (TRAIN, EVALUATE, MODEL, BYE):
        assert heard(kind, replace(setups[1], run="run2"), file)["error"] in (
            SiteErrorCode.SETUP,
            SiteErrorCode.MESSAGE,
        )

    # joined anew for every one of them, which somebody would have to approve twenty times: the counts are rounded
    monkeypatch.setattr(released_counts, "read_released_counts", lambda *_: [])
    again = [heard(HELLO, setup, joined(where, file)) for setup in setups]
    assert all("labels" in reply for reply in again)
    some = [patient for patient in patients if patient.any()]
    assert len(some) >= 10
    assert recovered(again, some) == 0


def test_first_setup_of_a_join_may_come_with_any_message(consortium: Consortium, tmp_path: Path) -> None:
    file = joined(make_site_c(consortium, tmp_path), tmp_path / "site.json")
    heard(MODEL, make_setup(consortium, partition__holdout=0.2), file)  # no model in it, but the site has agreed
    assert heard(HELLO, make_setup(consortium, partition__holdout=0.3), file)["error"] == SiteErrorCode.SETUP
    assert "labels" in heard(HELLO, make_setup(consortium, partition__holdout=0.2), file)


def test_refusal_names_the_changed_settings(consortium: Consortium, tmp_path: Path) -> None:
    first = make_setup(consortium)
    with pytest.raises(
        SiteError, match=r"a different setup than .*; clients, partition\.holdout, run changed\. .* join again"
    ):
        changed = replace(make_setup(consortium, partition__holdout=0.3), run="run2", clients=4)
        approval.SetupRecord(first.values).check_same_setup(changed.values)
    approval.SetupRecord(first.values).check_same_setup(StudySetup.from_json(first.to_json()).values)
    file = joined(make_site_c(consortium, tmp_path), tmp_path / "site.json")
    file.with_suffix(approval.SETUP_SUFFIX).write_text("{")
    assert heard(HELLO, first, file)["error"] == SiteErrorCode.SETUP


def test_same_setup_gets_the_same_answer_and_nothing_is_computed(
    consortium: Consortium,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, setup = joined(make_site_c(consortium, tmp_path), tmp_path / "site.json"), make_setup(consortium)
    first = heard(HELLO, setup, file)
    monkeypatch.setattr(client_app, "_workers", {})  # also in another process
    monkeypatch.setattr(client_app, "SiteWorker", lambda *_: pytest.fail("something is computed"))
    assert heard(HELLO, setup, file) == first
    shuffled = json.dumps(dict(reversed(json.loads(setup.to_json()).items())))
    assert from_records(send_to_site(HELLO, {"setup": shuffled}, file).content)[1] == first


def test_counts_leave_once_and_another_study_causes_a_warning(
    consortium: Consortium,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where, said = make_site_c(consortium, tmp_path), list[str]()
    setup, other = (make_setup(consortium, partition__holdout=share) for share in (0.1, 0.2))
    first = SiteWorker(where, setup, said.append).introduce()["labels"]
    assert not any("have left before" in line for line in said)
    with monkeypatch.context() as patch:
        patch.setattr(label_counts, "count_labels", lambda *_: pytest.fail("counted again"))
        worker = SiteWorker(where, replace(setup, run="run2"), said.append)
        assert worker.introduce()["labels"] == first
        worker.run, worker.digest = "run1", "f" * 32  # other data in a run that has the counts: none are told
        assert worker.introduce()["labels"] == label_counts.withheld_counts(list(first))
    assert not audit_of(where, "earlier label counts")

    asked_after: list[int] = []
    monkeypatch.setattr(
        worker_module, "confirm_at_terminal", lambda question: bool(asked_after.append(len(said))) or True
    )
    SiteWorker(replace(where, needs_approval=True), other, said.append).introduce()
    (place,) = [place for place, line in enumerate(said) if "label counts of this site have left before" in line]
    assert f"for 1 other study ({setup.digest} on " in said[place]
    assert [place < after for after in asked_after] == [True]
    assert [(line["study"], line["others"]) for line in audit_of(where, "earlier label counts")] == [
        (other.digest, [setup.digest])
    ]
    (where.state_dir / "released_counts.json").write_text("[{}]")
    assert released_counts.read_released_counts(where.state_dir, said.append) == []
    assert "renamed to released_counts.json.damaged-1" in said[-1]


# ---- approval by a digest


def test_only_the_approved_study_is_answered(consortium: Consortium, tmp_path: Path) -> None:
    setup, other = make_setup(consortium), make_setup(consortium, partition__holdout=0.3)
    where = make_site_c(consortium, tmp_path, needs_approval=True, approved_digest=setup.digest)
    assert "labels" in heard(HELLO, setup, joined(where, tmp_path / "site.json"))  # and nobody is asked
    file = joined(where, tmp_path / "site.json")
    assert heard(HELLO, other, file) == {"error": SiteErrorCode.APPROVAL, "name": where.name}
    assert f"asks for the study {other.digest}, and you approved the study {setup.digest}" in join_state.not_approved
    assert read_site_file(file).approved_digest == setup.digest


def test_earlier_approval_does_not_override_another_approved_digest(consortium: Consortium, tmp_path: Path) -> None:
    setup, other = make_setup(consortium), make_setup(consortium, partition__holdout=0.3)
    where = make_site_c(consortium, tmp_path)
    SiteWorker(where, other, lambda _: None)
    with pytest.raises(SiteError, match="you approved the study"):
        SiteWorker(replace(where, approved_digest=setup.digest), other, lambda _: None)


def test_digest_covers_everything_except_the_run_name(consortium: Consortium) -> None:
    setup = make_setup(consortium)
    assert replace(setup, run="run2").digest == StudySetup.from_json(setup.to_json()).digest == setup.digest
    others = [
        replace(setup, clients=4),
        replace(setup, classes=None),
        replace(setup, shape=(1, 8, 9)),
        make_setup(consortium, partition__holdout=0.3),
        make_setup(consortium, training__rounds=9),
        make_setup(consortium, method__name="fedprox"),
        make_setup(consortium, seed=4),
    ]
    assert len({setup.digest, *(each.digest for each in others)}) == 8


@pytest.mark.parametrize("words", [["--approve", "yes"], ["--approve", "0" * 16]])
@pytest.mark.parametrize("name", ["join", "validate"])
def test_invalid_digest_is_rejected(tmp_path: Path, name: str, words: list[str]) -> None:
    options = [
        "localhost:1",
        "--name",
        "a",
        "--csv",
        "a.csv",
        "--images",
        ".",
        "--insecure",
        "--state-dir",
        str(tmp_path),
    ]
    result = CliRunner().invoke(command, [name, *options, *words])
    assert isinstance(result.exception, ConfigError)
    assert "--approve takes the digest of a study, 64 hexadecimal digits" in str(result.exception)
    assert CliRunner().invoke(command, [name, *options, "--yes"]).exit_code == 2


def test_digest_may_be_written_in_capitals() -> None:
    assert parse_digest(f" sha256:{'A' * 64}\n") == "a" * 64
    assert parse_digest(None) is None
