"""A site's own folder (`--memory`): for its owner's eyes only, of one join at a time; what is damaged is set aside.

flower/          Flower's files, the SuperNode's log
cache/           prepared images and kept tokens; removed when the join ends, unless kept on request
approved.json    the experiments that were approved here
NAME-OF-A-RUN/   what the site's method remembers between rounds
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedmll.deploy.sentences import Refused, plain
from fedmll.errors import ConfigError

CACHE, FLOWER, LOCK = "cache", "flower", "join.lock"
MOST_RUNS = 20  # whose memories are kept: a server may give its run another name every time
RUN_NAME = re.compile("[A-Za-z0-9]{1,64}")


@contextmanager
def private() -> Iterator[None]:
    """What is written meanwhile has mode 0600, new folders 0700; also what processes started meanwhile write."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def make_private(folder: Path) -> None:
    """The folder, with mode 0700: what lies in it from before is out of reach too."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


@contextmanager
def occupied(folder: Path, name: str) -> Iterator[None]:
    """One join at a time has the folder. The system frees the lock of a process that is killed."""
    make_private(folder)
    with (folder / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                f"The memory folder {folder} is in use by another join ({lock.read().strip() or 'unknown'}). Wait "
                "until that one is over or stop it; a second client needs a folder of its own (--memory DIR)."
            ) from None
        lock.truncate(0)
        lock.write(f"{name}, process {os.getpid()}\n")
        lock.flush()
        yield


def folder_of_run(memory: Path, run: str) -> Path:
    """What the server calls its run becomes a folder here: it must not be one of the site's own, or lead elsewhere."""
    if not isinstance(run, str) or not RUN_NAME.fullmatch(run) or run.lower() in (CACHE, FLOWER):
        raise Refused("settings", f"The server calls its run '{plain(str(run), 80)}', which is no name for a folder.")
    return memory / run


def make_room(memory: Path, run: str) -> None:
    """For another run's memory. Folders of runs that are over are empty; Refused: too many others are not. Nothing of
    them is deleted: their runs may go on."""
    others = [path for path in memory.iterdir() if path.is_dir() and path.name not in (CACHE, FLOWER, run)]
    for path in others:
        if not any(path.iterdir()):
            path.rmdir()
    left = [path for path in others if path.exists()]
    if len(left) >= MOST_RUNS and not (memory / run).exists():
        raise Refused(
            "limits",
            f"{memory} holds memories of {len(left)} runs that did not end, and no more are begun. Remove the folders "
            "of those that will not go on.",
        )


def set_aside(path: Path) -> Path:
    """Under another name, with a number that is free; nothing is deleted."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def clear_cache(memory: Path) -> None:
    """The prepared images: of patients, perhaps."""
    shutil.rmtree(memory / CACHE, ignore_errors=True)
