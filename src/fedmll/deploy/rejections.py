"""Why the server rejects a client: codes, and their texts for the client's user.

Only the code travels to the client. The text comes from the fedmll that is installed at the client, so a server cannot
print its own text on a client's screen, and a client learns nothing about other clients.
"""

from __future__ import annotations

import re
from enum import StrEnum

from fedmll.core.errors import ReplyRejected

FLOWER_ERROR_CODE = 9000  # outside the range of Flower's own error codes
REJECTION = re.compile(rf"\[code: {FLOWER_ERROR_CODE}\] fedmll rejects: ([a-z]+)(?: (-?[0-9]{{1,12}}))?")


class RejectionCode(StrEnum):
    """Why a client is rejected."""

    # at the port, before a request is read (request_guard.py)
    CLOCK = "clock"
    TWICE = "twice"
    REVOKED = "revoked"
    UNKNOWN = "unknown"
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


def explain_rejection(log: str, server: str, name: str, key: object) -> str | None:
    """Explain the port's last rejection in the log of a SuperNode, for the client's user.

    Args:
        log: what the SuperNode wrote.
        server: the address of the server.
        name: the name of the client.
        key: the file of the client's key.

    Returns:
        A paragraph, or None if the log has no rejection.
    """
    found = REJECTION.findall(log)
    if not found:
        return None
    code, seconds = found[-1]
    if code == RejectionCode.CLOCK:
        offset = int(seconds or 0)
        direction = "ahead of" if offset > 0 else "behind"
        return (
            f"The clock of this machine is {abs(offset)} s {direction} the server's, so the server takes its messages "
            "for old ones. Set the clock (timedatectl set-ntp true, or ask your administrator), then join again."
        )
    if code == RejectionCode.TWICE:
        return (
            f"Another program is connected to {server} with the same key ({key}), so this one is rejected. Stop the "
            "other program first. If it is not yours, tell the server's operator: the key must be revoked and replaced."
        )
    if code == RejectionCode.REVOKED:
        return (
            f"The operator of {server} has revoked this key ({key}). Create a new one with `fedmll keys rotate {name}` "
            "and send its .pub file."
        )
    if code == RejectionCode.UNKNOWN:
        return (
            f"{server} does not know the key of {name}. Send the public key ({name}.pub, created by `fedmll keys new "
            f"{name}`) to its operator, who puts it into the server's folder of keys and restarts the server."
        )
    return None
