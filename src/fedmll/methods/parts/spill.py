"""A second pass over a round's replies without K models in memory: they are on disk meanwhile."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedmll.client import Peer, Reply
from fedmll.message import Message, Tensors


class Spill:
    """Weights are written as they come and read again one at a time, in any order, as often as needed; whatever else a
    reply holds is small and stays. The file has no name: it is gone with the process, also if it is killed."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.rest: list[tuple[Peer, Message, int, int]] = []  # …, where its weights begin, how many
        self.end = 0

    def add(self, peer: Peer, reply: Message) -> None:
        weights = reply["weights"].contiguous().numpy()
        rest = {name: tensor for name, tensor in reply.tensors.items() if name != "weights"}
        self.rest.append((peer, Message(rest, reply.numbers), self.end, len(weights)))
        self.file.seek(self.end)
        self.end += self.file.write(weights.tobytes())

    def __len__(self) -> int:
        return len(self.rest)

    def __getitem__(self, place: int) -> Reply:
        """The reply that came as the `place`-th, from 0 on."""
        peer, rest, start, count = self.rest[place]
        self.file.seek(start)
        weights = np.frombuffer(self.file.read(4 * count), np.float32).copy()
        return peer, Message({"weights": torch.from_numpy(weights)} | rest.tensors, rest.numbers)

    def __iter__(self) -> Iterator[Reply]:
        return (self[place] for place in range(len(self)))

    @property
    def integers(self) -> Tensors:
        """Of the first reply: what cannot be averaged."""
        return {name: t for name, t in self.rest[0][1].tensors.items() if not t.is_floating_point()}

    def columns(self, numbers: int) -> Iterator[Tensor]:
        """The replies (clients, some of the weights), column after column, about `numbers` at a time. All have as many
        weights."""
        width, length = max(1, numbers // len(self.rest)), self.rest[0][3]
        for first in range(0, length, width):
            last, rows = min(first + width, length), []
            for place in range(len(self.rest)):
                self.file.seek(4 * (place * length + first))
                rows.append(np.frombuffer(self.file.read(4 * (last - first)), np.float32))
            yield torch.from_numpy(np.stack(rows))
