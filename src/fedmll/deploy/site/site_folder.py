"""A site's own folder (`--state-dir`), readable by its owner only and used by one join at a time.

flower/                Flower's files, the SuperNode's log
cache/                 prepared images and tokens; removed when the join ends, unless --keep-cache
approved.json          the studies that were approved here
released_counts.json   the label counts that have left
audit.jsonl            what left, and when
NAME-OF-A-RUN/         the client state of that run between rounds
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedmll.core.files import exclusive_lock
from fedmll.core.text import printable
from fedmll.deploy.error_codes import SiteError, SiteErrorCode

CACHE, FLOWER, LOCK = "cache", "flower", "join.lock"
MAX_RUNS = 20  # with client state on the disk: a server could give its run another name every time
RUN_NAME = re.compile("[A-Za-z0-9]{1,64}")


@contextmanager
def private_files() -> Iterator[None]:
    """New files get mode 0600 and new folders 0700, also those of processes that are started meanwhile."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def make_private_folder(folder: Path) -> None:
    """Create the folder, or set its mode, to 0700: then others cannot reach older files in it either."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Allow one join at a time in the folder. The operating system frees the lock of a process that is killed."""
    make_private_folder(folder)
    advice = "Wait until it is over, or stop it. A second client needs a folder of its own (--state-dir DIR)."
    with exclusive_lock(folder / LOCK, f"The folder {folder} is in use by another join", advice):
        yield


def run_state_folder(state_dir: Path, run: str) -> Path:
    """The folder for a run's client state.

    The server chooses the name of the run, so it must not lead elsewhere or name one of the site's own folders.
    """
    if not isinstance(run, str) or not RUN_NAME.fullmatch(run) or run.lower() in (CACHE, FLOWER):
        raise SiteError(
            SiteErrorCode.SETTINGS,
            f"The server calls its run '{printable(run, 80)}', which is not a valid folder name.",
        )
    return state_dir / run


def limit_runs(state_dir: Path, run: str) -> None:
    """Remove the empty folders of finished runs, and raise a SiteError if too many others are left.

    Folders with client state are never deleted: their runs may continue.
    """
    others = [path for path in state_dir.iterdir() if path.is_dir() and path.name not in (CACHE, FLOWER, run)]
    for path in others:
        if not any(path.iterdir()):
            path.rmdir()
    left = [path for path in others if path.exists()]
    if len(left) >= MAX_RUNS and not (state_dir / run).exists():
        raise SiteError(
            SiteErrorCode.LIMITS,
            f"{state_dir} contains client state of {len(left)} unfinished runs, and this is the maximum. Remove the "
            "folders of runs that will not continue.",
        )


def clear_cache(state_dir: Path) -> None:
    """Delete the prepared images: they may show patients."""
    shutil.rmtree(state_dir / CACHE, ignore_errors=True)
