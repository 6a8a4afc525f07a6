"""Clients: who has how many positives of what, and what taking part is worth to each."""

from __future__ import annotations

import numpy as np

from fedmll.report.chart import COUNT, DOTS, MAP, NAME, PERCENT, Axis, Chart, Columns, Series, Sheet
from fedmll.report.runs import Run, number
from fedmll.report.study import Row, Study
from fedmll.running.clients import ClientLabels

ALONE = "local-only"
OWN = {"map": "mAP", "auc": "AUC", "macro_f1": "macro F1"}
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
    client has of the model."""
    alone = [row for row in study.rows if row.first.method == ALONE and any(run.per_client for run in row.finished)]
    series = []
    for place, row in enumerate(study.rows):
        if alone and row.first.method == ALONE:
            continue
        columns = _gains(row, alone[0] if alone else None)
        if columns[NAME]:
            series.append(Series(row.label, place, columns))
    if not series:
        return None
    x = Axis("samples", "samples that the client holds out", COUNT, log=True)
    if alone:
        ys = [Axis(key, f"gain in {text}, percentage points", PERCENT) for key, text in OWN.items()]
        words = (
            "A dot is a client, the mean over the seeds: its own held-out samples, by the common model, minus by the "
        )
        words += "model it has trained alone. Above the line it gains by taking part."
        return Chart("gain", "Each client's gain over local-only", words, DOTS, [x], ys, series, line="zero")
    ys = [Axis(key, f"{text}, %", PERCENT) for key, text in OWN.items()]
    words = "A dot is a client, measured on the samples that it holds out itself; the mean over the seeds."
    return Chart("own", "What each client gets", words, DOTS, [x], ys, series)


def _gains(row: Row, alone: Row | None) -> Columns:
    """A line a client: means over the seeds in which both were measured."""
    found: dict[str, list[list[float]]] = {}
    base = {} if alone is None else {run.seed: _by_name(run) for run in alone.finished}
    for run in row.finished:
        if alone is not None and run.seed not in base:
            continue
        for name, values in _by_name(run).items():
            before = base.get(run.seed, {}).get(name)
            if alone is not None and before is None:
                continue
            margin = values[1:] if before is None else [a - b for a, b in zip(values[1:], before[1:], strict=True)]
            found.setdefault(name, []).append([values[0], *margin])
    columns: Columns = {NAME: list(found)}
    for place, key in enumerate(("samples", *OWN)):
        columns[key] = [_mean([values[place] for values in of]) for of in found.values()]
    return columns


def _by_name(run: Run) -> dict[str, list[float]]:
    return {str(line["client"]): [number(line.get(key)) for key in ("samples", *OWN)] for line in run.per_client}


def _mean(values: list[float]) -> float:
    defined = [value for value in values if np.isfinite(value)]
    return float(np.mean(defined)) if defined else float("nan")
