"""What a whole federation leaves from its counts: figures by site and class, thresholds in the model, label counts."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from sites import CLASSES, NAMES, NOT_ANNOTATED, Consortium
from sklearn.metrics import f1_score
from test_counts import Seen, federation
from test_flower import consortium, quick  # noqa: F401  (fixtures)
from typer.testing import CliRunner

from fedmll import load_model
from fedmll.cli.main import app
from fedmll.data.dataset import Dataset
from fedmll.deploy import label_counts, serving, site_worker
from fedmll.deploy.introduction import Introduction
from fedmll.deploy.serving import Server
from fedmll.deploy.site import Site
from fedmll.errors import ConfigError, DataError, FederationError, ReplyRefused
from fedmll.evaluation import cuts
from fedmll.evaluation.counted import Counted, SiteCounts
from fedmll.evaluation.histograms import BINS, histograms
from fedmll.evaluation.metrics import evaluate
from fedmll.running import federated

LEARNT = {"training__rounds": 8, "training__lr": 0.03}  # so that scores are not all near 0.5
SPLIT = ("train", "train", "validation", "test")


def with_split(folder: Path, *names: str) -> Any:
    """The labels of these sites with a column that says what is for thresholds, and what for tests."""

    def change(site: Site) -> Site:
        if site.name not in names:
            return site
        first, *lines = site.csv.read_text().splitlines()
        marked = [f"{first},split", *(f"{line},{SPLIT[place % 4]}" for place, line in enumerate(lines))]
        path = folder / f"{site.name}.csv"
        path.write_text("\n".join(marked) + "\n")
        return replace(site, csv=path)

    return change


@dataclass(frozen=True)
class Done:
    folder: Path
    seen: Seen  # of the last test: site-a's test rows, its validation rows, site-b's …, then site-c's only kind
    said: list[str]
    found: dict[str, Any]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Sites a and b mark validation and test rows, site c holds out a share."""
    from sites import write_consortium

    folder, seen = tmp_path_factory.mktemp("federated"), []  # type: ignore[var-annotated]
    (folder / "run").mkdir()

    def recorded(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
        seen.append((scores, targets))
        return histograms(scores, targets)

    with pytest.MonkeyPatch.context() as patch:
        quick.__wrapped__(patch)
        patch.setattr(site_worker, "histograms", recorded)
        _, hear = federation(
            write_consortium(folder / "consortium"), folder / "run", min_count=1,
            server={"thresholds": "recall=0.8", "calibrate": "platt"},
            change=with_split(folder, "site-a", "site-b"), **LEARNT,
        )  # fmt: skip
    out = folder / "run" / "out"
    return Done(out, seen[-5:], hear.said, json.loads((out / "federated.json").read_text()))


def rows_of(done: Done, places: tuple[int, ...], column: int) -> tuple[np.ndarray, np.ndarray]:
    p, y = (np.concatenate([done.seen[place][side][:, column] for place in places]) for side in (0, 1))
    return p[y >= 0], y[y >= 0]


TEST, TUNING = (0, 2, 4), (1, 3, 4)


def test_figures_are_of_test_rows_and_thresholds_of_validation_rows(done: Done) -> None:
    model = load_model(done.folder / "model.safetensors")
    assert model.description["thresholds_for"] == "recall=0.8"
    by = model.calibration
    assert by is not None
    thresholds = model.tuned_thresholds
    assert thresholds is not None
    for column, label in enumerate(CLASSES):
        row = done.found["pooled"]["by_class"][label]
        p, y = rows_of(done, TEST, column)
        assert (row["positives"], row["known"]) == (y.sum(), len(y))
        assert row["f1"] == pytest.approx(100 * f1_score(y, p >= 0.5, zero_division=0))
        p, y = rows_of(done, TUNING, column)
        counts = histograms(p[:, None], y[:, None])
        cut = cuts.wanted_recall(counts, 0.8)[0]
        assert (p[y == 1] > cut).mean() >= 0.8
        logit = np.log(cut / (1 - cut))
        assert thresholds[column] == pytest.approx(1 / (1 + np.exp(-by[column, 0] * logit - by[column, 1])))
        test, target = rows_of(done, TEST, column)
        assert row["f1_tuned"] == pytest.approx(100 * f1_score(target, test > cut, zero_division=0))
        assert row["threshold_tuned"] == thresholds[column]
    assert [done.found["sites"][name]["same_rows"] for name in NAMES] == [False, False, True]


def test_each_site_has_figures_and_thresholds_of_its_own(done: Done) -> None:
    for name, tested, tuning in zip(NAMES, TEST, TUNING, strict=True):
        own = federated.by_site(done.folder)[name]
        assert own["thresholds_for"] == "recall=0.8"
        y = done.seen[tuning][1]
        both = ((y == 1).any(0)) & ((y == 0).any(0))
        mine = done.found["sites"][name]["chosen_on_own_counts"]
        assert mine == [label for label, known in zip(CLASSES, both, strict=True) if known]
        assert 0 < both.sum() < 10 or name != "site-c"
        common = done.found["pooled"]["own"]
        for column, label in enumerate(CLASSES):
            if not both[column]:  # nothing of its own to choose it on
                assert own["thresholds"][column] == common["thresholds"][column]
                assert own["calibration"][column] == common["calibration"][column]
            row = done.found["sites"][name]["by_class"][label]
            assert row["known"] == (done.seen[tested][1][:, column] >= 0).sum()
            assert row["threshold_own"] == own["thresholds"][column]
        assert own["thresholds"] != common["thresholds"]
    exact = evaluate(*done.seen[0], CLASSES)
    mean = done.found["sites"]["site-a"]["mean"]
    assert abs(mean["auc"] - exact.values["macro_auc"]) <= mean["auc_error"] + 1e-9
    assert mean["auc_low"] <= mean["auc"] <= mean["auc_high"]
    curve = done.found["sites"]["site-a"]["curve"]
    assert sum(curve["samples"]) == (done.seen[0][1] >= 0).sum()


def test_metrics_of_rounds_follow_the_same_rows(done: Done) -> None:
    """val_…: of the rows for thresholds, so that `keep = "best"` does not look at the tests."""
    summary = json.loads((done.folder / "summary.json").read_text())["metrics"]
    sizes = np.array([44, 34, 20])
    for prefix, places in (("sites_", TEST), ("val_", TUNING)):
        own = [evaluate(*done.seen[place], CLASSES).values["macro_auc"] for place in places]
        assert summary[f"{prefix}macro_auc"] == pytest.approx(np.average(own, weights=sizes))
    assert not [name for name in summary if name.startswith("sites_val_")]


def test_the_table_by_site_and_class_and_the_commands(done: Done) -> None:
    with (done.folder / "federated.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["site"] for row in rows[::10]] == ["(pooled)", *NAMES]
    assert {row["class"] for row in rows} == set(CLASSES)
    row = rows[13]
    expected = done.found["sites"]["site-a"]["by_class"]["digit-3"]
    assert float(row["ap_error"]) == pytest.approx(expected["ap_error"], abs=1e-4)
    shown = CliRunner().invoke(app, ["show", str(done.folder)])
    assert shown.exit_code == 0, shown.output
    assert "from the sites' counts" in shown.output
    assert "site-b" in shown.output
    assert "of site-c the thresholds were chosen on the rows" in shown.output


def test_a_damaged_table_is_named(done: Done, tmp_path: Path) -> None:
    (tmp_path / "federated.json").write_text('{"classes": []}')
    with pytest.raises(DataError, match=r"federated\.json, with the figures by site, cannot be read"):
        federated.overview(tmp_path)


def small(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return histograms(scores, targets).astype(np.int32)


def test_thresholds_from_sums_are_those_of_the_rows_together(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    y = (draw.random((4000, 3)) < [0.05, 0.2, 0.5]).astype(np.int8)
    p = 1 / (1 + np.exp(-(draw.standard_normal(y.shape) * 1.5 + 2 * y - 2)))
    parts = np.array_split(np.arange(4000), 20)
    for goal in ("f1", "recall=0.9", "precision=0.6", "find=0.9"):
        counts = {f"s{k}": SiteCounts(small(p[rows], y[rows]), None, 1, {}) for k, rows in enumerate(parts)}
        found = federated.chosen(Counted(("a", "b", "c"), counts, goal))
        assert found is not None
        whole = {"a": SiteCounts(small(p, y), None, 1, {})}
        pooled = federated.chosen(Counted(("a", "b", "c"), whole, goal))
        assert pooled is not None
        np.testing.assert_array_equal(found.thresholds, pooled.thresholds)
    nothing = {"a": SiteCounts(np.zeros((2, 3, BINS), np.int32), None, 1, {"test": ("a",)})}
    assert federated.chosen(Counted(("a", "b", "c"), nothing)) is None
    federated.write(tmp_path, Counted(("a", "b", "c"), nothing), 0)
    assert federated.by_site(tmp_path) == {}
    found = federated.overview(tmp_path)
    assert found is not None
    assert found[1][1][1] == "–"
    assert found[2] == [federated.SAME_ROWS]


@pytest.mark.parametrize(("name", "value"), [("thresholds", "recal=0.9"), ("calibrate", "plat")])
def test_a_slip_of_the_pen_is_said_before_anything_starts(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=value):
        Server(NAMES, **{name: value})


# ---- how many images have a class


def labelled(*columns: tuple[int, int, int]) -> Dataset:
    """Of each class so many present, absent and unknown."""
    labels = np.array([[1] * p + [0] * a + [-1] * u for p, a, u in columns], np.int8).T
    names = tuple("abcdefgh"[: len(columns)])
    return Dataset(np.zeros((len(labels), 1), np.uint8), labels, names)


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ((40, 60, 0), (40, 60, 0)),
        ((0, 100, 0), (0, 100, 0)),
        ((9, 91, 0), (-1, -2, 0)),  # the negatives would say how many positives
        ((91, 9, 0), (-2, -1, 0)),
        ((10, 90, 0), (10, 90, 0)),
        ((9, 1, 90), (-1, -1, -2)),
        ((30, 65, 5), (30, -2, -1)),
        ((5, 45, 50), (-1, 45, -2)),
    ],
)
def test_small_counts_stay_at_the_site(counts: tuple[int, int, int], told: tuple[int, int, int]) -> None:
    data = labelled(counts, (50, 50, 0))
    found = label_counts.of_site(data, np.array([True, True]), 10)
    assert found == {"a": told, "b": (50, 50, 0)}
    assert label_counts.believed(json.loads(json.dumps(found)), ["a", "b"], 100) == found
    assert label_counts.of_site(data, np.array([False, True]), 1) == {"b": (50, 50, 0)}
    assert label_counts.of_site(data, np.array([True, False]), 1) == {"a": counts}


@pytest.mark.parametrize("told", [None, 5, {"b": [1, 1, 98]}, {"a": [1, 1]}, {"a": [1, True, 98]}, {"a": "abc"}])
def test_label_counts_that_are_none_are_refused(told: Any) -> None:
    assert label_counts.believed(told, ["a"], 100) is None


@pytest.mark.parametrize("row", [[-3, 50, 50], [50, 51, -1], [40, 40, 10], [101, -2, -1]])
def test_label_counts_that_cannot_be_are_refused(row: list[int]) -> None:
    assert label_counts.believed({"a": row}, ["a"], 100) is None
    said = {"samples": 100, "held_out": 4, "classes": ["a"], "digest": "0" * 32, "labels": {"a": row}}
    with pytest.raises(ReplyRefused, match="how many of its images have a class"):
        Introduction.of(said)
    for wrong in ({"validation": 4}, {"validation": -1}, {"validation": True}):
        with pytest.raises(ReplyRefused, match="which of its images are held out"):
            Introduction.of(said | wrong)


def told(samples: int, **labels: tuple[int, int, int]) -> Introduction:
    return Introduction(samples, 0, tuple(labels), "0" * 32, min_count=10, labels=labels)


def test_what_a_person_should_know() -> None:
    here = {
        "one": told(100, a=(-1, -2, 0), b=(0, 100, 0)),
        "two": told(50, b=(0, 50, 0)),
        "three": told(20, c=(0, 0, 20)),
    }
    assert label_counts.doubts(["a", "b", "c", "d"], here) == [
        "no site has a training image with a known label of c, d",
        "no site has a training image with b",
        "two has no training image with any of its classes",
        "three knows no label of any of its 20 training images",
    ]
    assert label_counts.doubts(["a"], {"one": told(100, a=(-1, -2, 0))}) == []


def test_the_tables(tmp_path: Path) -> None:
    here = {"one": told(100, a=(-1, -2, 0), b=(20, 80, 0)), "two": told(50, b=(30, 0, 20))}
    assert label_counts.shown(["a", "b"], here) == [
        "training images: present / absent / unknown | one (100) | two (50)",
        "a | < 10 / not said / 0 | –",
        "b | 20 / 80 / 0 | 30 / 0 / 20",
    ]
    many = here | {f"s{number}": told(10, a=(10, 0, 0)) for number in range(9)}
    lines = label_counts.shown(["a", "b"], many)
    assert lines[1] == "a | 10 | 90 / 0 / 50"
    label_counts.write(tmp_path, ["a", "b"], ["one", "absent", "two"], dict(reversed(here.items())))
    assert (tmp_path / "labels.csv").read_text().splitlines() == [
        "site,class,images,present,absent,unknown",
        "one,a,100,< 10,not said,0",
        "one,b,100,20,80,0",
        "two,a,50,0,0,50",
        "two,b,50,30,0,20",
    ]


def test_a_run_shows_its_labels_first(done: Done) -> None:
    start = next(place for place, line in enumerate(done.said) if line.startswith("training images"))
    assert done.said[start].split(" | ")[1:] == ["site-a (46)", "site-b (36)", "site-c (30)"]
    assert len(done.said[start + 1 :]) >= len(CLASSES)
    with (done.folder / "labels.csv").open() as file:
        rows = {(row["site"], row["class"]): row for row in csv.DictReader(file)}
    assert len(rows) == 30
    for number in NOT_ANNOTATED["site-c"]:
        assert rows["site-c", f"digit-{number}"]["unknown"] == "30"
    assert sum(int(rows["site-a", label]["present"]) for label in CLASSES) == 46


def test_a_class_that_nobody_knows_needs_a_persons_word(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a terminal and --yes the run does not start; with a word it does, and is not asked again."""
    settings = {"training__rounds": 1, "min_count": 1}
    with pytest.raises(FederationError, match=r"known label of cow\. Have it put right .* --yes"):
        federation(consortium, tmp_path, [*CLASSES, "cow"], **settings)
    out = tmp_path / "out"
    assert not (out / "labels.csv").exists()
    assert "known label of cow" in (out / "log.txt").read_text()
    from test_flower import Hear, make_grid

    from fedmll.running import loop

    asked: list[list[str]] = []
    experiment = loop.experiment_in(out)
    server = Server(NAMES, min_clients=2, round_timeout=5, join_timeout=2, keys=str(consortium.keys), run="run1")

    def stop(found: Any) -> None:
        asked.append(list(found))

    with monkeypatch.context() as patch:
        patch.setattr(serving.loop, "resume", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            serving.drive(make_grid(consortium, tmp_path), experiment, server, out, Hear(), confirm=stop)
    assert asked == [["no site has a training image with a known label of cow"]]
    serving.drive(make_grid(consortium, tmp_path), experiment, server, out, Hear(), confirm=stop)
    assert len(asked) == 1
    assert (out / "summary.json").exists()


@pytest.mark.parametrize(("answer", "starts"), [("y", True), ("", False), ("no", False)])
def test_a_persons_word(monkeypatch: pytest.MonkeyPatch, answer: str, starts: bool) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    if starts:
        label_counts.at_terminal(["x"])
    else:
        with pytest.raises(FederationError, match="although x"):
            label_counts.at_terminal(["x"])


def test_yes_is_for_servers_only(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text("")
    result = CliRunner().invoke(app, ["resume", str(tmp_path), "--yes"])
    assert isinstance(result.exception, ConfigError)
    assert "is not a federation between machines" in str(result.exception)
