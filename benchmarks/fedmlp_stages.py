"""Does FedMLP's second stage pay, and if not, is it the tags? On composites of Fashion-MNIST with partial annotation:

    python benchmarks/fedmlp_stages.py --rounds 12 --first-stage 6
    python benchmarks/fedmlp_stages.py --rounds 48 --first-stage 36 --view none

compares, over seeds, FedAvg-PL with the same augmentation, the first stage alone (WPC), all of FedMLP, FedMLP whose
tags are true (an oracle puts the right label where FedMLP tags; the rest is the same) and its two parts alone. Margins
are over WPC alone, paired by seed. Beside them the share of the positive tags that are true.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedmll import Experiment, run
from fedmll.cli.display import RunProgress
from fedmll.cli.tables import console
from fedmll.client import Client
from fedmll.data import federation
from fedmll.message import Message, Tensors
from fedmll.methods.fedmlp import FedMLP
from fedmll.running.comparison import markdown, mean_and_spread

METRICS = ("bacc", "auc", "map")
TRUTH: dict[str, Tensor] = {}  # client → its true targets; worker processes inherit it


class OracleTags(FedMLP):
    """FedMLP tags the same entries, each with its true label. Only a simulation can do this."""

    name: ClassVar[str] = "benchmark-oracle-tags"

    def _tag(self, client: Client, features: Tensor, message: Message, memory: Tensors) -> Tensor:
        tags = super()._tag(client, features, message, memory)
        memory["tags"] = torch.where(tags >= 0, TRUTH[client.name].to(tags.dtype), tags)
        return memory["tags"]


def rows(view: str, first_stage: int, shares: tuple[float, float]) -> dict[str, dict[str, object]]:
    stage = {"method.view": view, "method.first_stage": first_stage}
    tagging = {"method.negative_share": shares[0], "method.positive_share": shares[1]}
    alone = {"method.name": "fedmlp", "method.view": view, "method.tags": False, "method.consistency": False}
    return {
        "fedavg-pl, same view": {"method.name": "fedavg-pl", "training.augment": view},
        "fedavg-pl, same view, two passes": {
            "method.name": "fedavg-pl", "training.augment": view, "training.local_epochs": 2,
        },
        "WPC only": alone,
        "fedmlp": {"method.name": "fedmlp"} | stage | tagging,
        "fedmlp, oracle tags": {"method.name": OracleTags.name} | stage | tagging,
        "fedmlp, tags only": {"method.name": "fedmlp", "method.consistency": False} | stage | tagging,
        "fedmlp, consistency only": {"method.name": "fedmlp", "method.tags": False} | stage,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--first-stage", type=int, default=6)
    parser.add_argument("--view", default="weak")
    parser.add_argument("--seeds", default="10,11,12")
    parser.add_argument("--annotation", default="one-class", help="one-class, or the number of missing classes")
    parser.add_argument("--shares", default="0.02,0.04", help="T0 and T1")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    low, high = (float(share) for share in options.shares.split(","))
    base = Experiment.load(Path(__file__).parents[1] / "examples" / "partial-fashion.toml").changed(
        {"training.rounds": options.rounds, "engine.evaluate_every": options.rounds}
    )
    if options.annotation != "one-class":
        base = base.changed({"annotation.kind": "missing", "annotation.missing": int(options.annotation)})
    variants = rows(options.view, options.first_stage, (low, high))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    with RunProgress(len(variants) * len(seeds) * options.rounds) as progress:
        for seed in seeds:
            data = federation.build(base.changed({"seed": seed}))
            TRUTH.clear()
            TRUTH.update({n: torch.from_numpy(data.truth[r]) for n, r in zip(data.names, data.samples, strict=True)})
            for name, changes in variants.items():
                progress.label = f"{name}, seed {seed}"
                result = run(base.changed({"seed": seed} | changes), observer=progress, prepared=data)
                found[name].append(result.metrics | {"tags": result.rows[-1].get("tag_precision_1", np.nan)})
    table = []
    for name, results in found.items():
        margins = [[a[m] - b[m] for a, b in zip(results, found["WPC only"], strict=True)] for m in METRICS]
        cells = [
            f"{mean_and_spread(np.array([r[m] for r in results]))} ({mean_and_spread(np.array(d), '+')})"
            for m, d in zip(METRICS, margins, strict=True)
        ]
        true = np.mean([result["tags"] for result in results])
        table.append([name, *cells, "–" if np.isnan(true) else f"{true:.0f}"])
    header = [f"{options.rounds} rounds, t1 = {options.first_stage}, view {options.view}", *METRICS, "true tags, %"]
    console.print(markdown(header, table), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
