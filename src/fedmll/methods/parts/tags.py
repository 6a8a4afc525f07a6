"""Missing label detection of FedMLP (Sun et al., 2024, Eq. 5–10): in the second stage of a run entries that nobody
annotated are tagged, for good, where the features are nearest to a class prototype, the more the easier the class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedmll.client import Peer, Work
from fedmll.errors import ClientError, ConfigError
from fedmll.message import Message, Tensors
from fedmll.methods.contract import AUTO, Found, Like, Merger, Part, PartOptions, Records, option
from fedmll.methods.expected import MOST_SAMPLES
from fedmll.methods.parts.prototypes import PrototypeMeans, local_prototypes, nearness

if TYPE_CHECKING:
    from fedmll.experiment import Experiment

NOT_SENT = -1.0  # in `difficulty`
LARGEST_FEATURE = 1e4  # in a prototype


class Staged(Part):
    """A part that knows the two stages."""

    acts_later: ClassVar[bool] = False  # only in the second
    shared = ("first_stage",)

    class Options(PartOptions):
        first_stage: Annotated[int, Field(ge=1)] | Literal["auto"] = option("auto", "t1: rounds; auto: a tenth of them")

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> Found:
        rule = "a tenth of the rounds, as published" if cls.acts_later else ""
        tenth = max(1, round(experiment.training.rounds / 10))
        return {"first_stage": (tenth, rule)} if options.first_stage == AUTO else {}

    @classmethod
    def check(cls, options: Any, experiment: Experiment, where: str) -> None:
        rounds = experiment.training.rounds
        if cls.acts_later and options.first_stage >= rounds:
            raise ConfigError(
                f"{where}first_stage = {options.first_stage} leaves no round for FedMLP's second stage in a run of "
                f"{rounds}: tags and consistency would never act. Lower it, raise training.rounds, or say that the "
                "first stage is all you want: leave both parts out (of fedmlp: method.tags = false and "
                "method.consistency = false)."
            )

    def begin(self, peers: Sequence[Peer]) -> None:
        known = torch.stack([peer.owned for peer in peers]).any(0).tolist()
        nobody = [name for name, somebody in zip(self.task.classes, known, strict=True) if not somebody]
        if nobody:
            raise ConfigError(
                f"No client annotates {', '.join(nobody)}, and FedMLP can only spread what some client knows. Leave "
                "such classes out, or let a client annotate them."
            )

    def second_stage(self, round: int) -> bool:
        parts = (type(self), *self.beside.values())
        return any(getattr(part, "acts_later", False) for part in parts) and round > self.options.first_stage


class Tags(Staged):
    """Missing label detection (Eq. 5–10): prototypes go up, and from the next round on tags come of them."""

    name = "tags"
    every_class = True
    acts_later = True

    class Options(Staged.Options):
        adaptive: bool = option(True, "st, the self-adaptive threshold: tag in proportion to d (Eq. 10)")
        negative_share: float = option(0.005, "T0: share of the likely negatives, tagged in a round", ge=0, le=1)
        positive_share: float = option(0.01, "T1: share of the likely positives, tagged in a round", ge=0, le=1)
        low: float = option(0.3, "L: p below it counts as learnt (Eq. 10)", ge=0, le=1)
        high: float = option(0.7, "R: p above it counts as learnt (Eq. 10)", ge=0, le=1)
        difficulty: Literal["negative", "active"] = option("negative", "d of the classes a client misses; knows")
        momentum: float = option(0.0, "of the global prototypes", ge=0, lt=1)

    @classmethod
    def check(cls, options: Any, experiment: Experiment, where: str) -> None:
        super().check(options, experiment, where)
        if options.low > options.high:
            raise ConfigError(
                f"{where}low = {options.low} is above {where}high = {options.high}; the paper has 0.3 and 0.7."
            )

    def send(self, state: Tensors, peer: Peer, round: int) -> Tensors:
        return dict(state) if self.second_stage(round) else {}

    def expects(self, sent: Tensors, round: int) -> dict[str, Like]:
        """From the last round of the first stage on."""
        if round < self.options.first_stage:
            return {}
        classes, limit = len(self.task.classes), LARGEST_FEATURE
        expected = {
            "prototypes": Like((2, classes, self.model.width), low=-limit, high=limit),
            "votes": Like((2, classes), torch.bool, by_class=1),
            "made": Like((2,), torch.int64, low=0, high=MOST_SAMPLES * classes),
        }
        if self.options.adaptive:
            share = Like(
                (classes,), low=NOT_SENT, high=1, rule=lambda d: bool(((d == NOT_SENT) | (d >= 0)).all()),
                broken="holds values that are no shares",
            )  # fmt: skip
            expected["difficulty"] = share
        return expected

    def merger(self, state: Tensors, round: int, beside: Mapping[str, Merger]) -> Merger | None:
        return Tagging(self, state, round) if round >= self.options.first_stage else None

    def audit(self, memory: Tensors, truth: Tensor) -> Tensor | None:
        """How many tags there are and how many of them are true: (2, label, class)."""
        if "tags" not in memory:
            return None
        said = torch.stack([(memory["tags"] == label) & (truth >= 0) for label in (0, 1)])
        return torch.stack([said.sum(1), (said & (memory["tags"] == truth)).sum(1)])

    def audited(self, total: Tensor) -> Records:
        """In all and by (label, class)."""
        count, right = total
        if not count.any():
            return {}
        records: Records = {"tags_made": count, "tags_true": right}
        for name, made, true in (("", count, right), ("_0", count[0], right[0]), ("_1", count[1], right[1])):
            if made.any():
                records["tag_precision" + name] = 100 * float(true.sum() / made.sum())
        return records

    def prepare(self, work: Work) -> None:
        """Eq. 7–9: tag some of the entries that are neither known nor tagged, and remember."""
        received = work.received(self.name)
        if not received:
            return
        targets, memory, option = work.client.targets, work.memory(self.name), self.options
        tags = memory.setdefault("tags", torch.full_like(targets, -1))
        if tags.shape != targets.shape:
            raise ClientError(
                f"Client {work.client.name} remembers tags for {len(tags)} samples and has {len(targets)} now. Its "
                "data must stay the same during a run; start a new run."
            )
        blank = torch.zeros(2, targets.shape[1], dtype=torch.float64, device=targets.device)
        carry = memory.setdefault("carry", blank)
        difficulty = received.get("difficulty", torch.ones_like(blank[0]))
        features = work.look(features=True).features
        assert features is not None
        z = nearness(features, received["prototypes"])
        open_entries = (targets < 0) & (tags < 0) & received["votes"].all(0)
        tag(tags, carry, z[0] - z[1], open_entries, difficulty.double(), (option.negative_share, option.positive_share))
        work.targets = torch.where(targets >= 0, targets, tags)

    def finish(self, work: Work, mine: None) -> Tensors:
        if work.round < self.options.first_stage:
            return {}
        look, targets, memory = work.look(features=True), work.client.targets, work.memory(self.name)
        assert look.features is not None
        prototypes, votes = local_prototypes(look.features, targets, self.task.smallest_group)
        made = [(memory["tags"] == label).sum() if memory else torch.tensor(0) for label in (0, 1)]
        reply = {"prototypes": prototypes, "votes": votes, "made": torch.stack(made)}
        if self.options.adaptive:
            missing = ~(targets >= 0).any(0)
            counted = missing if self.options.difficulty == "negative" else ~missing
            p = look.probabilities
            learnt = ((p < self.options.low) | (p > self.options.high)).float().mean(0)
            reply["difficulty"] = torch.where(counted, learnt, NOT_SENT)
        return reply


class Tagging(Merger):
    """Eq. 6 and 10 over a stream: prototypes count alike, difficulties by the clients' sizes."""

    def __init__(self, part: Tags, state: Tensors, round: int) -> None:
        self.part, self.state, self.round = part, state, round
        self.means, self.made = PrototypeMeans(), torch.zeros(2, dtype=torch.int64)
        self.learnt, self.size = torch.zeros(2, len(part.task.classes), dtype=torch.float64)

    def add(self, peer: Peer, reply: Message) -> None:
        self.means.add(reply["prototypes"], reply["votes"])
        self.made += reply["made"]
        if self.part.options.adaptive:
            size = (reply["difficulty"] != NOT_SENT) * reply.numbers["samples"]
            self.learnt += reply["difficulty"] * size
            self.size += size

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        """A class that nobody spoke of keeps its prototypes; its difficulty is 1."""
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
    """Eq. 8–9, in place: of a class's open samples with z ≥ 0 the ⌊d·T0·#⌋ largest z become 0, of those with z < 0 the
    ⌊d·T1·#⌋ smallest become 1. `carry` (label, class) keeps the fractions of these counts for the next round."""
    for label, side in ((0, z >= 0), (1, z < 0)):
        candidates = open_entries & side
        available = candidates.sum(0)
        quota = difficulty * shares[label] * available + carry[label]
        count = torch.minimum(quota.floor(), available)
        carry[label] = quota - count
        order = z.abs().masked_fill(~candidates, -1).argsort(dim=0, descending=True, stable=True)
        tags[order.argsort(0) < count] = label
