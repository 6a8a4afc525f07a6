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
    """Weights are written as they come and read again one at a time, as often as needed; whatever else a reply holds is
    small and stays. The file has no name: it is gone with the process, also if it is killed."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.rest: list[tuple[Peer, Message, int]] = []

    def add(self, peer: Peer, reply: Message) -> None:
        weights = reply["weights"].contiguous().numpy()
        rest = {name: tensor for name, tensor in reply.tensors.items() if name != "weights"}
        self.rest.append((peer, Message(rest, reply.numbers), len(weights)))
        self.file.write(weights.tobytes())

    def __len__(self) -> int:
        return len(self.rest)

    def __iter__(self) -> Iterator[Reply]:
        self.file.flush()
        start = 0
        for peer, rest, count in self.rest:
            self.file.seek(start)
            weights = np.frombuffer(self.file.read(4 * count), np.float32).copy()
            start += 4 * count
            yield peer, Message({"weights": torch.from_numpy(weights)} | rest.tensors, rest.numbers)
        self.file.seek(start)

    @property
    def integers(self) -> Tensors:
        """Of the first reply: what cannot be averaged."""
        return {name: t for name, t in self.rest[0][1].tensors.items() if not t.is_floating_point()}

    def columns(self, numbers: int) -> Iterator[Tensor]:
        """The replies (clients, some of the weights), column after column, about `numbers` at a time. All have as many
        weights."""
        self.file.flush()
        width, length = max(1, numbers // len(self.rest)), self.rest[0][2]
        for first in range(0, length, width):
            last, rows = min(first + width, length), []
            for place in range(len(self.rest)):
                self.file.seek(4 * (place * length + first))
                rows.append(np.frombuffer(self.file.read(4 * (last - first)), np.float32))
            yield torch.from_numpy(np.stack(rows))
        self.file.seek(4 * length * len(self.rest))
