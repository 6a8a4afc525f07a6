"""What a federation writes from the sites' counts: metrics by site and class, thresholds in the model, label counts."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import CLASSES, NAMES, NOT_ANNOTATED, Consortium
from evaluation_federation import ScoresAndLabels, run_without_server_data
from fake_grid import consortium, fast_polling  # noqa: F401  (fixtures)
from sklearn.metrics import f1_score
from typer.testing import CliRunner

from fedmll import load_model
from fedmll.cli.main import app
from fedmll.core.errors import ConfigError, DataError, FederationError, ReplyRejected
from fedmll.core.text import confirm_at_terminal
from fedmll.data.dataset import Dataset
from fedmll.deploy import label_counts
from fedmll.deploy.introduction import Introduction
from fedmll.deploy.server import serve
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.deploy.site import worker
from fedmll.deploy.site.site_config import Site
from fedmll.evaluation.histogram_metrics import FederatedHistograms, SiteHistograms
from fedmll.evaluation.histograms import BINS, score_histograms
from fedmll.evaluation.metrics import evaluate
from fedmll.evaluation.thresholds import thresholds_for_recall
from fedmll.runs.run_folder import RunFolder
from fedmll.training import federated_evaluation

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
    seen: ScoresAndLabels  # of the last test: site-a test, validation; site-b test, validation; site-c
    said: list[str]
    found: dict[str, Any]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Sites a and b mark validation and test rows, site c holds out a share."""
    from consortium import write_consortium

    folder, seen = tmp_path_factory.mktemp("federated"), []  # type: ignore[var-annotated]
    (folder / "run").mkdir()

    def recorded(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
        seen.append((scores, targets))
        return score_histograms(scores, targets)

    with pytest.MonkeyPatch.context() as patch:
        fast_polling.__wrapped__(patch)
        patch.setattr(worker, "score_histograms", recorded)
        _, hear = run_without_server_data(
            write_consortium(folder / "consortium"), folder / "run", min_count=1,
            server={"thresholds": "recall=0.8", "calibrate": "platt"},
            change=with_split(folder, "site-a", "site-b"), **LEARNT,
        )  # fmt: skip
    out = folder / "run" / "out"
    return Done(out, seen[-5:], hear.said, json.loads((out / "site_metrics.json").read_text()))


def rows_of(done: Done, places: tuple[int, ...], column: int) -> tuple[np.ndarray, np.ndarray]:
    p, y = (np.concatenate([done.seen[place][side][:, column] for place in places]) for side in (0, 1))
    return p[y >= 0], y[y >= 0]


TEST, TUNING = (0, 2, 4), (1, 3, 4)


def test_metrics_use_test_rows_and_thresholds_use_validation_rows(done: Done) -> None:
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
        counts = score_histograms(p[:, None], y[:, None])
        cut = thresholds_for_recall(counts, 0.8)[0]
        assert (p[y == 1] > cut).mean() >= 0.8
        logit = np.log(cut / (1 - cut))
        assert thresholds[column] == pytest.approx(1 / (1 + np.exp(-by[column, 0] * logit - by[column, 1])))
        test, target = rows_of(done, TEST, column)
        assert row["f1_tuned"] == pytest.approx(100 * f1_score(target, test > cut, zero_division=0))
        assert row["threshold_tuned"] == thresholds[column]
    assert [done.found["sites"][name]["same_rows"] for name in NAMES] == [False, False, True]


def test_each_site_has_its_own_metrics_and_thresholds(done: Done) -> None:
    for name, tested, tuning in zip(NAMES, TEST, TUNING, strict=True):
        own = federated_evaluation.read_site_thresholds(done.folder)[name]
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


def test_metrics_of_rounds_use_the_same_rows(done: Done) -> None:
    """val_…: of the rows for thresholds, so that `keep = "best"` does not look at the tests."""
    summary = json.loads((done.folder / "summary.json").read_text())["metrics"]
    sizes = np.array([44, 34, 20])
    for prefix, places in (("sites_", TEST), ("val_", TUNING)):
        own = [evaluate(*done.seen[place], CLASSES).values["macro_auc"] for place in places]
        assert summary[f"{prefix}macro_auc"] == pytest.approx(np.average(own, weights=sizes))
    assert not [name for name in summary if name.startswith("sites_val_")]


def test_table_by_site_and_class_and_the_commands(done: Done) -> None:
    with (done.folder / "site_metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["site"] for row in rows[::10]] == ["(pooled)", *NAMES]
    assert {row["class"] for row in rows} == set(CLASSES)
    row = rows[13]
    expected = done.found["sites"]["site-a"]["by_class"]["digit-3"]
    assert float(row["ap_error"]) == pytest.approx(expected["ap_error"], abs=1e-4)
    shown = CliRunner().invoke(app, ["show", str(done.folder)])
    assert shown.exit_code == 0, shown.output
    assert "from the sites' histograms" in shown.output
    assert "site-b" in shown.output
    assert "for site-c the thresholds were chosen on the same rows" in shown.output


def test_damaged_metrics_table_is_reported_by_name(done: Done, tmp_path: Path) -> None:
    (tmp_path / "site_metrics.json").write_text('{"classes": []}')
    with pytest.raises(DataError, match=r"site_metrics\.json, with the metrics of each site, cannot be read"):
        federated_evaluation.site_metrics_table(tmp_path)


def site_histograms(counts: np.ndarray, not_sent: Any = {}) -> SiteHistograms:  # noqa: B006
    return SiteHistograms(test=counts, validation=None, min_count=1, not_sent=not_sent)


def small(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return score_histograms(scores, targets).astype(np.int32)


def test_thresholds_from_summed_histograms_equal_those_of_pooled_rows(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    y = (draw.random((4000, 3)) < [0.05, 0.2, 0.5]).astype(np.int8)
    p = 1 / (1 + np.exp(-(draw.standard_normal(y.shape) * 1.5 + 2 * y - 2)))
    parts = np.array_split(np.arange(4000), 20)
    for goal in ("f1", "recall=0.9", "precision=0.6", "conformal_recall=0.9"):
        counts = {f"s{k}": site_histograms(small(p[rows], y[rows])) for k, rows in enumerate(parts)}
        found = federated_evaluation.choose_common_thresholds(FederatedHistograms(("a", "b", "c"), counts, goal))
        assert found is not None
        whole = {"a": site_histograms(small(p, y))}
        pooled = federated_evaluation.choose_common_thresholds(FederatedHistograms(("a", "b", "c"), whole, goal))
        assert pooled is not None
        np.testing.assert_array_equal(found.thresholds, pooled.thresholds)
    nothing = {"a": site_histograms(np.zeros((2, 3, BINS), np.int32), {"test": ("a",)})}
    assert federated_evaluation.choose_common_thresholds(FederatedHistograms(("a", "b", "c"), nothing)) is None
    federated_evaluation.write_site_metrics(RunFolder(tmp_path), FederatedHistograms(("a", "b", "c"), nothing), 0)
    assert federated_evaluation.read_site_thresholds(tmp_path) == {}
    found = federated_evaluation.site_metrics_table(tmp_path)
    assert found is not None
    assert found[1][1][1] == "–"
    assert found[2] == [federated_evaluation.SAME_ROWS]


@pytest.mark.parametrize(("name", "value"), [("thresholds", "recal=0.9"), ("calibrate", "plat")])
def test_misspelt_threshold_settings_are_rejected_before_the_start(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=value):
        ServerSettings(clients=NAMES, **{name: value})


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
        ((12, 88, 0), (10, 90, 0)),
        ((13, 87, 0), (15, 85, 0)),
        ((33, 34, 33), (35, 30, 35)),  # the largest is what the others leave
        ((9, 1, 90), (-1, -1, -2)),
        ((30, 65, 5), (-2, -2, -1)),
        ((5, 45, 50), (-1, -2, -2)),
    ],
)
def test_small_counts_stay_at_the_site(counts: tuple[int, int, int], told: tuple[int, int, int]) -> None:
    data = labelled(counts, (50, 50, 0))
    found = label_counts.count_labels(data, np.array([True, True]), 10)
    assert found == {"a": told, "b": (50, 50, 0)}
    assert label_counts.parse_counts(json.loads(json.dumps(found)), ["a", "b"], 100) == found
    assert label_counts.count_labels(data, np.array([False, True]), 1) == {"b": (50, 50, 0)}
    assert label_counts.count_labels(data, np.array([True, False]), 1) == label_counts.count_labels(
        data, np.array([True, False]), 5
    )


@pytest.mark.parametrize("smallest", [1, 10])
def test_withheld_counts_cannot_be_derived_from_released_ones(smallest: int) -> None:
    """Whatever is told of a class, at least two numbers of images fit to each of its counts."""
    for images in (4, 15, 16, 21, 30, 31, 39):
        fitting: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
        for present in range(images + 1):
            for absent in range(images + 1 - present):
                row = (present, absent, images - present - absent)
                told = label_counts.count_labels(labelled(row), np.array([True]), smallest)
                assert label_counts.parse_counts(told, ["a"], images) == told
                if sum(count > 0 for count in row) > 1:  # otherwise it is the number of images
                    fitting.setdefault(told["a"], []).append(row)
        for rows in fitting.values():
            assert all(max(column) == 0 or len(set(column)) > 1 for column in zip(*rows, strict=True)), rows


@pytest.mark.parametrize("told", [None, 5, {"b": [1, 1, 98]}, {"a": [1, 1]}, {"a": [1, True, 98]}, {"a": "abc"}])
def test_malformed_label_counts_are_rejected(told: Any) -> None:
    assert label_counts.parse_counts(told, ["a"], 100) is None


@pytest.mark.parametrize("row", [[-3, 50, 50], [50, 55, -1], [40, 40, 10], [105, -2, -1], [41, 59, 0], [52, -2, -1]])
def test_impossible_label_counts_are_rejected(row: list[int]) -> None:
    assert label_counts.parse_counts({"a": row}, ["a"], 100) is None
    said = {"samples": 100, "held_out": 4, "classes": ["a"], "digest": "0" * 32, "labels": {"a": row}}
    with pytest.raises(ReplyRejected, match="how many of its images have each class"):
        Introduction.from_json(said)
    for wrong in ({"validation": 4}, {"validation": -1}, {"validation": True}):
        with pytest.raises(ReplyRejected, match="which of its images are held out"):
            Introduction.from_json(said | wrong)


def told(samples: int, **labels: tuple[int, int, int]) -> Introduction:
    return Introduction(
        samples=samples, held_out=0, classes=tuple(labels), digest="0" * 32, min_count=10, labels=labels
    )


def test_doubtful_label_counts() -> None:
    here = {
        "one": told(100, a=(-1, -2, 0), b=(0, 100, 0)),
        "two": told(50, b=(0, 50, 0)),
        "three": told(20, c=(0, 0, 20)),
    }
    assert label_counts.find_doubts(["a", "b", "c", "d"], here) == [
        "no site has a training image with a known label of c, d",
        "no site has a training image with b",
        "two has no training image with any of its classes",
        "three knows no label of any of its 20 training images",
    ]
    assert label_counts.find_doubts(["a"], {"one": told(100, a=(-1, -2, 0))}) == []


def test_tables(tmp_path: Path) -> None:
    here = {"one": told(100, a=(-1, -2, 0), b=(20, 80, 0)), "two": told(50, b=(30, 0, 20))}
    assert label_counts.format_table(["a", "b"], here) == [
        "training images, rounded to 5: present / absent / unknown | one (100) | two (50)",
        "a | < 10 / withheld / 0 | –",
        "b | 20 / 80 / 0 | 30 / 0 / 20",
    ]
    many = here | {f"s{number}": told(10, a=(10, 0, 0)) for number in range(9)}
    lines = label_counts.format_table(["a", "b"], many)
    assert lines[1] == "a | 10 | 90 / 0 / 50"
    label_counts.write_label_counts(tmp_path, ["a", "b"], ["one", "absent", "two"], dict(reversed(here.items())))
    assert (tmp_path / "labels.csv").read_text().splitlines() == [
        "site,class,images,present,absent,unknown",
        "one,a,100,< 10,withheld,0",
        "one,b,100,20,80,0",
        "two,a,50,0,0,50",
        "two,b,50,30,0,20",
    ]


def test_run_shows_its_labels_first(done: Done) -> None:
    start = next(place for place, line in enumerate(done.said) if line.startswith("training images"))
    assert done.said[start].split(" | ")[1:] == ["site-a (46)", "site-b (36)", "site-c (30)"]
    assert len(done.said[start + 1 :]) >= len(CLASSES)
    with (done.folder / "labels.csv").open() as file:
        rows = {(row["site"], row["class"]): row for row in csv.DictReader(file)}
    assert len(rows) == 30
    for number in NOT_ANNOTATED["site-c"]:
        assert rows["site-c", f"digit-{number}"]["unknown"] == "30"
    assert {rows["site-a", label]["present"] for label in CLASSES} <= {"0", "< 5", "5", "10"}


def test_class_that_no_site_knows_needs_confirmation(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a terminal and --yes the run does not start; with a word it does, and is not asked again."""
    settings = {"training__rounds": 1, "min_count": 1}
    with pytest.raises(FederationError, match=r"known label of cow\. Correct the labels .* --yes"):
        run_without_server_data(consortium, tmp_path, [*CLASSES, "cow"], **settings)
    out = tmp_path / "out"
    assert not (out / "labels.csv").exists()
    assert "known label of cow" in (out / "log.txt").read_text()
    from fake_grid import RecordingCallback, make_grid

    asked: list[str] = []
    experiment = RunFolder(out).load_experiment()
    server = ServerSettings(
        clients=NAMES, min_clients=2, round_timeout=5, join_timeout=2, keys=str(consortium.keys), run="run1"
    )

    def confirm(question: str) -> bool:
        asked.append(question)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(serve.round_loop, "train", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            serve.run_federation(
                make_grid(consortium, tmp_path), experiment, server, out, callback=RecordingCallback(), confirm=confirm
            )
    assert asked == ["Start all the same?"]
    serve.run_federation(
        make_grid(consortium, tmp_path), experiment, server, out, callback=RecordingCallback(), confirm=confirm
    )
    assert len(asked) == 1
    assert (out / "summary.json").exists()


@pytest.mark.parametrize(("answer", "starts"), [("y", True), ("", False), ("no", False)])
def test_operator_confirms_doubtful_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str, starts: bool
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    sites = {"one": told(100, a=(0, 100, 0))}

    def confirm() -> None:
        label_counts.confirm_label_counts(
            tmp_path, ["a"], ["one"], sites, notify=lambda text: None, confirm=confirm_at_terminal
        )

    if starts:
        confirm()
    else:
        with pytest.raises(FederationError, match="although no site has a training image with a"):
            confirm()
    assert (tmp_path / "labels.csv").exists() == starts


def test_yes_is_for_servers_only(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text("")
    result = CliRunner().invoke(app, ["resume", str(tmp_path), "--yes"])
    assert isinstance(result.exception, ConfigError)
    assert "is not a real federation" in str(result.exception)
