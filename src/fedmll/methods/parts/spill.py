"""A second pass over a round's replies without K models in memory: they are on disk meanwhile."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmll.client import Peer, Reply
from fedmll.message import Message, Tensors

Places = dict[str, tuple[int, Tensor]]  # of each tensor: where it begins, and one without values that is like it


class Spill:
    """Replies are written as they come and read again one at a time, in any order, as often as needed. The file has no
    name: it is gone with the process, also if it is killed. It lies in `folder`, or where temporary files do."""

    def __init__(self, folder: Path | None = None) -> None:
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.written: list[tuple[Peer, Places, dict[str, float]]] = []
        self.end = 0

    def add(self, peer: Peer, reply: Message) -> None:
        places: Places = {}
        self.file.seek(self.end)
        for name, tensor in reply.tensors.items():
            places[name] = (self.end, torch.empty_like(tensor, device="meta"))
            self.end += self.file.write(tensor.contiguous().numpy().tobytes())
        self.written.append((peer, places, reply.numbers))

    def __len__(self) -> int:
        return len(self.written)

    def __getitem__(self, place: int) -> Reply:
        """The reply that came as the `place`-th, from 0 on."""
        peer, places, numbers = self.written[place]
        return peer, Message({name: self._read(*where) for name, where in places.items()}, numbers)

    def __iter__(self) -> Iterator[Reply]:
        return (self[place] for place in range(len(self)))

    @property
    def senders(self) -> list[str]:
        return [peer.name for peer, _, _ in self.written]

    @property
    def integers(self) -> Tensors:
        """Of the first reply: what cannot be averaged."""
        places = self.written[0][1]
        return {name: self._read(*where) for name, where in places.items() if not where[1].is_floating_point()}

    def columns(self, numbers: int) -> Iterator[Tensor]:
        """The replies' weights (clients, some of them), column after column, about `numbers` at a time. All have as
        many weights."""
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
