"""Block-wise alignment (FedHarmony, Eq. 8) compared with the alignment of all pairs of labels (Eq. 4).

    python benchmarks/fedharmony_blocks.py cost                           one step of the loss, C = 20, 80, 1,628
    python benchmarks/fedharmony_blocks.py train FILE.toml --root DATA    the paper's Tables 2 and 4

`train` runs both variants of an experiment. They take turns, round by round. It prints the CPU time of each variant
(Table 2, as a ratio of one run on one machine) and the Wilcoxon signed-rank test over the eight metrics (Table 4).
All times are CPU times of one thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import wilcoxon
from torch import Tensor

from fedmll.config.experiment import Experiment
from fedmll.data import federation
from fedmll.engines.local import LocalEngine
from fedmll.methods.parts.label_correlation import (
    BlockAlignmentLoss,
    batch_correlation,
    default_clusters,
    discrepancy,
    spectral_blocks,
)
from fedmll.testing import aggregate

METRICS = ("c_ap", "o_ap", "c_p", "c_r", "c_f1", "o_p", "o_r", "o_f1")  # as in the paper's Table 1


def planted_scores(sizes: Sequence[int], samples: int, seed: int) -> Tensor:
    """Scores whose labels are correlated within groups of these sizes."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(len(sizes)), sizes)
    latent = 1.5 * rng.normal(size=(samples, len(sizes)))[:, group] + rng.normal(size=(samples, len(group))) - 2
    return torch.sigmoid(torch.tensor(latent, dtype=torch.float32))


def python_loop(aim: Tensor, blocks: Tensor) -> Callable[[Tensor], Tensor]:
    """The same loss as a plain loop over the blocks."""
    members = [(blocks == block).nonzero().flatten() for block in blocks.unique()]
    members = [m for m in members if len(m) > 1]
    aims = [aim[m[:, None], m] for m in members]
    masks = [~torch.eye(len(m), dtype=torch.bool) for m in members]
    pairs = sum(int(mask.sum()) for mask in masks)

    def loss(scores: Tensor) -> Tensor:
        total = scores.new_zeros(())
        for m, a, mask in zip(members, aims, masks, strict=True):
            total = total + ((batch_correlation(scores[:, m]) - a).square() * mask).sum()
        return total / pairs

    return loss


def step_times(losses: dict[str, Callable[[Tensor], Tensor]], scores: Tensor, repeats: int) -> dict[str, float]:
    """Median CPU time, in ms, of a forward and a backward pass. The variants take turns."""
    times: dict[str, list[float]] = {name: [] for name in losses}
    for turn in range(repeats + 2):
        for name, loss in losses.items():
            leaf = scores.clone().requires_grad_()
            begin = time.process_time()
            loss(leaf).backward()
            if turn >= 2:  # the first two are for warming up
                times[name].append(1000 * (time.process_time() - begin))
    return {name: statistics.median(values) for name, values in times.items()}


def even_sizes(classes: int) -> list[int]:
    """The default number of blocks, of about equal size."""
    groups = default_clusters(classes)
    return [classes // groups + (i < classes % groups) for i in range(groups)]


def measure_step(repeats: int, batch: int) -> None:
    torch.set_num_threads(1)
    cases = {f"{c:,}": even_sizes(c) for c in (20, 80, 1628)}
    cases["1,628, one of 800"] = [800, *even_sizes(828)]
    spectral_blocks(
        batch_correlation(planted_scores([3, 3], 100, seed=0)), 2, seed=0
    )  # the first call also imports scikit-learn
    print(f"one step of the alignment loss, batch size {batch}, forward and backward, CPU time in ms\n")
    header = (
        "C",
        "blocks",
        "pairs worked on",
        "all pairs",
        "loop over blocks",
        "batched",
        "all/batched",
        "clustering",
        "pays after",
    )
    print("| " + " | ".join(header) + " |\n|" + "---:|" * len(header))
    for name, sizes in cases.items():
        scores = planted_scores(sizes, 3000, seed=0)
        aim = batch_correlation(scores)
        begin = time.process_time()
        blocks = spectral_blocks(aim, len(sizes), seed=0)
        clustering = 1000 * (time.process_time() - begin)
        batched, full = BlockAlignmentLoss(aim, blocks), BlockAlignmentLoss(aim, torch.zeros_like(blocks))
        part = scores[:batch]
        check = discrepancy(batch_correlation(part), aim, blocks)
        loop = python_loop(aim, blocks)
        assert np.allclose([batched(part).item(), loop(part).item()], check, rtol=1e-4), "the variants must agree"
        ms = step_times({"full": full, "loop": loop, "batched": batched}, part, repeats)
        saved = ms["full"] - ms["batched"]
        pays = f"{int(np.ceil(clustering / saved)):,} steps" if saved > 0.02 * ms["full"] else "never"
        row = [
            name,
            str(len(sizes)),
            f"{batched.padded:,} of {full.padded:,}",
            f"{ms['full']:.2f}",
            f"{ms['loop']:.2f}",
        ]
        row += [f"{ms['batched']:.2f}", f"{ms['full'] / ms['batched']:.1f}×", f"{clustering:.0f} ms", pays]
        print("| " + " | ".join(row) + " |")


def compare_runs(file: Path, root: Path | None, rounds: int | None, seed: int) -> None:
    overrides = {"method.name": "fedharmony", "seed": seed, "engine.workers": 0}
    overrides |= {"data.root": root} if root is not None else {}
    overrides |= {"training.rounds": rounds} if rounds is not None else {}
    base = Experiment.load(file, overrides)
    data = federation.build(base)
    variants: dict[str, dict[str, Any]] = {
        "blocks": {},
        "no blocks": {"method.blocks": False},
        "fedavg": {"method.name": "fedavg"},
    }
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            name: LocalEngine(data.with_experiment(base.changed(change)), Path(folder) / name)
            for name, change in variants.items()
        }
        states = {name: engine.initial_state() for name, engine in engines.items()}
        spent = dict.fromkeys(engines, 0.0)
        print("cumulative CPU time, s (Table 2)\n")
        print("| round | " + " | ".join(engines) + " | saved by blocks |\n|" + "---:|" * (len(engines) + 2))
        for number in range(1, base.training.rounds + 1):
            for name, engine in engines.items():
                begin = time.process_time()
                replies = engine.collect_replies(states[name], number)
                states[name], _ = aggregate(engine.method, states[name], replies, number)
                spent[name] += time.process_time() - begin
            saved = 100 * (1 - spent["blocks"] / spent["no blocks"])
            print(f"| {number} | " + " | ".join(f"{s:.1f}" for s in spent.values()) + f" | {saved:.1f} % |", flush=True)
        found = {n: engine.evaluate(engine.method.final_model(states[n])).values for n, engine in engines.items()}
    print("\n| | " + " | ".join(METRICS) + " |\n|---|" + "---:|" * len(METRICS))
    for name, values in found.items():
        print(f"| {name} | " + " | ".join(f"{values[metric]:.2f}" for metric in METRICS) + " |")
    with_blocks, without = ([found[name][metric] for metric in METRICS] for name in ("blocks", "no blocks"))
    test = wilcoxon(with_blocks, without)
    verdict = "no significant difference" if test.pvalue > 0.05 else "a significant difference"
    print(
        f"\nWilcoxon signed-rank over the eight metrics (Table 4): W {test.statistic:g}, p {test.pvalue:.3f}: {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("cost", help="the time of one step of the loss")
    step.add_argument("--repeats", type=int, default=30)
    step.add_argument("--batch", type=int, default=16)
    both = commands.add_parser("train", help="train with blocks, without blocks, and FedAvg")
    both.add_argument("file", type=Path, help="an experiment")
    both.add_argument("--root", type=Path, help="the data folder")
    both.add_argument("--rounds", type=int)
    both.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.command == "cost":
        measure_step(options.repeats, options.batch)
    else:
        compare_runs(options.file, options.root, options.rounds, options.seed)


if __name__ == "__main__":
    main()
