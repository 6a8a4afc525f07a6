"""Client states (tags, control variates, …) on disk: one tensor file per client and round. After a crash every client
continues from its state at the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedmll.core import files
from fedmll.core.message import Tensors
from fedmll.core.tensor_files import DamagedFile, read_tensors, write_tensors

KEPT = 2  # checkpoints
StateVersions = set[tuple[int, int]]  # pairs of client and round


class ClientStateStore:
    """The files of all clients in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.latest: dict[int, int] = {}  # client → the round of its newest state
        self.unsynced = False
        self.replaced: tuple[list[Path], ...] = tuple([] for _ in range(KEPT))  # since each checkpoint, newest first
        self.saved = 0  # the newest round that a checkpoint refers to
        self.keeps_all = False

    def path(self, client: int, round: int) -> Path:
        return self.folder / _name(client, round)

    def read(self, path: Path | None) -> Tensors:
        """The state in a file; DamagedFile if it is not what was written. None: the client has no state yet."""
        return {} if path is None else read_tensors(path)

    def write(self, path: Path, state: Tensors, *, durable: bool = True) -> None:
        """`durable = False`: the file is on the disk only after the next `sync`, which waits once for all files."""
        if state:
            write_tensors(path, state, durable=durable)

    def set_aside_if_damaged(self, client: int, round: int) -> str | None:
        """Why a state that a checkpoint refers to cannot be used; None if it can. A damaged file is renamed."""
        path = self.path(client, round)
        try:
            read_tensors(path)
        except DamagedFile as error:
            renamed = f" It was renamed to {files.move_damaged_file(path).name}." if path.exists() else ""
            return f"{error}{renamed}"
        return None

    def written(self, client: int, round: int) -> None:
        """Note that a worker has written the state of a client."""
        before = self.latest.get(client, round)
        if before > self.saved and before != round and not self.keeps_all:  # no checkpoint refers to it
            self.path(client, before).unlink(missing_ok=True)
        elif before != round:
            self.replaced[0].append(self.path(client, before))
        self.latest[client] = round
        self.unsynced = True

    def sync(self) -> None:
        """Wait until everything is on the disk, before a checkpoint refers to it."""
        if self.unsynced:
            files.sync_disk(self.folder)
            self.unsynced = False

    def keep_only(self, versions: StateVersions | None) -> None:
        """Delete every state that no checkpoint refers to and that is not in use. None: it is not known which those
        are, so all are kept."""
        self.keeps_all, self.saved = versions is None, max(self.latest.values(), default=0)
        if versions is not None and self.folder.is_dir():
            wanted = {_name(*version) for version in versions}
            for path in self.folder.glob("[0-9]*.*[0-9].safetensors"):
                if path.name not in wanted:
                    path.unlink()

    def checkpointed(self, kept: Callable[[], StateVersions | None]) -> None:
        """Delete what was replaced before the oldest checkpoint that is kept. Only these files are looked at, not those
        of all clients; the next `keep_only` deletes what remains."""
        *younger, oldest = self.replaced
        if not self.keeps_all:
            for path in oldest:
                path.unlink(missing_ok=True)
        self.replaced, self.saved = ([], *younger), max(self.latest.values(), default=0)


def _name(client: int, round: int) -> str:
    return f"{client:06d}.{round:06d}.safetensors"
