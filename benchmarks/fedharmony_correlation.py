"""Are the label correlations that a model learned close to the true ones? For the runs of a comparison:

    fedmll compare examples/coco20.toml --root DATA --out runs/coco20 --seeds 0,1 --methods fedavg,fedprox,fedharmony
    python benchmarks/fedharmony_correlation.py runs/coco20 --figure correlation.png

The table has one row per method: the Frobenius distance between the label correlations of the final model's predictions
on the test images and those of the true labels, and the mAP (mean ± std over the seeds). The figure shows the matrices
of one seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from fedmll.cli.output import console
from fedmll.config.experiment import Experiment
from fedmll.data import federation
from fedmll.reports.figures import label_correlation
from fedmll.runs.formatting import markdown_table, mean_and_std


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="a run folder, or a folder with the runs of `fedmll compare`")
    parser.add_argument(
        "--figure", type=Path, help="where to write the figure; default: correlation.png in that folder"
    )
    parser.add_argument("--seed", type=int, help="the seed of the figure; default: the first")
    options = parser.parse_args()
    runs = sorted(path.parent for path in options.folder.glob("**/summary.json"))
    if not runs:
        parser.error(f"there is no finished run in {options.folder}")
    found: dict[str, list[tuple[int, label_correlation.RunCorrelations, float]]] = {}
    prepared: dict[str, federation.Federation] = {}
    for run in runs:
        experiment = Experiment.load(run / "experiment.toml")
        parts = (experiment.data, experiment.partition, experiment.annotation)
        key = f"{experiment.seed} {[part.model_dump_json() for part in parts]}"
        if key not in prepared:
            prepared[key] = federation.build(experiment)
        row = "/".join(part for part in run.relative_to(options.folder).parts if not part.startswith("seed-"))
        summary = json.loads((run / "summary.json").read_text())
        one = label_correlation.write_run_correlations(run, prepared[key])
        found.setdefault(row or experiment.method.name, []).append((experiment.seed, one, summary["metrics"]["map"]))
    table = [
        [
            name,
            mean_and_std(np.array([label_correlation.frobenius_distance(c.learned, c.true) for _, c, _ in cells])),
            mean_and_std(np.array([label_correlation.structure_correlation(c.learned, c.true) for _, c, _ in cells])),
            mean_and_std(np.array([value for _, _, value in cells])),
        ]
        for name, cells in found.items()
    ]
    no_correlation = [
        label_correlation.frobenius_distance(np.zeros_like(c.true), c.true)
        for cells in found.values()
        for _, c, _ in cells[:1]
    ]
    table.append(["(no correlation at all)", f"{no_correlation[0]:.2f}", "–", "–"])
    console.print(
        markdown_table(["method", "distance learned → true", "r", "map"], table), soft_wrap=True, markup=False
    )
    seed = options.seed if options.seed is not None else min(s for cells in found.values() for s, _, _ in cells)
    shown = {name: c for name, cells in found.items() for s, c, _ in cells if s == seed}
    any_run = next(iter(shown.values()))
    matrices = {name: c.learned for name, c in shown.items()}
    if len(shown) == 1:
        matrices = any_run.matrices
    out = options.figure or options.folder / "correlation.png"
    label_correlation.write_matrices(out, matrices | {"true": any_run.true}, any_run.classes, any_run.blocks)
    console.print(f"figure (seed {seed}) in {out}", soft_wrap=True)


if __name__ == "__main__":
    main()
