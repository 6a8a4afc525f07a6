"""How close are metrics and thresholds from the histograms of sites to the exact ones?

    python benchmarks/histogram_metrics.py --root DATA [--keep FOLDER]

The predictions are real: COCO (80 classes) and ChestX-ray14 (14 classes) through a frozen ImageNet MobileNetV2 with the
exact linear head (`fed-ridge`, calibrated). Test and validation data are divided over 3, 20 and 200 sites at random.
Only classes with at least ten positives in the test data count. Values are shares, not percent.

With --keep the two runs stay in that folder and are not repeated. The exit code is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fedmll import load_run, run
from fedmll.config.experiment import Experiment
from fedmll.core.small_groups import is_small
from fedmll.evaluation import metrics, thresholds
from fedmll.evaluation.histograms import evaluate_histograms, score_histograms
from fedmll.evaluation.ranking import Floats, Ints
from fedmll.runs.array_files import Predictions
from fedmll.training.callbacks import Callback

DATA = {"COCO-80": "coco2014_8k_112.npz", "ChestX-ray14": "chestxray14_part001_112jpeg.npz"}
SITES = (3, 20, 200)
MIN_COUNT = 10  # of --min-count, for the last three columns
MIN_POSITIVES = 10  # in the test data; other classes do not count
GOALS = {"AUC": 1e-3, "AP": 2e-3, "F1": 2e-3}
HEADER = (
    "data", "sites", "classes", "max ΔAUC", "its bound", "max ΔAP", "its bound", "within", "ΔF1 validation",
    "ΔF1 test", "classes left", "positives left", "max ΔAUC of them",
)  # fmt: skip


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary)
        lines, all_reached = [], True
        for name, file in DATA.items():
            test, validation = load_predictions(options.root, folder / Path(file).stem, file)
            for sites in SITES:
                line, reached = compare(test, validation, sites)
                lines.append([name, str(sites), *line])
                all_reached = all_reached and reached
    print("| " + " | ".join(HEADER) + " |\n|---|" + "---:|" * (len(HEADER) - 1))
    for cells in lines:
        print("| " + " | ".join(cells) + " |")
    print(f"goals {GOALS}, and always within the bound: {'reached' if all_reached else 'MISSED'}")
    sys.exit(0 if all_reached else 1)


def load_predictions(root: str, folder: Path, file: str) -> tuple[Predictions, Predictions]:
    """Predictions on the test and the validation data, of the run in `folder`. A missing run is trained first."""
    if not (folder / "summary.json").exists():
        weights = str(Path(root) / "mobilenet_v2_imagenet.safetensors")
        experiment = Experiment.make(
            {
                "data": {"name": f"packed:{file}", "root": root, "size": 112},
                "partition": {"kind": "dirichlet", "clients": 10, "beta": 0.3},
                "method": {"name": "fed-ridge", "calibrate": "platt"},
                "model": {"backbone": "mobilenet-v2", "freeze": "backbone", "weights": weights},
                "engine": {"workers": 0, "evaluate_every": 100},
            }
        )
        run(experiment, folder, callback=Callback())
    finished = load_run(folder)
    return finished.predictions("test"), finished.predictions("validation")


def compare(test: Predictions, validation: Predictions, sites: int) -> tuple[list[str], bool]:
    """One row of the table, and whether the goals are reached."""
    scores, targets = test.probabilities, test.targets
    kept = (targets == 1).sum(axis=0) >= MIN_POSITIVES
    exact = metrics.evaluate(scores, targets, test.classes).per_class
    parts, tuning = site_histograms(test, sites), site_histograms(validation, sites)
    approximate = evaluate_histograms(add(parts), test.classes).per_class
    difference = {name: np.abs(approximate[name] - exact[name])[kept] / 100 for name in ("auc", "ap")}
    bound = {name: approximate[f"{name}_error"][kept] / 100 for name in ("auc", "ap")}
    within = all((difference[name] <= bound[name] + 1e-9).all() for name in difference)

    pooled = thresholds.best_thresholds(validation.probabilities, validation.targets)
    from_histograms = thresholds.best_f1_thresholds(add(tuning))
    lost = [
        f1(data, pooled)[kept].mean() - f1(data, from_histograms)[kept].mean() for data in (validation, test)
    ]  # on the data that the thresholds were chosen on, and on new data

    released = evaluate_histograms(add([without_small_classes(part) for part in parts]), test.classes).per_class
    defined = kept & np.isfinite(released["auc"])
    released_difference = np.abs(released["auc"] - exact["auc"])[defined] / 100
    share = released["positives"][kept].sum() / (targets == 1).sum(axis=0)[kept].sum()
    cells = [
        f"{kept.sum()} of {len(kept)}",
        *(f"{value[name].max():.5f}" for name in ("auc", "ap") for value in (difference, bound)),
        "always" if within else "NOT ALWAYS",
        *(f"{value:+.4f}" for value in lost),
        str(int(defined.sum())),
        f"{100 * share:.0f} %",
        f"{released_difference.max():.4f}" if len(released_difference) else "–",
    ]
    reached = difference["auc"].max() <= GOALS["AUC"] and difference["ap"].max() <= GOALS["AP"]
    return cells, bool(within and reached and max(lost) <= GOALS["F1"])


def site_histograms(data: Predictions, sites: int) -> list[Ints]:
    """The histograms of each site (2, C, bins), if the data is divided over the sites at random."""
    owner = np.random.default_rng(0).integers(sites, size=len(data.targets))
    return [score_histograms(data.probabilities[owner == site], data.targets[owner == site]) for site in range(sites)]


def add(histograms: Sequence[Ints]) -> Ints:
    return np.sum(histograms, axis=0)


def without_small_classes(histograms: Ints) -> Ints:
    """What leaves a site with --min-count: nothing of a class with few positives or few negatives."""
    small = np.logical_or(*is_small(histograms.sum(axis=2), MIN_COUNT))
    return np.where(small[:, None], 0, histograms)


def f1(data: Predictions, thresholds: Floats) -> Floats:
    """The F1 of each class; 0 where the class has no positive."""
    predicted, present, known = data.probabilities > thresholds, data.targets == 1, data.targets >= 0
    true_positives = (predicted & present).sum(axis=0)
    return np.asarray(2 * true_positives / np.maximum((predicted & known).sum(axis=0) + present.sum(axis=0), 1))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="the folder with the packed files and the weights")
    parser.add_argument("--keep", default=None, help="keep the two runs in this folder")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
