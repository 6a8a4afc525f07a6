"""`Message`: named tensors and named numbers, nothing else. It is sent, stored and aggregated."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

Tensors = dict[str, Tensor]  # also the type of the server's state and of a client's state


@dataclass
class Message:
    tensors: Tensors = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def shares_tensors(self, other: Message) -> bool:
        """Whether both messages hold the same tensor objects, as when many clients are sent one copy in memory."""
        mine, others = self.tensors, other.tensors
        return mine.keys() == others.keys() and all(tensor is others[name] for name, tensor in mine.items())

    @property
    def nbytes(self) -> int:
        """Size when sent: the tensors, and eight bytes per number."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values()) + 8 * len(self.numbers)
