"""Atomic writes, file locks, full disks, damaged files: a file is the old one or the new one, never half of each."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fedmll.core.errors import ConfigError, FedmllError
from fedmll.core.text import printable

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
WRITE_ERRORS = (*DISK_FULL, errno.EROFS, errno.EACCES, errno.EPERM)
FREE_SPACE = (
    "Free some space, then start the command again; a run that has begun continues with `fedmll resume FOLDER`, and no "
    "finished round is lost."
)


@contextmanager
def atomic_replace(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path in the same folder, which replaces `path` when the block ends without an error.

    Args:
        path: the file to create or to replace.
        durable: wait until the file is on the disk (fsync). A file that is not durable survives the end of this
            process, but a power cut only after `sync_disk`.
    """
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
    except Exception as error:
        number = _error_number(error)
        if number not in WRITE_ERRORS:
            raise
        raise OSError(number, os.strerror(number), str(path)) from None  # name the file, not its temporary name
    finally:
        with suppress(OSError):  # a read-only disk: there is no temporary file
            temporary.unlink(missing_ok=True)


def is_leftover(path: Path) -> bool:
    """Whether a file is the temporary file of a process that was killed while writing."""
    return path.name.startswith(".") and path.suffix == ".tmp"


def write_atomic(path: Path, content: bytes | str) -> None:
    with atomic_replace(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def move_damaged_file(path: Path) -> Path:
    """Rename a damaged file to NAME.damaged-N with the first free number; return the new path."""
    return path.rename(free_name_for_damaged(path))


def free_name_for_damaged(path: Path) -> Path:
    """NAME.damaged-N with the first free number."""
    number = 1
    while (free := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return free


class FileLocked(FedmllError):
    """Another process holds the lock. `content` is what that process wrote into the lock file."""

    def __init__(self, path: Path, content: str) -> None:
        super().__init__(f"Another process has locked {path}.")
        self.content = content


@contextmanager
def file_lock(
    path: Path, *, wait: bool = True, on_wait: Callable[[], None] = lambda: None, inherited: bool = True,
    mode: int = 0o666,
) -> Iterator[BinaryIO]:  # fmt: skip
    """Hold an exclusive lock on a file, which is created if needed, and yield the file (mode "a+b", unbuffered).

    The operating system releases the lock when the process ends, however it ends. The file is never removed: otherwise
    a third process could lock a new file while a second one still waits for the old one.

    Args:
        path: the file to lock.
        wait: wait for the lock; otherwise raise `FileLocked` if another process holds it.
        on_wait: called once before waiting.
        inherited: forked children hold the lock too, and threads of one process exclude each other. False: the lock
            belongs to this process alone, and `is_file_locked` sees it; a worker that survives its killed parent for a
            moment does not hold it.
        mode: permissions of a new file.
    """
    acquire: Callable[[BinaryIO, int], None] = fcntl.flock if inherited else fcntl.lockf
    with open(path, "a+b", buffering=0, opener=lambda name, flags: os.open(name, flags, mode)) as file:
        try:
            acquire(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if not wait:
                file.seek(0)
                raise FileLocked(path, file.read().decode(errors="replace").strip()) from None
            on_wait()
            acquire(file, fcntl.LOCK_EX)
        yield file


@contextmanager
def exclusive_lock(
    path: Path, problem: str, advice: str, *, inherited: bool = True, mode: int = 0o666
) -> Iterator[None]:  # fmt: skip
    """Hold a lock whose file says which process holds it.

    Args:
        path: the file to lock.
        problem: the beginning of the error message if another process holds the lock, without a full stop.
        advice: the end of that message.
        inherited: see `file_lock`.
        mode: see `file_lock`.

    Raises:
        ConfigError: another process holds the lock; the message says which process, on which host and since when.
    """
    try:
        with file_lock(path, wait=False, inherited=inherited, mode=mode) as file:
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            with suppress(OSError):  # on a full disk the lock holds without the text
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}, since {started}".encode())
            yield
    except FileLocked as error:
        raise ConfigError(f"{problem} ({printable(error.content) or 'unknown'}). {advice}") from None


def is_file_locked(path: Path) -> bool:
    """Whether a process holds a lock with `inherited=False` on the file.

    The lock is not taken for the test: that could reject another process that starts at this moment. On systems other
    than Linux the answer is always False.
    """
    if not path.is_file() or sys.platform != "linux":
        return False
    flock_struct = "hhqqi4x"  # type, whence, start, length, process
    with path.open("rb") as file:
        answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(flock_struct, fcntl.F_RDLCK, 0, 0, 0, 0))
    return bool(struct.unpack(flock_struct, answer)[0] != fcntl.F_UNLCK)


@contextmanager
def explain_full_disk(folder: Path, advice: str) -> Iterator[None]:
    """Turn the error of a full disk into a `FedmllError` that ends with the caller's advice."""
    try:
        yield
    except FedmllError:
        raise
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise FedmllError(f"The disk of {folder} is full. {advice}") from None


def is_disk_full(error: BaseException) -> bool:
    return _error_number(error) in DISK_FULL


def _error_number(error: BaseException) -> int:
    """The errno of an error; 0 if it has none. safetensors raises errors of its own, with the number in the text."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found and not isinstance(error, FedmllError) else 0


def describe_file_error(error: OSError) -> str | None:
    """One paragraph for a person about a file that cannot be read or written; None for other errors."""
    if error.filename is None or error.errno is None:
        return f"The disk is full. {FREE_SPACE}" if is_disk_full(error) else None
    path = Path(os.fsdecode(error.filename))
    place = path.parent if path.name.startswith(".") else path  # hidden files are ours, and mean their folder
    if is_disk_full(error):
        return f"{place} cannot be written: the disk is full, or has no free inodes. {FREE_SPACE}"
    if error.errno in WRITE_ERRORS:
        return (
            f"{place} cannot be written or read ({error.strerror}). Choose another folder, or change its permissions."
        )
    return f"{place}: {error.strerror}."


def sync_folder(folder: Path) -> None:
    """Make a rename durable: wait until the directory entry is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_disk(folder: Path) -> None:
    """Wait until everything on the folder's disk is durable, whichever process wrote it.

    One wait for many files is faster than two waits per file.
    """
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
    """The SHA-256 of a file's contents, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
