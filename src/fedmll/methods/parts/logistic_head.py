"""The exact linear head by logistic regression from sums. The result is the fit to all data in one place, and does not
depend on how the data is divided among the clients.

Opening exchange: each client sends Σ [f, 1] [f, 1]ᵀ over all its samples, and for each class Σ [f, 1] over its known
and over its positive targets y. From these follow the coordinates in which the problem is well conditioned
(parts/logistic_solver.py), the weights ω of positives and negatives and a first trial. Then, in every round, the server
sends rows [w, b] for each class, and clients send sums over the known targets, with p = σ(w f + b):

    Σ ω ℓ,   Σ ω (p − y) [f, 1],   Σ ω p (1 − p) r rᵀ      r: [f, 1] in a few directions that the server sends

λ, the penalty of the standardised weights relative to n, is chosen by the log-loss of held-out samples. All candidates
are fitted at the same time, in the first CHOICE_ROUNDS rounds, to four fifths of the samples; the loss of the others
is summed. Then the chosen candidate is fitted to all samples. Which samples are held out follows from the seed and the
bytes of a sample, so the choice does not depend on the partition either. The bias is not penalised.

Unknown targets are not used. A class that has no positive or no negative target gets w = 0 and the bias of its
smoothed rate, log((n⁺ + ½) / (n⁻ + ½)), because its best bias is infinite. Small groups (core/small_groups.py): a
client sends nothing for a class whose sums would be over a small group, also among the held-out or the other samples.

Balanced, a known target of class c has the weight ω = n_c / 2n_c⁺ if it is positive and n_c / 2n_c⁻ otherwise, with the
counts of all clients. Otherwise ω = 1.

Products (`products` of the head): the network adds products r_i r_j of a few directions of the features, which follow
from the opening exchange (`product_directions`). Candidates with and without them are compared in the same rounds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedmll.config.experiment import Experiment
from fedmll.core import small_groups
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.core.processes import single_thread
from fedmll.methods.framework.base import Aggregator, PartOptions, Records, SumAggregator, TensorSpec, option
from fedmll.methods.framework.client_round import Client, ClientInfo, ClientRound
from fedmll.methods.parts import logistic_solver as solver
from fedmll.methods.parts.classifier_rows import HeadRows
from fedmll.methods.parts.logistic_solver import Coordinates
from fedmll.methods.parts.ridge_head import LARGEST_SUM, HeadFromSums, check_initial_features, is_symmetric
from fedmll.methods.parts.standardisation import MEAN, SCALE
from fedmll.methods.parts.sum_checks import refuse_logistic, refuse_logistic_start
from fedmll.models.flat_weights import FlatWeights

GRID = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0)  # values of λ
PRODUCT_GRID = GRID[-3:]  # with products, which need a larger penalty
USUAL = 0.1  # λ if there are no held-out samples
CHOICE_ROUNDS = 6  # rounds in which all candidates are fitted
HELD_OUT = 0.2  # share of the samples
CHUNK = 1024  # samples that are summed at a time
DIRECTIONS, OFFSET = "products.directions", "products.offset"  # names of the buffers
OPENING = ("gram", "known", "positive", "folds")
ROUND_SUMS = ("loss", "gradient", "curvature")


class LogisticHead(HeadFromSums):
    """The head is the exact solution of logistic regression, from sums that clients send in every round."""

    name = "logistic"
    requires = frozenset({"class-rows"})
    exchanges = frozenset({"opening", "rounds"})
    sends = ("rows", "basis", "weights")

    class Options(PartOptions):
        logistic: Annotated[float, Field(gt=0)] | Literal["held-out"] = option(
            "held-out",
            "λ: penalty of the logistic regression, relative to n; held-out: by the loss of held-out samples",
        )
        logistic_balanced: bool = option(False, "give positives and negatives of a class the same total weight")
        logistic_rounds: int = option(10, "number of rounds of the fit to all samples", ge=1, le=1000)

    @property
    def balanced(self) -> bool:
        return bool(self.options.logistic_balanced)

    @classmethod
    def rounds(cls, options: Any) -> int:
        """The number of rounds with these options."""
        return int(options.logistic_rounds) + (CHOICE_ROUNDS if options.logistic == "held-out" else 0)

    def chooses(self, step: int) -> bool:
        """Whether λ is not decided yet in this step. Step 0 is the first exchange."""
        return self.options.logistic == "held-out" and step <= CHOICE_ROUNDS

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        check_initial_features(experiment, "logistic")

    @property
    def plain(self) -> int:
        """The width of the features without added ones."""
        return self.model.backbone.width

    @property
    def added(self) -> int:
        """The number of features that the head adds (products)."""
        return self.model.width - self.plain

    def initial_state(self) -> Tensors:
        width, classes = self.model.width, len(self.task.classes)
        double = torch.float64
        return {
            "rows": torch.zeros(1, classes, width + 1, dtype=double),
            "basis": torch.zeros(width + 1, 1, dtype=double),
            "weights": torch.ones(2, classes, dtype=double),
        }

    def send(self, state: Tensors, client: ClientInfo, round: int) -> Tensors:
        asked = self.collects(round) and self.exchange_step(round) > 0
        return super().send(state, client, round) if asked else {}

    # ---- client

    def collect_statistics(self, client_round: ClientRound) -> Tensors:
        client, features = client_round.client, client_round.outputs(features=True).features
        assert features is not None
        targets = small_groups.mask_small_groups(client.targets, self.task.min_group_size)
        step = self.exchange_step(client_round.number)
        held_out = choose_held_out(client) if self.chooses(step) else None
        folds = None
        if held_out is not None:
            folds = split_folds(targets, held_out, self.task.min_group_size)
        if step == 0:
            return opening_sums(features[:, : self.plain].double(), targets, folds)
        sent = self.received(client_round)
        check_request(sent, self.candidates if folds else 1)
        return round_sums(features.double(), targets, sent["rows"], sent["basis"], sent["weights"], folds)

    @property
    def candidates(self) -> int:
        return len(GRID) + (len(PRODUCT_GRID) if self.added else 0)

    # ---- server

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        if not self.collects(round):
            return {}
        double, classes, step = torch.float64, len(self.task.classes), self.exchange_step(round)
        if step == 0:
            size = self.plain + 1
            return {
                "gram": TensorSpec((1, size, size), double, rule=is_symmetric, broken="is not symmetric"),
                "known": TensorSpec((classes, size), double, -LARGEST_SUM, LARGEST_SUM, by_class=0),
                "positive": TensorSpec((classes, size), double, -LARGEST_SUM, LARGEST_SUM, by_class=0),
                "folds": TensorSpec((2, 2, classes), double, low=0, by_class=2, check_together=refuse_logistic_start),
            }
        rows, largest = sent["rows"], float(sent["weights"].max())
        packed = solver.packed_size(sent["basis"].shape[1] + 1)
        shape = (len(rows), classes)
        specs = {
            "loss": TensorSpec(shape, double, low=0, by_class=1),
            "gradient": TensorSpec((*shape, rows.shape[2]), double, -LARGEST_SUM, LARGEST_SUM, by_class=1),
            "curvature": TensorSpec(
                (*shape, packed),
                double,
                by_class=1,
                check_together=lambda own, samples: refuse_logistic(own, rows, samples * largest),
            ),
        }
        return specs | ({"held_out": TensorSpec(shape, double, low=0, by_class=1)} if self.chooses(step) else {})

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator | None:
        if not self.collects(round):
            return None
        step = self.exchange_step(round)
        return LogisticStartAggregator(self) if step == 0 else LogisticAggregator(self, state, step)

    def write_rows(self, merged: Tensors, rows: Tensor, known: Tensor) -> None:
        """Put the rows (C, width + 1) into the head of the global model. `known` (C,): a target of the class is."""
        merged["weights"] = HeadRows.of(self.weights).replace(merged["weights"], rows, torch.ones_like(known))

    @property
    def products(self) -> int:
        """The number of directions whose products are added."""
        return self.weights.layout[DIRECTIONS].shape[0]

    def write_products(self, merged: Tensors, directions: Tensor, offset: Tensor) -> None:
        """Put the directions (K, width) of products into the global model."""
        weights = merged["weights"].clone()
        for name, values in ((DIRECTIONS, directions), (OFFSET, offset)):
            weights[self.weights.layout[name].where] = values.flatten().to(weights.dtype)
        merged["weights"] = weights


class LogisticStart(LogisticHead):
    """The head starts as the exact solution of logistic regression, from all clients' sums before round 1."""

    name = "logistic-start"
    exchanges = frozenset({"opening"})

    def exchange_count(self, exchange: str) -> int:
        return self.rounds(self.options) + 1 if exchange in self.exchanges else 0

    def initial_state(self) -> Tensors:
        return {}


class LogisticRefit(LogisticStart):
    """After the last round the head is replaced by the exact solution of logistic regression on the trained
    features."""

    name = "logistic-refit"
    provides = frozenset({"final-classifier"})
    conflicts = frozenset({"private-labels", "local-models"})
    exchanges = frozenset({"closing"})

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        """Any features will do, because they are those of the trained network."""

    def write_rows(self, merged: Tensors, rows: Tensor, known: Tensor) -> None:
        """A class without known targets keeps its trained row."""
        merged["weights"] = HeadRows.of(self.weights).replace(merged["weights"], rows, known)


class LogisticStartAggregator(Aggregator):
    """After the opening exchange: the coordinates, the weights of the entries and the first trial."""

    def __init__(self, part: LogisticHead) -> None:
        self.part, self.sums, self.replies = part, Tensors(), 0

    def add(self, client: ClientInfo, reply: Message) -> None:
        self.replies += 1
        for name in OPENING:
            self.sums[name] = reply[name] + self.sums[name] if name in self.sums else reply[name].clone()

    @single_thread()
    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        part = self.part
        map = None
        if "opening" in part.exchanges:
            map = standardising_map(part.weights, merged["weights"], part.plain)
        gram, known, positive = self.sums["gram"][0], self.sums["known"], self.sums["positive"]
        if map is not None:
            gram, known, positive = map @ gram @ map.T, known @ map.T, positive @ map.T
        coordinates = Coordinates.of_sums(gram, part.added, standardised=map is not None)
        counts = torch.stack([known[:, -1] - positive[:, -1], positive[:, -1]])  # (2, C): negatives and positives
        weights = entry_weights(counts) if part.balanced else torch.ones_like(counts)
        total = torch.stack([(weights * fold).sum(0) for fold in (counts, *self.sums["folds"])])  # (3, C)
        both = torch.stack([(fold > 0).all(0) for fold in (counts, self.sums["folds"][0])])  # (2, C)
        rate = (counts[1] + 0.5) / (counts.sum(0) + 1)
        weighted = (weights * counts)[1] / total[0].clamp(min=1e-300)
        rate = torch.where(both[0], weighted, rate)
        bias = torch.logit(rate)
        slope = weights[0, :, None] * rate[:, None] * (known - positive)
        slope += weights[1, :, None] * (rate - 1)[:, None] * positive
        slope = torch.cat([slope[:, :-1], slope.new_zeros(len(slope), part.added), slope[:, -1:]], 1)
        slope = coordinates.gradients(slope / total[0].clamp(min=1e-300)[:, None])
        slope = torch.where(both[0][:, None], slope, 0)
        grid = GRID + (PRODUCT_GRID if part.added else ()) if part.chooses(0) else (part.options.logistic,)
        penalty = torch.tensor(grid, dtype=torch.float64)
        with_products = torch.arange(len(grid)) >= (len(GRID) if part.chooses(0) else 0)
        if part.added:
            part.write_products(merged, *product_directions(coordinates, slope, rate, part.products))
        trial = solver.first_trial(coordinates, slope, bias, rate, penalty)
        state = coordinates.state | solver.start(trial, coordinates.curved)
        state |= {"penalty": penalty, "total": total, "both": both, "weights": weights}
        state |= {"clients": torch.tensor(self.replies), "with_products": with_products}
        state |= {"rows": coordinates.rows(trial), "basis": coordinates.basis}
        part.write_rows(merged, state["rows"][int((penalty - USUAL).abs().argmin())], total[0] > 0)
        return state, {}


class LogisticAggregator(SumAggregator):
    """After a round: one more evaluation of every problem, and in the last round of the choice, λ.

    If a client is missing, the sums belong to another problem. They are not used, and the next round asks for the same.
    """

    def __init__(self, part: LogisticHead, state: Tensors, step: int) -> None:
        super().__init__(part, state, step)
        self.head, self.choosing, self.step = part, part.chooses(step), step
        names = (*ROUND_SUMS, "held_out") if self.choosing else ROUND_SUMS
        self.totals = {name: torch.zeros((), dtype=torch.float64) for name in names}
        self.replies = 0

    def add(self, client: ClientInfo, reply: Message) -> None:
        self.replies += 1
        for name in self.totals:
            self.totals[name] = self.totals[name] + reply[name]

    @single_thread()
    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        state, penalty = dict(self.state), self.state["penalty"]
        coordinates = Coordinates.of_state(state)
        fitted, total = state["both"][int(self.choosing)], state["total"][int(self.choosing)]
        if self.replies == int(state["clients"]):
            free = fitted[:, None].repeat(len(penalty), 1, state["trial"].shape[2])
            free[~state["with_products"], :, : self.head.added] = False
            state |= solver.advance(state, self.totals, coordinates, penalty, total, free)
            if self.choosing:
                loss = self.totals["held_out"]
                state["held_out"] = torch.where(state["failures"] == 0, loss, state.get("held_out", loss))
        chosen, records = 0, Records()
        if self.choosing:
            chosen, held_out = choose(state.get("held_out"), state["total"][2], fitted, penalty)
            records = {} if held_out is None else {"held_out_loss": held_out}
        records |= {"logistic": float(penalty[chosen]), "gradient": largest_gradient(state, chosen)}
        if self.head.added:
            records["products"] = float(state["with_products"][chosen])
        self.head.write_rows(merged, coordinates.rows(state["point"][chosen]), state["total"][0] > 0)
        if "rounds" not in self.head.exchanges and self.step == self.head.rounds(self.head.options):
            return {}, records  # the solver is not needed any more
        if self.choosing and self.step == CHOICE_ROUNDS:
            own = {name: state[name][chosen : chosen + 1].clone() for name in ("penalty", "with_products")}
            state |= solver.restart(state, chosen) | own
            state.pop("held_out", None)
        return state | {"rows": coordinates.rows(state["trial"])}, records


def product_directions(coordinates: Coordinates, slope: Tensor, rate: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Directions (count, width) of x and offsets (count,), so that r = Q f + q has mean 0 and covariance 1.

    They span the left singular vectors of (E + 1)⁻¹ B, the ridge solutions of all classes with unit variance; B is the
    covariance of x and y / √(π (1 − π)), which is the gradient `slope` (C, width + 1) up to the sign. If there are
    fewer classes than directions, the principal directions follow.
    """
    size = coordinates.size
    values = coordinates.values[-size:]
    cross = (slope[:, -size - 1 : -1] / (rate * (1 - rate)).sqrt()[:, None]).T
    found = torch.linalg.svd(cross / (values + 1)[:, None], full_matrices=False)[0][:, :count]
    principal = torch.eye(size, dtype=values.dtype).flip(1)  # by descending eigenvalue
    span = torch.linalg.qr(torch.cat([found, principal], 1)[:, : max(count, found.shape[1])])[0][:, :count]
    variance, turned = torch.linalg.eigh(span.T @ (values[:, None] * span))
    span = span @ turned / variance.clamp(min=solver.SMALLEST).sqrt()
    directions = (coordinates.vectors @ span / coordinates.deviation[:size, None]).T
    return directions, -directions @ coordinates.mean[:size]


def choose(losses: Tensor | None, total: Tensor, fitted: Tensor, penalty: Tensor) -> tuple[int, float | None]:
    """The candidate with the smallest loss (K, C) of held-out samples, and its mean; USUAL if nothing was held out."""
    usable = fitted & (total > 0)
    if losses is None or not bool(usable.any()):
        return int((penalty - USUAL).abs().argmin()), None
    sums = losses[:, usable].sum(1)
    return int(sums.argmin()), float(sums.min() / total[usable].sum())


def largest_gradient(state: Tensors, candidate: int) -> float:
    """The largest norm of a gradient at the best points: 0 means that every class is solved."""
    return float(state["gradient"][candidate].norm(dim=-1).max())


def standardising_map(layout: FlatWeights, weights: Tensor, width: int) -> Tensor | None:
    """The matrix M with [f̂, 1] = M [f, 1] for the standardised features f̂ of the model; None if it has none.

    Clients summed the features as they are, because mean and scale follow from the same exchange.
    """
    if MEAN not in layout.layout:
        return None
    mean, scale = (weights[layout.layout[name].where].double() for name in (MEAN, SCALE))
    map = torch.diag(torch.cat([scale, scale.new_ones(1)]))
    map[:width, -1] = -mean * scale
    return map


def entry_weights(counts: Tensor) -> Tensor:
    """(2, C): the weights of negatives and positives, n / 2n⁻ and n / 2n⁺; 1 for a class that lacks one of them."""
    return torch.where((counts > 0).all(0), counts.sum(0) / 2 / counts.clamp(min=1), 1)


def choose_held_out(client: Client) -> Tensor:
    """bool (N,): the samples that are held out. It follows from the seed and the stored bytes of each sample, so that a
    sample is held out at every client that may have it."""
    threshold, found = int(HELD_OUT * 2**32), []
    seed = str(client.task.seed).encode()
    for batch in client.evaluation_batches():
        for sample in np.ascontiguousarray(batch.raw.cpu().numpy()):
            digest = hashlib.blake2b(sample.tobytes(), digest_size=4, key=seed).digest()
            found.append(int.from_bytes(digest, "big") < threshold)
    return torch.tensor(found, device=client.task.device)


def split_folds(targets: Tensor, held_out: Tensor, min_size: int) -> tuple[Tensor, Tensor]:
    """The targets of the samples that are not held out, and of those that are; −1 elsewhere.

    A class with a small group in one of them is in neither: the sums of a class over both of them leave, too. Sums of
    different classes are of different functions of the features, so their groups are not compared.
    """
    folds = torch.where(held_out[:, None], -1, targets), torch.where(held_out[:, None], targets, -1)
    small = [small_groups.find_small_classes(fold.cpu().numpy(), min_size) for fold in folds]
    released = torch.from_numpy(~(small[0] | small[1])).to(targets.device)
    return torch.where(released, folds[0], -1), torch.where(released, folds[1], -1)


def opening_sums(features: Tensor, targets: Tensor, folds: tuple[Tensor, Tensor] | None) -> Tensors:
    """The reply in the opening exchange. `folds` (2, 2, C) are the negatives and positives that are not held out, and
    those that are."""
    augmented = torch.cat([features, features.new_ones(len(features), 1)], 1)
    gram = augmented.T @ augmented
    counts = [torch.stack([(fold == label).sum(0) for label in (0, 1)]) for fold in folds or (targets, targets[:0])]
    return {
        "gram": ((gram + gram.T) / 2)[None],
        "known": (targets >= 0).double().T @ augmented,
        "positive": (targets == 1).double().T @ augmented,
        "folds": torch.stack(counts).double(),
    }


def round_sums(
    features: Tensor,
    targets: Tensor,
    rows: Tensor,
    basis: Tensor,
    weights: Tensor,
    folds: tuple[Tensor, Tensor] | None = None,
) -> Tensors:
    """The reply in a round, for rows (K, C, width + 1) and weights (2, C) of negatives and positives."""
    fitted, held_out = (targets, None) if folds is None else folds
    candidates, classes, width = rows.shape
    size = basis.shape[1] + 1
    first, second = torch.triu_indices(size, size, device=rows.device)
    sums = {
        "loss": rows.new_zeros(candidates, classes),
        "gradient": rows.new_zeros(candidates * classes, width),
        "curvature": rows.new_zeros(candidates * classes, len(first)),
    } | ({} if held_out is None else {"held_out": rows.new_zeros(candidates, classes)})
    for begin in range(0, len(features), CHUNK):
        place = slice(begin, begin + CHUNK)
        augmented = torch.cat([features[place], features.new_ones(len(features[place]), 1)], 1)
        turned = torch.cat([augmented @ basis, augmented[:, -1:]], 1)
        present = (targets[place] == 1).double()[:, None]  # (n, 1, C)
        omega = _weights_of(fitted[place], weights)
        z = (augmented @ rows.flatten(0, 1).T).view(-1, candidates, classes)
        p = torch.sigmoid(z)
        loss = F.softplus(z) - present * z
        sums["loss"] += (omega * loss).sum(0)
        if held_out is not None:
            sums["held_out"] += (_weights_of(held_out[place], weights) * loss).sum(0)
        sums["gradient"] += (omega * (p - present)).flatten(1).T @ augmented
        sums["curvature"] += (omega * p * (1 - p)).flatten(1).T @ (turned[:, first] * turned[:, second])
    return sums | {name: sums[name].view(candidates, classes, -1) for name in ("gradient", "curvature")}


def _weights_of(targets: Tensor, weights: Tensor) -> Tensor:
    """(n, 1, C): the weights of the targets; 0 if they are unknown."""
    return (torch.where(targets == 1, weights[1], weights[0]) * (targets >= 0))[:, None]


def check_request(sent: Tensors, candidates: int) -> None:
    """At a client: reject what no fit asks for. The sums at very many rows would show single samples."""
    if len(sent["rows"]) > candidates or sent["basis"].shape[1] > solver.CURVED:
        raise ConfigError(
            f"The server asks for the sums of {len(sent['rows'])} rows per class in {sent['basis'].shape[1]} "
            f"directions, and a logistic regression needs at most {candidates} in {solver.CURVED}. Ask the server's "
            "operator why."
        )
