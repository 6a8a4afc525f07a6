"""A second pass over the replies of a round without all models in memory: they are kept on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmll.core.message import Message, Tensors
from fedmll.methods.client_round import ClientInfo, Reply

Places = dict[str, tuple[int, Tensor]]  # tensor → its offset, and an empty tensor of the same shape and type


class DiskBuffer:
    """Replies are written as they arrive and read again one at a time, in any order and as often as needed. The file is
    in `folder`, or where temporary files are. It has no name: the system deletes it when the process ends or is
    killed."""

    def __init__(self, folder: Path | None = None) -> None:
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.written: list[tuple[ClientInfo, Places, dict[str, float]]] = []
        self.end = 0

    def add(self, client: ClientInfo, reply: Message) -> None:
        places: Places = {}
        self.file.seek(self.end)
        for name, tensor in reply.tensors.items():
            places[name] = (self.end, torch.empty_like(tensor, device="meta"))
            self.end += self.file.write(tensor.contiguous().numpy().tobytes())
        self.written.append((client, places, reply.numbers))

    def __len__(self) -> int:
        return len(self.written)

    def __getitem__(self, place: int) -> Reply:
        """The reply at a position, in the order of arrival, from 0 on."""
        client, places, numbers = self.written[place]
        return client, Message({name: self._read(*where) for name, where in places.items()}, numbers)

    def __iter__(self) -> Iterator[Reply]:
        return (self[place] for place in range(len(self)))

    @property
    def senders(self) -> list[str]:
        return [client.name for client, _, _ in self.written]

    @property
    def integers(self) -> Tensors:
        """The integer tensors of the first reply, which cannot be averaged."""
        places = self.written[0][1]
        return {name: self._read(*where) for name, where in places.items() if not where[1].is_floating_point()}

    def columns(self, numbers: int) -> Iterator[Tensor]:
        """The weights of all replies (clients, columns), some columns at a time: about `numbers` numbers. All replies
        have the same number of weights."""
        width, length = max(1, numbers // len(self)), len(self.written[0][1]["weights"][1])
        for first in range(0, length, width):
            last, rows = min(first + width, length), []
            for _, places, _ in self.written:
                self.file.seek(places["weights"][0] + 4 * first)
                rows.append(np.frombuffer(self.file.read(4 * (last - first)), np.float32))
            yield torch.from_numpy(np.stack(rows))

    def _read(self, start: int, like: Tensor) -> Tensor:
        self.file.seek(start)
        content = bytearray(self.file.read(like.numel() * like.element_size()))
        return (torch.frombuffer(content, dtype=like.dtype) if content else torch.zeros(0, dtype=like.dtype)).reshape(
            like.shape
        )
