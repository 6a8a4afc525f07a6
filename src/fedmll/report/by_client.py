"""Clients: who has how many positives of what, and what taking part is worth to each."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmll.report.chart import COUNT, DOTS, MAP, NAME, PERCENT, Axis, Chart, Columns, Series, Sheet
from fedmll.report.runs import Run, number
from fedmll.report.study import Row, Study
from fedmll.running.clients import ClientLabels

ALONE = "local-only"
OWN = {"map": "mAP", "auc": "AUC", "macro_f1": "macro F1"}
WIDTH = 0.6  # of the dots of a method, where one method stands beside the other
MOST_CLIENTS, MOST_CLASSES, MOST_MAPS = 120, 120, 6  # of a map that can be read, and maps of a page


def label_maps(study: Study) -> Chart | None:
    """A map of each division: seeds divide the data differently, methods do not."""
    sheets: dict[bytes, Sheet] = {}
    larger = False
    for run in study.finished:
        known = run.clients
        if known is None or not len(known.names):
            continue
        key = known.annotated.tobytes() + (b"" if known.positives is None else known.positives.tobytes())
        if key not in sheets and len(sheets) < MOST_MAPS:
            sheets[key] = _sheet(f"seed {run.seed}", known)
            larger |= len(known.names) > MOST_CLIENTS or len(known.classes) > MOST_CLASSES
    if not sheets:
        return None
    words = "Training samples with the class, as the client annotates them; hatched: the client does not annotate it."
    if not any(value for sheet in sheets.values() for line in sheet.values for value in line):
        words = "Hatched: the client does not annotate the class. How many positives a site has, only the site knows."
    if larger:
        words += f" Only the first {MOST_CLIENTS} clients and {MOST_CLASSES} classes are drawn."
    return Chart("clients", "Clients × classes", words, MAP, sheets=_told_apart(list(sheets.values())))


def _sheet(label: str, known: ClientLabels) -> Sheet:
    annotated = known.annotated[:MOST_CLIENTS, :MOST_CLASSES]
    counts = np.zeros(annotated.shape, int) if known.positives is None else known.positives
    values = [
        [int(count) if yes else None for count, yes in zip(line, there, strict=True)]
        for line, there in zip(counts[:MOST_CLIENTS, :MOST_CLASSES], annotated, strict=True)
    ]
    return Sheet(label, list(known.names[:MOST_CLIENTS]), list(known.classes[:MOST_CLASSES]), values)


def _told_apart(sheets: list[Sheet]) -> list[Sheet]:
    labels = [sheet.label for sheet in sheets]
    return [
        Sheet(f"{s.label} ({place})" if labels.count(s.label) > 1 else s.label, s.rows, s.columns, s.values)
        for place, s in enumerate(sheets, 1)
    ]


def by_client(study: Study) -> Chart | None:
    """The gain of each client over its own model, paired by seed, where a local-only run is there; else what each
    client has of the model. A client is one of its seed: another seed divides the data anew."""
    alone = [row for row in study.rows if row.first.method == ALONE and any(run.per_client for run in row.finished)]
    found = {
        place: columns
        for place, row in enumerate(study.rows)
        if not (alone and row.first.method == ALONE) and (columns := _of(row, alone[0] if alone else None))[NAME]
    }
    if not found:
        return None
    labels = tuple(study.rows[place].label for place in found)
    series = [
        Series(labels[number], place, columns | {"method": _beside(number, len(columns[NAME]))})
        for number, (place, columns) in enumerate(found.items())
    ]
    xs = [
        Axis("method", "method", names=labels, limits=(-0.6, len(labels) - 0.4)),
        Axis("samples", "samples that the client holds out", COUNT, log=True),
    ]
    if len(labels) == 1:
        xs.reverse()  # nothing stands beside it
    if alone:
        ys = [Axis(key, f"gain in {text}, percentage points", PERCENT) for key, text in OWN.items()]
        words = "A dot is a client of a seed: its own held-out samples by the common model, minus by the model that it "
        words += "trained alone. Above the dashed line it gains by taking part; a thick line is the mean."
        return Chart("gain", "Each client’s gain over local-only", words, DOTS, xs, ys, series, line="zero")
    ys = [Axis(key, f"{text}, %", PERCENT) for key, text in OWN.items()]
    words = "A dot is a client of a seed, measured on the samples that it holds out itself; a thick line is the mean."
    return Chart("own", "What each client gets", words, DOTS, xs, ys, series)


def _beside(place: int, count: int) -> list[float]:
    """The dots of one thing, side by side around its place."""
    return (place + WIDTH * (np.arange(count) / max(1, count - 1) - 0.5 * (count > 1))).tolist()


def _of(row: Row, alone: Row | None) -> Columns:
    """A line a client and seed: what it has, or what it gains where both were measured."""
    base = {(run.seed, line[0]): line[1:] for run in (alone.finished if alone else ()) for line in _lines(run)}
    columns: Columns = {key: [] for key in (NAME, "samples", *OWN)}
    for run in row.finished:
        for name, samples, *values in _lines(run):
            before = base.get((run.seed, name)) if alone else (samples, *[0.0] * len(values))
            if before is None:
                continue
            columns[NAME].append(f"{name}, seed {run.seed}")
            columns["samples"].append(samples)
            for key, value, other in zip(OWN, values, before[1:], strict=True):
                columns[key].append(value - other)
    return columns


def _lines(run: Run) -> list[tuple[Any, ...]]:
    return [(line["client"], *(number(line.get(key)) for key in ("samples", *OWN))) for line in run.per_client]
