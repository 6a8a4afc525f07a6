"""Does the learned label correlation come nearer to the true one? For the runs of a comparison:

    fedmll compare examples/coco20.toml --root DATA --out runs/coco20 --seeds 0,1 --methods fedavg,fedprox,fedharmony
    python benchmarks/harmony_coco.py runs/coco20 --picture correlation.png

prints, for each method, the Frobenius distance of the final model's label correlations on the test images from those of
their true labels (mean ± std over the seeds) beside its mAP, and draws the matrices of one seed side by side.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from fedmll.analysis import correlation_picture as picture
from fedmll.cli.tables import console
from fedmll.data import federation
from fedmll.experiment import Experiment
from fedmll.running.comparison import markdown, mean_and_spread


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="a run's folder, or one with the runs of `fedmll compare`")
    parser.add_argument("--picture", type=Path, help="default: correlation.png in that folder")
    parser.add_argument("--seed", type=int, help="of the picture; default: the first")
    options = parser.parse_args()
    runs = sorted(path.parent for path in options.folder.glob("**/summary.json"))
    if not runs:
        parser.error(f"there is no finished run in {options.folder}")
    found: dict[str, list[tuple[int, picture.RunCorrelations, float]]] = {}
    prepared: dict[str, federation.Federation] = {}
    for run in runs:
        experiment = Experiment.load(run / "experiment.toml")
        parts = (experiment.data, experiment.partition, experiment.annotation)
        key = f"{experiment.seed} {[part.model_dump_json() for part in parts]}"
        if key not in prepared:
            prepared[key] = federation.build(experiment)
        row = "/".join(part for part in run.relative_to(options.folder).parts if not part.startswith("seed-"))
        summary = json.loads((run / "summary.json").read_text())
        one = picture.of_run(run, prepared[key])
        found.setdefault(row or experiment.method.name, []).append((experiment.seed, one, summary["metrics"]["map"]))
    table = [
        [
            name,
            mean_and_spread(np.array([picture.distance(c.learned, c.true) for _, c, _ in cells])),
            mean_and_spread(np.array([picture.likeness(c.learned, c.true) for _, c, _ in cells])),
            mean_and_spread(np.array([value for _, _, value in cells])),
        ]
        for name, cells in found.items()
    ]
    nothing = [picture.distance(np.zeros_like(c.true), c.true) for cells in found.values() for _, c, _ in cells[:1]]
    table.append(["(no correlation at all)", f"{nothing[0]:.2f}", "–", "–"])
    console.print(markdown(["method", "distance learned → true", "r", "map"], table), soft_wrap=True, markup=False)
    seed = options.seed if options.seed is not None else min(s for cells in found.values() for s, _, _ in cells)
    shown = {name: c for name, cells in found.items() for s, c, _ in cells if s == seed}
    any_run = next(iter(shown.values()))
    matrices = {name: c.learned for name, c in shown.items()}
    if len(shown) == 1:
        matrices = any_run.matrices
    out = options.picture or options.folder / "correlation.png"
    picture.draw(out, matrices | {"true": any_run.true}, any_run.classes, any_run.blocks)
    console.print(f"picture (seed {seed}) in {out}", soft_wrap=True)


if __name__ == "__main__":
    main()
