"""What a run learnt of the label correlations, beside the consensus of its clients and the truth (FedHarmony, Fig. 4).
The numbers first, then a picture of them. Works for the run of any method."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from fedmll.data import federation
from fedmll.data.federation import Federation
from fedmll.files import replacing
from fedmll.methods.parts.correlation import StreamedCorrelation, default_clusters, label_correlation, spectral_blocks
from fedmll.running.saved import load_run

Matrix = NDArray[np.float64]

NAMED = 40  # with more classes than this their names would not fit
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
    experiment = saved.experiment
    data = prepared or federation.build(experiment)
    scores = torch.from_numpy(saved.predict(data.test))
    learned = StreamedCorrelation(scores.shape[1])
    learned.add(scores)
    true = label_correlation(data.test.labels)
    blocks = spectral_blocks(torch.from_numpy(np.nan_to_num(true)), default_clusters(len(true)), experiment.seed)
    matrix = learned.matrix().double().numpy()
    found = RunCorrelations(data.test.classes, matrix, true, _last_consensus(folder), blocks.numpy())
    tensors = {name: torch.from_numpy(matrix.copy()) for name, matrix in found.matrices.items()} | {"blocks": blocks}
    with replacing(folder / FILE) as temporary:
        save_file(tensors, temporary, {"classes": json.dumps(found.classes)})
    return found


def _last_consensus(folder: Path) -> Matrix | None:
    """From the run's records, newest first."""
    for path in sorted((folder / "records").glob("*.safetensors"), reverse=True):
        consensus = load_file(path).get("consensus")
        if consensus is not None:
            return consensus.double().numpy()
    return None


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


def draw(
    path: Path,
    matrices: Mapping[str, Matrix],
    classes: Sequence[str],
    blocks: NDArray[np.int64],
    true: str = "true",
) -> None:
    """Matrices side by side, labels in the order of their blocks; each with its distance from the one called `true`."""
    order = np.argsort(blocks, kind="stable")
    reference = matrices[true]
    limit = max(0.1, float(np.nanquantile(np.abs(_off_diagonal(reference)), 0.99)))
    side = 3.6 if len(classes) <= NAMED else 4.4
    width = side * len(matrices) + 2.2
    figure = Figure(figsize=(width, side + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(1, len(matrices), sharey=True, squeeze=False)
    for axes, (name, matrix) in zip(panels[0], matrices.items(), strict=True):
        mesh = axes.imshow(_off_diagonal(matrix)[np.ix_(order, order)], cmap=_colours(), vmin=-limit, vmax=limit)
        gap = (
            "" if name == true else f"\ndistance {distance(matrix, reference):.2f}, r {likeness(matrix, reference):.2f}"
        )
        axes.set_title(name + gap, fontsize=10)
        _outline(axes, blocks[order])
        if len(classes) <= NAMED:
            axes.set_xticks(range(len(classes)), [classes[c] for c in order], rotation=90, fontsize=7)
            axes.set_yticks(range(len(classes)), [classes[c] for c in order], fontsize=7)
        else:
            axes.set_xticks([])
            axes.set_yticks([])
        axes.tick_params(length=0, labelleft=axes is panels[0][0])
    figure.colorbar(mesh, ax=panels[0].tolist(), shrink=0.6, pad=0.01, label="label correlation (Eq. 2)")
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lstrip(".") or "png", dpi=150)


def _off_diagonal(matrix: Matrix) -> Matrix:
    hollow = matrix.copy()
    np.fill_diagonal(hollow, np.nan)
    return hollow


def _colours() -> Any:
    import matplotlib

    return matplotlib.colormaps["RdBu_r"].with_extremes(bad="0.85")


def _outline(axes: Axes, sorted_blocks: NDArray[np.int64]) -> None:
    """A frame around every block of more than one label."""
    for block in np.unique(sorted_blocks):
        places = np.flatnonzero(sorted_blocks == block)
        if len(places) > 1:
            corner, side = places[0] - 0.5, len(places)
            axes.add_patch(Rectangle((corner, corner), side, side, fill=False, edgecolor="0.2", linewidth=0.8))
