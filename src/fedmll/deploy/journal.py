"""What the operator of a server is told: on the screen, and in log.txt with the time."""

from __future__ import annotations

from pathlib import Path

from fedmll.errors import printable
from fedmll.running.folder import logging_to
from fedmll.running.observers import Observer

LONGEST = 600  # a line


class Journal:
    """The names and reasons in a line may be a client's own words: they are made harmless here, whoever wrote it."""

    def __init__(self, out: Path, observer: Observer) -> None:
        self.out, self.observer = out, observer

    def say(self, text: str) -> None:
        line = printable(text, LONGEST)
        with logging_to(self.out) as log:
            log.info(line)
        self.observer.warning(line)
