"""What a good reply looks like. Everything that a client sends is compared with this before it is merged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedmll.client import under
from fedmll.message import Message, Tensors
from fedmll.models.flat import FlatWeights

LARGEST_UPDATE = 10  # times 1 + the norm of what was sent: no honest round of training moves parameters further
LARGEST_GROWTH = 20  # the same for running statistics, which start from 0 and 1 whatever the data is
MOST_SAMPLES = 10**8  # that one client may say it has


@dataclass(frozen=True)
class Like:
    """What a tensor of a reply must be: its shape, type and range, all stated."""

    shape: tuple[int | None, ...]  # None: from 1 to `most`
    dtype: torch.dtype = torch.float32
    low: float = -math.inf
    high: float = math.inf
    norm: float = math.inf  # the largest
    most: int = 1
    why: str = ""  # the shape is what it is
    rule: Callable[[Tensor], bool] | None = None  # what else must hold …
    broken: str = ""  # … and what to say if it does not
    by_class: int | None = None  # along this axis are the classes: a client speaks only of those that it annotates …
    absent: float = 0  # … and this stands where it does not
    together: Callable[[Tensors, float], str | None] | None = None  # a reason, of all of the part's tensors and samples

    @classmethod
    def sent(cls, weights: Tensor, why: str = "", flat: FlatWeights | None = None) -> Like:
        """Weights after a round of training that started from these. `flat` knows which of them are what."""
        return Trained(tuple(weights.shape), weights.dtype, why=why, start=weights, flat=flat)

    def refuse(self, name: str, tensor: Tensor) -> str | None:
        reason = self.refuse_shape(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if reason is not None:
            return reason
        if tensor.is_floating_point() and not all_finite(tensor):
            return f"{name} holds NaN or infinite values"
        bounded = self.low > -math.inf or self.high < math.inf
        if bounded and tensor.numel() and not (self.low <= float(tensor.min()) and float(tensor.max()) <= self.high):
            return f"{name} holds values outside [{self.low:g}, {self.high:g}]"
        if self.norm < math.inf and float(tensor.norm()) > self.norm:
            return f"{name} has the norm {float(tensor.norm()):.3g}; at most {self.norm:.3g} is believed"
        if self.rule is not None and not self.rule(tensor):
            return f"{name} {self.broken}"
        return None

    def refuse_classes(self, name: str, tensor: Tensor, annotated: Tensor) -> str | None:
        """Of a tensor that is otherwise good: whether it speaks of classes that its client does not annotate."""
        if self.by_class is None:
            return None
        others = tensor.index_select(self.by_class, (~annotated).nonzero().flatten())
        return f"{name} speaks of classes that it does not annotate" if bool((others != self.absent).any()) else None

    def refuse_shape(self, name: str, shape: tuple[int, ...], dtype: str) -> str | None:
        """The same of what is only announced: nothing is allocated for it yet."""
        if self._fits(shape) and f"torch.{dtype}" == str(self.dtype):
            return None
        because = f" ({self.why})" if self.why else ""
        return f"{name} is torch.{dtype} {shape}, not {self.dtype} {self.shape}{because}"

    @property
    def most_bytes(self) -> int:
        """Of the largest tensor that fits."""
        return math.prod(self.most if size is None else size for size in self.shape) * self.dtype.itemsize

    def _fits(self, shape: tuple[int, ...]) -> bool:
        allowed = [(1, self.most) if size is None else (size, size) for size in self.shape]
        return len(shape) == len(allowed) and all(a <= n <= b for n, (a, b) in zip(shape, allowed, strict=True))


class Diverged(str):
    """A reason to refuse a reply that may not be its client's fault: from a spoilt model honest training runs away."""


@dataclass(frozen=True)
class Trained(Like):
    """Weights that came out of a round of training: the *update* is bounded, so that neither large nor turned weights
    pass; running statistics are of an ordinary size, and no variance is negative."""

    start: Tensor | None = None
    flat: FlatWeights | None = None

    @cached_property
    def size(self) -> float:
        assert self.start is not None
        return 1 + float(torch.linalg.vector_norm(self.start))

    def refuse(self, name: str, tensor: Tensor) -> str | None:
        assert self.start is not None
        reason = self.refuse_shape(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if reason is not None:
            return reason
        count = 0 if self.flat is None else self.flat.buffer_count
        end, size = tensor.numel() - count, self.size
        moved = float(torch.dist(tensor, self.start) if not count else torch.dist(tensor[:end], self.start[:end]))
        statistics = float(torch.linalg.vector_norm(tensor[end:])) if count else 0.0
        if not math.isfinite(moved + statistics) and not bool(torch.isfinite(tensor).all()):
            return Diverged(f"{name} holds NaN or infinite values")
        if not moved <= LARGEST_UPDATE * size:
            return Diverged(f"{name} moved by the norm {moved:.3g}; at most {LARGEST_UPDATE * size:.3g} is believed")
        if not statistics <= LARGEST_GROWTH * size:
            believed = LARGEST_GROWTH * size
            return Diverged(f"{name} has statistics of the norm {statistics:.3g}; at most {believed:.3g} is believed")
        return None if self.flat is None else refuse_variances(name, tensor, self.flat)


def all_finite(tensor: Tensor) -> bool:
    """A sum is finite only of finite numbers, and made in one pass; where it is not, one looks at each."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def refuse_variances(name: str, weights: Tensor, flat: FlatWeights) -> str | None:
    """BatchNorm divides by their roots: one that is negative makes every later prediction NaN."""
    if any(bool((weights[place] < 0).any()) for place in flat.variances(len(weights))):
        return f"{name} holds a negative variance"
    return None


def refuse_unlike(expected: Mapping[str, Like], reply: Message) -> str | None:
    """Why a reply to a round of training does not hold what is expected, or None."""
    reason = refuse_names(expected, reply)
    if reason is not None:
        return reason
    if not all(math.isfinite(number) for number in reply.numbers.values()):
        return "one of its numbers is not finite"
    if not reply.numbers.get("samples", 0) > 0:
        return "it does not say how many samples it has"
    return refuse_tensors(expected, reply) or refuse_together(expected, reply)


def refuse_together(expected: Mapping[str, Like], reply: Message) -> str | None:
    """Of tensors that are each good by itself: why they cannot belong together."""
    for name, like in expected.items():
        if like.together is not None:
            part = name.rpartition("/")[0]
            reason = like.together(under(part, reply.tensors), reply.numbers["samples"])
            if reason is not None:
                return f"{part}: {reason}"
    return None


def refuse_names(expected: Mapping[str, Like], reply: Message) -> str | None:
    missing, unknown = expected.keys() - reply.tensors.keys(), reply.tensors.keys() - expected.keys()
    if missing:
        return f"it lacks {', '.join(sorted(missing))}"
    return f"it holds the unknown key {', '.join(sorted(unknown))}" if unknown else None


def refuse_tensors(expected: Mapping[str, Like], reply: Message) -> str | None:
    reasons = (like.refuse(name, reply[name]) for name, like in expected.items())
    return next((reason for reason in reasons if reason is not None), None)


def refuse_classes(expected: Mapping[str, Like], reply: Message, annotated: Tensor) -> str | None:
    """Why a reply that holds what is expected cannot be its client's."""
    reasons = (like.refuse_classes(name, reply[name], annotated) for name, like in expected.items())
    return next((reason for reason in reasons if reason is not None), None)
