"""The image cache: built once, by one process, completely."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from encoded import encode, encoded_files, random_pixels

from fedmll.core.errors import DataError
from fedmll.data.images import cache
from fedmll.data.images.decode import EncodedImages, decoded_images


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDMLL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_existing_cache_entry_is_not_built_again(cache_folder: Path) -> None:
    pixels = random_pixels(3, 8, 8)
    first = decoded_images("key", lambda: encoded_files([encode(image) for image in pixels]), None).store

    def must_not_be_called() -> EncodedImages:
        raise AssertionError("decoded twice")

    again = decoded_images("key", must_not_be_called, None).store
    assert np.array_equal(first, again)
    assert len(list(cache_folder.glob("*.npy"))) == 1


def test_cache_keys_distinguish_contents_types_and_shapes() -> None:
    numbers = np.arange(6, dtype=np.uint8)
    keys = [
        cache.content_key("a", "bc"),
        cache.content_key("ab", "c"),
        cache.content_key(numbers),
        cache.content_key(numbers.reshape(2, 3)),
        cache.content_key(numbers.astype(np.int16)),
        cache.content_key(numbers[::-1]),
    ]
    assert len(set(keys)) == len(keys)
    assert cache.content_key(numbers.reshape(2, 3).T) == cache.content_key(np.array([[0, 3], [1, 4], [2, 5]], np.uint8))


def test_key_of_mapped_store_is_its_name_and_of_store_in_memory_its_contents(cache_folder: Path) -> None:
    store = cache.cached_array("thename", lambda: ((1, 1, 2, 2), lambda images: images.fill(7)))
    assert cache.store_key(store) == "thename"
    assert cache.store_key(np.array(store)) == cache.content_key(np.full((1, 1, 2, 2), 7, np.uint8))


def test_large_arrays_are_mapped_and_small_ones_are_not(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MEMORY_LIMIT", 100)

    def fill(images: np.ndarray) -> None:
        images[:] = 3

    small = cache.in_memory_or_cached(lambda: "small", (1, 1, 10, 10), fill)
    large = cache.in_memory_or_cached(lambda: "large", (1, 1, 10, 11), fill)
    assert not isinstance(small, np.memmap)
    assert isinstance(large, np.memmap)
    assert small.min() == large.min() == 3
    assert [path.name for path in cache_folder.glob("*.npy")] == ["large.npy"]


def test_damaged_cache_file_is_built_again(cache_folder: Path) -> None:
    def prepare() -> tuple[cache.Shape, cache.Fill]:
        return (2, 1, 50, 50), lambda images: images.fill(9)

    cache.cached_array("key", prepare)
    file = cache_folder / "key.npy"
    os.truncate(file, 1000)
    assert cache.cached_array("key", prepare).min() == 9
    file.write_bytes(b"")
    assert cache.cached_array("key", prepare).min() == 9


def test_a_failing_build_leaves_nothing_behind(cache_folder: Path) -> None:
    def fail(images: np.ndarray) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        cache.cached_array("key", lambda: ((1, 1, 2, 2), fail))
    assert [path.name for path in cache_folder.iterdir()] == ["key.lock"]


def test_too_little_disk_space_is_reported_before_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(DataError, match=r"need .* MB.*FEDMLL_CACHE"):
        cache.cached_array("key", lambda: ((1, 1, 2, 2), lambda images: None))


def test_cache_that_is_not_a_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDMLL_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="FEDMLL_CACHE"):
        cache.cached_array("key", lambda: ((1, 1, 2, 2), lambda images: None))


BUILDER = """
import os, signal, sys, time
import numpy as np
from fedmll.data.images.cache import cached_array

def fill(images):
    with open(sys.argv[1], "a") as log:
        log.write("built\\n")
    for value in range(len(images)):
        time.sleep(0.02)
        images[value] = value
        if "die" in sys.argv and value == 10:
            images.flush()
            os.kill(os.getpid(), signal.SIGKILL)

store = cached_array("key", lambda: ((30, 1, 100, 100), fill))
assert all((store[value] == value).all() for value in range(30)), "incomplete"
"""


def start_builder(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    script = textwrap.dedent(BUILDER)
    return subprocess.Popen([sys.executable, "-c", script, str(log), *arguments])


def test_processes_that_start_together_build_once(tmp_path: Path, cache_folder: Path) -> None:
    log = tmp_path / "log"
    builders = [start_builder(log) for _ in range(3)]
    for builder in builders:
        builder.communicate(timeout=60)
    assert [builder.returncode for builder in builders] == [0, 0, 0], "each found every image complete"
    assert log.read_text() == "built\n"


def test_waiting_for_another_process_is_reported(tmp_path: Path, cache_folder: Path) -> None:
    cache_folder.mkdir()
    with (cache_folder / "key.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said: list[str] = []

        def show(done: int, total: int, what: str) -> None:
            said.append(what)
            fcntl.flock(lock, fcntl.LOCK_UN)  # the other process is done

        cache.cached_array("key", lambda: ((1, 1, 2, 2), lambda images: images.fill(1)), show, "decoding images")
    assert said == ["decoding images: waiting for another process that does the same work"]


def test_killed_process_leaves_no_incomplete_cache_file(tmp_path: Path, cache_folder: Path) -> None:
    log = tmp_path / "log"
    killed = start_builder(log, "die")
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not (cache_folder / "key.npy").exists()
    assert len(list(cache_folder.glob(".key.npy.*.tmp"))) == 1, "the killed builder was in the middle of writing"
    next_one = start_builder(log)
    next_one.communicate(timeout=60)
    assert next_one.returncode == 0
    assert log.read_text() == "built\nbuilt\n"
    assert not list(cache_folder.glob(".key.npy.*.tmp")), "what the killed one left is removed"
