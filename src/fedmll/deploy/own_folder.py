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
