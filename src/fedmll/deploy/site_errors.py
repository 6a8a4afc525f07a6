"""Errors at a site. The site's operator sees the full text; only an error code leaves the site.

The codes are a fixed list, so no error message can carry a file name, a path or a patient's number to the server. Each
machine turns a code into text by itself (`SiteErrorCode.description`).
"""

from __future__ import annotations

from enum import StrEnum

from fedmll.core.errors import ClientError, ConfigError, DataError, FedmllError, ReplyRejected
from fedmll.core.files import is_disk_full
from fedmll.core.text import printable

MAX_LINE, MAX_TEXT = 1000, 20_000  # characters of a site's own output


class SiteErrorCode(StrEnum):
    """What the server learns about an error at a site."""

    DATA = "data"
    SETTINGS = "settings"
    LIMITS = "limits"
    APPROVAL = "approval"
    SETUP = "setup"
    PATH = "path"
    FILE = "file"
    STATE = "state"
    DISK = "disk"
    TRAINING = "training"
    MODEL = "model"
    VALIDATES = "validates"
    MESSAGE = "message"
    INTERNAL = "internal"

    @property
    def description(self) -> str:
        """A sentence for the server's operator; its subject is the site."""
        return DESCRIPTIONS[self]


DESCRIPTIONS = {
    SiteErrorCode.DATA: "it cannot use its data (details are shown at the site)",
    SiteErrorCode.SETTINGS: "it cannot work with the settings of this experiment (details are shown at the site)",
    SiteErrorCode.LIMITS: "the experiment exceeds a limit that the site has set (the site shows which one)",
    SiteErrorCode.APPROVAL: "nobody at the site has approved the experiment",
    SiteErrorCode.SETUP: "it has already answered a different setup in this join (the site shows what changed)",
    SiteErrorCode.PATH: "the experiment names a path or a file, and a site accepts files by their digest only",
    SiteErrorCode.FILE: "it lacks a file that the experiment needs (join --weights; the site shows which one)",
    SiteErrorCode.STATE: "the client state to continue from is missing or damaged (the site shows what to do)",
    SiteErrorCode.DISK: "its disk is full (the site shows which one)",
    SiteErrorCode.TRAINING: "it could not complete its round (details are shown at the site)",
    SiteErrorCode.MODEL: "it rejected the model that was sent to it (details are shown at the site)",
    SiteErrorCode.VALIDATES: "it only validates and does not train",
    SiteErrorCode.MESSAGE: "it received a message that it cannot read",
    SiteErrorCode.INTERNAL: "an internal error occurred (details are shown at the site)",
}
CODES_OF_ERRORS = {
    DataError: SiteErrorCode.DATA,
    ConfigError: SiteErrorCode.SETTINGS,
    ClientError: SiteErrorCode.TRAINING,
    ReplyRejected: SiteErrorCode.MESSAGE,
}


class SiteError(FedmllError):
    """A site does not do what the server asks.

    Args:
        code: what the server learns.
        text: the full reason, which is shown at the site only.
    """

    def __init__(self, code: SiteErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def error_code(error: Exception) -> SiteErrorCode:
    """The code that leaves the site instead of the error's text."""
    if isinstance(error, SiteError):
        return error.code
    if is_disk_full(error):
        return SiteErrorCode.DISK
    codes = (code for kind, code in CODES_OF_ERRORS.items() if isinstance(error, kind))
    return next(codes, SiteErrorCode.INTERNAL)


def describe_error(code: object) -> str:
    """Text for the code that a site sent, at the server.

    A code that is not in the list is shown as it is, made safe to print.
    """
    known = next((each for each in SiteErrorCode if each == code), None)
    return f"unknown error code '{printable(code, 80)}'" if known is None else known.description


def printable_block(text: str) -> str:
    """Several lines (a traceback), indented so that none of them looks like a line of fedmll's own output."""
    return "\n".join(f"  | {printable(line, MAX_LINE)}" for line in text[:MAX_TEXT].splitlines())
