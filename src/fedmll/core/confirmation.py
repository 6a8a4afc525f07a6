"""Questions to the person at the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

Confirm = Callable[[str], bool]  # a question → whether the answer is yes


def confirm_at_terminal(question: str) -> bool:
    """Ask a yes/no question. Without a terminal nobody can answer, so the result is False."""
    return sys.stdin.isatty() and input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def confirm_always(question: str) -> bool:
    """The answer is known beforehand: the user gave it as an option, or the sites belong to the user (a simulation)."""
    return True
