"""The average of a real federation: centered clipping, unless the experiment or the method says otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import NAMES, Consortium
from fake_grid import RecordingCallback, close, consortium, fast_polling, make_grid  # noqa: F401  (fixtures)

from fedmll import run
from fedmll.config.experiment import Experiment
from fedmll.core.text import confirm_always
from fedmll.deploy.flower import child_processes, superlink
from fedmll.deploy.server.default_average import describe_average, with_default_average
from fedmll.deploy.server.serve import serve, study_digest
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.runs.run_folder import RunFolder


def make(name: str = "fedavg", **options: Any) -> Experiment:
    training = {"training": {"optimizer": "sgd"}} if name in ("scaffold", "fednova") else {}
    options |= {"loss": "sigmoid"} if name == "private-fedavg" else {}
    frozen = {"model": {"freeze": "backbone", "weights": "random"}} if name in ("fed-ridge", "fed-logistic") else {}
    return Experiment.make({"method": {"name": name} | options} | training | frozen)


def average_of(experiment: Experiment, sites: int) -> Any:
    return with_default_average(experiment, sites).method.options.get("average")


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedavg-pl", "scaffold", "fedcurv", "fedmlp", "compose"])
def test_methods_with_the_mean_use_centered_clipping_from_three_sites_on(name: str) -> None:
    assert average_of(make(name), 3) == "centered-clipping"
    assert average_of(make(name), 2) == "mean"


@pytest.mark.parametrize("average", ["mean", "clipped-mean", "trimmed-mean"])
def test_average_of_the_experiment_is_kept(average: str) -> None:
    assert average_of(make(average=average), 5) == average
    assert average_of(make("compose", average=average), 5) == average


def test_options_of_a_composed_mean_count_as_its_choice() -> None:
    assert average_of(make("compose", mean={"weighting": "equal"}), 5) == "mean"


def test_other_settings_do_not_change() -> None:
    before = make("fedprox", mu=0.3, weighting="equal").changed({"training.rounds": 7})
    after = with_default_average(before, 4)
    assert before.differs(after) == ["method.average"]


def test_experiment_file_of_a_run_keeps_its_average(tmp_path: Path) -> None:
    """A complete file names its average, and so does the experiment of a resumed run."""
    (tmp_path / "simulated.toml").write_text(make().to_toml())
    assert average_of(Experiment.load(tmp_path / "simulated.toml"), 5) == "mean"


@pytest.mark.parametrize(
    "name", ["fednova", "surgical", "fedharmony", "cbafed", "rscfed", "private-fedavg", "fed-ridge"]
)
def test_methods_with_their_own_average_keep_it(name: str) -> None:
    assert with_default_average(make(name), 5) == make(name)


@pytest.mark.parametrize(
    ("name", "options", "sites", "text"),
    [
        ("fedavg", {"average": "centered-clipping"}, 3, "average: centered-clipping, which tolerates 1 faulty site of"),
        ("fedavg", {"average": "centered-clipping"}, 9, "average: centered-clipping, which tolerates 2 faulty sites"),
        ("fedavg", {"average": "clipped-mean"}, 9, "average: clipped-mean, which tolerates 2 faulty sites of 9"),
        ("fedavg", {"average": "trimmed-mean"}, 4, "average: trimmed-mean, which tolerates 1 faulty site of 4"),
        ("fedavg", {"average": "trimmed-mean", "trim": 0.4}, 5, "average: trimmed-mean, which tolerates 2 faulty"),
        ("fedavg", {"average": "mean"}, 5, "average: mean, which tolerates no faulty site; method.average ="),
        ("fedavg", {}, 2, "average: mean; with 2 sites no average can tell which one is faulty"),
        ("fednova", {}, 5, "average: normalised, which belongs to fednova and tolerates no faulty site"),
        ("fedharmony", {"aggregation": False}, 5, "average: mean, which belongs to fedharmony and tolerates no"),
        ("fed-logistic", {}, 5, "average: none, fed-logistic adds up the sites' sums; a site that sends wrong"),
        ("fed-ridge", {}, 5, "average: none, fed-ridge adds up the sites' sums; a site that sends wrong sums"),
    ],
)  # fmt: skip
def test_operator_is_told_what_the_average_tolerates(name: str, options: Any, sites: int, text: str) -> None:
    assert describe_average(make(name, **options), sites).startswith(text)


def test_one_tolerated_site_is_named_in_the_singular() -> None:
    experiment = make("fedavg", average="centered-clipping")
    assert "1 faulty site of 3, unless it has a large share" in describe_average(experiment, 3)
    assert "2 faulty sites of 9, unless they have a large share" in describe_average(experiment, 9)


def test_served_run_stores_the_average_and_a_simulation_repeats_it(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`serve` with three sites: the operator, the audit log, the sites' digest and a local run agree."""
    grid, callback, out = make_grid(consortium, tmp_path), RecordingCallback(), tmp_path / "run"
    monkeypatch.setattr(superlink, "run_superlink", lambda *a: FakeSuperLink(grid))
    monkeypatch.setattr(child_processes, "open_listener", lambda host, port: FakeSuperLink(grid))
    settings = ServerSettings(clients=NAMES, keys=str(consortium.keys), min_clients=3, round_timeout=5, join_timeout=2)
    experiment = consortium.server()
    result = serve(experiment, settings, out, callback=callback, confirm=confirm_always)
    assert RunFolder(out).load_experiment().method.options["average"] == "centered-clipping"
    assert any(
        line.startswith("average: centered-clipping, which tolerates 1 faulty site of 3") for line in callback.said
    )
    events = [json.loads(line) for line in (out / "audit.jsonl").read_text().splitlines()]
    (event,) = [each for each in events if each["event"] == "average"]
    assert (event["average"], event["tolerated"]) == ("centered-clipping", 1)
    assert any(study_digest(experiment, 3) in line for line in callback.said)
    assert study_digest(experiment, 3) != study_digest(experiment.changed({"method.average": "mean"}), 3)
    assert close(result, run(consortium.local(method__average="centered-clipping")))
    assert not close(result, run(consortium.local()))


class FakeSuperLink:
    """Stands for a listening socket and for a running SuperLink."""

    def __init__(self, grid: Any) -> None:
        self.grid = grid

    def __enter__(self) -> FakeSuperLink:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        pass

    def check_alive(self) -> None:
        pass
