"""Charts of clients: how many positives of each class each client has, and what each client gains by federated
training."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmll.comparison.compared_runs import ComparedRow, ComparedRuns
from fedmll.evaluation.metric_definitions import label_of
from fedmll.reports.chart import (
    COUNT,
    HEATMAP,
    NAME,
    PERCENT,
    POINTS,
    ZERO,
    Chart,
    ChartAxis,
    ChartSeries,
    Columns,
    Heatmap,
)
from fedmll.runs.client_labels import ClientLabels
from fedmll.runs.run_overview import RunRecord, float_or_nan

LOCAL_ONLY = "local-only"
CLIENT_METRICS = ("map", "auc", "macro_f1")
COLUMN_WIDTH = 0.6  # of the points of one method, where methods are side by side
MAX_CLIENTS, MAX_CLASSES = 120, 120  # of a heatmap that can be read
MAX_HEATMAPS = 6


def label_heatmaps(study: ComparedRuns) -> Chart | None:
    """One heatmap of clients × classes per partition. Seeds partition the data differently, methods do not."""
    heatmaps: dict[bytes, Heatmap] = {}
    cut = False
    for run in study.finished:
        labels = run.client_labels
        if labels is None or not len(labels.names):
            continue
        key = labels.annotated.tobytes() + (b"" if labels.positives is None else labels.positives.tobytes())
        if key not in heatmaps and len(heatmaps) < MAX_HEATMAPS:
            heatmaps[key] = _heatmap(f"seed {run.seed}", labels)
            cut |= len(labels.names) > MAX_CLIENTS or len(labels.classes) > MAX_CLASSES
    if not heatmaps:
        return None
    caption = "Training samples of each client with each class. Hatched: the client does not annotate the class."
    if not any(value for heatmap in heatmaps.values() for line in heatmap.values for value in line):
        caption = (
            "Hatched: the client does not annotate the class. Only the site itself knows how many positives it has."
        )
    if cut:
        caption += f" Only the first {MAX_CLIENTS} clients and {MAX_CLASSES} classes are shown."
    maps = _with_unique_labels(list(heatmaps.values()))
    return Chart(name="clients", title="Positives per client and class", caption=caption, kind=HEATMAP, heatmaps=maps)


def _heatmap(label: str, labels: ClientLabels) -> Heatmap:
    annotated = labels.annotated[:MAX_CLIENTS, :MAX_CLASSES]
    counts = np.zeros(annotated.shape, int) if labels.positives is None else labels.positives
    values = [
        [int(count) if known else None for count, known in zip(line, known_in_line, strict=True)]
        for line, known_in_line in zip(counts[:MAX_CLIENTS, :MAX_CLASSES], annotated, strict=True)
    ]
    return Heatmap(label, list(labels.names[:MAX_CLIENTS]), list(labels.classes[:MAX_CLASSES]), values)


def _with_unique_labels(heatmaps: list[Heatmap]) -> list[Heatmap]:
    labels = [heatmap.label for heatmap in heatmaps]
    return [
        Heatmap(f"{h.label} ({place})" if labels.count(h.label) > 1 else h.label, h.rows, h.columns, h.values)
        for place, h in enumerate(heatmaps, 1)
    ]


def client_chart(study: ComparedRuns) -> Chart | None:
    """The metrics of each client on the samples that it holds out. If there is a local-only run, the chart shows the
    difference to it, paired by seed and client, because another seed partitions the data differently."""
    baselines = [
        row for row in study.rows if row.first.method == LOCAL_ONLY and any(run.per_client for run in row.finished)
    ]
    baseline = baselines[0] if baselines else None
    found = {
        place: columns
        for place, row in enumerate(study.rows)
        if not (baseline and row.first.method == LOCAL_ONLY) and (columns := _client_columns(row, baseline))[NAME]
    }
    if not found:
        return None
    labels = tuple(study.rows[place].label for place in found)
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
    if baseline:
        return Chart(
            name="gain",
            title="Gain of each client over local training",
            caption=(
                "One point per client and seed: the metric of the federated model minus that of the model which the "
                "client trained alone, both on the samples that the client holds out. Above the dashed line the "
                "client gains by taking part. The thick line is the mean."
            ),
            kind=POINTS,
            xs=xs,
            ys=[ChartAxis(key, f"gain in {label_of(key)}, percentage points", PERCENT) for key in CLIENT_METRICS],
            series=series,
            reference=ZERO,
        )
    return Chart(
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
