"""What a site says when it does not do as it is asked. The full reason is shown at the site; what leaves is one of a
fixed list of sentences, so that no error can carry a file's name, a path or a patient's number away."""

from __future__ import annotations

import re
import unicodedata

from fedmll.errors import ClientError, ConfigError, DataError, FedmllError, ReplyRefused
from fedmll.files import is_full

SENTENCES = {
    "data": "its data cannot be used; it sees why",
    "settings": "it cannot work with the settings of this experiment; it sees which",
    "limits": "the experiment is beyond a limit that it has set; it sees which",
    "approval": "nobody there has approved the experiment",
    "path": "the experiment names a path or a file; a site takes files by their digest only",
    "file": "it lacks a file that the experiment starts from (join --weights); it sees which",
    "memory": "it has lost its memory of the round that the run goes on from; it sees what to do",
    "disk": "its disk is full; it sees which",
    "training": "it could not do its round; it sees why",
    "model": "it did not take the model that it was sent; it sees why",
    "validates": "it only validates, and does not train",
    "message": "it was sent something that it cannot read",
    "internal": "an internal error; it sees the details",
}
OF_ERRORS = {DataError: "data", ConfigError: "settings", ClientError: "training", ReplyRefused: "message"}

LONGEST_LINE, LONGEST_TEXT = 1000, 20_000
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_].*?(?:\x07|\x1b\\|$)|[ -/]*[0-~])?", re.DOTALL)
LINE_BREAKS = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")


class Refused(FedmllError):
    """A refusal of a site's own: `code` is what the server hears, the text is for the site."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def sentence(error: Exception) -> str:
    """What leaves the site."""
    if isinstance(error, Refused):
        return SENTENCES[error.code]
    if is_full(error):
        return SENTENCES["disk"]
    codes = (code for kind, code in OF_ERRORS.items() if isinstance(error, kind))
    return SENTENCES[next(codes, "internal")]


def plain(text: str, most: int = LONGEST_LINE) -> str:
    """A text of somebody else's, for one line of a terminal: no escape sequence, no control character, no line break
    (what follows one would look like a line of ours), and not too long."""
    start = LINE_BREAKS.sub(" ", ESCAPES.sub("", text[: 4 * most]))
    shown = "".join(c for c in start if unicodedata.category(c)[0] != "C")
    return shown if len(shown) <= most else f"{shown[:most]} …"


def indented(text: str) -> str:
    """A text of several lines (a traceback), none of which looks like a line of ours."""
    return "\n".join(f"  | {plain(line)}" for line in text[:LONGEST_TEXT].splitlines())
