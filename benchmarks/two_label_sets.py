"""Two sites with different label sets: the packed COCO images are divided in two halves. One site annotates COCO's 80
classes, the other one the 20 classes of VOC, under VOC's names. What a method makes of unknown targets decides how good
the 60 classes become that only one site annotates.

    python benchmarks/two_label_sets.py --root DATA --weights WEIGHTS.safetensors
    python benchmarks/two_label_sets.py --root DATA --weights WEIGHTS.safetensors --images 2000 --seeds 0
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fedmll import run
from fedmll.config.experiment import Experiment
from fedmll.config.presets import load_preset
from fedmll.data.sources import voc

FILE = "coco2014_8k_112.npz"
METHODS = ("fedavg", "fedavg-pl", "fedmlp", "fed-ridge", "fed-logistic")
COLUMNS = ("all", "coco", "coco, its own classes", "voc", "shared classes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help=f"the folder of {FILE}")
    parser.add_argument("--weights", type=Path, required=True, help="ImageNet weights of MobileNetV2")
    parser.add_argument("--images", type=int, default=8208, help="how many images, from the first")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=",".join(METHODS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_sites(options.root / FILE, Path(folder), options.images)
        print("mAP of the test data, %, mean over the seeds\n")
        print(f"| method | {' | '.join(COLUMNS)} |\n|---|{'---:|' * len(COLUMNS)}")
        for method in options.methods.split(","):
            seeds = [int(seed) for seed in options.seeds.split(",")]
            found = [measure(method, seed, Path(folder), options) for seed in seeds]
            cells = [f"{np.mean([row[column] for row in found]):.2f}" for column in COLUMNS]
            print(f"| {method} | {' | '.join(cells)} |", flush=True)


def write_sites(file: Path, folder: Path, count: int) -> None:
    """coco.npz: every second image with COCO's 80 classes; voc.npz: the others with VOC's 20."""
    with np.load(file, allow_pickle=False) as opened:
        packed = {name: opened[name] for name in opened.files}  # each access would read the array again
    names, offset = [str(name) for name in packed["classes"]], packed["offset"]
    here = {COCO_NAMES.get(name, name): name for name in voc.CLASSES}
    columns = [names.index(name) for name in here]
    for site, first in (("coco", 0), ("voc", 1)):
        rows = np.arange(first, min(count, len(offset) - 1), 2)
        parts = [packed["jpeg"][offset[row] : offset[row + 1]] for row in rows]
        labels, classes = packed["labels"][rows], names
        if site == "voc":
            labels, classes = labels[:, columns], list(here.values())
        np.savez(
            folder / f"{site}.npz", jpeg=np.concatenate(parts), offset=np.cumsum([0, *map(len, parts)]), labels=labels,
            classes=np.array(classes), is_test=packed["is_test"][rows],
        )  # fmt: skip


COCO_NAMES: dict[str, str] = load_preset("preset:coco-voc")["sites"][1]["rename"]


def measure(method: str, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    values: dict[str, Any] = {
        "seed": seed,
        "data": {"size": 112},
        "sites": [
            {"name": "coco", "data": f"packed:{folder / 'coco.npz'}"},
            {"name": "voc", "data": f"packed:{folder / 'voc.npz'}", "rename": COCO_NAMES},
        ],
        "model": {"backbone": "mobilenet-v2", "freeze": "backbone", "weights": str(options.weights)},
        "method": {"name": method},
        "training": {"rounds": options.rounds, "lr": 1e-3},
        "engine": {"evaluate_every": options.rounds},
    }
    result = run(Experiment.make(values), out=folder / f"{method}-{seed}")
    groups = {
        "shared classes" if group["site"] is None else group["site"] + (", its own classes" if group["only"] else ""):
        group["metrics"]["map"]
        for group in result.summary["by_site"]
    }  # fmt: skip
    return {"all": result.metrics["map"], **groups}


if __name__ == "__main__":
    main()
