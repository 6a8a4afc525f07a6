"""The cache of prepared images: each set is made once, kept as one memory-mapped `.npy`, and shared by all processes.

It lives in `$FEDMLL_CACHE`, else in `~/.cache/fedmll`, or (a site of a real federation) in the site's own folder;
deleting it only costs the time to build it again.
A file there is complete or absent: it is written under another name, by one process at a time, and renamed when done.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedmll.data.dataset import mapped_file
from fedmll.errors import DataError
from fedmll.files import replacing, write

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called as `progress(done, total, what)`, e.g. `progress(1024, 8208, "decoding images")`."""

Shape: TypeAlias = tuple[int, int, int, int]
Fill: TypeAlias = Callable[[NDArray[Any]], None]

RAM_LIMIT = 64 * 2**20  # larger arrays are mapped from the cache, so that all processes share one copy
LAYOUT_VERSION = 2  # part of every key: a change of how images are prepared must not find the old ones


def silent(done: int, total: int, what: str) -> None:
    """A progress that shows nothing."""


def cache_folder() -> Path:
    return Path(os.environ.get("FEDMLL_CACHE") or "~/.cache/fedmll").expanduser()


_own_folder: ContextVar[Path | None] = ContextVar("_own_folder", default=None)


def image_folder() -> Path:
    """Where prepared images lie: in the cache folder, or where `images_in` says."""
    return _own_folder.get() or cache_folder()


@contextmanager
def images_in(folder: Path) -> Iterator[None]:
    """Meanwhile prepared images are kept in a folder of their own, which can be shut to others and removed."""
    token = _own_folder.set(folder)
    try:
        yield
    finally:
        _own_folder.reset(token)


def content_key(*parts: object) -> str:
    """A name for what is prepared from exactly these parts; arrays count with their contents, type and shape."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (LAYOUT_VERSION, *parts):
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype.str} {part.shape}\x1f".encode())
            digest.update(np.ascontiguousarray(part).view(np.uint8).data)
        else:
            digest.update(f"{part}\x1f".encode())
    return digest.hexdigest()


def store_key(store: NDArray[np.uint8]) -> str:
    """The key of an image store. A store of the cache has it in its name already, and need not be read again."""
    if (own := getattr(store, "key", None)) is not None:  # of images that are decoded when they are asked for
        return str(own)
    path = mapped_file(store)
    return path.stem if path is not None and path.parent == image_folder() else content_key(store)


def cached(
    key: str, prepare: Callable[[], tuple[tuple[int, ...], Fill]], progress: Progress = silent,
    what: str = "preparing images", kind: Any = np.uint8,
) -> NDArray[Any]:  # fmt: skip
    """The array called `key`, mapped. If it is not there, prepare() says its shape and how to fill it in."""
    path = image_folder() / f"{key}.npy"
    images = _mapped(path, kind)
    if images is not None:
        return images
    with alone(path, lambda: progress(0, 1, f"{what}: waiting for another process that does the same")):
        images = _mapped(path, kind)  # the process that we waited for has made it
        if images is None:
            _build(path, *prepare(), kind)
            images = _mapped(path, kind)
    if images is None:
        raise DataError(f"The image cache '{path}' cannot be read back after it was written; check the disk.")
    return images


def remembered(key: str, make: Callable[[], dict[Any, Any]]) -> dict[str, Any]:
    """A few facts about images under a key of their own; make() finds them out if they are not there."""
    path = image_folder() / f"{key}.json"
    facts = _read_facts(path)
    if facts is None:
        with alone(path, lambda: None):
            facts = _read_facts(path)  # the process that we waited for has found them
            if facts is None:
                facts = remember(key, make())
    return facts


def remember(key: str, facts: dict[Any, Any]) -> dict[str, Any]:
    text = json.dumps(facts)
    write(image_folder() / f"{key}.json", text)
    return dict(json.loads(text))


def in_ram_or_cached(
    key: Callable[[], str], shape: Shape, fill: Fill, progress: Progress = silent, what: str = "preparing images"
) -> NDArray[np.uint8]:
    """Small arrays are simply filled in memory; the key is worked out only for those that are cached."""
    if math.prod(shape) > RAM_LIMIT:
        return cached(key(), lambda: (shape, fill), progress, what)
    images = np.zeros(shape, dtype=np.uint8)
    fill(images)
    return images


def _mapped(path: Path, kind: Any) -> NDArray[Any] | None:
    """The array of a good file; None if there is none, or one that was cut short by a failing disk."""
    try:
        images = np.load(path, mmap_mode="r", allow_pickle=False)
    except (FileNotFoundError, ValueError, EOFError):
        return None
    except OSError as error:
        raise _unusable(path.parent, error) from None
    return images if images.dtype == kind and images.ndim >= 3 else None


def _read_facts(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        raise _unusable(path.parent, error) from None


def _build(path: Path, shape: tuple[int, ...], fill: Fill, kind: Any) -> None:
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)  # we hold the lock, so whoever wrote this was killed
    needed, free = math.prod(shape) * np.dtype(kind).itemsize, shutil.disk_usage(path.parent).free
    if needed > free:  # asked beforehand: writing to a mapped file on a full disk kills the process
        raise DataError(
            f"The prepared images need {needed / 2**20:,.0f} MB and the cache folder '{path.parent}' has "
            f"{free / 2**20:,.0f} MB free. Make room, choose a smaller image size, or {_elsewhere()} on a larger disk."
        )
    with replacing(path) as temporary:
        images = np.lib.format.open_memmap(temporary, mode="w+", dtype=kind, shape=shape)
        fill(images)
        images.flush()


@contextmanager
def alone(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Only one process at a time prepares `path`. The system frees the lock of a process that is killed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The empty lock file stays: removing it would let a third process lock a new one while a second still waits.
        lock = path.with_suffix(".lock").open("a")
    except OSError as error:
        raise _unusable(path.parent, error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unusable(folder: Path, error: OSError) -> DataError:
    return DataError(f"The cache '{folder}' cannot be used ({error.strerror}): {_elsewhere()} that you can write to.")


def _elsewhere() -> str:
    return "set FEDMLL_CACHE to a folder" if _own_folder.get() is None else "give --memory a folder"
