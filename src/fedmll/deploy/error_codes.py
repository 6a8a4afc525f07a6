"""Codes that the server and its sites send to each other instead of text, and the texts for people.

- RejectionCode: why the server rejects a client, which sees ADVICE or `explain_rejection`.
- SiteErrorCode: what the server learns about an error at a site. The site's own operator sees the full text.

Only a code of these fixed lists travels. The text comes from the fedmll that is installed where the code arrives. So a
server cannot print its own text on a client's screen, a client learns nothing about other clients, and no error message
carries a file name, a path or a patient's number to the server.
"""

from __future__ import annotations

import re
from enum import StrEnum

from fedmll.core.errors import ClientError, ConfigError, DataError, FedmllError, ReplyRejected
from fedmll.core.files import is_disk_full
from fedmll.core.text import printable

MAX_LINE, MAX_TEXT = 1000, 20_000  # characters of a site's own output
FLOWER_ERROR_CODE = 9000  # outside the range of Flower's own error codes
REJECTION = re.compile(rf"\[code: {FLOWER_ERROR_CODE}\] fedmll rejects: ([a-z]+)(?: (-?[0-9]{{1,12}}))?")


class RejectionCode(StrEnum):
    """Why a client is rejected."""

    # at the port, before a request is read (request_guard.py)
    CLOCK = "clock"
    TWICE = "twice"
    REVOKED = "revoked"
    UNKNOWN = "unknown"
    SERVER = "server"
    # when the client introduces itself (membership.py)
    NAME = "name"
    VALIDATING = "validating"
    TRAINING = "training"
    UNINVITED = "uninvited"
    EXCLUDED = "excluded"
    TAKEN = "taken"
    CLASSES = "classes"
    FROZEN = "frozen"
    CHANGED = "changed"
    INTRODUCTION = "introduction"
    OTHER = "other"


ADVICE = {
    RejectionCode.NAME: "your key belongs to another name; join with the --name that the operator gave you",
    RejectionCode.VALIDATING: "you are a client of this run; take part with `fedmll join`",
    RejectionCode.TRAINING: "you are a validator in this run; take part with `fedmll validate`",
    RejectionCode.UNINVITED: "your name is not on this run's list of clients; ask its operator",
    RejectionCode.EXCLUDED: (
        "the operator has excluded you from this run; stay connected: you may be readmitted, or ask the operator"
    ),
    RejectionCode.TAKEN: "another client is already connected under your name",
    RejectionCode.CLASSES: "you have a class that this federation does not have; see --classes",
    RejectionCode.FROZEN: (
        "the frozen part of your model differs from the server's; use the same text encoder, weights and versions"
    ),
    RejectionCode.CHANGED: "your images or labels differ from those that this run began with; restore them",
    RejectionCode.INTRODUCTION: "the server does not understand your description of your data; is it the same fedmll?",
    RejectionCode.OTHER: "ask the server's operator; the reason is in the server's log",
}


class JoinRejected(ReplyRejected):
    """A client may not take part. The code is sent to the client; the text is for the server's operator."""

    def __init__(self, code: RejectionCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def describe_rejection(code: object) -> str | None:
    """The text that a client shows for the code in the server's message; None if the message has no code."""
    if not isinstance(code, str):
        return None
    known = next((each for each in RejectionCode if each == code), RejectionCode.OTHER)
    return f"the server rejected you: {ADVICE.get(known, ADVICE[RejectionCode.OTHER])}"


def format_rejection(code: RejectionCode, seconds: float | None = None) -> str:
    """A rejection by the port as one line that Flower writes to the client's log; `explain_rejection` reads it."""
    return f"fedmll rejects: {code}" + ("" if seconds is None else f" {round(seconds)}")


def explain_rejection(log: str, server: str, name: str, key: object) -> tuple[RejectionCode, str] | None:
    """The port's last rejection in the log of a SuperNode, and a text for the client's user; None if there is none."""
    found = REJECTION.findall(log)
    if not found:
        return None
    code, seconds = found[-1]
    offset = int(seconds or 0)
    texts = {
        RejectionCode.CLOCK: (
            f"The clock of this machine is {abs(offset)} s {'ahead of' if offset > 0 else 'behind'} the server's, so "
            "the server takes its messages for old ones. Set the clock (timedatectl set-ntp true, or ask your "
            "administrator), then join again."
        ),
        RejectionCode.TWICE: (
            f"Another program is connected to {server} with the same key ({key}), so this one is rejected. Stop the "
            "other program first. If it is not yours, tell the server's operator: the key must be revoked and replaced."
        ),
        RejectionCode.REVOKED: (
            f"The operator of {server} has revoked this key ({key}). Create a new one with `fedmll keys rotate {name}` "
            "and send its .pub file."
        ),
        RejectionCode.UNKNOWN: (
            f"{server} does not know the key of {name}. Send the public key ({name}.pub, created by `fedmll keys new "
            f"{name}`) to its operator, who puts it into the server's folder of keys and restarts the server."
        ),
        RejectionCode.SERVER: (
            f"The certificate that this site sees at {server} is not the one of the federation's server: something "
            "between them ends the TLS connection, for example a reverse proxy. Tell the server's operator: TLS must "
            "be passed through unchanged."
        ),
    }
    known = next((each for each in texts if each == code), None)
    return None if known is None else (known, texts[known])


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
    """A site does not do what the server asks. The server learns the code; the text is shown at the site only."""

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
    """Text for the code that a site sent, at the server. A code that is not in the list is not shown."""
    known = next((each for each in SiteErrorCode if each == code), None)
    return "it reports an error that this server does not know" if known is None else known.description


def printable_block(text: str) -> str:
    """Several lines (a traceback), indented so that none of them looks like a line of fedmll's own output."""
    return "\n".join(f"  | {printable(line, MAX_LINE)}" for line in text[:MAX_TEXT].splitlines())
