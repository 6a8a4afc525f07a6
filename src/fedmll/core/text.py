"""Text for people: safe printing of text from other machines, suggestions for misspelt names, yes/no questions."""

from __future__ import annotations

import difflib
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable

Confirm = Callable[[str], bool]  # a question → whether the answer is yes
MAX_CHARACTERS = 400
TERMINAL_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_].*?(?:\x07|\x1b\\|$)|[ -/]*[0-~])?", re.DOTALL)
LINE_BREAKS = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")


def printable(text: object, max_characters: int = MAX_CHARACTERS) -> str:
    """Make text from another machine safe for a terminal and for one line of a log.

    Terminal escape sequences, control characters and marks that reverse the writing direction are removed, a line
    break becomes one space, and long text is cut: " …" marks the cut.
    """
    whole = str(text)
    start = whole[: 4 * max_characters]  # megabytes need not be searched
    line = LINE_BREAKS.sub(" ", TERMINAL_SEQUENCES.sub("", start)).rstrip()
    clean = "".join(" " if c.isspace() else c for c in line if c.isspace() or unicodedata.category(c)[0] != "C")
    return clean if len(clean) <= max_characters and len(start) == len(whole) else f"{clean[:max_characters]} …"


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: `; did you mean 'fedprox'?`, or all known names if none is similar."""
    choices = sorted(known)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(choices)}."


def confirm_at_terminal(question: str) -> bool:
    """Ask a yes/no question. Without a terminal nobody can answer, so the result is False."""
    return sys.stdin.isatty() and input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def confirm_always(question: str) -> bool:
    """The answer is known beforehand: the user gave it as an option, or the sites belong to the user (a simulation)."""
    return True


def letters(name: str) -> str:
    """Only letters and digits, in lower case: spellings differ in the rest."""
    return "".join(letter for letter in name.lower() if letter.isalnum())
