"""Platt calibration by federated Newton steps: p = σ(a z + b) with two numbers per class, fitted in rounds without
training. The targets are Platt's (1999), (N₊+1)/(N₊+2) and 1/(N₋+2), with the counts of all clients' known entries.

For every class and every candidate (a, b), a client replies with six sums over its known entries: the log-loss, its
gradient and its Hessian. A full Newton step and shorter ones are tried at the same time, and the best is used. So the
loss never grows, and the result is that of the pooled data for any partition.

The head was fitted to the same samples, so its scores are too confident. The score s of a sample is therefore corrected
as if the sample had been left out, as in generalised cross-validation: y − (y − s) / (1 − h), where h is the mean
leverage in its class.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmll.core import small_groups
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.methods.framework.base import Aggregator, Part, Records, SumAggregator, TensorSpec
from fedmll.methods.framework.client_round import ClientRound
from fedmll.methods.parts.classifier_rows import HeadRows
from fedmll.methods.parts.ridge_head import RidgeAggregator, RidgeHead
from fedmll.methods.parts.sum_checks import refuse_losses

ROUNDS = 10  # nine Newton steps: the first round evaluates the initial a and b
STEPS = torch.tensor([1.0, 0.5, 0.1, 0.01], dtype=torch.float64)  # fractions of a Newton step that are tried
DAMPING = 1e-9  # relative, added to the Hessian's diagonal: it is singular if all scores are equal
LEAST = 0.05  # lower bound of 1 − h


class PlattCalibration(Part):
    """Platt calibration: probabilities σ(a z + b) with a and b per class, fitted by federated Newton steps."""

    name = "platt"
    provides = frozenset({"final-classifier"})
    conflicts = frozenset({"private-labels"})
    depends_on = (RidgeHead,)
    exchanges = frozenset({"opening", "rounds"})
    sends = ("tried", "targets", "leverage")
    sums = ("sums",)

    def initial_state(self) -> Tensors:
        pairs = torch.zeros(2, len(self.task.classes), dtype=torch.float64)
        best = torch.cat([pairs, pairs[:1] + torch.inf])  # a, b and their loss
        return {"tried": pairs[None], "targets": pairs, "leverage": pairs, "best": best}

    def collect_statistics(self, client_round: ClientRound) -> Tensors:
        if client_round.number == 0:
            return {}
        sent, features = self.received(client_round), client_round.outputs(features=True).features
        assert features is not None
        check_request(sent, len(self.task.classes))
        with torch.no_grad():
            scores = client_round.model.logits(features).double() / 4 + 0.5  # z = 4 (s − ½)
        # the same targets as in the sums of the ridge head
        targets = small_groups.mask_small_groups(client_round.client.targets, self.task.min_group_size)
        left_out = as_left_out(scores, targets, sent["leverage"])
        return {"sums": sums_of(4 * (left_out - 0.5), targets, sent["targets"], sent["tried"])}

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        if round == 0:
            return {}
        shape = (len(sent["tried"]), 6, len(self.task.classes))
        tried = sent["tried"]
        return {
            "sums": TensorSpec(
                shape,
                torch.float64,
                rule=_convex,
                broken="are not sums of a log-loss",
                check_together=lambda own, samples: refuse_losses(own["sums"], tried, samples),
            )
        }

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        if round == 0:
            ridge = earlier[RidgeHead.name]
            assert isinstance(ridge, RidgeAggregator)
            return PlattStartAggregator(ridge, state)
        return SumAggregator(self, state, round)

    def update_state(self, state: Tensors, sums: Tensors, round: int) -> tuple[Tensors, Records]:
        return state | better(state["tried"], state["best"], sums["sums"]), {}

    def finalize_model(self, state: Tensors, message: Message) -> None:
        """Multiply a and b into the rows of the head, so that prediction needs no additional code."""
        if torch.isinf(state["best"][2]).any():
            return  # before the first round
        a, b = state["best"][:2]
        head = HeadRows.of(self.weights)
        front, rows, back = head.split(message["weights"], len(a))
        rows = a[:, None] * rows.double()
        rows[:, -1] += b
        message.tensors["weights"] = head.join(front, rows.float(), back)


class PlattStartAggregator(Aggregator):
    """After the ridge head is solved: Platt's targets from its counts, and the initial a and b. It needs no replies."""

    def __init__(self, ridge: RidgeAggregator, state: Tensors) -> None:
        self.ridge, self.state = ridge, state

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        negatives, positives = self.ridge.counts
        targets = torch.stack([1 / (negatives + 2), (positives + 1) / (positives + 2)])
        prior = torch.log((positives + 1) / (negatives + 1))
        first = torch.stack([torch.zeros_like(prior), prior])
        return self.state | {"targets": targets, "leverage": self.ridge.leverage, "tried": first[None]}, {}


def check_request(sent: Tensors, classes: int) -> None:
    """At a client: reject what no calibration asks for.

    With a large a, the sums count the samples above one score. Many candidates would show the score of every sample.
    """
    if len(sent["tried"]) > len(STEPS):
        raise ConfigError(
            f"The server asks for the sums of {len(sent['tried'])} candidates of Platt's calibration, and at most "
            f"{len(STEPS)} are needed. Ask the server's operator why."
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in sent.items()}
    pairs = (2, classes)
    if shapes != {"tried": (len(sent["tried"]), *pairs), "targets": pairs, "leverage": pairs}:
        raise ConfigError("The server's request for Platt's calibration has wrong tensors. Ask its operator why.")
    if not bool(((sent["targets"] >= 0) & (sent["targets"] <= 1)).all()):
        raise ConfigError("The server's targets of Platt's calibration are not from 0 to 1. Ask its operator why.")


def as_left_out(scores: Tensor, targets: Tensor, leverage: Tensor) -> Tensor:
    """y − (y − s) / (1 − h). `leverage` (2, C) is that of negatives and of positives."""
    present = (targets == 1).double()
    h = torch.where(targets == 1, leverage[1], leverage[0])
    return present - (present - scores) / (1 - h).clamp(min=LEAST)


def sums_of(z: Tensor, targets: Tensor, taught: Tensor, tried: Tensor) -> Tensor:
    """(tried, 6, C): sums over the known entries of the loss, its first and its second derivatives by a and b."""
    known = (targets >= 0).double()
    t = torch.where(targets == 1, taught[1], taught[0])
    found = []
    for a, b in tried:
        logits = a * z + b
        p = torch.sigmoid(logits)
        slope, bend = (p - t) * known, p * (1 - p) * known
        loss = (F.softplus(logits) - t * logits) * known
        found.append(torch.stack([s.sum(0) for s in (loss, slope * z, slope, bend * z * z, bend * z, bend)]))
    return torch.stack(found)


def better(tried: Tensor, best: Tensor, sums: Tensor) -> Tensors:
    """The a and b with the smallest loss so far, per class, and what is tried next: the Newton step from there, and
    fractions of it. A class without improvement does not change."""
    loss, chosen = sums[:, 0].min(0)
    place = torch.arange(len(loss))
    improved = loss < best[2]
    a, b = torch.where(improved, tried[chosen, :, place].T, best[:2])
    _, ga, gb, haa, hab, hbb = sums[chosen, :, place].T
    haa, hbb = haa * (1 + DAMPING), hbb * (1 + DAMPING)
    determinant = (haa * hbb - hab.square()).clamp(min=1e-300)
    step = torch.stack([hab * gb - hbb * ga, hab * ga - haa * gb]) / determinant
    step = torch.where(improved & torch.isfinite(step), step, 0)
    now = torch.stack([a, b])
    return {
        "best": torch.stack([a, b, torch.where(improved, loss, best[2])]),
        "tried": now + STEPS[:, None, None] * step,
    }


def _convex(sums: Tensor) -> bool:
    loss, _, _, haa, hab, hbb = sums.unbind(1)
    slack = 1e-9 * (1 + haa * hbb)
    return bool((loss >= 0).all() and (haa >= 0).all() and (hbb >= 0).all() and (hab**2 <= haa * hbb + slack).all())
