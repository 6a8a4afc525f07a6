"""FedHarmony's Theorems 2.1 and 2.2 as an experiment: gradient descent on a weighted block matrix.

    python benchmarks/fedharmony_theorems.py --figure theorems.png

f_full(R) = ‖Γ∘(R − R*)‖², f_blk(R) = ‖Γ∘(P_U R − B)‖² with B = P_U R*, the pairs within blocks. Step 1/(2 max γ²).
Theorem 2.1: f(T) ≤ (1 − 2ηγ²)^T f(0), with γ_in (the smallest weight within blocks) for f_blk and γ_out (the largest
across them) for f_full. The proof needs the *smallest* weight for f_full, and that is γ_out only if all weights across
blocks are equal. The script runs both cases. Theorem 2.2: f_full(R_blk) = f_blk(R_blk) + ‖Γ_out∘E‖², E = R* − B.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

SIZES = (6, 5, 4, 3, 2)  # of the blocks
INNER, OUTER = 0.5, 0.15  # γ_in, γ_out
ROUNDING = 1e-24  # a loss below this share of the first one is rounding


@dataclass(frozen=True)
class Problem:
    target: Matrix  # R*
    weights: Matrix  # Γ
    inside: NDArray[np.bool_]  # the pairs within blocks

    def loss(self, matrix: Matrix, where: NDArray[np.bool_]) -> float:
        return float(((self.weights * (matrix - self.target))[where] ** 2).sum())

    def descend(self, where: NDArray[np.bool_], steps: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Gradient descent from R = 0 on the pairs `where`: the loss on these pairs, and f_full, before every step."""
        matrix = np.zeros_like(self.target)
        own, full = [], []
        for _ in range(steps + 1):
            own.append(self.loss(matrix, where))
            full.append(self.loss(matrix, np.ones_like(where)))
            gradient = 2 * self.weights**2 * (matrix - self.target) * where
            matrix = matrix - self.step * gradient
        return np.array(own), np.array(full)

    @property
    def step(self) -> float:
        return 1 / (2 * float((self.weights**2).max()))

    def factor(self, weight: float) -> float:
        """1 − 2ηγ²."""
        return 1 - 2 * self.step * weight**2


def make(lowest_outer: float, seed: int) -> Problem:
    """A correlation matrix with strong blocks and weak links across them; weights of symmetric pairs are equal."""
    rng = np.random.default_rng(seed)
    block = np.repeat(np.arange(len(SIZES)), SIZES)
    inside = np.equal.outer(block, block)

    def symmetric(low: float, high: float) -> Matrix:
        upper = np.triu(rng.uniform(low, high, inside.shape))
        return upper + np.triu(upper, 1).T

    target = np.where(inside, symmetric(0.2, 0.9), symmetric(-0.1, 0.1))
    weights = np.where(inside, symmetric(INNER, 1.0), symmetric(lowest_outer, OUTER))
    inner_pairs, outer_pairs = np.argwhere(inside), np.argwhere(~inside)
    for pairs, value in ((inner_pairs, INNER), (outer_pairs, OUTER), (outer_pairs[::-1], lowest_outer)):
        i, j = pairs[0]  # the extremes are reached, so that the bounds are those of the theorem
        weights[i, j] = weights[j, i] = value
    return Problem(target, weights, inside)


def rate(losses: NDArray[np.float64]) -> float:
    """The factor by which one step multiplies the loss: the mean over the second half of the steps above rounding."""
    alive = np.flatnonzero(losses > ROUNDING * losses[0])
    end = alive[-1]
    begin = end // 2
    return float((losses[end] / losses[begin]) ** (1 / (end - begin)))


def show(axes: Axes, problem: Problem, steps: int, title: str) -> None:
    everywhere = np.ones_like(problem.inside)
    blocks, full_of_blocks = problem.descend(problem.inside, steps)
    full, _ = problem.descend(everywhere, steps)
    outside = problem.loss(np.zeros_like(problem.target), ~problem.inside)
    time = np.arange(steps + 1)
    smallest = float(problem.weights.min())
    lines = (
        ("f_blk", blocks, "C0", "-"),
        ("f_blk, bound: γ_in", problem.factor(INNER) ** time * blocks[0], "C0", ":"),
        ("f_full", full, "C3", "-"),
        ("f_full, bound: γ_out", problem.factor(OUTER) ** time * full[0], "C3", ":"),
        ("f_full, bound: smallest γ", problem.factor(smallest) ** time * full[0], "0.5", ":"),
        ("f_full of the block-wise iterate", full_of_blocks, "C2", "-"),
        ("‖Γ_out∘E‖²", np.full(steps + 1, outside), "C2", ":"),
    )
    for name, values, colour, style in lines:
        axes.semilogy(time, np.maximum(values, 1e-300), style, color=colour, label=name, linewidth=1.6)
    axes.set_ylim(1e-10 * full[0], 3 * full[0])
    axes.set_xlabel("step T")
    axes.set_title(title, fontsize=10)

    def held(values: NDArray[np.float64], weight: float) -> str:
        bound = problem.factor(weight) ** time * values[0]
        beyond = np.flatnonzero((values > bound * (1 + 1e-9)) & (values > ROUNDING * values[0]))
        return "holds" if not len(beyond) else f"broken from T = {beyond[0]}"

    table = [
        ["f_blk", f"γ_in = {INNER}", f"{problem.factor(INNER):.5f}", f"{rate(blocks):.5f}", held(blocks, INNER)],
        ["f_full", f"γ_out = {OUTER}", f"{problem.factor(OUTER):.5f}", f"{rate(full):.5f}", held(full, OUTER)],
        ["f_full", f"min γ = {smallest}", f"{problem.factor(smallest):.5f}", f"{rate(full):.5f}", held(full, smallest)],
    ]
    error = float(np.abs(full_of_blocks - blocks - outside).max())
    print(f"\n{title}\n{'':8}{'weight':16}{'bound per step':>14}{'measured':>12}  bound")
    for name, weight, bound, measured, verdict in table:
        print(f"{name:8}{weight:16}{bound:>14}{measured:>12}  {verdict}")
    print(f"Theorem 2.2: |f_full(R_blk) − f_blk(R_blk) − ‖Γ_out∘E‖²| ≤ {error:.1e}; ‖Γ_out∘E‖² = {outside:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--figure", type=Path, default=Path("fedharmony-theorems.png"))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    show(left, make(OUTER, options.seed), options.steps, "all weights across blocks equal to γ_out")
    show(right, make(OUTER / 5, options.seed), options.steps, f"weights across blocks between {OUTER / 5:g} and γ_out")
    left.set_ylabel("loss")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(options.figure, dpi=150)
    print(f"\nfigure in {options.figure}")


if __name__ == "__main__":
    main()
