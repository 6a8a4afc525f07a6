"""Files that are either the old ones or the new ones, never half of each."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedmll.errors import FedmllError

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary path in the same folder that becomes `path` when the block ends well: fsync, then rename. What is not
    durable outlives this process, however it ends, but no power cut before `sync_disk`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if durable:
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def is_leftover(path: Path) -> bool:
    """What a process that was killed while writing leaves behind."""
    return path.name.startswith(".") and path.suffix == ".tmp"


def write(path: Path, content: bytes | str) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def room_for(folder: Path, advice: str) -> Iterator[None]:
    """A full disk ends the block with a sentence. Files are whole, old or new; what to do is the caller's advice."""
    try:
        yield
    except FedmllError:
        raise
    except Exception as error:
        if not is_full(error):
            raise
        raise FedmllError(f"The disk of {folder} is full. {advice}") from None


def is_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL
    return any(f"os error {number}" in str(error) for number in FULL)  # safetensors has errors of its own


def sync_folder(folder: Path) -> None:
    """Make a rename durable: the directory entry itself must reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_disk(folder: Path) -> None:
    """Everything on the folder's disk, whichever process wrote it: one wait instead of two a file."""
    if sys.platform != "linux":
        os.sync()
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
