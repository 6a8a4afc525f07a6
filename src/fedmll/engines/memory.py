"""Clients' memories (tags, control variates, …) on disk: one file a client and round, so that a run killed anywhere
finds each client as it was at the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

from fedmll import files
from fedmll.message import Tensors

KEPT = 2  # checkpoints
Versions = set[tuple[int, int]]  # of memories: client and round


class MemoryStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.latest: dict[int, int] = {}  # client → the round of its newest memory
        self.unsynced = False
        self.replaced: tuple[list[Path], ...] = tuple([] for _ in range(KEPT))  # since a checkpoint, the newest first
        self.saved = 0  # the round of the newest memory that a checkpoint refers to
        self.keeps_all = False

    def path(self, client: int, round: int) -> Path:
        return self.folder / _name(client, round)

    def read(self, path: Path | None) -> Tensors:
        return {} if path is None else load_file(path)

    def write(self, path: Path, memory: Tensors, *, durable: bool = True) -> None:
        """What is not durable is so from the next `sync` on: a checkpoint waits for the disk once, not twice a file."""
        if memory:
            with files.replacing(path, durable=durable) as temporary:
                save_file({name: tensor.contiguous() for name, tensor in memory.items()}, temporary)

    def written(self, client: int, round: int) -> None:
        before = self.latest.get(client, round)
        if before > self.saved and before != round and not self.keeps_all:  # no checkpoint knows it
            self.path(client, before).unlink(missing_ok=True)
        elif before != round:
            self.replaced[0].append(self.path(client, before))
        self.latest[client] = round
        self.unsynced = True

    def sync(self) -> None:
        """Before a checkpoint refers to what was written."""
        if self.unsynced:
            files.sync_disk(self.folder)
            self.unsynced = False

    def keep_only(self, versions: Versions | None) -> None:
        """Delete every memory that no checkpoint (and nobody now) refers to. None: it is not known which, keep all."""
        self.keeps_all, self.saved = versions is None, max(self.latest.values(), default=0)
        if versions is not None and self.folder.is_dir():
            wanted = {_name(*version) for version in versions}
            for path in self.folder.glob("[0-9]*.[0-9]*.safetensors"):
                if path.name not in wanted:
                    path.unlink()

    def checkpointed(self, kept: Callable[[], Versions | None]) -> None:
        """Delete what was replaced before the oldest checkpoint that is kept: only that is looked at, and not the files
        of all clients. What is then left over goes with the next `keep_only`."""
        *younger, oldest = self.replaced
        if not self.keeps_all:
            for path in oldest:
                path.unlink(missing_ok=True)
        self.replaced, self.saved = ([], *younger), max(self.latest.values(), default=0)


def _name(client: int, round: int) -> str:
    return f"{client:06d}.{round:06d}.safetensors"
