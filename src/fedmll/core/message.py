"""`Message`: named tensors and named numbers, nothing else. `DiskBuffer`: messages that are read more than once."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

Tensors = dict[str, Tensor]  # also the type of the server's state and of a client's state
Offsets = dict[str, tuple[int, Tensor]]  # tensor → its offset in a file, and an empty tensor of the same shape and type
Sender = TypeVar("Sender")


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


class DiskBuffer(Generic[Sender]):
    """Messages that are written to disk as they arrive and read again one at a time, in any order.

    Aggregation in two passes needs no more memory than in one. The file is in `folder`, or where temporary files are.
    It has no name: the system deletes it when the process ends or is killed.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.written: list[tuple[Sender, Offsets, dict[str, float]]] = []
        self.end = 0

    def add(self, sender: Sender, message: Message) -> None:
        offsets: Offsets = {}
        self.file.seek(self.end)
        for name, tensor in message.tensors.items():
            offsets[name] = (self.end, torch.empty_like(tensor, device="meta"))
            self.end += self.file.write(tensor.contiguous().numpy().tobytes())
        self.written.append((sender, offsets, message.numbers))

    def __len__(self) -> int:
        return len(self.written)

    def __getitem__(self, position: int) -> tuple[Sender, Message]:
        """The sender and the message at a position, in the order of arrival, from 0 on."""
        sender, offsets, numbers = self.written[position]
        return sender, Message({name: self._read(*where) for name, where in offsets.items()}, numbers)

    def __iter__(self) -> Iterator[tuple[Sender, Message]]:
        return (self[position] for position in range(len(self)))

    @property
    def senders(self) -> list[Sender]:
        return [sender for sender, _, _ in self.written]

    @property
    def integers(self) -> Tensors:
        """The integer tensors of the first message, which cannot be averaged."""
        offsets = self.written[0][1]
        return {name: self._read(*where) for name, where in offsets.items() if not where[1].is_floating_point()}

    def columns(self, numbers: int) -> Iterator[Tensor]:
        """The tensor "weights" of all messages (messages, columns), some columns at a time: about `numbers` numbers."""
        width, length = max(1, numbers // len(self)), len(self.written[0][1]["weights"][1])
        for first in range(0, length, width):
            last, rows = min(first + width, length), []
            for _, offsets, _ in self.written:
                self.file.seek(offsets["weights"][0] + 4 * first)
                rows.append(np.frombuffer(self.file.read(4 * (last - first)), np.float32))
            yield torch.from_numpy(np.stack(rows))

    def _read(self, start: int, like: Tensor) -> Tensor:
        self.file.seek(start)
        content = bytearray(self.file.read(like.numel() * like.element_size()))
        empty = torch.zeros(0, dtype=like.dtype)
        return (torch.frombuffer(content, dtype=like.dtype) if content else empty).reshape(like.shape)
