"""The report for one site of a federation: is the federated model better than a model that the site trains alone? One
HTML file, in the style of the other reports, about the site's own test data.

The report claims a difference only where an interval shows it. Classes with few samples are named, but not judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from fedmll.core.versions import fedmll_version
from fedmll.evaluation.bootstrap import COMPARED_METRICS, MIN_SAMPLES, Estimate, ModelOutput, PairedComparison
from fedmll.evaluation.metric_definitions import CLASS_METRICS
from fedmll.reports.charts import Chart, ChartSeries, reliability_chart, reliability_curve
from fedmll.reports.html_report import chart_data, load_template, read_resource
from fedmll.runs.array_files import Predictions

# The models that are compared
LOCAL, LOCAL_TUNED, FEDERATED, FEDERATED_TUNED = "local", "local, tuned", "federated", "federated, tuned"
LABELS = {
    LOCAL: "your local model",
    LOCAL_TUNED: "your local model, tuned here",
    FEDERATED: "the federated model",
    FEDERATED_TUNED: "the federated model, tuned here",
}
MAIN_METRIC = "ap"
TUNED_METRICS = ("f1", "ece")  # thresholds and calibration change them: both models are compared after tuning
AVERAGE_LABELS = {name: CLASS_METRICS[name].label for name in COMPARED_METRICS} | {"ap": "mAP"}
FALSE_ALARMS = 20  # one interval in 20 excludes zero by chance where there is no difference


class Verdict(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class SiteComparison:
    """What the report shows."""

    site: str
    experiment: str  # a few words on it
    classes: tuple[str, ...]  # those that the site annotates
    outputs: Mapping[str, ModelOutput]  # for the test samples, by LOCAL, …; without a local model only FEDERATED…
    targets: NDArray[np.int8]  # (N, C) labels of the test samples
    split: str  # a sentence: which samples were used for thresholds and which for the metrics
    notes: Sequence[str] = ()  # what else a reader must know
    comparison: PairedComparison | None = None  # None if the site has too few samples for any metric

    @property
    def has_local_model(self) -> bool:
        return LOCAL in self.outputs


def judge(difference: Estimate, metric: str) -> Verdict:
    """Is the first model better? UNDECIDED if the interval of the difference contains zero."""
    sign = -difference.sign if CLASS_METRICS[metric].lower_is_better else difference.sign
    return {1: Verdict.BETTER, -1: Verdict.WORSE, 0: Verdict.UNDECIDED}[sign]


def main_verdict(site: SiteComparison) -> Verdict:
    if site.comparison is None or not site.has_local_model:
        return Verdict.UNDECIDED
    return judge(site.comparison.difference(FEDERATED, LOCAL, MAIN_METRIC), MAIN_METRIC)


def describe_verdict(site: SiteComparison) -> str:
    """The result in one or two sentences."""
    if site.comparison is None:
        return (
            f"Your test data is too small for a comparison: no class has {MIN_SAMPLES} images with it and "
            f"{MIN_SAMPLES} without it among the {len(site.targets)} test images. No metrics are shown, because they "
            "would look more certain than they are."
        )
    if not site.has_local_model:
        value = site.comparison.average(FEDERATED, MAIN_METRIC)
        return f"The federated model has an mAP of {_with_interval(value)} on your test data."
    difference = site.comparison.difference(FEDERATED, LOCAL, MAIN_METRIC)
    gap = f"the difference in mAP is {_gap_with_interval(difference)}"
    return {
        Verdict.BETTER: f"The federated model is better than your local model on your test data: {gap}.",
        Verdict.WORSE: f"Your local model is better than the federated model on your test data: {gap}.",
        Verdict.UNDECIDED: f"Your test data shows no clear difference between the federated model and yours: {gap}.",
    }[judge(difference, MAIN_METRIC)]


def describe_classes(site: SiteComparison) -> list[str]:
    """One paragraph on the classes that gained or lost, and one on the classes with too few samples."""
    comparison = site.comparison
    if comparison is None:
        return []
    sentences = list[str]()
    columns = np.flatnonzero(comparison.enough_samples).tolist()
    if site.has_local_model:
        verdicts = {c: judge(comparison.difference(FEDERATED, LOCAL, MAIN_METRIC, c), MAIN_METRIC) for c in columns}
        by_verdict = {
            verdict: ", ".join(site.classes[column] for column in columns if verdicts[column] is verdict)
            for verdict in (Verdict.BETTER, Verdict.WORSE)
        }
        judged = [f"{verdict} for {names}" for verdict, names in by_verdict.items() if names]
        if judged:
            sentences.append(f"By average precision the federated model is {' and '.join(judged)}.")
        undecided = sum(verdict is Verdict.UNDECIDED for verdict in verdicts.values())
        if undecided:
            sentences.append(f"For {_classes(undecided)} there is no clear difference.")
        if len(columns) > 1 and undecided < len(columns):
            sentences.append(
                f"About one in {FALSE_ALARMS} of these {len(columns)} intervals excludes zero by chance, so a single "
                "class is less reliable than the average."
            )
    paragraphs = [" ".join(sentences)] if sentences else []
    small = [
        f"{name} ({positives} with, {negatives} without)"
        for name, positives, negatives, enough in zip(
            site.classes, comparison.positives, comparison.negatives, comparison.enough_samples, strict=True
        )
        if not enough
    ]
    if small:
        paragraphs.append(
            f"These classes have too few test images and are left out of the averages: {', '.join(small)}."
        )
    return paragraphs


def render_site_report(site: SiteComparison) -> str:
    """The HTML page."""
    charts = [] if site.comparison is None else [_calibration_chart(site)]
    question = "is the federated model better than yours?" if site.has_local_model else "the federated model"
    return load_template("site.html.jinja").render(
        title=f"{site.site}: {question}",
        about=f"{site.experiment}. Written at your site by fedmll {fedmll_version()}; it was not sent to anyone.",
        verdict_text=describe_verdict(site),
        verdict=main_verdict(site),
        class_paragraphs=describe_classes(site),
        differences=_differences(site),
        models=_models(site),
        metric_labels=list(AVERAGE_LABELS.values()),
        class_tables=_class_tables(site),
        compared=site.has_local_model,
        charts={chart.name: chart for chart in charts},
        split=site.split,
        notes=list(site.notes),
        min_samples=MIN_SAMPLES,
        data=chart_data(charts),
        css=Markup(read_resource("page.css") + read_resource("site.css")),
        script=Markup(read_resource("page.js")),
    )


def _compared_models(metric: str) -> tuple[str, str]:
    return (FEDERATED_TUNED, LOCAL_TUNED) if metric in TUNED_METRICS else (FEDERATED, LOCAL)


def _differences(site: SiteComparison) -> list[dict[str, str]]:
    """One tile per metric: the federated model minus the local model."""
    if site.comparison is None or not site.has_local_model:
        return []
    words = {Verdict.BETTER: "better", Verdict.WORSE: "worse", Verdict.UNDECIDED: "no clear difference"}
    tiles = []
    for metric in COMPARED_METRICS:
        difference = site.comparison.difference(*_compared_models(metric), metric)
        verdict = judge(difference, metric)
        tiles.append(
            {
                "name": AVERAGE_LABELS[metric] + (", both models tuned here" if metric in TUNED_METRICS else ""),
                "value": _points(difference.value),
                "interval": f"{_points(difference.low)} to {_points(difference.high)}",
                "words": words[verdict],
                "verdict": verdict,
            }
        )
    return tiles


def _models(site: SiteComparison) -> list[dict[str, Any]]:
    """One row per model: the average of each metric."""
    comparison = site.comparison
    if comparison is None:
        return []
    return [
        {"label": LABELS[name], "cells": [_cell(comparison.average(name, metric)) for metric in COMPARED_METRICS]}
        for name in site.outputs
    ]


def _class_tables(site: SiteComparison) -> list[dict[str, Any]]:
    """One table per metric with one row per class. The bars of a table have the same scale."""
    comparison = site.comparison
    if comparison is None:
        return []
    tables = []
    for metric in COMPARED_METRICS:
        first, second = _compared_models(metric)
        columns = np.flatnonzero(comparison.enough_samples).tolist()
        gaps = {c: comparison.difference(first, second, metric, c) for c in columns if site.has_local_model}
        ends = [abs(end) for gap in gaps.values() for end in (gap.low, gap.high) if math.isfinite(end)]
        reach = max([1.0, *ends]) * 1.05
        rows = []
        for column in columns:
            row: dict[str, Any] = {
                "class": site.classes[column],
                "positives": int(comparison.positives[column]),
                "negatives": int(comparison.negatives[column]),
                "federated": _cell(comparison.of_class(first, metric, column)),
            }
            if site.has_local_model:
                gap = gaps[column]
                row |= {
                    "local": _cell(comparison.of_class(second, metric, column)),
                    "gap": _points(gap.value),
                    "interval": f"{_points(gap.low)} to {_points(gap.high)}",
                    "verdict": judge(gap, metric),
                    "bar": {name: _bar_position(getattr(gap, name), reach) for name in ("low", "value", "high")},
                }
            rows.append(row)
        models = "with both models tuned here" if metric in TUNED_METRICS else "without tuning"
        if not site.has_local_model:
            models = models.replace("both models", "the model")
        label = CLASS_METRICS[metric].label
        lower = " (lower is better)" if CLASS_METRICS[metric].lower_is_better else ""
        tables.append({"heading": f"{label[0].upper()}{label[1:]} {models}{lower}", "rows": rows})
    return tables


def _calibration_chart(site: SiteComparison) -> Chart:
    assert site.comparison is not None
    enough = np.flatnonzero(site.comparison.enough_samples)
    series = []
    for place, (name, output) in enumerate(site.outputs.items()):
        predictions = Predictions(
            classes=tuple(site.classes[column] for column in enough),
            probabilities=np.asarray(output.probabilities, np.float32)[:, enough],
            targets=site.targets[:, enough],
            rows=np.arange(len(site.targets)),
        )
        series.append(ChartSeries(LABELS[name], place, reliability_curve([predictions])[0]))
    return reliability_chart(
        "Do the probabilities match the observed frequencies?",
        series,
        "Below the diagonal the predicted probabilities are too high. All classes with enough test images are "
        "taken together; the band is the 95 % interval of the observed frequency (Wilson).",
    )


def _bar_position(value: float, reach: float) -> str:
    """The position on a bar with zero in the middle, in percent of its width."""
    return f"{50 + 50 * value / reach:.2f}"


def _cell(estimate: Estimate) -> dict[str, str]:
    return {"value": _number(estimate.value), "interval": f"{_number(estimate.low)}–{_number(estimate.high)}"}


def _number(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "–"


def _points(value: float) -> str:
    """A difference with its sign; 0.0 has none."""
    if not math.isfinite(value):
        return "–"
    text = f"{value:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")


def _gap_with_interval(gap: Estimate) -> str:
    return f"{_points(gap.value)} (95 % interval {_points(gap.low)} to {_points(gap.high)})"


def _with_interval(value: Estimate) -> str:
    return f"{_number(value.value)} (95 % interval {_number(value.low)} to {_number(value.high)})"


def _classes(count: int) -> str:
    return f"{count} {'class' if count == 1 else 'classes'}"
