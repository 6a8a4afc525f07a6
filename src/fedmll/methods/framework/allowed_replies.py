"""Which replies are allowed: the tensors of a reply, their shapes, types and bounds.

Everything that a client sends is compared with this before it is aggregated.
A `TensorSpec` describes one tensor of a reply. If a reply does not fit, a `ReplyProblem` says why. It has a code, which
decides what happens, and a text for people.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from fedmll.core.message import Message, Tensors
from fedmll.methods.framework.client_round import tensors_of
from fedmll.models.flat_weights import FlatWeights

LARGEST_UPDATE = 10  # times 1 + the norm of the sent weights: no honest round of training moves parameters further
LARGEST_GROWTH = 20  # the same for running statistics, which start from 0 and 1 for any data
MOST_SAMPLES = 10**8  # that one client may claim to have


class ProblemCode(Enum):
    """Why a reply is rejected."""

    NAMES = "names"  # a tensor is missing, or there is an unknown one
    NUMBERS = "numbers"  # samples, steps or loss are missing or impossible
    SHAPE = "shape"
    NOT_FINITE = "not finite"  # a number, or a value of a tensor
    RANGE = "range"
    NORM = "norm"
    RULE = "rule"  # a condition of the specification does not hold
    CLASSES = "classes"  # it contains values for classes that the client does not annotate
    DIVERGED = "diverged"  # the weights: not finite, or too far from those that were sent


@dataclass(frozen=True)
class ReplyProblem:
    """Why a reply is rejected."""

    code: ProblemCode
    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def diverged(self) -> bool:
        """Whether numbers are too large, or not finite: training diverged. The usual cause is a learning rate that is
        too high. It may not be the client's fault: from a damaged model honest training diverges too."""
        return self.code in (ProblemCode.DIVERGED, ProblemCode.NOT_FINITE, ProblemCode.NORM)


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor of a reply must be: its shape, type and range."""

    shape: tuple[int | None, ...]  # None: from 1 to `most`
    dtype: torch.dtype = torch.float32
    low: float = -math.inf
    high: float = math.inf
    norm: float = math.inf  # the largest allowed
    most: int = 1
    why: str = ""  # why the shape is what it is, for the message
    rule: Callable[[Tensor], bool] | None = None  # a further condition …
    broken: str = ""  # … and the message if it does not hold: "is not symmetric"
    by_class: int | None = None  # the axis of the classes: a client reports only the classes that it annotates …
    absent: float = 0  # … and has this value for the others
    check_together: Callable[[Tensors, float], str | None] | None = None  # (all tensors of the part, samples) → message

    @classmethod
    def trained_weights(cls, weights: Tensor, why: str = "", flat: FlatWeights | None = None) -> TensorSpec:
        """The specification of weights after a round of training that started from `weights`, with this layout."""
        return TrainedWeightsSpec(tuple(weights.shape), weights.dtype, why=why, start=weights, flat=flat)

    def find_problem(self, name: str, tensor: Tensor) -> ReplyProblem | None:
        """Why a tensor of a reply is rejected, or None."""
        problem = self.find_shape_problem(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if problem is not None:
            return problem
        if tensor.is_floating_point() and not all_finite(tensor):
            return ReplyProblem(ProblemCode.NOT_FINITE, f"{name} holds NaN or infinite values")
        bounded = self.low > -math.inf or self.high < math.inf
        if bounded and tensor.numel() and not (self.low <= float(tensor.min()) and float(tensor.max()) <= self.high):
            return ReplyProblem(ProblemCode.RANGE, f"{name} holds values outside [{self.low:g}, {self.high:g}]")
        if self.norm < math.inf and float(tensor.norm()) > self.norm:
            text = f"{name} has the norm {float(tensor.norm()):.3g}; at most {self.norm:.3g} is accepted"
            return ReplyProblem(ProblemCode.NORM, text)
        if self.rule is not None and not self.rule(tensor):
            return ReplyProblem(ProblemCode.RULE, f"{name} {self.broken}")
        return None

    def find_class_problem(self, name: str, tensor: Tensor, annotated: Tensor) -> ReplyProblem | None:
        """Whether a tensor has values for classes that its client does not annotate."""
        if self.by_class is None:
            return None
        others = tensor.index_select(self.by_class, (~annotated).nonzero().flatten())
        if not bool((others != self.absent).any()):
            return None
        return ReplyProblem(ProblemCode.CLASSES, f"{name} has values for classes that the client does not annotate")

    def find_shape_problem(self, name: str, shape: tuple[int, ...], dtype: str) -> ReplyProblem | None:
        """Whether the shape and type are wrong. They can be checked before the tensor is allocated."""
        if self._fits(shape) and f"torch.{dtype}" == str(self.dtype):
            return None
        because = f" ({self.why})" if self.why else ""
        text = f"{name} is torch.{dtype} {shape}, not {self.dtype} {self.shape}{because}"
        return ReplyProblem(ProblemCode.SHAPE, text)

    @property
    def most_bytes(self) -> int:
        """The size of the largest tensor that fits."""
        return math.prod(self.most if size is None else size for size in self.shape) * self.dtype.itemsize

    def _fits(self, shape: tuple[int, ...]) -> bool:
        allowed = [(1, self.most) if size is None else (size, size) for size in self.shape]
        return len(shape) == len(allowed) and all(a <= n <= b for n, (a, b) in zip(shape, allowed, strict=True))


@dataclass(frozen=True)
class TrainedWeightsSpec(TensorSpec):
    """Weights after a round of training. The *update* is bounded, so that neither very large nor inverted weights are
    accepted. Running statistics have a moderate norm, and no variance is negative. What only the server sets has not
    changed."""

    start: Tensor | None = None
    flat: FlatWeights | None = None

    @cached_property
    def size(self) -> float:
        assert self.start is not None
        return 1 + float(torch.linalg.vector_norm(self.start[: len(self.start) - self.server_count]))

    @property
    def server_count(self) -> int:
        return 0 if self.flat is None else self.flat.server_count

    def find_problem(self, name: str, tensor: Tensor) -> ReplyProblem | None:
        assert self.start is not None
        problem = self.find_shape_problem(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if problem is not None:
            return problem
        count = 0 if self.flat is None else self.flat.buffer_count
        end, stop, size = tensor.numel() - count, tensor.numel() - self.server_count, self.size
        moved = float(torch.dist(tensor, self.start) if not count else torch.dist(tensor[:end], self.start[:end]))
        statistics = float(torch.linalg.vector_norm(tensor[end:stop])) if count else 0.0
        text = None
        if not torch.equal(tensor[stop:], self.start[stop:]):
            return ReplyProblem(ProblemCode.RULE, f"{name} changed the mean or the scale of the features")
        if not math.isfinite(moved + statistics) and not bool(torch.isfinite(tensor).all()):
            text = f"{name} holds NaN or infinite values"
        elif not moved <= LARGEST_UPDATE * size:
            text = f"{name} moved by the norm {moved:.3g}; at most {LARGEST_UPDATE * size:.3g} is accepted"
        elif not statistics <= LARGEST_GROWTH * size:
            limit = LARGEST_GROWTH * size
            text = f"{name} has running statistics of the norm {statistics:.3g}; at most {limit:.3g} is accepted"
        if text is not None:
            return ReplyProblem(ProblemCode.DIVERGED, text)
        if self.flat is not None and has_negative_variance(tensor, self.flat):
            return ReplyProblem(ProblemCode.RULE, f"{name} holds a negative variance")
        return None


def all_finite(tensor: Tensor) -> bool:
    """The sum is computed in one pass and is finite only if all numbers are; otherwise each number is looked at."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def has_negative_variance(weights: Tensor, flat: FlatWeights) -> bool:
    """BatchNorm takes the root of its variances: a negative one makes every later prediction NaN."""
    return any(bool((weights[place] < 0).any()) for place in flat.variances(len(weights)))


def find_reply_problem(specs: Mapping[str, TensorSpec], reply: Message) -> ReplyProblem | None:
    """Why a reply to a round of training is rejected, or None."""
    problem = find_name_problem(specs, reply)
    if problem is not None:
        return problem
    if not all(math.isfinite(number) for number in reply.numbers.values()):
        return ReplyProblem(ProblemCode.NOT_FINITE, "one of its numbers is not finite")
    if not reply.numbers.get("samples", 0) > 0:
        return ReplyProblem(ProblemCode.NUMBERS, "it does not state how many samples it has")
    return find_tensor_problem(specs, reply) or _find_inconsistency(specs, reply)


def _find_inconsistency(specs: Mapping[str, TensorSpec], reply: Message) -> ReplyProblem | None:
    """Tensors that are valid one by one may still contradict each other."""
    for name, spec in specs.items():
        if spec.check_together is not None:
            part = name.rpartition("/")[0]
            text = spec.check_together(tensors_of(part, reply.tensors), reply.numbers["samples"])
            if text is not None:
                return ReplyProblem(ProblemCode.RULE, f"{part}: {text}")
    return None


def find_name_problem(specs: Mapping[str, TensorSpec], reply: Message) -> ReplyProblem | None:
    """Whether tensors are missing or unknown."""
    missing, unknown = specs.keys() - reply.tensors.keys(), reply.tensors.keys() - specs.keys()
    if missing:
        return ReplyProblem(ProblemCode.NAMES, f"it lacks {', '.join(sorted(missing))}")
    if not unknown:
        return None
    parts = sorted({name.rpartition("/")[0] for name in unknown} - {""})
    whose = ", ".join(f"neither in `sums` nor in `reply_spec` of the part '{part}'" for part in parts)
    text = f"it holds the unknown key {', '.join(sorted(unknown))}{f' ({whose})' if whose else ''}"
    return ReplyProblem(ProblemCode.NAMES, text)


def find_tensor_problem(specs: Mapping[str, TensorSpec], reply: Message) -> ReplyProblem | None:
    """The first problem of its tensors, each looked at alone."""
    problems = (spec.find_problem(name, reply[name]) for name, spec in specs.items())
    return next((problem for problem in problems if problem is not None), None)


def find_class_problem(specs: Mapping[str, TensorSpec], reply: Message, annotated: Tensor) -> ReplyProblem | None:
    """Whether a reply has values for classes that its client does not annotate."""
    problems = (spec.find_class_problem(name, reply[name], annotated) for name, spec in specs.items())
    return next((problem for problem in problems if problem is not None), None)
