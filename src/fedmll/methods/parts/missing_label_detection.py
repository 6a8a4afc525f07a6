"""Missing label detection of FedMLP (Sun et al., 2024, Eq. 5–10). In the second stage of a run, missing entries whose
features are nearest to a class prototype get a permanent tag. Easier classes get more tags.

A class has two prototypes: the mean feature of the samples in which it is present (1), and in which it is absent (0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmll.config.experiment import Experiment
from fedmll.core import small_groups
from fedmll.core.errors import ClientError, ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.methods.framework.allowed_replies import MOST_SAMPLES
from fedmll.methods.framework.base import Aggregator, Records, TensorSpec, TruthAudit, option
from fedmll.methods.framework.client_round import ClientInfo, ClientRound
from fedmll.methods.parts.semi_supervised import TwoStagePart

NOT_SENT = -1.0  # the value of `difficulty` for a class that the client does not report
LARGEST_FEATURE = 1e4  # larger values in a prototype are rejected


class FedMLPPart(TwoStagePart):
    """A part of FedMLP. There is a second stage only if a part acts in it."""

    first_share = 50 / 500

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        rounds = experiment.training.rounds
        if cls.acts_later and options.first_stage >= rounds:
            raise ConfigError(
                f"{prefix}first_stage = {options.first_stage} leaves no round for FedMLP's second stage in a run of "
                f"{rounds}: tags and consistency would never act. Lower it or raise training.rounds. If you want only "
                "the first stage, leave both parts out (of fedmlp: method.tags = false and method.consistency = false)."
            )

    def validate_clients(self, clients: Sequence[ClientInfo]) -> None:
        known = torch.stack([client.owned for client in clients]).any(0).tolist()
        nobody = [name for name, somebody in zip(self.task.classes, known, strict=True) if not somebody]
        if nobody:
            raise ConfigError(
                "FedMLP needs for every class a client that annotates the class and has positives of it, and there is "
                f"none for {', '.join(nobody)}. Leave such classes out, or change the partition or the annotation."
            )

    def second_stage(self, round: int) -> bool:
        parts = (type(self), *self.other_parts.values())
        return any(getattr(part, "acts_later", False) for part in parts) and round > self.options.first_stage


class MissingLabelTags(FedMLPPart, TruthAudit):
    """Missing label detection (Eq. 5–10): clients send prototypes, and tag missing entries with the global ones."""

    name = "tags"
    conflicts = frozenset({"private-labels"})
    acts_later = True

    class Options(FedMLPPart.Options):
        adaptive: bool = option(True, "st: number of tags in proportion to the difficulty d of a class (Eq. 10)")
        negative_share: float = option(0.005, "T0: share of the likely negatives to tag per round", ge=0, le=1)
        positive_share: float = option(0.01, "T1: share of the likely positives to tag per round", ge=0, le=1)
        low: float = option(0.3, "L: p below it counts as learned (Eq. 10)", ge=0, le=1)
        high: float = option(0.7, "R: p above it counts as learned (Eq. 10)", ge=0, le=1)
        difficulty: Literal["negative", "active"] = option(
            "negative", "clients report d of the classes that they do not annotate (negative), or annotate (active)"
        )
        momentum: float = option(0.0, "momentum of the global prototypes", ge=0, lt=1)

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        super().check(options, experiment, prefix)
        if options.low > options.high:
            raise ConfigError(
                f"{prefix}low = {options.low} is above {prefix}high = {options.high}; the paper has 0.3 and 0.7."
            )

    def send(self, state: Tensors, client: ClientInfo, round: int) -> Tensors:
        return dict(state) if self.second_stage(round) else {}

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        """From the last round of the first stage on."""
        if round < self.options.first_stage:
            return {}
        classes, limit = len(self.task.classes), LARGEST_FEATURE
        expected = {
            "prototypes": TensorSpec((2, classes, self.model.width), low=-limit, high=limit),
            "votes": TensorSpec((2, classes), torch.bool, by_class=1),
            "made": TensorSpec((2,), torch.int64, low=0, high=MOST_SAMPLES * classes),
        }
        if self.options.adaptive:
            share = TensorSpec(
                (classes,), low=NOT_SENT, high=1, rule=lambda d: bool(((d == NOT_SENT) | (d >= 0)).all()),
                broken="holds values that are not shares",
            )  # fmt: skip
            expected["difficulty"] = share
        return expected

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator | None:
        return TagAggregator(self, state, round) if round >= self.options.first_stage else None

    def count_correct(self, client_state: Tensors, targets: Tensor) -> Tensor | None:
        """The number of tags and of correct tags: (2, label, class)."""
        if "tags" not in client_state:
            return None
        tags = client_state["tags"]
        tagged = torch.stack([(tags == label) & (targets >= 0) for label in (0, 1)])
        return torch.stack([tagged.sum(1), (tagged & (tags == targets)).sum(1)])

    def audit_records(self, total: Tensor) -> Records:
        """The precision of all tags and of the tags 0 and 1, and the counts per (label, class)."""
        count, right = total
        if not count.any():
            return {}
        records: Records = {"tags_made": count, "tags_true": right}
        for name, made, true in (("", count, right), ("_0", count[0], right[0]), ("_1", count[1], right[1])):
            if made.any():
                records["tag_precision" + name] = 100 * float(true.sum() / made.sum())
        return records

    def on_round_start(self, client_round: ClientRound) -> None:
        """Eq. 7–9: tag some of the entries that are neither known nor tagged, and store the tags."""
        received = self.received(client_round)
        if not received:
            return
        targets, kept, option = client_round.client.targets, self.client_state(client_round), self.options
        tags = kept.setdefault("tags", torch.full_like(targets, -1))
        if tags.shape != targets.shape:
            raise ClientError(
                f"Client {client_round.client.name} has tags for {len(tags)} samples and now has {len(targets)}. Its "
                "data must stay the same during a run; start a new run."
            )
        blank = torch.zeros(2, targets.shape[1], dtype=torch.float64, device=targets.device)
        carry = kept.setdefault("carry", blank)
        difficulty = received.get("difficulty", torch.ones_like(blank[0]))
        features = client_round.outputs(features=True).features
        assert features is not None
        z = cosine_similarity(features, received["prototypes"])
        open_entries = (targets < 0) & (tags < 0) & received["votes"].all(0)
        tag(tags, carry, z[0] - z[1], open_entries, difficulty.double(), (option.negative_share, option.positive_share))
        client_round.targets = torch.where(targets >= 0, targets, tags)

    def on_round_end(self, client_round: ClientRound, round_state: None) -> Tensors:
        if client_round.number < self.options.first_stage:
            return {}
        outputs, kept = client_round.outputs(features=True), self.client_state(client_round)
        targets = client_round.client.targets
        assert outputs.features is not None
        shown = small_groups.mask_small_groups(targets, self.task.min_group_size)  # both prototypes of a class, or none
        prototypes, votes = local_prototypes(outputs.features, shown)
        made = [(kept["tags"] == label).sum() if kept else torch.tensor(0) for label in (0, 1)]
        reply = {"prototypes": prototypes, "votes": votes, "made": torch.stack(made)}
        if self.options.adaptive:
            missing = ~(targets >= 0).any(0)
            counted = missing if self.options.difficulty == "negative" else ~missing
            p = outputs.probabilities
            learnt = ((p < self.options.low) | (p > self.options.high)).float().mean(0)
            reply["difficulty"] = torch.where(counted, learnt, NOT_SENT)
        return reply


class TagAggregator(Aggregator):
    """Eq. 6 and 10, one reply at a time. Prototypes have equal weights; difficulties are weighted by size."""

    def __init__(self, part: MissingLabelTags, state: Tensors, round: int) -> None:
        self.part, self.state, self.round = part, state, round
        self.means, self.made = PrototypeMeans(), torch.zeros(2, dtype=torch.int64)
        self.learnt, self.size = torch.zeros(2, len(part.task.classes), dtype=torch.float64)

    def add(self, client: ClientInfo, reply: Message) -> None:
        self.means.add(reply["prototypes"], reply["votes"])
        self.made += reply["made"]
        if self.part.options.adaptive:
            size = (reply["difficulty"] != NOT_SENT) * reply.numbers["samples"]
            self.learnt += reply["difficulty"] * size
            self.size += size

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        """A class that no client reported keeps its prototypes; its difficulty is 1."""
        state, records = self.means.result(self.state, self.part.options.momentum), Records()
        if self.part.second_stage(self.round):
            records = {f"tags_{label}": float(self.made[label]) for label in (0, 1)}
        if self.part.options.adaptive:
            state["difficulty"] = torch.where(self.size > 0, self.learnt / self.size.clamp(min=1), 1.0).float()
            records["difficulty"] = state["difficulty"]
        return state, records


def tag(
    tags: Tensor, carry: Tensor, z: Tensor, open_entries: Tensor, difficulty: Tensor, shares: tuple[float, float]
) -> None:
    """Eq. 8–9, in place. Among the open samples of a class with z ≥ 0, the ⌊d·T0·#⌋ with the largest z get the tag 0.
    Among those with z < 0, the ⌊d·T1·#⌋ with the smallest z get the tag 1. `carry` (label, class) keeps the fractions
    of these counts for the next round."""
    for label, side in ((0, z >= 0), (1, z < 0)):
        candidates = open_entries & side
        available = candidates.sum(0)
        quota = difficulty * shares[label] * available + carry[label]
        count = torch.minimum(quota.floor(), available)
        carry[label] = quota - count
        order = z.abs().masked_fill(~candidates, -1).argsort(dim=0, descending=True, stable=True)
        tags[order.argsort(0) < count] = label


def local_prototypes(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The mean feature (label, class, width) of the samples with each label, and bool (label, class): whether there are
    any. Without samples the mean is 0. Features are (samples, width), or class-wise (samples, classes, width)."""
    members = torch.stack([targets == label for label in (0, 1)]).transpose(1, 2).float()  # (label, class, sample)
    counts = members.sum(2)
    sums = members @ features if features.dim() == 2 else torch.einsum("lcn,ncw->lcw", members, features)
    some = counts > 0
    return torch.where(some[:, :, None], sums / counts.clamp(min=1)[:, :, None], 0.0), some


def cosine_similarity(features: Tensor, prototypes: Tensor) -> Tensor:
    """The cosine of each sample's features with each prototype (label, samples, classes)."""
    features, prototypes = F.normalize(features, dim=-1), F.normalize(prototypes, dim=2)
    if features.dim() == 2:
        return features @ prototypes.transpose(1, 2)
    return torch.einsum("ncw,lcw->lnc", features, prototypes)


class PrototypeMeans:
    """The mean of the clients' prototypes, with equal weights. A class without new prototypes keeps its old ones."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def add(self, prototypes: Tensor, votes: Tensor) -> None:
        if self.sums is None:
            self.sums = torch.zeros_like(prototypes, dtype=torch.float64)
            self.votes = torch.zeros_like(votes, dtype=torch.int64)
        self.sums += prototypes.double() * votes[:, :, None]
        self.votes += votes

    def result(self, old: Tensors, momentum: float) -> Tensors:
        if self.sums is None:
            return {name: old[name] for name in ("prototypes", "votes") if name in old}
        new, voted = (self.sums / self.votes.clamp(min=1)[:, :, None]).float(), self.votes > 0
        known = voted
        if "prototypes" in old:
            mixed = torch.where(old["votes"][:, :, None], momentum * old["prototypes"] + (1 - momentum) * new, new)
            new, known = torch.where(voted[:, :, None], mixed, old["prototypes"]), voted | old["votes"]
        return {"prototypes": new, "votes": known}
