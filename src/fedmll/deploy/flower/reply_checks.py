"""Checks of a reply before any of it is used.

The reply must come from the node that was asked, fit the message that was sent, and agree with what the client said
about itself when it joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import Message as FlowerMessage

from fedmll.core.errors import ReplyRejected, UpdateDiverged
from fedmll.core.message import Message
from fedmll.deploy.error_codes import SiteErrorCode, describe_error
from fedmll.deploy.flower.client_app import TRAIN
from fedmll.deploy.flower.membership import Member
from fedmll.deploy.flower.records import Info, from_records
from fedmll.deploy.introduction import Introduction
from fedmll.evaluation.metric_definitions import MAX_PERCENT, metrics_from_sites
from fedmll.methods.framework.allowed_replies import (
    ProblemCode,
    ReplyProblem,
    find_class_problem,
    find_name_problem,
    find_reply_problem,
    find_tensor_problem,
)
from fedmll.methods.framework.base import TensorSpec
from fedmll.methods.framework.client_round import ClientInfo

TRAINING_NUMBERS = ("samples", "steps", "loss")  # in a reply to a round of training
MAX_LOSS = 1e6
MAX_STEPS = 1e9


@dataclass(frozen=True, kw_only=True)
class PendingMessage:
    """A message that was sent and not answered yet."""

    client: ClientInfo
    member: Member  # the connection that it was sent to
    specs: dict[str, TensorSpec]  # of the tensors in a valid reply


def check_reply(
    kind: str, reply: FlowerMessage, pending: PendingMessage, introduction: Introduction
) -> tuple[Message, Info]:
    """Decode and check a reply to a message of this kind (train, evaluate, …).

    Raises:
        UpdateDiverged: training diverged, perhaps because of the model that was sent.
        ReplyRejected: the reply is invalid; the text says why.
    """
    if reply.has_error():
        raise ReplyRejected(f"its node reports Flower's error {int(reply.error.code)}")  # the reason is free text
    if reply.metadata.src_node_id != pending.member.node:
        raise ReplyRejected("another node sent it")
    numbers = TRAINING_NUMBERS if kind == TRAIN else metrics_from_sites()
    message, info = from_records(reply.content, pending.specs, numbers)
    if "error" in info:
        diverged = kind == TRAIN and info["error"] == SiteErrorCode.TRAINING
        raise (UpdateDiverged if diverged else ReplyRejected)(describe_error(info["error"]))
    if info.get("name") != pending.client.name:
        raise ReplyRejected("it calls itself by another name")
    try:
        if kind == TRAIN:
            problem = _training_problem(pending, message, introduction)
        else:
            problem = _evaluation_problem(pending, message)
        problem = problem or find_class_problem(pending.specs, message, pending.client.owned)
    except Exception as error:  # a reply that makes a check fail is invalid
        text = f"it cannot be checked ({type(error).__name__})"
        problem = ReplyProblem(ProblemCode.RULE, text)
    if problem is not None:
        raise (UpdateDiverged if problem.diverged else ReplyRejected)(problem.text)
    return message, info


def _training_problem(pending: PendingMessage, reply: Message, introduction: Introduction) -> ReplyProblem | None:
    problem = find_reply_problem(pending.specs, reply)
    if problem is not None:
        return problem
    if "loss" not in reply.numbers:
        return ReplyProblem(ProblemCode.NUMBERS, "it does not state its loss")
    samples, loss, steps = (reply.numbers.get(name, 0.0) for name in ("samples", "loss", "steps"))
    if samples != introduction.samples:
        text = f"it claims {samples:g} images and joined with {introduction.samples}"
        return ReplyProblem(ProblemCode.NUMBERS, text)
    if abs(loss) > MAX_LOSS or not 0 <= steps <= MAX_STEPS:
        text = f"it claims a loss of {loss:g} after {steps:g} steps, which is impossible"
        return ReplyProblem(ProblemCode.NUMBERS, text)
    return None


def _evaluation_problem(pending: PendingMessage, reply: Message) -> ReplyProblem | None:
    """A metric may be NaN: it is undefined on the site's data."""
    problem = find_name_problem(pending.specs, reply) or find_tensor_problem(pending.specs, reply)
    if problem is not None:
        return problem
    wrong = [name for name, value in reply.numbers.items() if not (value != value or 0 <= value <= MAX_PERCENT)]
    if not wrong:
        return None
    return ReplyProblem(ProblemCode.NUMBERS, f"{wrong[0]} is {reply.numbers[wrong[0]]:g}, not from 0 to {MAX_PERCENT}")


def cap_shares(sizes: Sequence[int], max_share: float) -> list[float]:
    """Lower the largest sizes to a common level c, so that none is more than `max_share` of the sum.

    c is the solution of c = max_share · Σ min(size, c). If there is none, all sizes become 1.
    """
    if max_share * len(sizes) <= 1:
        return [1.0] * len(sizes)
    level, ordered = float("inf"), sorted(sizes, reverse=True)
    for lowered, largest in enumerate(ordered):
        level = max_share * sum(ordered[lowered:]) / (1 - max_share * lowered)
        if largest <= level:
            break
    return [min(float(size), level) for size in sizes]
