"""FedMLP — Sun et al., "FedMLP: Federated Multi-Label Medical Image Classification under Task Heterogeneity", 2024.

Each client annotates some classes (AC) and misses the others (NC). Two stages:

  rounds 1 … t1   WPC loss (Eq. 3–4): BCE over the known entries, logits moved by the client's log prior odds; two views
  later rounds    Missing entries are tagged, for good, where the features are nearest to a class prototype (Eq. 5–9),
                  the more the easier the class (Eq. 10). The loss is WPC over true and tagged entries, and the squared
                  distance to the round-start global model's p over the other missing ones: a mean over batch × classes.

Switches (Table 3), each also under the paper's name: `partial_loss` (wpc; off: plain BCE, missing entries are 0 as in
FedAvg), `tags` (mld), `consistency` (cr), `adaptive` (st; off: the difficulty d is 1). All off is FedAvg. "WPC only" is
tags and consistency off. t1 is a tenth of the rounds (the paper's 50 of 500) unless it is given. Unknown is decided
entry by entry, so blanks in an annotated class are missing entries too, and π is over the entries that are not. Weight
decay must be decoupled (training.optimizer = "adamw"): a class without gradient at a client is otherwise erased there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedmll.errors import ClientError, ConfigError
from fedmll.message import Message, Tensors
from fedmll.methods.base import AUTO, Like, Local, Method, Reply
from fedmll.models.backbones import Classifier

if TYPE_CHECKING:
    from fedmll.client import Batch, Client, Peer
    from fedmll.experiment import Experiment

Share = Annotated[float, Field(ge=0, le=1)]
UPLOADED = ("prototypes", "votes", "difficulty")  # beside the weights, from round t1 on
NOT_SENT = -1.0  # in `difficulty`
LARGEST_FEATURE = 1e6  # in a prototype


class FedMLP(Method):
    name = "fedmlp"
    summary = "partial annotation: prior-adjusted partial loss, prototype tags, consistency with the global model"
    published: ClassVar[dict[str, Any]] = {
        "model.backbone": "resnet18", "training.rounds": 500, "training.local_epochs": 1, "training.batch_size": 32,
        "training.optimizer": "adamw", "training.lr": 3e-5, "training.weight_decay": 5e-4, "training.keep": "last",
        "partition.kind": "iid", "participation.fraction": 1.0, "annotation.kind": "missing",
    }  # fmt: skip
    unpublished: ClassVar[dict[str, str]] = {
        "model.weights": "ImageNet weights of ResNet-18 in torchvision's format",
        "annotation.missing": "how many classes each client does not annotate, by table; up to all but one",
        "partition.clients": "as many as classes: 5 for ICH, 8 for ChestX-ray14",
    }

    symbols: ClassVar[dict[str, str]] = {
        "mld": "tags", "wpc": "partial_loss", "cr": "consistency", "st": "adaptive", "t1": "first_stage",
        "T0": "negative_share", "T1": "positive_share", "L": "low", "R": "high",
    }  # fmt: skip

    class Options(Method.Options):
        tags: bool = True  # missing label detection (Eq. 5–9)
        partial_loss: bool = True  # the weighted partial class loss (Eq. 3–4)
        consistency: bool = True  # with the round-start global model, where nothing is known
        adaptive: bool = True  # the self-adaptive threshold: tag in proportion to d (Eq. 10)
        first_stage: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"  # t1, in rounds; auto: a tenth of them
        negative_share: Share = 0.005  # of the likely negatives, tagged in a round
        positive_share: Share = 0.01  # of the likely positives
        low: Share = 0.3  # p < L or p > R counts as learnt
        high: Share = 0.7
        difficulty: Literal["negative", "active"] = "negative"  # d of the classes that a client misses; knows (Eq. 10)
        momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the global prototypes
        warmup_consistency: bool = False  # consistency in the first stage too (released code)
        view: Literal["none", "flip", "shift", "crop-flip", "weak"] = "weak"  # the augmentation of the WPC loss's views

    options: Options

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> dict[str, tuple[Any, str]]:
        if options.first_stage != AUTO:
            return {}
        return {"first_stage": (max(1, round(experiment.training.rounds / 10)), "a tenth of the rounds, as published")}

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        options, rounds = cls.Options(**experiment.method.options), experiment.training.rounds
        if options.low > options.high:
            raise ConfigError(
                f"method.low = {options.low} is above method.high = {options.high}; the paper has 0.3 and 0.7."
            )
        if (options.tags or options.consistency) and int(options.first_stage) >= rounds:
            raise ConfigError(
                f"method.first_stage = {options.first_stage} leaves no round for FedMLP's second stage in a run of "
                f"{rounds}: tags and consistency would never act. Lower it, raise training.rounds, or say that the "
                "first stage is all you want: method.tags = false and method.consistency = false."
            )

    def second_stage(self, round: int) -> bool:
        return (self.options.tags or self.options.consistency) and round > int(self.options.first_stage)

    # ---- the server

    def begin(self, peers: Sequence[Peer]) -> None:
        known = torch.stack([peer.owned for peer in peers]).any(0).tolist()
        nobody = [name for name, somebody in zip(self.task.classes, known, strict=True) if not somebody]
        if nobody:
            raise ConfigError(
                f"No client annotates {', '.join(nobody)}, and FedMLP can only spread what some client knows. Leave "
                "such classes out, or let a client annotate them."
            )

    def send(self, state: Tensors, client: Peer, round: int) -> Message:
        message = super().send(state, client, round)
        if self.options.tags and self.second_stage(round) and "prototypes" in state:
            message.tensors |= {name: state[name] for name in UPLOADED if name in state}
        return message

    def merge(self, state: Tensors, replies: Iterable[Reply], round: int) -> Tensors:
        means = _ServerMeans()
        tagged = {"tags_0": 0.0, "tags_1": 0.0}

        def weights_only() -> Iterator[Reply]:
            for peer, reply in replies:
                means.add(reply)
                for name in tagged:
                    tagged[name] += reply.numbers.get(name, 0.0)
                kept = {name: tensor for name, tensor in reply.tensors.items() if name not in UPLOADED}
                yield peer, Message(kept, reply.numbers)

        merged = super().merge(state, weights_only(), round)
        if self.options.tags and self.second_stage(round):
            self.records |= tagged
        if not means.empty:
            merged |= means.result(state, self.options.momentum)
            if "difficulty" in merged:
                self.records["difficulty"] = merged["difficulty"]
        return merged

    def expects(self, sent: Message, round: int) -> dict[str, Like]:
        expected = super().expects(sent, round)
        if self.uploads(round):
            classes = len(self.task.classes)
            limit = LARGEST_FEATURE
            expected["prototypes"] = Like((2, classes, self._width), low=-limit, high=limit)
            expected["votes"] = Like((2, classes), torch.bool)
            if self.options.adaptive:
                expected["difficulty"] = Like((classes,), low=NOT_SENT, high=1)
        return expected

    def refuse(self, sent: Message, reply: Message, round: int) -> str | None:
        reason, d = super().refuse(sent, reply, round), reply.tensors.get("difficulty")
        if reason is None and d is not None and not bool(((d == NOT_SENT) | (d >= 0)).all()):
            return "difficulty holds values that are no shares"
        return reason

    def uploads(self, round: int) -> bool:
        """Whether clients send prototypes in this round: from the last of the first stage on."""
        return self.options.tags and round >= int(self.options.first_stage)

    @cached_property
    def _width(self) -> int:
        model = self.model()
        assert isinstance(model, Classifier)
        return model.head.in_features

    def audit(self, memories: Iterable[tuple[Tensors, Tensor]]) -> dict[str, float | Tensor]:
        """How many tags there are and how many of them are true, in all and by (label, class)."""
        count = right = torch.zeros(2, len(self.task.classes), dtype=torch.int64)
        for memory, truth in memories:
            if "tags" in memory:
                tags = memory["tags"]
                said = torch.stack([(tags == label) & (truth >= 0) for label in (0, 1)])
                count, right = count + said.sum(1), right + (said & (tags == truth)).sum(1)
        records: dict[str, float | Tensor] = {}
        if count.any():
            records = {"tag_precision": 100 * float(right.sum() / count.sum()), "tags_made": count, "tags_true": right}
            for label in (0, 1):
                if count[label].any():
                    records[f"tag_precision_{label}"] = 100 * float(right[label].sum() / count[label].sum())
        return records

    # ---- the client

    def prepare(self, client: Client, message: Message, memory: Tensors) -> Local:
        local, options = super().prepare(client, message, memory), self.options
        second = self.second_stage(client.round)
        consistency = options.consistency and (second or options.warmup_consistency)
        tagging = options.tags and second and "prototypes" in message.tensors
        labels = client.targets
        if consistency or tagging:
            features, local["teacher"] = look(client)  # the client's model still is the global one
        if tagging:
            tags = self._tag(client, features, message, memory)
            labels = torch.where(labels >= 0, labels, tags)
        if options.partial_loss:
            annotated = (client.targets >= 0).any(0)
            among = torch.where(annotated, (labels >= 0).sum(0), len(labels))  # a class with tags alone: of all samples
            local["prior"] = log_prior_odds((labels == 1).sum(0), among, len(labels))
        views = 2 if options.partial_loss and not second and client.data.is_images else 1
        return local | {"labels": labels, "views": views, "consistency": consistency}

    def _tag(self, client: Client, features: Tensor, message: Message, memory: Tensors) -> Tensor:
        """Eq. 7–9: tag some of the entries that are neither known nor tagged, and remember."""
        targets, options = client.targets, self.options
        tags = memory.get("tags", torch.full(targets.shape, -1, dtype=torch.int8)).to(targets.device)
        if tags.shape != targets.shape:
            raise ClientError(
                f"Client {client.name} remembers tags for {len(tags)} samples and has {len(targets)} now. Its data "
                "must stay the same during a run; start a new run."
            )
        prototypes, votes = message["prototypes"].to(targets.device), message["votes"].to(targets.device)
        difficulty = message.tensors.get("difficulty", torch.ones(targets.shape[1])).to(targets.device)
        carry = memory.get("carry", torch.zeros(2, targets.shape[1], dtype=torch.float64)).to(targets.device)
        z = F.normalize(features, dim=1) @ F.normalize(prototypes, dim=2).transpose(1, 2)  # (2, samples, classes)
        open_entries = (targets < 0) & (tags < 0) & votes.all(0)
        tag(
            tags,
            carry,
            z[0] - z[1],
            open_entries,
            difficulty.double(),
            (options.negative_share, options.positive_share),
        )
        memory["tags"], memory["carry"] = tags.cpu(), carry.cpu()
        return tags

    def loss(self, model: nn.Module, batch: Batch, local: Local) -> Tensor:
        views: int = local["views"]
        wpc, view = self.options.partial_loss, self.options.view
        images = torch.cat([batch.view(view) for _ in range(views)]) if wpc else batch.images
        labels = local["labels"][batch.rows].repeat(views, 1)
        logits = model(images)
        moved = logits + local["prior"] if wpc else logits
        entries = self.entries(moved, replace(batch, targets=labels), local)
        known = labels >= 0
        if local["consistency"]:
            teacher = local["teacher"][batch.rows].repeat(views, 1)
            entries = torch.where(known, entries, (torch.sigmoid(logits) - teacher).square())
        elif wpc:
            entries = entries * known
        return entries.mean()

    def finish(self, client: Client, local: Local, reply: Message, memory: Tensors) -> None:
        super().finish(client, local, reply, memory)
        options = self.options
        if not self.uploads(client.round):
            return
        features, p = look(client)
        targets = client.targets
        prototypes, votes = local_prototypes(features, targets)
        uploaded = {"prototypes": prototypes, "votes": votes}
        if options.adaptive:
            missing = ~(targets >= 0).any(0)
            counted = missing if options.difficulty == "negative" else ~missing
            learnt = ((p < options.low) | (p > options.high)).float().mean(0)
            uploaded["difficulty"] = torch.where(counted, learnt, NOT_SENT)
        reply.tensors |= {name: tensor.cpu() for name, tensor in uploaded.items()}
        if "tags" in memory:
            reply.numbers |= {f"tags_{label}": float((memory["tags"] == label).sum()) for label in (0, 1)}


@torch.no_grad()
def look(client: Client) -> tuple[Tensor, Tensor]:
    """Features (samples, width) and p (samples, classes) of all its data by the client's model as it is, eval mode."""
    model = client.model
    assert isinstance(model, Classifier)
    model.eval()
    features = torch.cat([model.features(batch.images) for batch in client.scan()])
    return features, torch.sigmoid(model.head(features))


def log_prior_odds(positives: Tensor, among: Tensor, samples: int) -> Tensor:
    """log π − log(1−π), π = positives / among, kept 1/(2 samples) away from 0 and 1: added to a logit it is Eq. 3."""
    prior = (positives / among).clamp(1 / (2 * samples), 1 - 1 / (2 * samples))
    return torch.log(prior) - torch.log1p(-prior)


def local_prototypes(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 5: the mean feature (label, class, width) of the samples with each label, and where there are any."""
    members = torch.stack([targets == label for label in (0, 1)]).transpose(1, 2).float()  # (label, class, sample)
    counts = members.sum(2)
    return members @ features / counts.clamp(min=1)[:, :, None], counts > 0


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


class _ServerMeans:
    """Eq. 6 and 10 over a stream: prototypes count alike, difficulties by the clients' sizes."""

    def __init__(self) -> None:
        self.empty = True

    def add(self, reply: Message) -> None:
        if "prototypes" not in reply.tensors:
            return
        prototypes, votes = reply["prototypes"].double(), reply["votes"]
        d = reply.tensors.get("difficulty")
        if self.empty:
            self.empty = False
            self.sums, self.votes = torch.zeros_like(prototypes), torch.zeros_like(votes, dtype=torch.int64)
            self.learnt, self.size = (torch.zeros(votes.shape[1], dtype=torch.float64) for _ in range(2))
            self.adaptive = d is not None
        self.sums += prototypes * votes[:, :, None]
        self.votes += votes
        if d is not None:
            size = (d != NOT_SENT) * reply.numbers["samples"]
            self.learnt += d * size
            self.size += size

    def result(self, state: Tensors, momentum: float) -> Tensors:
        """A class that nobody spoke of keeps its prototypes; its difficulty is 1."""
        new = (self.sums / self.votes.clamp(min=1)[:, :, None]).float()
        voted = self.votes > 0
        known = voted
        if "prototypes" in state:
            old, before = state["prototypes"], state["votes"]
            mixed = torch.where(before[:, :, None], momentum * old + (1 - momentum) * new, new)
            new, known = torch.where(voted[:, :, None], mixed, old), voted | before
        result = {"prototypes": new, "votes": known}
        if self.adaptive:
            result["difficulty"] = torch.where(self.size > 0, self.learnt / self.size.clamp(min=1), 1.0).float()
        return result
