"""Message: named tensors and named numbers, nothing else. What travels, what is stored and what is merged."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

Tensors = dict[str, Tensor]  # also the server's state and a client's memory: plain data, resumable for free


@dataclass
class Message:
    tensors: Tensors = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def same(self, other: Message) -> bool:
        """Whether it has the very same tensors: many clients are sent what is only once in memory."""
        mine, others = self.tensors, other.tensors
        return mine.keys() == others.keys() and all(tensor is others[name] for name, tensor in mine.items())

    @property
    def nbytes(self) -> int:
        """Bytes on a wire: the tensors, and eight bytes a number."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values()) + 8 * len(self.numbers)
