"""Clients' memories (tags, control variates, …) on disk: one file a client and round, so that a run killed anywhere
finds each client as it was at the last checkpoint."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from fedmll import files
from fedmll.message import Tensors


class MemoryStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.latest: dict[int, int] = {}  # client → the round of its newest memory

    def path(self, client: int, round: int) -> Path:
        return self.folder / f"{client:06d}.{round:06d}.safetensors"

    def paths(self, client: int, round: int) -> tuple[Path | None, Path]:
        """The file that the client's memory is in, and the one for its memory after `round`."""
        old = self.latest.get(client)
        return (None if old is None else self.path(client, old)), self.path(client, round)

    def read(self, path: Path | None) -> Tensors:
        return {} if path is None else load_file(path)

    def write(self, path: Path, memory: Tensors) -> None:
        if memory:
            with files.replacing(path) as temporary:
                save_file({name: tensor.contiguous() for name, tensor in memory.items()}, temporary)

    def written(self, client: int, round: int) -> None:
        if self.path(client, round).exists():
            self.latest[client] = round

    def keep_only(self, versions: set[tuple[int, int]] | None) -> None:
        """Delete every memory that no checkpoint (and nobody now) refers to. None: it is not known which, keep all."""
        if versions is not None and self.folder.is_dir():
            wanted = {self.path(*version) for version in versions}
            for path in self.folder.glob("[0-9]*.[0-9]*.safetensors"):
                if path not in wanted:
                    path.unlink()
