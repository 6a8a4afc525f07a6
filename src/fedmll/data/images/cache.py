"""The cache of prepared images: each set is prepared once, stored as one `.npy` file and memory-mapped by all
processes.

The cache is in `$FEDMLL_CACHE`, by default `~/.cache/fedmll`; a site of a real federation uses the site's own folder.
It can be deleted: it is then built again. A file in it is always complete: one process at a time writes it under
another name and renames it at the end.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import DataError
from fedmll.core.files import atomic_replace, file_lock, write_atomic
from fedmll.data.dataset import mapped_file

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called as `progress(done, total, what)`, e.g. `progress(1024, 8208, "decoding images")`."""

Shape: TypeAlias = tuple[int, int, int, int]
Fill: TypeAlias = Callable[[NDArray[Any]], None]

MEMORY_LIMIT = 64 * 2**20  # bytes; larger arrays are mapped from the cache, so that all processes share one copy
LAYOUT_VERSION = 2  # part of each key, so that images prepared by an older version are not used


def no_progress(done: int, total: int, what: str) -> None:
    """A progress callback that shows nothing."""


def cache_folder() -> Path:
    return Path(os.environ.get("FEDMLL_CACHE") or "~/.cache/fedmll").expanduser()


_separate_folder: ContextVar[Path | None] = ContextVar("_separate_folder", default=None)


def image_folder() -> Path:
    """The folder of prepared images: the cache folder, or the folder of `image_cache_in`."""
    return _separate_folder.get() or cache_folder()


@contextmanager
def image_cache_in(folder: Path) -> Iterator[None]:
    """Keep prepared images in a separate folder during the block, so that it can be private and can be removed."""
    token = _separate_folder.set(folder)
    try:
        yield
    finally:
        _separate_folder.reset(token)


def content_key(*parts: object) -> str:
    """A cache key for something prepared from exactly these parts; arrays count with contents, type and shape."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (LAYOUT_VERSION, *parts):
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype.str} {part.shape}\x1f".encode())
            digest.update(np.ascontiguousarray(part).view(np.uint8).data)
        else:
            digest.update(f"{part}\x1f".encode(errors="surrogateescape"))  # file names need not be UTF-8
    return digest.hexdigest()


def store_key(store: NDArray[np.uint8]) -> str:
    """The cache key of an image store. A store in the cache has the key as its file name and is not read again."""
    if (own := getattr(store, "key", None)) is not None:  # images that are decoded on demand
        return str(own)
    if (joined := getattr(store, "cache_key", None)) is not None:  # a JoinedStore
        return str(joined)
    path = mapped_file(store)
    return path.stem if path is not None and path.parent == image_folder() else content_key(store)


def cached_array(
    key: str, prepare: Callable[[], tuple[tuple[int, ...], Fill]], progress: Progress = no_progress,
    what: str = "preparing images", kind: Any = np.uint8,
) -> NDArray[Any]:  # fmt: skip
    """The memory-mapped array with this key; if it does not exist, `prepare()` returns its shape and a function to
    fill it."""
    path = image_folder() / f"{key}.npy"
    images = _mapped(path, kind)
    if images is not None:
        return images
    with _locked(path, lambda: progress(0, 1, f"{what}: waiting for another process that does the same work")):
        images = _mapped(path, kind)  # another process may have built it in the meantime
        if images is None:
            shape, fill = prepare()
            with _new_array(path, shape, kind) as built:
                fill(built)
            images = _mapped(path, kind)
    if images is None:
        raise DataError(f"The image cache '{path}' cannot be read back after it was written; check the disk.")
    return images


def find_cached_array(key: str, kind: Any) -> NDArray[Any] | None:
    """The memory-mapped array with this key, if it exists."""
    return _mapped(image_folder() / f"{key}.npy", kind)


class CachedArrayWriter:
    """Writes an array of the cache in pieces. Until `finish` the file does not exist; other processes wait for it."""

    def __init__(self, key: str, shape: tuple[int, ...], kind: Any) -> None:
        path = image_folder() / f"{key}.npy"
        with ExitStack() as stack:
            stack.enter_context(_locked(path))
            self.array = stack.enter_context(_new_array(path, shape, kind))
            self.stack = stack.pop_all()

    def finish(self) -> None:
        self.stack.close()

    def abandon(self) -> None:
        """Nothing is kept."""
        stop = KeyboardInterrupt()
        with suppress(KeyboardInterrupt):
            self.stack.__exit__(KeyboardInterrupt, stop, None)


def cached_json(key: str, make: Callable[[], dict[Any, Any]]) -> dict[str, Any]:
    """Stored facts about images; `make()` computes them if they do not exist."""
    path = image_folder() / f"{key}.json"
    facts = _read_facts(path)
    if facts is None:
        with _locked(path):
            facts = _read_facts(path)  # another process may have computed them in the meantime
            if facts is None:
                facts = store_json(key, make())
    return facts


def store_json(key: str, facts: dict[Any, Any]) -> dict[str, Any]:
    text = json.dumps(facts)
    write_atomic(image_folder() / f"{key}.json", text)
    return dict(json.loads(text))


def in_memory_or_cached(
    key: Callable[[], str], shape: Shape, fill: Fill, progress: Progress = no_progress, what: str = "preparing images"
) -> NDArray[np.uint8]:
    """An array in memory if it is small, otherwise in the cache; the key is computed only for the cache."""
    if math.prod(shape) > MEMORY_LIMIT:
        return cached_array(key(), lambda: (shape, fill), progress, what)
    images = np.zeros(shape, dtype=np.uint8)
    fill(images)
    return images


def _mapped(path: Path, kind: Any) -> NDArray[Any] | None:
    """The array of a complete file; None if it does not exist or is truncated."""
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


@contextmanager
def _new_array(path: Path, shape: tuple[int, ...], kind: Any) -> Iterator[NDArray[Any]]:
    """An array that becomes the file `path` when the block ends without an error. The caller holds the lock."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)  # we hold the lock, so the process that wrote this was killed
    needed, free = math.prod(shape) * np.dtype(kind).itemsize, shutil.disk_usage(path.parent).free
    if needed > free:  # checked first: writing to a mapped file on a full disk kills the process
        raise DataError(
            f"The prepared images need {needed / 2**20:,.0f} MB and the cache folder '{path.parent}' has "
            f"{free / 2**20:,.0f} MB free. Free some space, choose a smaller image size, or {_how_to_move()} on a "
            "larger disk."
        )
    with atomic_replace(path) as temporary:
        images = np.lib.format.open_memmap(temporary, mode="w+", dtype=kind, shape=shape)
        yield images
        images.flush()


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let only one process at a time prepare `path`."""
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(file_lock(path.with_suffix(".lock"), on_wait=on_wait))
        except OSError as error:
            raise _unusable(path.parent, error) from None
        yield


def _unusable(folder: Path, error: OSError) -> DataError:
    return DataError(f"The cache '{folder}' cannot be used ({error.strerror}): {_how_to_move()} that you can write to.")


def _how_to_move() -> str:
    return "set FEDMLL_CACHE to a folder" if _separate_folder.get() is None else "give --state-dir a folder"
