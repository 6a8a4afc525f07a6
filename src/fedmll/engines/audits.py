"""What the parts of a method count in clients' memories beside the truth, which only a simulation has."""

from __future__ import annotations

import torch

from fedmll.data.federation import Federation
from fedmll.engines.memory import MemoryStore
from fedmll.message import Tensors
from fedmll.methods.contract import Records
from fedmll.methods.method import Method


class Audits:
    def __init__(self, method: Method, data: Federation, store: MemoryStore) -> None:
        self.method, self.data, self.store = method, data, store
        self.parts = method.overriding("audit")
        self.known: dict[int, tuple[int, Tensors]] = {}  # of each client: of which round's memory, and its counts

    def records(self) -> Records:
        """Of all memories; only who has a new one is looked at."""
        if not self.parts or self.method.pooled:  # which has the truth itself
            return {}
        before = self.known
        self.known = {
            client: known if (known := before.get(client)) and known[0] == round else (round, self._of(client, round))
            for client, round in self.store.latest.items()
        }
        records: Records = {}
        for part in self.parts:
            counts = [counted[part.name] for _, counted in self.known.values() if part.name in counted]
            records |= part.audited(torch.stack(counts).sum(0)) if counts else {}
        return records

    def _of(self, client: int, round: int) -> Tensors:
        memory = self.store.read(self.store.path(client, round))
        truth = torch.from_numpy(self.data.truth[self.data.samples[client]])
        counted = ((part.name, part.audit(self.method.own(part, memory), truth)) for part in self.parts)
        return {name: counts for name, counts in counted if counts is not None}
