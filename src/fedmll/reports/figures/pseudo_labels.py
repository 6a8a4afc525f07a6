"""Pseudo-labels: labels that a method assigns to entries without annotation (the tags of FedMLP). How many there are in
each round and, in a simulation, which knows the hidden truth, how many of them are correct."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from fedmll.inference.load_run import SavedRun
from fedmll.reports.figure import COLOURS, MAX_CLASSES, MAX_NAMED_CLASSES, ReportFigure, apply_style, new_figure

KINDS = ("absent", "present")  # what a tag of 0 and of 1 means
SHADES = (COLOURS[0], COLOURS[3])


def pseudo_label_figures(run: SavedRun) -> list[ReportFigure]:
    """By round and, if the truth is known, by class. Empty if the run has no pseudo-labels."""
    return [figure for figure in (figure_by_round(run), figure_by_class(run)) if figure is not None]


def figure_by_round(run: SavedRun) -> ReportFigure | None:
    rows = rows_by_round(run)
    if not rows:
        return None
    truth_known = "precision_present" in rows[0]
    figure = new_figure(8.0 if truth_known else 4.4, 3.0)
    panels: Any = figure.subplots(1, 2 if truth_known else 1, squeeze=False)[0]
    _lines(panels[0], rows, "tags", "pseudo-labels")
    panels[0].set_ylim(bottom=0)
    caption = (
        "The pseudo-labels of the clients of each round. How many of them are correct is not known, because only a "
        "simulation has the hidden labels."
    )
    if truth_known:
        _lines(panels[1], rows, "precision", "correct, %")
        panels[1].set_ylim(0, 102)
        caption = (
            "Left: the pseudo-labels of all clients after each round. Right: the share of them that is correct. Only a "
            "simulation has the hidden labels; the method does not use them."
        )
    return ReportFigure(
        name="pseudo-labels", title="Pseudo-labels by round", caption=caption, figure=apply_style(figure), rows=rows
    )


def rows_by_round(run: SavedRun) -> list[dict[str, Any]]:
    """In a simulation, where the truth is known, of all clients; else as the clients of the round reported them."""
    audits, rows = run.records("tags_made"), []
    for row in run.folder.read_metrics():
        if "tags_0" not in row:
            continue
        found: dict[str, Any] = {"round": row["round"]}
        found |= {f"tags_{kind}": int(row[f"tags_{label}"]) for label, kind in enumerate(KINDS)}
        if row["round"] in audits:
            made = audits[row["round"]]["tags_made"].sum(1).tolist()
            found |= {f"tags_{kind}": count for kind, count in zip(KINDS, made, strict=True)}
        if audits:  # also for a round without tags
            found |= {f"precision_{kind}": row.get(f"tag_precision_{label}") for label, kind in enumerate(KINDS)}
        rows.append(found)
    return rows


def figure_by_class(run: SavedRun) -> ReportFigure | None:
    """After the last round. Only a simulation has it."""
    audits = run.records("tags_made", "tags_true", last=True)
    if not audits:
        return None
    ((number, audit),) = audits.items()
    counts = {what: audit[f"tags_{what}"].numpy() for what in ("made", "true")}
    shown = np.sort(np.argsort(-counts["made"].sum(0), kind="stable")[:MAX_CLASSES])
    rows = [
        {"class": run.classes[c]}
        | {f"{what}_{kind}": int(found[label, c]) for label, kind in enumerate(KINDS) for what, found in counts.items()}
        for c in shown
    ]
    figure = new_figure(8.0, max(2.2, 0.22 * min(len(shown), MAX_NAMED_CLASSES) + 0.9))
    panels: Any = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(shown))
    for axes, kind, shade in zip(panels, KINDS, SHADES, strict=True):
        all_made = np.array([row[f"made_{kind}"] for row in rows])
        right = np.array([row[f"true_{kind}"] for row in rows])
        axes.barh(places, all_made, color=shade, alpha=0.3, label="pseudo-labels")
        axes.barh(places, right, color=shade, label="correct")
        axes.set_title(f'"{kind}"', fontsize=10)
        axes.set_xlabel("entries", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    named = len(shown) <= MAX_NAMED_CLASSES
    panels[0].set_yticks(places if named else [], [row["class"] for row in rows] if named else [], fontsize=7)
    panels[0].invert_yaxis()
    return ReportFigure(
        name="pseudo-labels-by-class",
        title="Pseudo-labels by class",
        caption=(
            f"Pseudo-labels after round {number}; the solid part of a bar is correct. Only a simulation has the hidden "
            "labels."
        ),
        figure=apply_style(figure),
        rows=rows,
    )


def _lines(axes: Axes, rows: list[dict[str, Any]], what: str, label: str) -> None:
    rounds = [row["round"] for row in rows]
    for kind, shade, marker in zip(KINDS, SHADES, "os", strict=True):
        values = np.array([row[f"{what}_{kind}"] for row in rows], dtype=float)  # None: NaN, no point
        axes.plot(rounds, values, color=shade, marker=marker, markersize=3, label=f'"{kind}"')
    axes.set_xlabel("round", fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
