"""A second pass over a round's replies without K models in memory: they are on disk meanwhile."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import numpy as np
import torch

from fedmll.client import Peer, Reply
from fedmll.message import Message


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
