"""Label correlations: as a run learned them, as its clients agreed on them, and in the test data (FedHarmony, Fig. 4).
It works for runs of every method."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from safetensors.torch import save_file

from fedmll.core.files import atomic_replace
from fedmll.data import federation
from fedmll.data.federation import Federation
from fedmll.inference.load_run import SavedRun, load_run
from fedmll.methods.parts.label_correlation import (
    StreamedCorrelation,
    default_clusters,
    label_correlation,
    spectral_blocks,
)
from fedmll.reports.figure import (
    MAX_CLASSES,
    MAX_NAMED_CLASSES,
    TEXT_COLOUR,
    ReportFigure,
    add_colour_bar,
    apply_style,
    draw_class_matrix,
    new_figure,
    write_image,
)

Matrix = NDArray[np.float64]

FILE = "correlation.safetensors"  # in the run's folder


@dataclass(frozen=True, kw_only=True)
class RunCorrelations:
    classes: tuple[str, ...]
    learned: Matrix  # in the predictions of the final model on the test data
    true: Matrix  # in the labels of the test data
    consensus: Matrix | None  # of the clients of the last round, on their training data (FedHarmony)
    blocks: NDArray[np.int64]  # blocks of the true matrix

    @property
    def matrices(self) -> dict[str, Matrix]:
        found = {"learned": self.learned, "consensus": self.consensus, "true": self.true}
        return {name: matrix for name, matrix in found.items() if matrix is not None}


def write_run_correlations(folder: Path, prepared: Federation | None = None) -> RunCorrelations:
    """Compute the correlations of a finished run and write them into its folder. `prepared`: its data, if loaded."""
    saved = load_run(folder)
    test = (prepared or federation.build(saved.experiment)).test
    found = compute_correlations(saved, saved.predict(test), test.labels, np.arange(len(test.classes)))
    tensors = {name: torch.from_numpy(matrix.copy()) for name, matrix in found.matrices.items()}
    tensors["blocks"] = torch.from_numpy(found.blocks)
    with atomic_replace(folder / FILE) as temporary:
        save_file(tensors, temporary, {"classes": json.dumps(found.classes)})
    return found


def compute_correlations(
    run: SavedRun, scores: NDArray[np.float32], labels: NDArray[np.int8], shown: NDArray[np.int64]
) -> RunCorrelations:
    """For the classes `shown`; `scores` and `labels` have all classes."""
    learned = StreamedCorrelation(len(shown))
    learned.add(torch.from_numpy(scores[:, shown]))
    true = label_correlation(labels[:, shown])
    blocks = spectral_blocks(torch.from_numpy(np.nan_to_num(true)), default_clusters(len(true)), run.summary["seed"])
    agreed = [found["consensus"] for found in run.records("consensus", last=True).values()]
    consensus = agreed[0].double().numpy()[np.ix_(shown, shown)] if agreed else None
    names = tuple(run.classes[c] for c in shown)
    return RunCorrelations(
        classes=names, learned=learned.matrix().double().numpy(), true=true, consensus=consensus, blocks=blocks.numpy()
    )


def correlation_figure(run: SavedRun) -> ReportFigure | None:
    """From the stored predictions; None without them, or with a single class."""
    stored, shown = run.test_predictions, run.most_frequent_classes(MAX_CLASSES)
    if stored is None or len(shown) < 2:
        return None
    found = compute_correlations(run, stored.probabilities, stored.targets, shown)
    rows = [
        {"class": found.classes[a], "other": found.classes[b]}
        | {name: float(matrix[a, b]) for name, matrix in found.matrices.items()}
        for a, b in combinations(np.argsort(found.blocks, kind="stable").tolist(), 2)
    ]
    consensus = "" if found.consensus is None else ", and as the clients agreed in the last round (consensus)"
    return ReportFigure(
        name="correlation",
        title="Learned and true label correlation",
        caption=(
            "Which labels occur together in the predictions on the test data (learned) and in the labels of the test "
            f"data (true){consensus}. Labels are sorted by the blocks of the true matrix, which are framed. r is the "
            "correlation with the true matrix over all pairs; 1 means the same structure (FedHarmony, Fig. 4)."
        ),
        figure=apply_style(draw_matrices(found.matrices, found.classes, found.blocks)),
        rows=rows,
    )


def frobenius_distance(first: Matrix, second: Matrix) -> float:
    """Over the pairs of different labels; pairs that are undefined in one matrix are left out."""
    difference = first - second
    np.fill_diagonal(difference, 0)
    return float(np.sqrt(np.nansum(difference**2)))


def structure_correlation(first: Matrix, second: Matrix) -> float:
    """Pearson's correlation over the pairs of different labels: it compares the structure, not the scale."""
    upper = np.triu_indices(len(first), 1)
    a, b = first[upper], second[upper]
    both = np.isfinite(a) & np.isfinite(b)
    if both.sum() < 2 or not (a[both].std() and b[both].std()):
        return float("nan")
    return float(np.corrcoef(a[both], b[both])[0, 1])


def describe_difference(matrix: Matrix, reference: Matrix) -> str:
    """`distance 1.23, r 0.45`; without r if one matrix has the same value everywhere."""
    r = structure_correlation(matrix, reference)
    return f"distance {frobenius_distance(matrix, reference):.2f}" + ("" if np.isnan(r) else f", r {r:.2f}")


def write_matrices(
    path: Path, matrices: Mapping[str, Matrix], classes: Sequence[str], blocks: NDArray[np.int64], true: str = "true"
) -> None:
    """Write the matrices as an image file with a white background."""
    write_image(path, draw_matrices(matrices, classes, blocks, true))


def draw_matrices(
    matrices: Mapping[str, Matrix], classes: Sequence[str], blocks: NDArray[np.int64], true: str = "true"
) -> Figure:
    """Draw matrices side by side, labels sorted by their blocks, each with its difference from the one named `true`."""
    order = np.argsort(blocks, kind="stable")
    reference = matrices[true]
    off_diagonal = ~np.eye(len(reference), dtype=bool)
    limit = max(0.1, float(np.nanquantile(np.abs(reference[off_diagonal]), 0.99)))
    side = 3.6 if len(classes) <= MAX_NAMED_CLASSES else 4.4
    figure = new_figure(side * len(matrices) + 2.2, side + 1.6)
    line: Any = figure.subplots(1, len(matrices), sharey=True, squeeze=False)
    for axes, (name, matrix) in zip(line[0], matrices.items(), strict=True):
        mesh = draw_class_matrix(axes, matrix[np.ix_(order, order)], [classes[c] for c in order], limit)
        axes.set_title(name if name == true else f"{name}\n{describe_difference(matrix, reference)}", fontsize=10)
        _frame_blocks(axes, blocks[order])
        axes.tick_params(labelleft=axes is line[0][0])
    add_colour_bar(figure, mesh, line[0], "label correlation (Eq. 2)")
    return figure


def _frame_blocks(axes: Axes, sorted_blocks: NDArray[np.int64]) -> None:
    """A frame around every block of more than one label."""
    for block in np.unique(sorted_blocks):
        places = np.flatnonzero(sorted_blocks == block)
        if len(places) > 1:
            corner, side = places[0] - 0.5, len(places)
            axes.add_patch(Rectangle((corner, corner), side, side, fill=False, edgecolor=TEXT_COLOUR, linewidth=1))
