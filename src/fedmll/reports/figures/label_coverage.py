"""Label coverage: how many clients of each round have each label.

With few labels per client and few clients per round, no client of a round may have a label. The row of the classifier
for that label then learns nothing, and the pairwise tuning loss is wrong. The coverage is known before training; a run
with private labels records it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from fedmll.data.federation import Federation
from fedmll.inference.load_run import SavedRun
from fedmll.reports.figure import (
    COLOURS,
    MAX_CLASSES,
    MAX_NAMED_CLASSES,
    ReportFigure,
    add_colour_bar,
    apply_style,
    new_figure,
)
from fedmll.runs.formatting import format_csv


def compute_coverage(federation: Federation, rounds: int) -> NDArray[np.int64]:
    """(rounds, classes): how many clients of the round have the label, that is, may have it and annotate it."""
    owned = federation.allowed & federation.annotated
    return np.stack([owned[federation.participants(number)].sum(0) for number in range(1, rounds + 1)])


def coverage_table(counts: NDArray[np.int64], classes: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Header and one row per label: clients per round (fewest, mean, most), rounds without the label, longest gap."""
    header = ["label", "fewest", "mean", "most", "rounds without", "longest gap"]
    rows = []
    for name, column in zip(classes, counts.T, strict=True):
        numbers = [column.min(), f"{column.mean():.1f}", column.max(), (column == 0).sum(), longest_gap(column)]
        rows.append([name, *map(str, numbers)])
    return header, rows


def longest_gap(column: NDArray[np.int64]) -> int:
    """The largest number of consecutive rounds with a count of 0."""
    longest = gap = 0
    for count in column:
        gap = gap + 1 if count == 0 else 0
        longest = max(longest, gap)
    return longest


def coverage_csv(counts: NDArray[np.int64], classes: Sequence[str]) -> str:
    return format_csv(
        [[_round_column(classes), *classes], *([number, *row] for number, row in enumerate(counts.tolist(), 1))]
    )


def _round_column(classes: Sequence[str]) -> str:
    """The name of the column with the round, which no class has."""
    return "_round" if "round" in classes else "round"


def coverage_figure(run: SavedRun) -> ReportFigure | None:
    """None if the run did not record its coverage; only methods for private labels do."""
    records = run.records("coverage")
    if not records:
        return None
    shown = run.most_frequent_classes(MAX_CLASSES)
    counts = np.stack([tensors["coverage"].numpy()[shown] for tensors in records.values()])
    names, rounds = [run.classes[c] for c in shown], list(records)
    columns = [_round_column(names), *names]
    rows = [dict(zip(columns, [n, *row], strict=True)) for n, row in zip(rounds, counts.tolist(), strict=True)]
    gaps = [longest_gap(column) for column in counts.T]
    worst = int(np.argmax(gaps))
    found = (
        f"The longest gap is {gaps[worst]} rounds ({names[worst]})."
        if gaps[worst] > 1
        else f"In {int((counts == 0).any(1).sum())} of {len(rounds)} rounds some label was missing."
    )
    return ReportFigure(
        name="coverage",
        title="Label coverage by round",
        caption=(
            "The number of clients in each round that have each label. If no client has a label, the model learns "
            f"nothing about it in that round. {found}"
        ),
        figure=_draw(counts, names, rounds),
        rows=rows,
    )


def _draw(counts: NDArray[np.int64], names: Sequence[str], rounds: Sequence[int]) -> Figure:
    height = 0.2 * len(names) if len(names) <= MAX_NAMED_CLASSES else 5.0
    figure = new_figure(7.0, max(2.0, height + 1.0))
    axes = figure.subplots()
    colours = matplotlib.colormaps["cividis"].with_extremes(under=COLOURS[3])
    edges = (rounds[0] - 0.5, rounds[-1] + 0.5, len(names) - 0.5, -0.5)
    most = max(2, int(counts.max()))
    mesh = axes.imshow(counts.T, cmap=colours, vmin=1, vmax=most, aspect="auto", extent=edges, interpolation="none")
    named = len(names) <= MAX_NAMED_CLASSES
    axes.set_yticks(range(len(names)) if named else [], names if named else [], fontsize=7)
    axes.set_xlabel("round", fontsize=8)
    axes.tick_params(length=0, labelsize=7)
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    add_colour_bar(figure, mesh, [axes], "clients").set_ticks(sorted({1, (1 + most) // 2, most}))
    if (counts == 0).any():
        above: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
        axes.legend(handles=[Patch(color=COLOURS[3], label="no client")], frameon=False, fontsize=8, **above)
    return apply_style(figure)
