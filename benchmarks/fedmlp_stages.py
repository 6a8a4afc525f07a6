"""Does the second stage of FedMLP improve the result? If not, are wrong tags the reason?

    python benchmarks/fedmlp_stages.py --rounds 12 --first-stage 6
    python benchmarks/fedmlp_stages.py --rounds 48 --first-stage 36 --view none

The data is composites of Fashion-MNIST with partial annotation. The rows are FedAvg-PL with the same augmentation, the
first stage alone (WPC), the whole of FedMLP, FedMLP with true tags, and FedMLP with only one of its two other parts.
With true tags an oracle writes the true label wherever FedMLP sets a tag; everything else is the same. Margins over WPC
alone, paired by seed, are in brackets. The last column is the share of the positive tags that are true.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmll import Experiment, run
from fedmll.cli.display import RunProgress
from fedmll.cli.output import console
from fedmll.data import federation
from fedmll.methods.fedmlp import FedMLP
from fedmll.methods.framework.client_round import ClientRound
from fedmll.methods.framework.method import switch
from fedmll.methods.parts.missing_label_detection import MissingLabelTags
from fedmll.runs.formatting import markdown_table, mean_and_std

METRICS = ("bacc", "auc", "map")
TRUE_LABELS: dict[str, Tensor] = {}  # by client; worker processes are forked, so they have it too


class OracleTags(MissingLabelTags):
    """Tags the same entries as FedMLP, but with their true labels. Only a simulation can do this."""

    name = "oracle-tags"

    def on_round_start(self, client_round: ClientRound) -> None:
        super().on_round_start(client_round)
        client, client_state = client_round.client, self.client_state(client_round)
        if "tags" in client_state:
            tags = client_state["tags"]
            tags = torch.where(tags >= 0, TRUE_LABELS[client.name].to(tags.dtype), tags)
            client_state["tags"] = tags
            client_round.targets = torch.where(client.targets >= 0, client.targets, tags)


class OracleFedMLP(FedMLP):
    name = "benchmark-oracle-tags"
    parts = (switch("tags", OracleTags, "FedMLP's tags with their true labels"), *FedMLP.parts[1:])


def make_variants(view: str, first_stage: int, shares: tuple[float, float]) -> dict[str, dict[str, object]]:
    stage = {"method.view": view, "method.first_stage": first_stage}
    tagging = {"method.negative_share": shares[0], "method.positive_share": shares[1]}
    first_stage_only = {"method.name": "fedmlp", "method.view": view, "method.tags": False, "method.consistency": False}
    return {
        "fedavg-pl, same view": {"method.name": "fedavg-pl", "training.augment": view},
        "fedavg-pl, same view, two passes": {
            "method.name": "fedavg-pl", "training.augment": view, "training.local_epochs": 2,
        },
        "WPC only": first_stage_only,
        "fedmlp": {"method.name": "fedmlp"} | stage | tagging,
        "fedmlp, oracle tags": {"method.name": OracleFedMLP.name} | stage | tagging,
        "fedmlp, tags only": {"method.name": "fedmlp", "method.consistency": False} | stage | tagging,
        "fedmlp, consistency only": {"method.name": "fedmlp", "method.tags": False} | stage,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--first-stage", type=int, default=6)
    parser.add_argument("--view", default="weak", help="the augmentation")
    parser.add_argument("--seeds", default="10,11,12", help="separated by commas")
    parser.add_argument(
        "--annotation",
        default="one-class",
        help="one-class, or the number of classes that each client does not annotate",
    )
    parser.add_argument(
        "--shares",
        default="0.02,0.04",
        help="T0 and T1, the shares of likely negatives and positives that are tagged per round",
    )
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    low, high = (float(share) for share in options.shares.split(","))
    base = Experiment.load(Path(__file__).parents[1] / "examples" / "partial-fashion.toml").changed(
        {"training.rounds": options.rounds, "engine.evaluate_every": options.rounds}
    )
    if options.annotation != "one-class":
        base = base.changed({"annotation.kind": "missing", "annotation.missing": int(options.annotation)})
    variants = make_variants(options.view, options.first_stage, (low, high))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    with RunProgress(len(variants) * len(seeds) * options.rounds) as progress:
        for seed in seeds:
            data = federation.build(base.changed({"seed": seed}))
            TRUE_LABELS.clear()
            for client, rows in zip(data.names, data.samples, strict=True):
                TRUE_LABELS[client] = torch.from_numpy(data.true_labels[rows])
            for name, changes in variants.items():
                progress.label = f"{name}, seed {seed}"
                result = run(base.changed({"seed": seed} | changes), callback=progress, prepared=data)
                found[name].append(result.metrics | {"tags": result.rows[-1].get("tag_precision_1", np.nan)})
    table = []
    for name, results in found.items():
        margins = [[a[m] - b[m] for a, b in zip(results, found["WPC only"], strict=True)] for m in METRICS]
        cells = [
            f"{mean_and_std(np.array([r[m] for r in results]))} ({mean_and_std(np.array(d), '+')})"
            for m, d in zip(METRICS, margins, strict=True)
        ]
        true = np.mean([result["tags"] for result in results])
        table.append([name, *cells, "–" if np.isnan(true) else f"{true:.0f}"])
    header = [f"{options.rounds} rounds, t1 = {options.first_stage}, view {options.view}", *METRICS, "true tags, %"]
    console.print(markdown_table(header, table), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
