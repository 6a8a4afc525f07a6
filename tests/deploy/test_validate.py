# ruff: noqa: F811 (fixtures)
"""Who only validates: never asked to train, its counts in the pooled evaluation; and a model's file on own data."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import CLASSES, Consortium, write_csv
from fake_grid import FakeGrid, RecordingCallback, consortium, fast_polling, make_grid, make_site  # noqa: F401  (fixtures)
from sklearn.metrics import average_precision_score, roc_auc_score
from typer.testing import CliRunner

from fedmll.cli.main import app
from fedmll.core.errors import ConfigError, DataError
from fedmll.core.message import Message
from fedmll.deploy.error_codes import SiteError
from fedmll.deploy.experiment_for_sites import StudySetup, resolve_for_sites, settings_for_sites
from fedmll.deploy.flower.client_app import EVALUATE, MODEL, TRAIN
from fedmll.deploy.server import serve
from fedmll.deploy.server.server_settings import ServerSettings, read_server_settings, write_server_settings
from fedmll.deploy.site import validate
from fedmll.deploy.site import worker as site_worker
from fedmll.deploy.site.site_config import write_site_file
from fedmll.deploy.site.worker import SiteWorker
from fedmll.evaluation.histograms import BINS, score_histograms
from fedmll.inference.load_run import load_run
from fedmll.inference.model_file import load_model
from fedmll.runs.run_folder import RunFolder
from fedmll.training import round_loop

CLIENTS, VALIDATOR = ("site-a", "site-b"), "site-c"


def only_validates(consortium: Consortium, folder: Path, grid: FakeGrid) -> None:
    """And all counts leave."""
    for node in grid.nodes:
        here = make_site(consortium, node.name, folder)
        here = replace(here, limits=replace(here.limits, min_count=1), validation_only=node.name == VALIDATOR)
        write_site_file(here, node.site_file)


def served(
    consortium: Consortium, folder: Path, grid: FakeGrid, **changes: Any
) -> tuple[round_loop.Result, RecordingCallback]:
    own = {"data.size": 8, "study.classes": CLASSES, "study.channels": 1, "partition.holdout": 0.4}
    experiment = consortium.experiment("none", training__rounds=2, **changes).changed(own)
    RunFolder(folder / "out").create(experiment)
    hear = RecordingCallback()
    server = ServerSettings(
        clients=CLIENTS, min_clients=2, round_timeout=5, join_timeout=2, keys=str(consortium.keys), run="run1",
        validators=(VALIDATOR,),
    )  # fmt: skip
    return serve.run_federation(grid, experiment, server, folder / "out", callback=hear), hear


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory, consortium: Consortium) -> SimpleNamespace:
    """Two clients and a validator; all counts leave."""
    patch, seen = pytest.MonkeyPatch(), list[tuple[np.ndarray, np.ndarray]]()
    fast_polling.__wrapped__(patch)  # type: ignore[attr-defined]

    def recorded(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
        seen.append((scores, targets))
        return score_histograms(scores, targets)

    patch.setattr(site_worker, "score_histograms", recorded)
    folder = tmp_path_factory.mktemp("validated")
    grid = make_grid(consortium, folder)
    only_validates(consortium, folder, grid)
    result, hear = served(consortium, folder, grid)
    patch.undo()
    return SimpleNamespace(folder=folder, grid=grid, result=result, said=hear.said, seen=seen)


def test_validator_is_never_asked_to_train(over: SimpleNamespace) -> None:
    assert {name for kind, name in over.grid.log if kind == TRAIN} == set(CLIENTS)
    assert {name for kind, name in over.grid.log if kind == EVALUATE} == {*CLIENTS, VALIDATOR}
    assert [row["clients"] for row in over.result.rows] == [2, 2]
    assert any(line.startswith("site-c has joined: 50 images") and "7 annotated classes" in line for line in over.said)
    assert json.loads((over.folder / "out" / "sites.json").read_text())[VALIDATOR]["samples"] == 0


def test_validator_data_is_in_the_pooled_and_in_the_site_evaluation(over: SimpleNamespace) -> None:
    with (over.folder / "out" / "per_class.csv").open() as file:
        table = {row["class"]: row for row in csv.DictReader(file)}
    assert [len(targets) for _, targets in over.seen[-3:]] == [36, 28, 50]  # all of the validator's images
    for column, label in enumerate(CLASSES):
        p, y = (np.concatenate([one[place][:, column] for one in over.seen[-3:]]) for place in (0, 1))
        p, y = p[y >= 0], y[y >= 0]
        row = {name: float(value) for name, value in table[label].items() if name != "class"}
        assert (row["positives"], row["known"]) == (y.sum(), len(y))
        assert abs(row["auc"] - 100 * roc_auc_score(y, p)) <= row["auc_error"] + 1e-6
        assert abs(row["ap"] - 100 * average_precision_score(y, p)) <= row["ap_error"] + 1e-6
    by_site = (over.folder / "out" / "per_client.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in by_site[1:]] == [["site-a", "36"], ["site-b", "28"], ["site-c", "50"]]


def test_validator_does_not_change_the_model(over: SimpleNamespace, consortium: Consortium, tmp_path: Path) -> None:
    own = {"data.size": 8, "study.classes": CLASSES, "study.channels": 1, "partition.holdout": 0.4}
    experiment = consortium.experiment("none", training__rounds=2).changed(own)
    RunFolder(tmp_path / "out").create(experiment)
    server = ServerSettings(
        clients=CLIENTS, min_clients=2, round_timeout=5, join_timeout=2, keys=str(consortium.keys), run="run1"
    )
    grid = make_grid(consortium, tmp_path)
    grid.nodes.pop()
    without = serve.run_federation(grid, experiment, server, tmp_path / "out", callback=RecordingCallback())
    assert all(bool((without.weights[name] == tensor).all()) for name, tensor in over.result.weights.items())


def test_validator_receives_the_model(over: SimpleNamespace) -> None:
    assert (MODEL, VALIDATOR) in over.grid.log
    assert load_model(over.folder / VALIDATOR / "model.safetensors").classes == tuple(CLASSES)


def test_joining_with_the_wrong_command_is_rejected_with_advice(consortium: Consortium, tmp_path: Path) -> None:
    """A client that is listed as validating, and a validator that is not."""
    grid = make_grid(consortium, tmp_path)
    _, hear = served(consortium, tmp_path, grid)
    assert any(line.startswith("site-c is rejected: ") for line in hear.said)
    assert "site-c did not receive the model" in " ".join(hear.said)


def test_validating_site_rejects_training(consortium: Consortium, tmp_path: Path) -> None:
    experiment = resolve_for_sites(consortium.server(partition__holdout=0.3), (1, 8, 8))
    setup = StudySetup(
        run="run1", experiment=settings_for_sites(experiment), classes=tuple(CLASSES), shape=(1, 8, 8), clients=3
    )
    said: list[str] = []
    worker = SiteWorker(replace(make_site(consortium, VALIDATOR, tmp_path), validation_only=True), setup, said.append)
    assert (len(worker.data.train), len(worker.data.held_out)) == (0, 50)
    with pytest.raises(SiteError, match="only validates"):
        worker.train(Message(), 1, None, None)
    assert [line for line in said if line.startswith("  leaves per round")] == [
        f"  {'leaves per round':<16} nothing: you only validate"
    ]


def test_class_names_are_compared_before_approval(consortium: Consortium, tmp_path: Path) -> None:
    experiment = resolve_for_sites(consortium.server(), (1, 8, 8))
    said: list[str] = []
    setup = StudySetup(
        run="run1",
        experiment=settings_for_sites(experiment),
        classes=("Digit 0", "digit-11", *CLASSES[2:]),
        shape=(1, 8, 8),
        clients=3,
    )
    with pytest.raises(DataError, match=r"'digit-0', .*'Digit 0'\?.*'digit-1', .*'digit-11'\?"):
        SiteWorker(make_site(consortium, "site-a", tmp_path), setup, said.append)
    assert said == []
    setup = replace(setup, classes=tuple(CLASSES))
    SiteWorker(make_site(consortium, VALIDATOR, tmp_path), setup, said.append)
    assert said[0] == "not annotated here, so unknown: digit-2, digit-5, digit-7"
    assert said[1] == "The server asks for this study:"


def test_validators_are_kept_in_the_servers_file(tmp_path: Path) -> None:
    server = ServerSettings(clients=("a", "b"), validators=("lab",))
    write_server_settings(server, tmp_path)
    assert read_server_settings(tmp_path) == server
    assert (server.all_names, server.participants) == (("a", "b", "lab"), ("a", "b"))
    with pytest.raises(ConfigError, match="twice"):
        ServerSettings(clients=("a", "b"), validators=("b",))


# ---- a model's file


def test_validation_of_a_model_file_and_the_file_to_send(
    over: SimpleNamespace, consortium: Consortium, tmp_path: Path
) -> None:
    home, out = consortium.folder, tmp_path / "counts.json"
    with (home / "test" / "labels.csv").open() as file:
        rows = list(csv.reader(file))
    for number, row in enumerate(rows[1:]):
        row[4] = "1" if number < 4 else "0"  # few of digit-3
    write_csv(tmp_path / "labels.csv", rows)
    words = ["--csv", str(tmp_path / "labels.csv"), "--images", str(home / "images"), "--out", str(out)]
    done = CliRunner().invoke(app, ["validate", str(over.folder / "out"), *words], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    told = json.loads(out.read_text())
    model = load_run(over.folder / "out").model
    site = replace(make_site(consortium, "test", tmp_path), csv=tmp_path / "labels.csv")
    found = validate.validate_model(model, site)
    assert found.images == 120
    counts = np.zeros((2, len(CLASSES), BINS), np.int64)
    for name, sides in told["counts"].items():
        for row, side in enumerate(("present", "absent")):
            for place, count in sides[side].items():
                counts[row, CLASSES.index(name), int(place)] = count
    assert np.array_equal(counts, found.counts)
    assert set(told["counts"]) == set(CLASSES) - set(told["withheld_classes"]) == set(told["per_class"])
    assert min(int(counts[row, CLASSES.index(name)].sum()) for name in told["counts"] for row in (0, 1)) >= 10
    assert told["withheld_classes"] == ["digit-3"]
    assert f"{found.report.values['map']:.2f}" in done.output
    assert str(home) not in out.read_text()
    assert not {".png", "image"} & set(out.read_text().split('"'))


def test_unknown_class_names_are_rejected_with_suggestions(
    over: SimpleNamespace,
    consortium: Consortium,
    tmp_path: Path,
) -> None:
    with (consortium.folder / "test" / "labels.csv").open() as file:
        rows = list(csv.reader(file))
    rows[0][1:3] = ["Digit 0", "digit-11"]
    write_csv(tmp_path / "labels.csv", rows)
    site = replace(make_site(consortium, "test", tmp_path), csv=tmp_path / "labels.csv")
    with pytest.raises(DataError, match=r"'Digit 0', .*did you mean 'digit-0'\?.*'digit-11', .*'digit-1'"):
        validate.validate_model(load_run(over.folder / "out").model, site)


def test_validate_with_a_server_needs_a_name() -> None:
    done = CliRunner().invoke(app, ["validate", "fed.example.org:8000", "--csv", "a.csv", "--images", "."])
    assert isinstance(done.exception, ConfigError)
    assert "give it with --name" in str(done.exception)
