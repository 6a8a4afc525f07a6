"""What a run learnt of the label correlations, beside the consensus of its clients and the truth (FedHarmony, Fig. 4).
The numbers first, then a picture of them. Works for the run of any method."""

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

from fedmll.analysis.look import INK, NAMED, canvas, colour_bar, dressed, or_none, square
from fedmll.analysis.opened import classes_shown, kept_predictions, records_of
from fedmll.analysis.picture import Picture
from fedmll.data import federation
from fedmll.data.federation import Federation
from fedmll.files import replacing
from fedmll.methods.parts.correlation import StreamedCorrelation, default_clusters, label_correlation, spectral_blocks
from fedmll.running.saved import SavedRun, load_run

Matrix = NDArray[np.float64]

FILE = "correlation.safetensors"  # in the run's folder


@dataclass(frozen=True)
class RunCorrelations:
    classes: tuple[str, ...]
    learned: Matrix  # of the final model's predictions on the test data
    true: Matrix  # of the test data's labels
    consensus: Matrix | None  # of the last round's clients, on their training data (FedHarmony)
    blocks: NDArray[np.int64]  # of the truth

    @property
    def matrices(self) -> dict[str, Matrix]:
        found = {"learned": self.learned, "consensus": self.consensus, "true": self.true}
        return {name: matrix for name, matrix in found.items() if matrix is not None}


def of_run(folder: Path, prepared: Federation | None = None) -> RunCorrelations:
    """Of a finished run; also written into its folder. `prepared`: its data, if it is loaded already."""
    saved = load_run(folder)
    test = (prepared or federation.build(saved.experiment)).test
    found = correlations(saved, saved.predict(test), test.labels, np.arange(len(test.classes)))
    tensors = {name: torch.from_numpy(matrix.copy()) for name, matrix in found.matrices.items()}
    tensors["blocks"] = torch.from_numpy(found.blocks)
    with replacing(folder / FILE) as temporary:
        save_file(tensors, temporary, {"classes": json.dumps(found.classes)})
    return found


def correlations(
    run: SavedRun, scores: NDArray[np.float32], labels: NDArray[np.int8], shown: NDArray[np.int64]
) -> RunCorrelations:
    """Of the classes `shown`; `scores` and `labels` are of all."""
    learned = StreamedCorrelation(len(shown))
    learned.add(torch.from_numpy(scores[:, shown]))
    true = label_correlation(labels[:, shown])
    blocks = spectral_blocks(torch.from_numpy(np.nan_to_num(true)), default_clusters(len(true)), run.summary["seed"])
    agreed = [found["consensus"] for found in records_of(run, "consensus", last=True).values()]
    consensus = agreed[0].double().numpy()[np.ix_(shown, shown)] if agreed else None
    names = tuple(run.classes[c] for c in shown)
    return RunCorrelations(names, learned.matrix().double().numpy(), true, consensus, blocks.numpy())


def picture(run: SavedRun) -> Picture | None:
    """From the kept predictions; None where there are none, or no pair of classes."""
    kept, shown = kept_predictions(run), classes_shown(run)
    if kept is None or len(shown) < 2:
        return None
    found = correlations(run, kept.probabilities, kept.targets, shown)
    rows = [
        {"class": found.classes[a], "other": found.classes[b]}
        | {name: or_none(matrix[a, b]) for name, matrix in found.matrices.items()}
        for a, b in combinations(np.argsort(found.blocks, kind="stable").tolist(), 2)
    ]
    words = (
        "Which labels go together: in the model's predictions on the test data (learned), in the test data's labels "
        "(true)"
        + ("" if found.consensus is None else " and as the clients agreed in the last round (consensus)")
        + ". Labels are in the order of the blocks of the truth, framed; r is the correlation with the truth over all "
        "pairs: 1 is the same structure (FedHarmony, Fig. 4)."
    )
    figure = dressed(panels(found.matrices, found.classes, found.blocks))
    return Picture("correlation", "Learned and true label correlation", words, figure, rows)


def distance(first: Matrix, second: Matrix) -> float:
    """Frobenius distance over the pairs of different labels; pairs of which one matrix knows nothing are left out."""
    difference = first - second
    np.fill_diagonal(difference, 0)
    return float(np.sqrt(np.nansum(difference**2)))


def likeness(first: Matrix, second: Matrix) -> float:
    """Pearson's correlation of the pairs of different labels: right structure, whatever its scale."""
    upper = np.triu_indices(len(first), 1)
    a, b = first[upper], second[upper]
    both = np.isfinite(a) & np.isfinite(b)
    if both.sum() < 2 or not (a[both].std() and b[both].std()):
        return float("nan")
    return float(np.corrcoef(a[both], b[both])[0, 1])


def compared(matrix: Matrix, reference: Matrix) -> str:
    """In words; where one of them has the same value everywhere there is no structure to be like."""
    r = likeness(matrix, reference)
    return f"distance {distance(matrix, reference):.2f}" + ("" if np.isnan(r) else f", r {r:.2f}")


def draw(
    path: Path,
    matrices: Mapping[str, Matrix],
    classes: Sequence[str],
    blocks: NDArray[np.int64],
    true: str = "true",
) -> None:
    """The picture as a file, on white."""
    figure = panels(matrices, classes, blocks, true)
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lstrip(".") or "png", dpi=150, facecolor="white")


def panels(
    matrices: Mapping[str, Matrix], classes: Sequence[str], blocks: NDArray[np.int64], true: str = "true"
) -> Figure:
    """Matrices side by side, labels in the order of their blocks; each with its distance from the one called `true`."""
    order = np.argsort(blocks, kind="stable")
    reference = matrices[true]
    off_diagonal = ~np.eye(len(reference), dtype=bool)
    limit = max(0.1, float(np.nanquantile(np.abs(reference[off_diagonal]), 0.99)))
    side = 3.6 if len(classes) <= NAMED else 4.4
    figure = canvas(side * len(matrices) + 2.2, side + 1.6)
    line: Any = figure.subplots(1, len(matrices), sharey=True, squeeze=False)
    for axes, (name, matrix) in zip(line[0], matrices.items(), strict=True):
        mesh = square(axes, matrix[np.ix_(order, order)], [classes[c] for c in order], limit)
        axes.set_title(name if name == true else f"{name}\n{compared(matrix, reference)}", fontsize=10)
        _outline(axes, blocks[order])
        axes.tick_params(labelleft=axes is line[0][0])
    colour_bar(figure, mesh, line[0], "label correlation (Eq. 2)")
    return figure


def _outline(axes: Axes, sorted_blocks: NDArray[np.int64]) -> None:
    """A frame around every block of more than one label."""
    for block in np.unique(sorted_blocks):
        places = np.flatnonzero(sorted_blocks == block)
        if len(places) > 1:
            corner, side = places[0] - 0.5, len(places)
            axes.add_patch(Rectangle((corner, corner), side, side, fill=False, edgecolor=INK, linewidth=1))
