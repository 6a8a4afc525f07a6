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

from sites import CLASSES, Consortium, write_csv
from sklearn.metrics import average_precision_score, roc_auc_score
from test_flower import FakeGrid, Hear, consortium, make_grid, quick, site_of  # noqa: F401  (fixtures)
from typer.testing import CliRunner

from fedmll.cli.main import app
from fedmll.deploy import serving, site_worker, validating
from fedmll.deploy.flower.site_app import EVALUATE, MODEL, TRAIN
from fedmll.deploy.sentences import Refused
from fedmll.deploy.serving import Server
from fedmll.deploy.setting import save, server_in
from fedmll.deploy.site_worker import Setup, SiteWorker, remember_site
from fedmll.errors import ConfigError, DataError
from fedmll.evaluation.histograms import BINS, histograms
from fedmll.message import Message
from fedmll.running import loop
from fedmll.running.model import load_model
from fedmll.running.saved import load_run

CLIENTS, VALIDATOR = ("site-a", "site-b"), "site-c"


def only_validates(consortium: Consortium, folder: Path, grid: FakeGrid) -> None:  # noqa: F811
    """And all counts leave."""
    for node in grid.nodes:
        here = site_of(consortium, node.name, folder)
        here = replace(here, limits=replace(here.limits, min_count=1), validates=node.name == VALIDATOR)
        remember_site(here, node.site_file)


def served(consortium: Consortium, folder: Path, grid: FakeGrid, **changes: Any) -> tuple[loop.Result, Hear]:  # noqa: F811
    own = {"data.size": 8, "sites.classes": CLASSES, "sites.channels": 1, "partition.holdout": 0.4}
    experiment = consortium.experiment("none", training__rounds=2, **changes).changed(own)
    loop.create(folder / "out", experiment)
    hear = Hear()
    server = Server(
        CLIENTS, min_clients=2, round_timeout=5, join_timeout=2, keys=str(consortium.keys), run="run1",
        validators=(VALIDATOR,),
    )  # fmt: skip
    return serving.drive(grid, experiment, server, folder / "out", hear), hear


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory, consortium: Consortium) -> SimpleNamespace:  # noqa: F811
    """Two clients and a validator; all counts leave."""
    patch, seen = pytest.MonkeyPatch(), list[tuple[np.ndarray, np.ndarray]]()
    quick.__wrapped__(patch)  # type: ignore[attr-defined]

    def recorded(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
        seen.append((scores, targets))
        return histograms(scores, targets)

    patch.setattr(site_worker, "histograms", recorded)
    folder = tmp_path_factory.mktemp("validated")
    grid = make_grid(consortium, folder)
    only_validates(consortium, folder, grid)
    result, hear = served(consortium, folder, grid)
    patch.undo()
    return SimpleNamespace(folder=folder, grid=grid, result=result, said=hear.said, seen=seen)


def test_a_validator_is_never_asked_to_train(over: SimpleNamespace) -> None:
    assert {name for kind, name in over.grid.log if kind == TRAIN} == set(CLIENTS)
    assert {name for kind, name in over.grid.log if kind == EVALUATE} == {*CLIENTS, VALIDATOR}
    assert [row["clients"] for row in over.result.rows] == [2, 2]
    assert "site-c is here: 50 images to test on, 7 classes annotated" in over.said
    assert json.loads((over.folder / "out" / "sites.json").read_text())[VALIDATOR]["samples"] == 0


def test_its_data_counts_in_the_pooled_evaluation_and_by_site(over: SimpleNamespace) -> None:
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


def test_it_does_not_change_the_model(over: SimpleNamespace, consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    own = {"data.size": 8, "sites.classes": CLASSES, "sites.channels": 1, "partition.holdout": 0.4}
    experiment = consortium.experiment("none", training__rounds=2).changed(own)
    loop.create(tmp_path / "out", experiment)
    server = Server(CLIENTS, min_clients=2, round_timeout=5, join_timeout=2, keys=str(consortium.keys), run="run1")
    grid = make_grid(consortium, tmp_path)
    grid.nodes.pop()
    without = serving.drive(grid, experiment, server, tmp_path / "out", Hear())
    assert all(bool((without.weights[name] == tensor).all()) for name, tensor in over.result.weights.items())


def test_it_gets_the_model_too(over: SimpleNamespace) -> None:
    assert (MODEL, VALIDATOR) in over.grid.log
    assert load_model(over.folder / VALIDATOR / "model.safetensors").classes == tuple(CLASSES)


def test_who_comes_in_the_wrong_way_is_told(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    """A client that is listed as validating, and a validator that is not."""
    grid = make_grid(consortium, tmp_path)
    _, hear = served(consortium, tmp_path, grid)
    assert "site-c is refused: it trains, and is no client of this run" in hear.said
    assert "site-c did not get the model" in " ".join(hear.said)


def test_the_site_itself_refuses_to_train(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    experiment = serving.settled(consortium.server(partition__holdout=0.3), (1, 8, 8))
    setup = Setup("run1", serving.told(experiment), tuple(CLASSES), (1, 8, 8), 3)
    said: list[str] = []
    worker = SiteWorker(replace(site_of(consortium, VALIDATOR, tmp_path), validates=True), setup, said.append)
    assert (len(worker.data.train), len(worker.data.held_out)) == (0, 50)
    with pytest.raises(Refused, match="only validates"):
        worker.train(Message(), 1, None, None)
    assert [line for line in said if line.startswith("  leaves a round")] == [
        "  leaves a round  nothing: you only validate"
    ]


def test_class_names_are_compared_before_anybody_is_asked(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    experiment = serving.settled(consortium.server(), (1, 8, 8))
    said: list[str] = []
    setup = Setup("run1", serving.told(experiment), ("Digit 0", "digit-11", *CLASSES[2:]), (1, 8, 8), 3)
    with pytest.raises(DataError, match=r"'digit-0', .*'Digit 0'\?.*'digit-1', .*'digit-11'\?"):
        SiteWorker(site_of(consortium, "site-a", tmp_path), setup, said.append)
    assert said == []
    setup = replace(setup, classes=tuple(CLASSES))
    SiteWorker(site_of(consortium, VALIDATOR, tmp_path), setup, said.append)
    assert said[0] == "not annotated here, so unknown: digit-2, digit-5, digit-7"
    assert said[1] == "The server asks for this experiment:"


def test_validators_are_kept_in_the_servers_file(tmp_path: Path) -> None:
    server = Server(("a", "b"), validators=("lab",))
    save(server, tmp_path)
    assert server_in(tmp_path) == server
    assert (server.everybody, server.taking_part) == (("a", "b", "lab"), ("a", "b"))
    with pytest.raises(ConfigError, match="name somebody twice"):
        Server(("a", "b"), validators=("b",))


# ---- a model's file


def test_metrics_of_a_file_and_what_may_be_sent(over: SimpleNamespace, consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
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
    site = replace(site_of(consortium, "test", tmp_path), csv=tmp_path / "labels.csv")
    found = validating.validate_model(model, site)
    assert found.images == 120
    counts = np.zeros((2, len(CLASSES), BINS), np.int64)
    for name, sides in told["counts"].items():
        for row, side in enumerate(("present", "absent")):
            for place, count in sides[side].items():
                counts[row, CLASSES.index(name), int(place)] = count
    assert np.array_equal(counts, found.counts)
    assert set(told["counts"]) == set(CLASSES) - set(told["few"]) == set(told["per_class"])
    assert min(int(counts[row, CLASSES.index(name)].sum()) for name in told["counts"] for row in (0, 1)) >= 10
    assert told["few"] == ["digit-3"]
    assert f"{found.report.values['map']:.2f}" in done.output
    assert str(home) not in out.read_text()
    assert not {".png", "image"} & set(out.read_text().split('"'))


def test_other_class_names_are_refused_with_the_likely_ones(
    over: SimpleNamespace,
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
) -> None:
    with (consortium.folder / "test" / "labels.csv").open() as file:
        rows = list(csv.reader(file))
    rows[0][1:3] = ["Digit 0", "digit-11"]
    write_csv(tmp_path / "labels.csv", rows)
    site = replace(site_of(consortium, "test", tmp_path), csv=tmp_path / "labels.csv")
    with pytest.raises(DataError, match=r"'Digit 0', .*did you mean 'digit-0'\?.*'digit-11', .*'digit-1'"):
        validating.validate_model(load_run(over.folder / "out").model, site)


def test_a_server_wants_a_name() -> None:
    done = CliRunner().invoke(app, ["validate", "fed.example.org:8000", "--csv", "a.csv", "--images", "."])
    assert isinstance(done.exception, ConfigError)
    assert "give it with --name" in str(done.exception)
