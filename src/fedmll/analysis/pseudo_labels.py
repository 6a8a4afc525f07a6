"""Labels that a method gives to entries that nobody annotated (FedMLP's tags): how many by round, and in a simulation,
which alone knows the hidden truth, how many of them are right."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from fedmll.analysis.look import COLOURS, MOST, NAMED, canvas, dressed
from fedmll.analysis.opened import records_of
from fedmll.analysis.picture import Picture
from fedmll.running.folder import METRICS, read_rows
from fedmll.running.saved import SavedRun

KINDS = ("absent", "present")  # what a tag of 0 and of 1 says
SHADES = (COLOURS[0], COLOURS[3])


def pictures(run: SavedRun) -> list[Picture]:
    """By round, and by class where the truth was there to be compared with; empty where the run gave none."""
    return [picture for picture in (by_round(run), by_class(run)) if picture is not None]


def by_round(run: SavedRun) -> Picture | None:
    rows = table_of_rounds(run)
    if not rows:
        return None
    audited = "precision_present" in rows[0]
    figure = canvas(8.0 if audited else 4.4, 3.0)
    panels: Any = figure.subplots(1, 2 if audited else 1, squeeze=False)[0]
    _lines(panels[0], rows, "tags", "pseudo-labels")
    panels[0].set_ylim(bottom=0)
    words = (
        "Pseudo-labels that the clients of a round hold, by what they say. How many of them are right is not known: "
        "only a simulation that hid the truth could say."
    )
    if audited:
        _lines(panels[1], rows, "precision", "right, %")
        panels[1].set_ylim(0, 102)
        words = (
            "Left: pseudo-labels that the clients hold after each round, by what they say. Right: how many of them are "
            "right; only a simulation, which hid the truth, can know that. The method itself does not see it."
        )
    return Picture("pseudo-labels", "Pseudo-labels by round", words, dressed(figure), rows)


def table_of_rounds(run: SavedRun) -> list[dict[str, Any]]:
    """In a simulation of all clients' memories, where the truth is known; else what a round's clients told."""
    audits, rows = records_of(run, "tags_made"), []
    for row in read_rows(run.folder / METRICS):
        if "tags_0" not in row:
            continue
        found: dict[str, Any] = {"round": row["round"]}
        found |= {f"tags_{kind}": int(row[f"tags_{label}"]) for label, kind in enumerate(KINDS)}
        if row["round"] in audits:
            made = audits[row["round"]]["tags_made"].sum(1).tolist()
            found |= {f"tags_{kind}": count for kind, count in zip(KINDS, made, strict=True)}
        if audits:  # also for a round in which nothing was tagged yet
            found |= {f"precision_{kind}": row.get(f"tag_precision_{label}") for label, kind in enumerate(KINDS)}
        rows.append(found)
    return rows


def by_class(run: SavedRun) -> Picture | None:
    """After the last round. Only a simulation has it."""
    audits = records_of(run, "tags_made", "tags_true", last=True)
    if not audits:
        return None
    ((number, audit),) = audits.items()
    counts = {what: audit[f"tags_{what}"].numpy() for what in ("made", "true")}
    shown = np.sort(np.argsort(-counts["made"].sum(0), kind="stable")[:MOST])
    rows = [
        {"class": run.classes[c]}
        | {f"{what}_{kind}": int(found[label, c]) for label, kind in enumerate(KINDS) for what, found in counts.items()}
        for c in shown
    ]
    figure = canvas(8.0, max(2.2, 0.22 * min(len(shown), NAMED) + 0.9))
    panels: Any = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(shown))
    for axes, kind, shade in zip(panels, KINDS, SHADES, strict=True):
        all_made = np.array([row[f"made_{kind}"] for row in rows])
        right = np.array([row[f"true_{kind}"] for row in rows])
        axes.barh(places, all_made, color=shade, alpha=0.3, label="pseudo-labels")
        axes.barh(places, right, color=shade, label="right")
        axes.set_title(f'"{kind}"', fontsize=10)
        axes.set_xlabel("entries", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    named = len(shown) <= NAMED
    panels[0].set_yticks(places if named else [], [row["class"] for row in rows] if named else [], fontsize=7)
    panels[0].invert_yaxis()
    words = (
        f"Pseudo-labels after round {number}, by class and by what they say; the full part of a bar is right. Only a "
        "simulation, which hid the truth, can know that."
    )
    return Picture("pseudo-labels-by-class", "Pseudo-labels by class", words, dressed(figure), rows)


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
