"""The exact linear head by ridge regression from sums. It needs one exchange, and the result does not depend on how the
data is divided among the clients.

From its features f and known targets y, each client sends G = Σ f fᵀ, Σ f, B = Σ f y, Σ y and counts; one G for each
group of classes that are known for the same samples. Features are centred by the mean for the class, and scaled by S,
the square root of the pooled variance:

    w_c = S⁻¹ (S⁻¹ Ĝ_c S⁻¹ + λ n_c I)⁻¹ S⁻¹ B̂_c,   bias from the means; the bias is not penalised

G_c is the sum over the clients that annotate c. Unknown targets are not used. λ = "gcv" minimises generalised
cross-validation, n · RSS / (n − df)² summed over the classes, which needs only the same sums. The logit is
z = 4 (score − ½), so a score of ½ is p = ½. G shows the server the second moments of a client's features. Sums of small
groups, and sums that differ by a small group, do not leave a site (core/small_groups.py).

Balanced, a known entry of class c has the weight n_c / 2n_c⁺ if it is positive and n_c / 2n_c⁻ otherwise, with the
counts of all clients. This needs one more matrix per class, G_c⁺ = Σ f fᵀ over the positives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedmll.config.experiment import Experiment
from fedmll.core import small_groups
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.core.processes import single_thread
from fedmll.methods.framework.base import Aggregator, Part, PartOptions, Records, TensorSpec, option
from fedmll.methods.framework.client_round import ClientInfo, ClientRound
from fedmll.methods.parts.classifier_rows import HeadRows
from fedmll.methods.parts.standardisation import MEAN, SCALE
from fedmll.methods.parts.sum_checks import LARGEST_SQUARE, are_moments, refuse_moments

GRID = torch.logspace(-5, 1, 13, dtype=torch.float64)  # values of λ, relative to the number of samples
LARGEST_SUM = 1e12  # accepted for 10⁸ samples with features up to 10⁴
SMALLEST = 1e-6  # lower bound of a feature's standard deviation


class HeadFromSums(Part):
    """A head that is computed from sums, which clients send in an exchange without training."""

    conflicts = frozenset({"private-labels"})
    unit = False  # whether features have norm 1

    @property
    def balanced(self) -> bool:
        """Whether positives are also summed separately."""
        return False

    def collect_statistics(self, client_round: ClientRound) -> Tensors:
        features = client_round.outputs(features=True).features
        assert features is not None
        targets = small_groups.mask_small_groups(client_round.client.targets, self.task.min_group_size)
        return sums_of(features.double(), targets, self.balanced)

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        if not self.collects(round):
            return {}
        width, classes = self.model.width, len(self.task.classes)
        double = torch.float64
        square = (classes, width + 1, width + 1)
        positive = TensorSpec(square, double, rule=is_symmetric, broken="is not symmetric", by_class=0)
        return ({"positive": positive} if self.balanced else {}) | {
            "group": TensorSpec((classes,), torch.int64, low=-1, high=classes - 1, by_class=0, absent=-1),
            "gram": TensorSpec(
                (None, width + 1, width + 1), double, most=classes, rule=is_symmetric, broken="is not symmetric"
            ),
            "cross": TensorSpec((classes, width + 1), double, -LARGEST_SUM, LARGEST_SUM, by_class=0),
            "all": TensorSpec(
                (3, width),
                double,
                rule=are_moments,
                broken="does not hold counts, sums and squares",
                check_together=lambda sums, samples: refuse_moments(sums, samples, self.unit),
            ),
        }


class RidgeHead(HeadFromSums):
    """The head starts as the exact solution of ridge regression from all clients' sums."""

    name = "ridge"
    requires = frozenset({"class-rows"})
    exchanges = frozenset({"opening"})

    class Options(PartOptions):
        ridge: Annotated[float, Field(gt=0)] | Literal["gcv"] = option(
            "gcv", "λ: penalty of the ridge regression, relative to n; gcv: by generalised cross-validation"
        )
        ridge_balanced: bool = option(False, "give positives and negatives of a class the same total weight")

    @property
    def balanced(self) -> bool:
        return bool(self.options.ridge_balanced)

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        check_initial_features(experiment, "ridge")

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator | None:
        return RidgeAggregator(self) if self.collects(round) else None


class RidgeRefit(RidgeHead):
    """After the last round the head is replaced by the exact solution of ridge regression on the trained features."""

    name = "ridge-refit"
    provides = frozenset({"final-classifier"})
    conflicts = frozenset({"private-labels", "local-models"})
    exchanges = frozenset({"closing"})

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        """Any features will do, because they are those of the trained network."""


def check_initial_features(experiment: Experiment, kind: str) -> None:
    """For a head from sums of the opening exchange: training must not change the features, as batch normalisation
    does."""
    model = experiment.model
    if model.standardise and model.width is not None:
        raise ConfigError(
            f"A head from {kind} regression is computed before the features are standardised, and the layer of "
            "model.width comes after that. Set model.standardise = false, or leave model.width out."
        )
    alive = (model.freeze != "backbone" and model.backbone != "mlp") or model.width is not None
    if experiment.training.rounds and model.norm == "batch" and alive:
        raise ConfigError(
            f"A head that starts from {kind} regression (method.start = '{kind}') needs features that training does "
            "not change, and batch normalisation changes them. Set model.freeze = 'backbone', and model.norm = "
            "'group' if there is a neck (model.width)."
        )


def sums_of(features: Tensor, targets: Tensor, balanced: bool = False) -> Tensors:
    """A client's sums. `group` is the index of the Gram matrix of each class; −1 if no target of it is known."""
    augmented = torch.cat([features, features.new_ones(len(features), 1)], 1)
    known, group = torch.unique(
        targets >= 0, dim=1, return_inverse=True
    )  # groups of classes with the same known samples
    some = known.any(0)
    place = torch.cumsum(some, 0) - 1
    gram = torch.stack(
        [augmented[mask].T @ augmented[mask] for mask in known.T[some]] or [augmented[:0].T @ augmented[:0]]
    )
    moments = [torch.full_like(features[0], len(features)), features.sum(0), features.square().sum(0)]
    positive: Tensors = {}
    if balanced:
        positive["positive"] = torch.stack([augmented[mask].T @ augmented[mask] for mask in (targets == 1).T])
        positive["positive"] = (positive["positive"] + positive["positive"].mT) / 2
    return positive | {
        "group": torch.where(some[group], place[group], -1),
        "gram": (gram + gram.mT) / 2,
        "cross": (targets == 1).double().T @ augmented,
        "all": torch.stack(moments),
    }


class FeatureSumsAggregator(Aggregator):
    """Adds up the clients' sums. Classes with the same Gram matrices at all clients share one sum."""

    def __init__(self, part: HeadFromSums) -> None:
        self.part = part
        size, classes = part.model.width + 1, len(part.task.classes)
        self.grams: list[Tensor] = [torch.zeros(size, size, dtype=torch.float64)]
        self.of = torch.zeros(classes, dtype=torch.int64)  # class → index of its Gram matrix
        self.cross = torch.zeros(classes, size, dtype=torch.float64)
        self.moments = torch.zeros(3, size - 1, dtype=torch.float64)
        self.positive: Tensor | None = None

    def add(self, client: ClientInfo, reply: Message) -> None:
        self.cross += reply["cross"]
        self.moments += reply["all"]
        if "positive" in reply.tensors:
            self.positive = reply["positive"] + (0 if self.positive is None else self.positive)
        pairs, of = torch.unique(torch.stack([self.of, reply["group"]]), dim=1, return_inverse=True)
        grams = [
            self.grams[old] if new < 0 else self.grams[old] + reply["gram"][min(new, len(reply["gram"]) - 1)]
            for old, new in pairs.T.tolist()
        ]
        self.grams, self.of = grams, of


class RidgeAggregator(FeatureSumsAggregator):
    @single_thread()
    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        rows, strength = self.solve(self.part.options.ridge)
        if "opening" in self.part.exchanges:
            rows = self.for_standardised(rows, merged["weights"])
        known = torch.ones_like(self.known, dtype=torch.bool) if "opening" in self.part.exchanges else self.known > 0
        merged["weights"] = HeadRows.of(self.part.weights).replace(merged["weights"], rows, known)
        return {}, {"ridge": strength}

    def for_standardised(self, rows: Tensor, weights: Tensor) -> Tensor:
        """The same function of standardised features. Clients summed the features as they are, because mean and scale
        follow from the same exchange: w f + b = (w / scale) f̂ + (b + w mean)."""
        layout = self.part.weights.layout
        if MEAN not in layout:
            return rows
        mean, scale = (weights[layout[name].where].double() for name in (MEAN, SCALE))
        return torch.cat([rows[:, :-1] / scale, rows[:, -1:] + rows[:, :-1] @ mean[:, None]], 1)

    def solve(self, ridge: float | str) -> tuple[Tensor, float]:
        """The classifier's rows (C, width + bias) in logits, and λ. The row of a class without known targets is 0."""
        grams, of, cross = self.grams, self.of, self.cross
        known = torch.tensor([float(grams[number][-1, -1]) for number in of.tolist()], dtype=torch.float64)
        self.known = known
        self.counts = torch.stack([known - cross[:, -1], cross[:, -1]])  # (2, C): negatives and positives
        self.weights = torch.ones_like(self.counts)
        if self.positive is not None:
            both = (self.counts > 0).all(0)  # balancing needs both
            self.weights = torch.where(both, known / 2 / self.counts.clamp(min=1), 1)
            grams = [
                negative * (grams[number] - plus) + positive * plus
                for number, plus, (negative, positive) in zip(of.tolist(), self.positive, self.weights.T, strict=True)
            ]
            of, cross = torch.arange(len(of)), cross * self.weights[1][:, None]
        count, total, squares = self.moments
        variance = (squares / count - (total / count).square()).clamp(min=0)
        scale = 1 / variance.sqrt().clamp(min=SMALLEST)
        systems = [_RidgeSystem(gram, cross[of == number], scale) for number, gram in enumerate(grams)]
        if ridge == "gcv":
            errors = torch.stack([system.gcv(GRID) for system in systems]).sum(0)
            strength = float(GRID[errors.argmin()])
        else:
            strength = float(ridge)
        rows = torch.zeros_like(cross)
        for number, system in enumerate(systems):
            rows[of == number] = system.rows(strength)
        rows[:, -1] -= 0.5
        rows[known == 0] = 0
        self.leverage = self._leverage([systems[number] for number in of.tolist()], strength)
        return 4 * rows, strength

    def _leverage(self, systems: list[_RidgeSystem], strength: float) -> Tensor:
        """(2, C): the mean leverage of the negatives and of the positives."""
        if self.positive is None:
            return torch.tensor([[system.leverage(strength) for system in systems]] * 2, dtype=torch.float64)
        found = torch.zeros_like(self.counts)
        for c, (system, plus) in enumerate(zip(systems, self.positive, strict=True)):
            found[1, c] = system.leverage_of(plus, strength)
            found[0, c] = system.leverage_of(self.grams[int(self.of[c])] - plus, strength)
        return found * self.weights


class _RidgeSystem:
    """The linear system of classes with the same known samples, diagonalised once for all values of λ."""

    def __init__(self, gram: Tensor, cross: Tensor, scale: Tensor) -> None:
        self.count = float(gram[-1, -1].clamp(min=1))
        self.scale, self.mean = scale, gram[-1, :-1] / self.count
        centred = gram[:-1, :-1] - self.count * torch.outer(self.mean, self.mean)
        self.values, self.vectors = torch.linalg.eigh(centred * scale[:, None] * scale)
        self.values = self.values.clamp(min=0)
        self.rate = cross[:, -1] / self.count
        b = (cross[:, :-1] - cross[:, -1:] * self.mean) * scale
        self.turned = b @ self.vectors  # (classes, width)

    def gcv(self, grid: Tensor) -> Tensor:
        """n · RSS / (n − df)², summed over the classes, for every λ of the grid."""
        shrunk = self.values + self.count * grid[:, None]
        spread = self.count * (self.rate * (1 - self.rate)).sum()
        explained = (self.turned.square().sum(0) * (2 / shrunk - self.values / shrunk.square())).sum(1)
        left = (self.count - 1 - (self.values / shrunk).sum(1)).clamp(min=1e-3)
        return self.count * (spread - explained).clamp(min=0) / left.square()

    def rows(self, strength: float) -> Tensor:
        w = (self.turned / (self.values + self.count * strength)) @ self.vectors.T * self.scale
        return torch.cat([w, (self.rate - w @ self.mean)[:, None]], 1)

    def leverage(self, strength: float) -> float:
        """The mean over all samples of h_i = 1/n + z_iᵀ (ZᵀZ + λn)⁻¹ z_i, which is (1 + df) / n."""
        return float(1 + (self.values / (self.values + self.count * strength)).sum()) / self.count

    def leverage_of(self, gram: Tensor, strength: float) -> float:
        """The same mean over the samples of this Gram matrix."""
        count = float(gram[-1, -1].clamp(min=1))
        mean = gram[-1, :-1] / count
        moved = gram[:-1, :-1] / count - torch.outer(mean, mean) + torch.outer(mean - self.mean, mean - self.mean)
        turned = self.vectors * self.scale[:, None]
        return 1 / self.count + float(
            ((turned * (moved @ turned)).sum(0) / (self.values + self.count * strength)).sum()
        )


def is_symmetric(gram: Tensor) -> bool:
    """Symmetric, with squares ≥ 0 on the diagonal, and not too large."""
    squares = gram.diagonal(dim1=1, dim2=2)
    return torch.equal(gram, gram.mT) and bool((squares >= 0).all()) and float(gram.abs().max()) <= LARGEST_SQUARE
