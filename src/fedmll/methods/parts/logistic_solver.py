"""L-BFGS for many logistic regressions at once, from the sums of all clients (parts/logistic_head.py).

Every class and every candidate of the penalty λ is a problem of its own:

    minimise   Σ ω ℓ(w f + b, y) / Σ ω + λ/2 |S w|²      S: the standard deviations of the features

The problems are solved in coordinates in which they are well conditioned: features are standardised and turned into the
eigenvectors of their correlation matrix, with eigenvalues e. One evaluation of all problems is one exchange with the
clients, so that an evaluation is used as well as possible. The inverse Hessian with which L-BFGS starts is exact for
the bias and for the CURVED directions with the largest e, from sums of the same exchange. In the other directions it is
1 / (a e + λ), where a is the mean ratio of the curvature to e in the exact directions. If the value of a problem did
not decrease, the next trial is a shorter step from the best point so far. What was learned about the curvature is kept.

The state is a dictionary of tensors, so that it can be stored and resumed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmll.core.message import Tensors

CURVED = 32  # directions in which the Hessian is exact
MEMORY = 10  # pairs of steps and changes of the gradient
SMALLEST = 1e-6  # lower bound of a feature's standard deviation, and of an eigenvalue
COORDINATES = ("mean", "deviation", "values", "vectors")
SOLVER = ("point", "value", "gradient", "curvature", "trial", "steps", "changes", "failures")


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of rows [w, b] for features [x, more]: those of `more`, those of the eigenvectors of x by ascending
    eigenvalue, and the bias for centred features. `more` is only standardised."""

    mean: Tensor  # (width,) of the features
    deviation: Tensor  # (width,)
    values: Tensor  # (width,): the variance of every coordinate
    vectors: Tensor  # (D, D): eigenvectors of the correlation matrix of x as columns

    @classmethod
    def of_sums(cls, gram: Tensor, more: int = 0, standardised: bool = False) -> Coordinates:
        """From Σ [x, 1] [x, 1]ᵀ over all samples. `more` features have mean 0 and variance 1. With `standardised`, x
        has the scale in which weights are penalised."""
        count = gram[-1, -1].clamp(min=1)
        mean = gram[-1, :-1] / count
        covariance = gram[:-1, :-1] / count - torch.outer(mean, mean)
        deviation = covariance.diagonal().clamp(min=0).sqrt().clamp(min=SMALLEST)
        deviation = torch.ones_like(deviation) if standardised else deviation
        values, vectors = torch.linalg.eigh(covariance / deviation / deviation[:, None])
        zeros = mean.new_zeros(more)
        return cls(
            torch.cat([mean, zeros]),
            torch.cat([deviation, zeros + 1]),
            torch.cat([zeros + 1, values.clamp(min=SMALLEST)]),
            vectors,
        )

    @classmethod
    def of_state(cls, state: Tensors) -> Coordinates:
        return cls(*(state[name] for name in COORDINATES))

    @property
    def state(self) -> Tensors:
        return {name: getattr(self, name) for name in COORDINATES}

    @property
    def size(self) -> int:
        return len(self.vectors)

    @property
    def curved(self) -> int:
        return min(CURVED, self.size)

    @property
    def basis(self) -> Tensor:
        """(width + 1, curved): [f, 1] @ basis are the coordinates of a sample in the directions of the exact
        Hessian."""
        turned = self.vectors[:, -self.curved :] / self.deviation[: self.size, None]
        more = turned.new_zeros(len(self.mean) - self.size, self.curved)
        return torch.cat([turned, more, -(self.mean[: self.size] @ turned)[None]])

    def rows(self, points: Tensor) -> Tensor:
        """Points (…, width + 1) → rows [w, b] of a linear head."""
        more, x, bias = points.split([len(self.mean) - self.size, self.size, 1], -1)
        weights = torch.cat([x @ self.vectors.T, more], -1) / self.deviation
        return torch.cat([weights, bias - weights @ self.mean[:, None]], -1)

    def gradients(self, sums: Tensor) -> Tensor:
        """Gradients by rows [w, b] → gradients by points."""
        weights = (sums[..., :-1] - sums[..., -1:] * self.mean) / self.deviation
        x, more = weights.split([self.size, len(self.mean) - self.size], -1)
        return torch.cat([more, x @ self.vectors, sums[..., -1:]], -1)


def first_trial(coordinates: Coordinates, gradient: Tensor, bias: Tensor, rate: Tensor, penalty: Tensor) -> Tensor:
    """(K, C, width + 1): a careful Newton step from w = 0 and the bias of the class's rate, where Hessian and gradient
    (C, width + 1) follow from the sums of the opening exchange. Half of a Newton step, where the penalty is small."""
    spread = 2 * (rate * (1 - rate))[:, None] * coordinates.values
    weights = -gradient[:, :-1] / (spread + penalty[:, None, None])
    return torch.cat([weights, bias.expand(len(penalty), -1)[..., None]], -1)


def start(trial: Tensor, curved: int) -> Tensors:
    """The state before the first evaluation."""
    problems = trial.shape[:2]
    return {
        "point": trial,
        "trial": trial.clone(),
        "value": trial.new_full(problems, torch.inf),
        "gradient": torch.zeros_like(trial),
        "curvature": trial.new_zeros(*problems, curved + 1, curved + 1),
        "steps": trial.new_zeros(0, *trial.shape, dtype=torch.float32),
        "changes": trial.new_zeros(0, *trial.shape, dtype=torch.float32),
        "failures": trial.new_zeros(problems),
    }


def restart(state: Tensors, candidate: int) -> Tensors:
    """The problems of one candidate, on other data: from its best point, with what is known about the curvature."""
    chosen = {name: state[name][candidate : candidate + 1] for name in SOLVER if name not in ("steps", "changes")}
    known = {name: state[name][:, candidate : candidate + 1].clone() for name in ("steps", "changes")}
    return start(chosen["point"].clone(), chosen["curvature"].shape[-1] - 1) | known


def advance(
    state: Tensors, sums: Tensors, coordinates: Coordinates, penalty: Tensor, total: Tensor, free: Tensor
) -> Tensors:
    """The state after an evaluation of the trial.

    Args:
        state: What `start`, `restart` or `advance` returned.
        sums: Over the samples: `loss` (K, C), `gradient` (K, C, width + 1) by rows, `curvature` (K, C, packed).
        coordinates: Of the points.
        penalty: (K,).
        total: (C,): Σ ω; the sums are divided by it.
        free: bool (K, C, width + 1): which coordinates may change.
    """
    count, strength = total.clamp(min=1e-300), penalty[:, None]
    trial = state["trial"]
    value = sums["loss"] / count + strength / 2 * trial[..., :-1].square().sum(-1)
    gradient = coordinates.gradients(sums["gradient"] / count[:, None])
    gradient[..., :-1] += strength[..., None] * trial[..., :-1]
    gradient = torch.where(free, gradient, 0)
    curvature = unpack(sums["curvature"] / count[:, None], coordinates.curved + 1)
    step, change = trial - state["point"], gradient - state["gradient"]
    # A convex function has decreased if it still decreases at the trial. This is exact where values differ by rounding.
    better = (value <= state["value"]) | ((gradient * step).sum(-1) <= 0)
    first = torch.isinf(state["value"])
    usable = (step * change).sum(-1) > 1e-10 * step.norm(dim=-1) * change.norm(dim=-1)
    keep = (usable & ~first)[..., None]
    found = {"point": trial, "value": value, "gradient": gradient, "curvature": curvature}
    found = {
        name: torch.where(better.view(*better.shape, *(1,) * (new.dim() - 2)), new, state[name])
        for name, new in found.items()
    }
    if not bool(first.all()):
        for name, pair in (("steps", step), ("changes", change)):
            found[name] = torch.cat([state[name], (pair * keep).float()[None]])[-MEMORY:]
    state = state | found | {"failures": torch.where(better, 0, state["failures"] + 1)}
    direction = torch.where(free, _direction(state, coordinates, penalty), 0)
    direction = torch.where(torch.isfinite(direction).all(-1, keepdim=True), direction, 0)
    return state | {"trial": state["point"] + 0.5 ** state["failures"][..., None] * direction}


def _direction(state: Tensors, coordinates: Coordinates, penalty: Tensor) -> Tensor:
    """−H⁻¹ g by the two-loop recursion of L-BFGS (Nocedal and Wright, algorithm 7.4)."""
    q = state["gradient"].clone()
    pairs = [(s.double(), y.double()) for s, y in zip(state["steps"], state["changes"], strict=True)]
    inner = [(s * y).sum(-1) for s, y in pairs]
    inverse = [torch.where(product > 0, 1 / product, 0)[..., None] for product in inner]
    shares = []
    for (s, y), rho in reversed(list(zip(pairs, inverse, strict=True))):
        share = rho * (s * q).sum(-1, keepdim=True)
        q -= share * y
        shares.append(share)
    q = _initial_inverse(q, state["curvature"], coordinates, penalty)
    for (s, y), rho, share in zip(pairs, inverse, reversed(shares), strict=True):
        q += (share - rho * (y * q).sum(-1, keepdim=True)) * s
    return -q


def _initial_inverse(q: Tensor, curvature: Tensor, coordinates: Coordinates, penalty: Tensor) -> Tensor:
    """The inverse Hessian that L-BFGS corrects: exact in the last directions and for the bias, otherwise diagonal."""
    size = coordinates.curved
    width = q.shape[-1] - 1 - size
    diagonal = curvature.diagonal(dim1=-2, dim2=-1)
    ratio = diagonal[..., :-1].sum(-1, keepdim=True) / coordinates.values[-size:].sum()
    others = q[..., :width] / (ratio * coordinates.values[:width] + penalty[:, None, None])
    added = torch.full_like(diagonal, 1e-12) + 1e-10 * diagonal.mean(-1, keepdim=True)  # singular without any sample
    added[..., :-1] += penalty[:, None, None]
    factor, _ = torch.linalg.cholesky_ex(curvature + torch.diag_embed(added))
    exact = torch.cholesky_solve(q[..., width:, None], factor)[..., 0]
    return torch.cat([others, exact], -1)


def packed_size(size: int) -> int:
    """How many numbers a symmetric matrix has."""
    return size * (size + 1) // 2


def unpack(packed: Tensor, size: int) -> Tensor:
    """(…, packed) → symmetric matrices (…, size, size)."""
    first, second = torch.triu_indices(size, size)
    matrices = packed.new_zeros(*packed.shape[:-1], size, size)
    matrices[..., first, second] = packed
    matrices[..., second, first] = packed
    return matrices
