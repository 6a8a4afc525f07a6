"""What the operator of a server is told: on the screen, in log.txt with the time, and in the audit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedmll.deploy.audit import Audit
from fedmll.errors import printable
from fedmll.running.folder import logging_to
from fedmll.running.observers import Observer

LONGEST = 600  # a line


class Journal:
    """The names and reasons in a line may be a client's own words: they are made harmless here, whoever wrote it."""

    def __init__(self, out: Path, observer: Observer, record: Callable[..., None] | None = None) -> None:
        self.out, self.observer, self.record = out, observer, record or Audit(out).write

    def say(self, text: str, event: str = "notice", **facts: Any) -> None:
        line = printable(text, LONGEST)
        self.record(event, **facts, text=line)
        with logging_to(self.out) as log:
            log.info(line)
        self.observer.warning(line)
