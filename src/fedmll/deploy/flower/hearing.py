"""A reply as it comes in. Before anything of it is used it is bound to the node that was asked, compared with what was
sent, and with what its client said of itself when it joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Message as FlowerMessage

from fedmll.client import Peer
from fedmll.deploy.flower.records import from_records
from fedmll.deploy.flower.roster import Member
from fedmll.deploy.flower.site_app import TRAIN
from fedmll.deploy.introduction import Introduction
from fedmll.deploy.sentences import SENTENCES
from fedmll.errors import ReplyRefused, UpdateDiverged, printable
from fedmll.evaluation.pooled import HIGHEST, of_a_site
from fedmll.message import Message
from fedmll.methods.contract import Like, refuse_unlike
from fedmll.methods.expected import Diverged, refuse_classes, refuse_names, refuse_tensors

NUMBERS = ("samples", "steps", "loss")  # of a round of training
LARGEST_LOSS = 1e6
MOST_STEPS = 1e9


@dataclass
class Parcel:
    """A message on its way: to whom, and what a good reply to it holds."""

    peer: Peer
    member: Member
    expected: dict[str, Like]


def heard(kind: str, reply: FlowerMessage, parcel: Parcel, introduced: Introduction) -> tuple[Message, dict[str, Any]]:
    """The reply's message and what it says about itself; ReplyRefused says why it is not accepted."""
    if reply.has_error():
        raise ReplyRefused(f"its node reports: {printable(reply.error.reason or reply.error.code)}")
    if reply.metadata.src_node_id != parcel.member.node:
        raise ReplyRefused("another node sent it")
    allowed = NUMBERS if kind == TRAIN else of_a_site()
    message, about = from_records(reply.content, parcel.expected, allowed)
    if "error" in about:
        diverged = kind == TRAIN and about["error"] == SENTENCES["training"]
        raise (UpdateDiverged if diverged else ReplyRefused)(printable(about["error"]))
    if about.get("name") != parcel.peer.name:
        raise ReplyRefused(f"it calls itself '{printable(about.get('name'), 80)}'")
    try:
        reason = _refuse_training(parcel, message, introduced) if kind == TRAIN else _refuse_test(parcel, message)
        reason = reason or refuse_classes(parcel.expected, message, parcel.peer.owned)
    except Exception as error:  # a reply that confuses the check is not a good one
        reason = f"it cannot be checked ({type(error).__name__}: {printable(error)})"
    if reason is not None:
        raise (UpdateDiverged if isinstance(reason, Diverged) else ReplyRefused)(reason)
    return message, about


def _refuse_training(parcel: Parcel, reply: Message, introduced: Introduction) -> str | None:
    reason = refuse_unlike(parcel.expected, reply)
    if reason is not None:
        return reason
    if "loss" not in reply.numbers:
        return "it does not say its loss"
    samples, loss, steps = (reply.numbers.get(name, 0.0) for name in ("samples", "loss", "steps"))
    if samples != introduced.samples:
        return f"it says that it has {samples:g} images and joined with {introduced.samples}"
    if abs(loss) > LARGEST_LOSS or not 0 <= steps <= MOST_STEPS:
        return f"it says that its loss is {loss:g} after {steps:g} steps, which is not believed"
    return None


def _refuse_test(parcel: Parcel, reply: Message) -> str | None:
    """NaN is a metric that is undefined there."""
    reason = refuse_names(parcel.expected, reply) or refuse_tensors(parcel.expected, reply)
    if reason is not None:
        return reason
    wrong = [name for name, value in reply.numbers.items() if not (value != value or 0 <= value <= HIGHEST)]
    return f"{wrong[0]} is {reply.numbers[wrong[0]]:g}, not from 0 to {HIGHEST}" if wrong else None


def capped(sizes: Sequence[int], share: float) -> list[float]:
    """The sizes, the largest lowered to one level, so that none is more than `share` of their sum; all alike where that
    cannot be. It is the level c with c = share · Σ min(size, c)."""
    if share * len(sizes) <= 1:
        return [1.0] * len(sizes)
    level, ordered = float("inf"), sorted(sizes, reverse=True)
    for lowered, largest in enumerate(ordered):
        level = share * sum(ordered[lowered:]) / (1 - share * lowered)
        if largest <= level:
            break
    return [min(float(size), level) for size in sizes]
