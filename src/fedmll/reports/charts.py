"""The charts of the HTML report: their numbers and what they mean. `page.js` draws them in the page, `chart_drawing.py`
draws them with matplotlib for files. Learning curves are in `curves.py`.

Each series of a chart is a table of columns. All series have the same axes: every axis in `xs` can be drawn against
every axis in `ys`. The columns `y:low` and `y:high` are the ends of a band around the column `y`; `name` says what a
point is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.comparison.compared_runs import ComparedRow, ComparedRuns
from fedmll.evaluation.calibration import RANGES, reliability
from fedmll.evaluation.metric_definitions import CLASS_METRICS, label_of
from fedmll.evaluation.metrics import Confusion, mean_of_defined
from fedmll.evaluation.ranking import Floats
from fedmll.runs.array_files import ClientLabels, Predictions
from fedmll.runs.run_overview import RunRecord, float_or_nan

LINES, POINTS, HEATMAP = "lines", "points", "heatmap"  # kinds of charts
ZERO, DIAGONAL = "zero", "diagonal"  # reference lines
LOW, HIGH, NAME = ":low", ":high", "name"
PERCENT, COUNT, NUMBER = "percent", "count", "number"  # how a value is written
DIGITS = 5  # significant digits in the page

Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class ChartAxis:
    key: str  # the column
    label: str
    format: str = NUMBER
    log: bool = False
    limits: tuple[float, float] | None = None
    names: tuple[str, ...] = ()  # the labels of 0, 1, 2, … on an axis of categories


@dataclass(frozen=True)
class ChartSeries:
    label: str
    row: int  # the row of the result table: it sets the colour, and hides the series
    columns: Columns


@dataclass(frozen=True)
class Heatmap:
    """A matrix of counts; None where a count is unknown."""

    label: str
    rows: list[str]
    columns: list[str]
    values: list[list[int | None]]

    @property
    def csv_rows(self) -> list[dict[str, Any]]:
        return [
            {"client": name, "class": label, "positives": value}
            for name, line in zip(self.rows, self.values, strict=True)
            for label, value in zip(self.columns, line, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Chart:
    name: str
    title: str
    caption: str
    kind: str  # LINES, POINTS or HEATMAP
    xs: list[ChartAxis] = field(default_factory=list)
    ys: list[ChartAxis] = field(default_factory=list)
    series: list[ChartSeries] = field(default_factory=list)
    reference: str = ""  # ZERO or DIAGONAL: a thin line to compare with
    heatmaps: list[Heatmap] = field(default_factory=list)

    def csv_rows(self, x: ChartAxis, y: ChartAxis) -> list[dict[str, Any]]:
        """The numbers of one view, one row per point."""
        wanted = (NAME, x.key, y.key, y.key + LOW, y.key + HIGH, "count")
        rows = []
        for series in self.series:
            columns = {key: series.columns[key] for key in wanted if key in series.columns}
            for values in zip(*columns.values(), strict=True):
                rows.append({"series": series.label, **dict(zip(columns, values, strict=True))})
        return rows

    @property
    def as_json(self) -> dict[str, Any]:
        """What `page.js` draws."""
        return {
            "name": self.name,
            "title": self.title,
            "kind": self.kind,
            "reference": self.reference,
            "xs": [vars(axis) for axis in self.xs],
            "ys": [vars(axis) for axis in self.ys],
            "series": [
                {
                    "label": series.label,
                    "row": series.row,
                    "columns": {key: [_rounded(value) for value in column] for key, column in series.columns.items()},
                }
                for series in self.series
            ],
            "heatmaps": [vars(heatmap) for heatmap in self.heatmaps],
        }


def _rounded(value: Any) -> Any:
    """Rounded to the digits that the page shows. JSON has no NaN: it becomes null."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")


# ---- Classes

SHOWN_METRICS = ("ap", "auc", "f1")


def class_chart(compared: ComparedRuns) -> Chart | None:
    """None if no finished run has metrics per class."""
    series = []
    for place, row in enumerate(compared.rows):
        runs = [run for run in row.finished if run.per_class]
        names = [line["class"] for line in runs[0].per_class] if runs else []
        runs = [run for run in runs if [line["class"] for line in run.per_class] == names]
        if names:
            columns: Columns = {NAME: list(names), "frequency": _frequencies(runs[0], names)}
            columns |= {key: _means(runs, key) for key in SHOWN_METRICS}
            series.append(ChartSeries(row.label, place, columns))
    ys = [
        ChartAxis(key, f"{CLASS_METRICS[key].label}, %", PERCENT)
        for key in SHOWN_METRICS
        if any(np.isfinite(one.columns[key]).any() for one in series)
    ]
    if not ys:
        return None
    first = next(run for row in compared.rows for run in row.finished if run.per_class)
    where = "training" if _training_frequencies(first) else "test"
    return Chart(
        name="classes",
        title="Performance by class frequency",
        caption="One point per class: the mean over the seeds. Rare classes are on the left.",
        kind=POINTS,
        xs=[ChartAxis("frequency", f"{where} samples with the class, %", PERCENT, log=True)],
        ys=ys,
        series=series,
    )


def _training_frequencies(run: RunRecord) -> dict[str, float]:
    """The percentage of training samples with each class; empty if the run does not know it."""
    data = run.training_data
    samples = float_or_nan(data.get("samples"))
    if not samples > 0:
        return {}
    return {name: 100 * float_or_nan(n) / samples for name, n in zip(data["classes"], data["present"], strict=True)}


def _frequencies(run: RunRecord, names: list[str]) -> list[float]:
    in_training = _training_frequencies(run)
    if set(names) <= in_training.keys():
        return [in_training[name] for name in names]
    return [100 * line["positives"] / max(1.0, line["known"]) for line in run.per_class]


def _means(runs: Sequence[RunRecord], key: str) -> list[float]:
    values = np.array([[float_or_nan(line.get(key)) for line in run.per_class] for run in runs])
    counts = np.isfinite(values).sum(axis=0)
    with np.errstate(invalid="ignore"):
        means: list[float] = (np.nansum(values, axis=0) / np.where(counts, counts, np.nan)).tolist()
    return means


# ---- Clients

LOCAL_ONLY = "local-only"
CLIENT_METRICS = ("map", "auc", "macro_f1")
COLUMN_WIDTH = 0.6  # of the points of one method, where methods are side by side
MAX_CLIENTS, MAX_CLASSES = 120, 120  # of a heatmap that can be read
MAX_HEATMAPS = 6


def label_heatmaps(compared: ComparedRuns) -> Chart | None:
    """One heatmap of clients × classes per partition. Seeds partition the data differently, methods do not."""
    heatmaps: dict[bytes, Heatmap] = {}
    cut = False
    for run in compared.finished:
        found = run.client_labels
        if found is None or not len(found.names):
            continue
        key = found.annotated.tobytes() + (b"" if found.positives is None else found.positives.tobytes())
        if key not in heatmaps and len(heatmaps) < MAX_HEATMAPS:
            heatmaps[key] = _heatmap(f"seed {run.seed}", found)
            cut |= len(found.names) > MAX_CLIENTS or len(found.classes) > MAX_CLASSES
    if not heatmaps:
        return None
    caption = "Training samples of each client with each class. Hatched: the client does not annotate the class."
    if not any(value for heatmap in heatmaps.values() for line in heatmap.values for value in line):
        caption = (
            "Hatched: the client does not annotate the class. Only the site itself knows how many positives it has."
        )
    if cut:
        caption += f" Only the first {MAX_CLIENTS} clients and {MAX_CLASSES} classes are shown."
    labels = [heatmap.label for heatmap in heatmaps.values()]
    maps = [
        replace(heatmap, label=f"{heatmap.label} ({place})") if labels.count(heatmap.label) > 1 else heatmap
        for place, heatmap in enumerate(heatmaps.values(), 1)
    ]
    return Chart(name="clients", title="Positives per client and class", caption=caption, kind=HEATMAP, heatmaps=maps)


def _heatmap(label: str, labels: ClientLabels) -> Heatmap:
    annotated = labels.annotated[:MAX_CLIENTS, :MAX_CLASSES]
    counts = np.zeros(annotated.shape, int) if labels.positives is None else labels.positives
    values = [
        [int(count) if known else None for count, known in zip(line, known_in_line, strict=True)]
        for line, known_in_line in zip(counts[:MAX_CLIENTS, :MAX_CLASSES], annotated, strict=True)
    ]
    return Heatmap(label, list(labels.names[:MAX_CLIENTS]), list(labels.classes[:MAX_CLASSES]), values)


def client_chart(compared: ComparedRuns) -> Chart | None:
    """The metrics of each client on the samples that it holds out. If there is a local-only run, the chart shows the
    difference to it, paired by seed and client, because another seed partitions the data differently."""
    baselines = [
        row for row in compared.rows if row.first.method == LOCAL_ONLY and any(run.per_client for run in row.finished)
    ]
    baseline = baselines[0] if baselines else None
    found = {
        place: columns
        for place, row in enumerate(compared.rows)
        if not (baseline and row.first.method == LOCAL_ONLY) and (columns := _client_columns(row, baseline))[NAME]
    }
    if not found:
        return None
    labels = tuple(compared.rows[place].label for place in found)
    series = [
        ChartSeries(labels[number], place, columns | {"method": _side_by_side(number, len(columns[NAME]))})
        for number, (place, columns) in enumerate(found.items())
    ]
    xs = [
        ChartAxis("method", "method", names=labels, limits=(-0.6, len(labels) - 0.4)),
        ChartAxis("samples", "held-out samples of the client", COUNT, log=True),
    ]
    if len(labels) == 1:
        xs.reverse()  # there is no other method to compare with
    chart = Chart(
        name="per-client",
        title="Performance of each client",
        caption=(
            "One point per client and seed, measured on the samples that the client holds out. The thick line is the "
            "mean."
        ),
        kind=POINTS,
        xs=xs,
        ys=[ChartAxis(key, f"{label_of(key)}, %", PERCENT) for key in CLIENT_METRICS],
        series=series,
    )
    if baseline is None:
        return chart
    return replace(
        chart,
        name="gain",
        title="Gain of each client over local training",
        caption=(
            "One point per client and seed: the metric of the federated model minus that of the model which the "
            "client trained alone, both on the samples that the client holds out. Above the dashed line the client "
            "gains by taking part. The thick line is the mean."
        ),
        ys=[ChartAxis(key, f"gain in {label_of(key)}, percentage points", PERCENT) for key in CLIENT_METRICS],
        reference=ZERO,
    )


def _side_by_side(place: int, count: int) -> list[float]:
    """The x coordinates of the points of one method, spread around its place."""
    return (place + COLUMN_WIDTH * (np.arange(count) / max(1, count - 1) - 0.5 * (count > 1))).tolist()


def _client_columns(row: ComparedRow, baseline: ComparedRow | None) -> Columns:
    """One entry per client and seed: its metrics, or the difference to the baseline where both were measured."""
    runs = baseline.finished if baseline else ()
    before = {(run.seed, line[0]): line[1:] for run in runs for line in _client_rows(run)}
    columns: Columns = {key: [] for key in (NAME, "samples", *CLIENT_METRICS)}
    for run in row.finished:
        for name, samples, *values in _client_rows(run):
            base = before.get((run.seed, name)) if baseline else (samples, *[0.0] * len(values))
            if base is None:
                continue
            columns[NAME].append(f"{name}, seed {run.seed}")
            columns["samples"].append(samples)
            for key, value, other in zip(CLIENT_METRICS, values, base[1:], strict=True):
                columns[key].append(value - other)
    return columns


def _client_rows(run: RunRecord) -> list[tuple[Any, ...]]:
    keys = ("samples", *CLIENT_METRICS)
    return [(line["client"], *(float_or_nan(line.get(key)) for key in keys)) for line in run.per_client]


# ---- Calibration and thresholds

THRESHOLDS = np.linspace(0, 1, 51)[:-1]
NORMAL_QUANTILE = 1.96  # standard deviations on either side of the mean: 95 %
THRESHOLD_METRICS = tuple(
    f"{average}_{name}" for average in ("macro", "micro") for name in ("f1", "precision", "recall")
)


def calibration_chart(compared: ComparedRuns) -> Chart | None:
    """The reliability curve of each row, over all classes and seeds together."""
    series, errors = [], []
    for place, row in enumerate(compared.rows):
        predictions = [run.predictions for run in row.finished if run.predictions is not None]
        if predictions:
            columns, error = reliability_curve(predictions)
            errors.append(f"{row.label} {error:.2f}")
            series.append(ChartSeries(row.label, place, columns))
    if not series:
        return None
    return reliability_chart(
        "Calibration",
        series,
        "Below the diagonal the predicted probabilities are too high. All classes and seeds are taken "
        "together; the band is the 95 % interval of the observed frequency (Wilson). Expected calibration error "
        f"({RANGES} bins) in percentage points: {', '.join(errors)}.",
    )


def reliability_chart(title: str, series: list[ChartSeries], caption: str) -> Chart:
    return Chart(
        name="calibration",
        title=title,
        caption=caption,
        kind=LINES,
        xs=[ChartAxis("predicted", "predicted probability", NUMBER, limits=(0, 1))],
        ys=[ChartAxis("observed", "observed frequency", NUMBER, limits=(0, 1))],
        series=series,
        reference=DIAGONAL,
    )


def reliability_curve(predictions: Sequence[Predictions]) -> tuple[Columns, float]:
    """The ranges of probabilities that contain samples, and the expected calibration error in percentage points."""
    probabilities = np.concatenate([one.probabilities.ravel() for one in predictions])[:, None]
    targets = np.concatenate([one.targets.ravel() for one in predictions])[:, None]
    found = reliability(probabilities, targets)
    samples = found.samples[0]
    some = samples > 0
    observed = found.observed[0, some]
    low, high = wilson_interval(observed, samples[some])
    columns = {
        "predicted": found.predicted[0, some],
        "observed": observed,
        f"observed{LOW}": low,
        f"observed{HIGH}": high,
        "count": samples[some],
    }
    return {key: values.tolist() for key, values in columns.items()}, float(np.nan_to_num(found.error[0]))


def wilson_interval(share: Floats, count: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """The 95 % score interval of Wilson for a share of `count` samples."""
    square = NORMAL_QUANTILE**2 / count
    middle = (share + square / 2) / (1 + square)
    half = NORMAL_QUANTILE / (1 + square) * np.sqrt(share * (1 - share) / count + square / (4 * count))
    return middle - half, middle + half


def threshold_chart(compared: ComparedRuns) -> Chart | None:
    """F1, precision and recall of each row by threshold."""
    series = []
    for place, row in enumerate(compared.rows):
        found = [metrics_by_threshold(run.predictions) for run in row.finished if run.predictions is not None]
        if found:
            means = {key: np.mean([one[key] for one in found], axis=0).tolist() for key in THRESHOLD_METRICS}
            series.append(ChartSeries(row.label, place, {"threshold": THRESHOLDS.tolist(), **means}))
    if not series:
        return None
    labels = {key: key.replace("_", " ").replace("f1", "F1") for key in THRESHOLD_METRICS}
    return Chart(
        name="thresholds",
        title="Metrics by threshold",
        caption=(
            "A class is predicted if its probability is above the threshold, which is the same for all classes. The "
            "lines are means over the seeds. Macro: the mean over the classes with a positive in the test data."
        ),
        kind=LINES,
        xs=[ChartAxis("threshold", "threshold", NUMBER, limits=(0, 1))],
        ys=[ChartAxis(key, f"{label}, %", PERCENT) for key, label in labels.items()],
        series=series,
    )


def metrics_by_threshold(predictions: Predictions) -> dict[str, Floats]:
    """Each of THRESHOLD_METRICS in percent at each of THRESHOLDS: exactly what `evaluate` gives there, from one
    count."""
    samples, classes = predictions.probabilities.shape
    exceeded = np.searchsorted(THRESHOLDS, predictions.probabilities.astype(np.float64))  # how many are below p
    steps, column = len(THRESHOLDS) + 1, np.broadcast_to(np.arange(classes), (samples, classes))

    def count_above(target: int) -> Floats:
        """(thresholds, classes) entries with this target and p > threshold; in the last line all of them."""
        chosen = predictions.targets == target
        flat = np.bincount(exceeded[chosen] * classes + column[chosen], minlength=steps * classes)
        counts = flat.reshape(steps, classes)
        above = counts[::-1].cumsum(axis=0)[::-1]
        return np.concatenate([above[1:], above[:1]]).astype(np.float64)

    tp, fp = count_above(1), count_above(0)
    positives, negatives = tp[-1], fp[-1]
    found: dict[str, list[float]] = {key: [] for key in THRESHOLD_METRICS}
    for hits, alarms in zip(tp[:-1], fp[:-1], strict=True):
        cut = Confusion(np.stack([negatives - alarms, alarms, positives - hits, hits]))
        for average, of in (("macro", cut), ("micro", cut.pooled())):
            for key, share in (("f1", of.f1), ("precision", of.precision), ("recall", of.recall)):
                found[f"{average}_{key}"].append(100 * mean_of_defined(share))
    return {key: np.array(values) for key, values in found.items()}
