"""The table of metrics: it is complete, and every list of metrics that people see comes from it."""

from __future__ import annotations

import numpy as np
import pytest

from fedmll.core import registry
from fedmll.evaluation import metric_definitions
from fedmll.evaluation.bootstrap import COMPARED_METRICS, VECTORISED
from fedmll.evaluation.histogram_metrics import HISTOGRAM_METRICS
from fedmll.evaluation.histograms import evaluate_histograms, score_histograms
from fedmll.evaluation.metric_definitions import CLASS_METRICS, COMPUTED, METRICS, Metric, find_metric, metrics_in
from fedmll.evaluation.metrics import evaluate


def test_the_table_has_every_metric_that_is_computed() -> None:
    scores, targets = np.random.default_rng(0).random((20, 2)), np.tile(np.array([[0, 1], [1, 0]], np.int8), (10, 1))
    report = evaluate(scores, targets, ("a", "b"), np.full(2, 0.5))
    assert report.values.keys() | {"accuracy"} == set(COMPUTED) == set(VECTORISED)
    from_histograms = evaluate_histograms(score_histograms(scores, targets), ("a", "b"))
    assert {name.removesuffix(metric_definitions.ERROR) for name in from_histograms.values} <= set(COMPUTED)
    assert set(HISTOGRAM_METRICS) | set(COMPARED_METRICS) == set(CLASS_METRICS)
    assert {*CLASS_METRICS, "positives", "known"} - {"ece"} == report.per_class.keys()
    assert set(metric_definitions.CLASS_COLUMNS) <= report.per_class.keys()
    assert metric_definitions.SELECTION in METRICS


def test_labels_are_unique_and_every_metric_says_what_it_needs() -> None:
    everything = [*METRICS.values(), *metric_definitions.FEDERATED_METRICS.values(), *metric_definitions.COSTS.values()]
    assert len({metric.label for metric in everything}) == len(everything)
    assert all(metric.needs and metric.over for metric in METRICS.values())


def test_direction_and_unit() -> None:
    lower = {name for name in [*METRICS, "loss", *metric_definitions.COSTS] if metric_definitions.lower_is_better(name)}
    assert lower == {"hamming", "loss", "s/round", "MB/round"}
    assert [name for name, metric in CLASS_METRICS.items() if metric.lower_is_better] == ["ece"]
    assert find_metric("loss").unit == find_metric("recorded by a method").unit == metric_definitions.NUMBER
    assert find_metric("val_map").unit == metric_definitions.PERCENT


def test_places_show_metrics_in_the_order_of_the_table() -> None:
    assert metrics_in(metric_definitions.COMPARISON) == ("macro_auc", "map", "macro_f1", "macro_f1_tuned", "bacc")
    assert metrics_in(metric_definitions.LOG)[:3] == ("loss", "macro_auc", "map")
    assert metric_definitions.in_table_order(["own", "loss", "map", "macro_auc"]) == ["macro_auc", "map", "loss", "own"]


def test_a_metric_of_a_plug_in_is_percent_and_its_own_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_added", lambda kind: {"coverage": None})
    assert find_metric("coverage") == Metric(name="coverage", label="coverage")
    assert "coverage" in metric_definitions.metrics_from_sites()


def test_sites_report_only_what_they_can_compute() -> None:
    names = metric_definitions.metrics_from_sites()
    assert {"macro_auc", "hamming", "val_map"} <= names
    assert not {"accuracy", "macro_f1_tuned", "micro_f1_tuned", "client_mean_auc", "sites_map", "val_hamming"} & names


def test_metrics_on_other_data_have_their_prefix_and_say_what_they_need() -> None:
    names = {name for name in METRICS if name.startswith("val_")}
    assert names == {"val_macro_auc", "val_map", "val_macro_f1"}
    assert {name for name in METRICS if name.startswith("client_")} == {
        f"client_{kind}_{name}" for kind in ("mean", "worst") for name in ("auc", "map", "macro_f1")
    }
    assert METRICS["map"].needs == "a class with a positive in the test data"
    assert METRICS["accuracy"].needs == "test samples that all have exactly one label"
    assert METRICS["macro_f1_tuned"].needs == "a class with a positive in the test data, and validation data"
    assert METRICS["val_map"].needs == "a class with a positive in the validation data"
    assert METRICS["client_worst_auc"].needs.endswith(
        "samples that the clients themselves hold out (partition.holdout)"
    )


def test_places_of_the_metrics_of_clients_and_sites() -> None:
    headline, report, log = metric_definitions.HEADLINE, metric_definitions.REPORT, metric_definitions.LOG
    assert METRICS["client_mean_auc"].shown_in == METRICS["client_worst_auc"].shown_in == (headline,)
    assert METRICS["client_mean_map"].shown_in == ()
    of_sites = metric_definitions.FEDERATED_METRICS
    assert of_sites["pooled_macro_auc"].shown_in == (headline, report, log, metric_definitions.RUN_LIST)
    assert of_sites["pooled_map"].shown_in == (headline, report)
    assert of_sites["sites_map"].shown_in == (headline, report, metric_definitions.ROUND_TABLE)
    assert of_sites["sites_hamming"].shown_in == ()
