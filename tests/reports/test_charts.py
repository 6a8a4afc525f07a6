"""The numbers of the report's charts and tables, against the files of the runs, by hand, and against scikit-learn."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from report_runs import comparison, experiment, write_predictions, write_run
from scipy.stats import binomtest
from sklearn.metrics import f1_score, precision_score, recall_score

from fedmll import load_run
from fedmll.comparison.compared_runs import read_compared_runs
from fedmll.data import federation
from fedmll.evaluation.bootstrap import bootstrap_intervals
from fedmll.reports import curves as curves_module
from fedmll.reports.charts import (
    THRESHOLDS,
    calibration_chart,
    class_chart,
    client_chart,
    label_heatmaps,
    metrics_by_threshold,
    reliability_curve,
    threshold_chart,
    wilson_interval,
)
from fedmll.reports.curves import curve_columns, learning_curves
from fedmll.reports.html_report import compare_settings, count_of, describe_runs
from fedmll.reports.result_table import result_table
from fedmll.runs.array_files import Predictions, read_client_labels, read_predictions
from fedmll.runs.run_folder import RunFolder

__all__ = ["comparison"]


def table(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_a_curve_is_the_mean_and_the_range_of_its_seeds(tmp_path: Path) -> None:
    lines = {0: [(1, 10.0), (2, None), (3, 30.0)], 1: [(1, 14.0), (2, None), (3, 20.0)]}
    for seed, values in lines.items():
        rounds = [
            {"round": n, "loss": 1.0 / n, "seconds": 1.0 + seed, "bytes_up": 1e6 * n, "map": v} for n, v in values
        ]
        write_run(tmp_path / f"s{seed}", seed=seed, metrics={"map": 1.0}, rounds=rounds)
    study = read_compared_runs([tmp_path / "s0", tmp_path / "s1"])
    found = curve_columns(study.rows[0].runs, ["map"])
    assert found == {
        "round": [1, 3],
        "megabytes": [2.0, 9.0],  # up 1 + 2 + 3, down 1 a round
        "seconds": [1.5, 4.5],
        "map": [12.0, 25.0],
        "map:low": [10.0, 20.0],
        "map:high": [14.0, 30.0],
    }
    chart = learning_curves(study)
    assert chart is not None and [axis.key for axis in chart.ys] == ["map", "loss"]
    assert [axis.format for axis in chart.ys] == ["percent", "number"]


def test_metrics_with_a_single_round_come_last(tmp_path: Path) -> None:
    rounds = [{"round": 1, "loss": 1.0}, {"round": 2, "loss": 0.5, "map": 40.0}]
    chart = learning_curves(read_compared_runs([write_run(tmp_path / "a", metrics={"map": 40.0}, rounds=rounds)]))
    assert chart is not None and [axis.key for axis in chart.ys] == ["loss", "map"]


def test_a_long_curve_has_fewer_points_at_even_distances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves_module, "MAX_POINTS", 4)
    run = write_run(tmp_path / "a", rounds=[{"round": n, "loss": float(n)} for n in range(1, 11)])
    assert curve_columns(read_compared_runs([run]).rows[0].runs, ["loss"])["round"] == [1, 4, 7, 10]


def predictions(seed: int = 0, samples: int = 60, classes: int = 4) -> Predictions:
    draw = np.random.default_rng(seed)
    scores = np.round(draw.random((samples, classes)), 2).astype(np.float32)  # some are on a threshold
    targets = draw.choice([-1, 0, 1], (samples, classes), p=[0.2, 0.5, 0.3]).astype(np.int8)
    targets[:, -1] = np.minimum(targets[:, -1], 0)  # no positive: not in the means
    return Predictions(classes=tuple("abcd"[:classes]), probabilities=scores, targets=targets, rows=np.arange(samples))


def test_metrics_at_every_threshold_equal_scikit_learn() -> None:
    kept = predictions()
    found = metrics_by_threshold(kept)
    for place in (0, 13, 25, 40, 49):
        by_class_ = []
        for column in range(3):
            known = kept.targets[:, column] >= 0
            truth, said = kept.targets[known, column], kept.probabilities[known, column] > THRESHOLDS[place]
            by_class_.append(
                [score(truth, said, zero_division=0) for score in (f1_score, precision_score, recall_score)]
            )
        known = kept.targets >= 0
        truth, said = kept.targets[known], kept.probabilities[known] > THRESHOLDS[place]
        micro = [score(truth, said, zero_division=0) for score in (f1_score, precision_score, recall_score)]
        for name, macro_value, micro_value in zip(
            ("f1", "precision", "recall"), np.mean(by_class_, 0), micro, strict=True
        ):
            assert found[f"macro_{name}"][place] == pytest.approx(100 * macro_value)
            assert found[f"micro_{name}"][place] == pytest.approx(100 * micro_value)


def test_at_one_half_the_threshold_curve_is_the_f1_of_the_run(comparison: Path) -> None:
    chart = threshold_chart(read_compared_runs([comparison / "fedprox-mu=0.1" / "seed-0"]))
    metrics = json.loads((comparison / "fedprox-mu=0.1" / "seed-0" / "summary.json").read_text())["metrics"]
    assert chart is not None
    columns = chart.series[0].columns
    assert columns["threshold"][25] == 0.5
    assert columns["macro_f1"][25] == pytest.approx(metrics["macro_f1"])
    assert columns["micro_f1"][25] == pytest.approx(metrics["micro_f1"])


def test_reliability_by_hand() -> None:
    scores = np.array([[0.05, 0.05], [0.06, 0.5], [1.0, 0.5], [0.5, 0.3]], np.float32)
    targets = np.array([[0, 1], [0, 1], [1, 0], [1, -1]], np.int8)
    kept = Predictions(classes=("a", "b"), probabilities=scores, targets=targets, rows=np.arange(4))
    columns, error = reliability_curve([kept])
    assert columns["predicted"] == pytest.approx([(0.05 + 0.06 + 0.05) / 3, 0.5, 1.0], rel=1e-6)
    assert columns["observed"] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert columns["count"] == [3, 3, 1]
    assert error == pytest.approx(100 * (abs(0.16 - 1) + abs(1.5 - 2) + 0) / 7, rel=1e-5)


def test_the_wilson_interval_equals_scipy() -> None:
    low, high = wilson_interval(np.array([0.0, 0.25, 1.0]), np.array([7, 40, 12]))
    for place, (k, n) in enumerate(((0, 7), (10, 40), (12, 12))):
        ends = binomtest(k, n).proportion_ci(method="wilson")
        assert (low[place], high[place]) == pytest.approx((ends.low, ends.high), abs=1e-4)


def test_the_class_chart_has_the_numbers_of_per_class_csv(comparison: Path) -> None:
    chart = class_chart(read_compared_runs([comparison]))
    assert chart is not None
    files = [comparison / "fedprox-mu=0.1" / f"seed-{seed}" for seed in (0, 1)]
    aps = np.array([[float(line["ap"]) for line in table(file / "per_class.csv")] for file in files])
    columns = chart.series[1].columns
    np.testing.assert_allclose(columns["ap"], aps.mean(0))
    data = json.loads((files[0] / "data_fingerprint.json").read_text())["training"]
    np.testing.assert_allclose(columns["frequency"], 100 * np.array(data["present"]) / data["samples"])
    assert columns["name"] == data["classes"]


def test_the_gain_of_a_client_is_the_difference_to_local_training(comparison: Path) -> None:
    chart = client_chart(read_compared_runs([comparison]))
    assert chart is not None and chart.name == "gain" and [one.label for one in chart.series] == ["fedprox:mu=0.1"]
    columns, expected = chart.series[0].columns, {}
    for seed in (0, 1):
        ours, alone = (
            {line["client"]: float(line["auc"]) for line in table(comparison / row / f"seed-{seed}" / "per_client.csv")}
            for row in ("fedprox-mu=0.1", "local-only")
        )
        expected |= {f"{name}, seed {seed}": ours[name] - alone[name] for name in ours}
    assert columns["name"] == list(expected)
    np.testing.assert_allclose(columns["auc"], list(expected.values()))
    assert chart.xs[1].names == ("fedprox:mu=0.1",) and all(abs(x) <= 0.3 for x in columns["method"])


def test_without_local_only_the_chart_shows_the_metrics_of_each_client(comparison: Path) -> None:
    folder = comparison / "fedprox-mu=0.1" / "seed-1"
    chart = client_chart(read_compared_runs([folder]))
    assert chart is not None and chart.name == "per-client"
    lines = table(folder / "per_client.csv")
    np.testing.assert_allclose(chart.series[0].columns["map"], [float(line["map"]) for line in lines])
    np.testing.assert_allclose(chart.series[0].columns["samples"], [float(line["samples"]) for line in lines])


def test_the_heatmap_has_the_positives_of_each_client(comparison: Path) -> None:
    """One heatmap per seed: both methods have the same partition. Classes that are not annotated are None, not 0."""
    chart = label_heatmaps(read_compared_runs([comparison]))
    assert chart is not None and [heatmap.label for heatmap in chart.heatmaps] == ["seed 0", "seed 1"]
    data = federation.build(experiment().changed({"seed": 1}))
    counts = np.array([(data.true_labels[rows] == 1).sum(0) for rows in data.samples])
    expected = [
        [int(count) if known else None for count, known in zip(line, annotated, strict=True)]
        for line, annotated in zip(counts, data.annotated, strict=True)
    ]
    assert chart.heatmaps[1].values == expected and any(None in line for line in expected)
    assert chart.heatmaps[1].rows == list(data.names) and chart.heatmaps[1].columns == list(data.train.classes)
    kept = read_client_labels(comparison / "local-only" / "seed-1" / "client_labels.npz")
    assert kept.samples.tolist() == data.sizes.tolist()


def test_the_result_table_has_means_standard_deviations_and_ranks(tmp_path: Path) -> None:
    for method, values in {
        "a": (10, 12, 14),
        "b": (20, 20, 26),
        "centralized": (50, 50, 50),
        "c": (15, 16, 14),
    }.items():
        for seed, value in enumerate(values):
            write_run(
                tmp_path / method / f"seed-{seed}", method=method, seed=seed, metrics={"map": value, "hamming": value}
            )
    write_run(tmp_path / "d" / "seed-0", method="d", metrics={"map": 99.0, "hamming": 0.0})
    found = result_table(read_compared_runs([tmp_path]))
    assert found is not None and found.several_seeds
    figures = {row.label: dict(zip(found.metrics, row.cells, strict=True)) for row in found.rows}
    assert (figures["b"]["map"].text, figures["b"]["map"].spread) == ("22.00", f"± {np.std([20, 20, 26], ddof=1):.2f}")
    assert figures["b"]["map"].tooltip == "seed 0: 20.00, seed 1: 20.00, seed 2: 26.00"
    ranks = {label: (line["map"].rank, line["hamming"].rank) for label, line in figures.items()}
    assert ranks == {
        "a": ("", "best"),
        "b": ("best", ""),
        "c": ("second", "second"),
        "centralized": ("", ""),
        "d": ("", ""),
    }
    assert figures["a"]["MB/round"].text == "2.00" and figures["a"]["s/round"].text == "1.00"
    assert "Rows with fewer seeds than others are not ranked. centralized is not ranked" in found.caption


def test_a_single_seed_has_the_bootstrap_interval(comparison: Path) -> None:
    folder = comparison / "fedprox-mu=0.1" / "seed-1"
    found = result_table(read_compared_runs([folder]))
    kept = read_predictions(folder / "predictions.npz")
    tuned = load_run(folder).model.tuned_thresholds
    limits = bootstrap_intervals(kept.probabilities, kept.targets, kept.classes, 1, thresholds=tuned)
    assert found is not None
    figures = dict(zip(found.metrics, found.rows[0].cells, strict=True))
    for name in ("map", "macro_f1_tuned"):
        low, high = limits[name]
        assert figures[name].spread == f"[{low:.2f}, {high:.2f}]"


def test_the_calibration_curve_uses_all_seeds(tmp_path: Path) -> None:
    kept = [predictions(seed) for seed in (0, 1)]
    for seed, one in enumerate(kept):
        folder = write_run(tmp_path / f"s{seed}", seed=seed, metrics={"map": 1.0})
        write_predictions(folder, one.probabilities, one.targets, one.classes)
    chart = calibration_chart(read_compared_runs([tmp_path / "s0", tmp_path / "s1"]))
    assert chart is not None and chart.series[0].columns == reliability_curve(kept)[0]
    assert f"fedavg {reliability_curve(kept)[1]:.2f}." in chart.caption


def test_the_description_of_a_study(tmp_path: Path) -> None:
    for method, value in (("fedavg", 10.0), ("fedprox", 20.0)):
        write_run(tmp_path / method / "seed-0", method=method, metrics={"map": value})
    failed = write_run(tmp_path / "fedmlp" / "seed-0", method="fedmlp", lr=0.5)
    (failed / "failed.json").write_text('{"reason": "it diverged"}')
    study = read_compared_runs([tmp_path])
    assert describe_runs(study).replace("\N{NO-BREAK SPACE}", " ") == (
        "Three methods were compared on pets with seed 0. The data has two classes and 80 training, 10 validation and "
        "10 test samples. It is divided among two clients at random. Training: three rounds. fedprox has the highest "
        "mAP on the test data: 20.00 %. One run failed (see below)."
    )
    site = write_run(tmp_path / "server" / "run", metrics={"sites_map": 27.0})
    (site / "experiment.toml").write_text((site / "experiment.toml").read_text().replace('"pets"', '"none"'))
    RunFolder(site).write_summary(RunFolder(site).read_summary())
    assert describe_runs(read_compared_runs([site])).replace("\N{NO-BREAK SPACE}", " ") == (
        "The method fedavg was run on the data of the sites with seed 0. The data has two classes and 80 training, 10 "
        "validation and 10 test samples. It is held by two sites. Training: three rounds. mAP, mean of the sites: "
        "27.00 %."
    )
    shared, differ = compare_settings(study.rows)
    assert ("training.rounds", "3") in shared
    assert dict(differ)["training.lr"] == ["0.1", "0.5", "0.1"]
    assert [count_of(1, "class"), count_of(2, "class"), count_of(20, "run")] == ["one class", "two classes", "20 runs"]
