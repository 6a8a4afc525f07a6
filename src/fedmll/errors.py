"""Errors that speak to a person: what is wrong, where, what to do. The command line prints them and exits with 2."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable
from typing import Any

SHOWN = 400  # characters of what somebody else sent


class FedmllError(Exception):
    """Something the user can put right. Its text is one paragraph; no traceback is shown."""


class DataError(FedmllError):
    """The data is missing, unreadable or not what was announced."""


class ConfigError(FedmllError):
    """The experiment asks for something unknown or impossible."""


class CheckpointError(FedmllError):
    """A checkpoint is damaged or belongs to another experiment."""


class ClientError(FedmllError):
    """A client could not do its round (it diverged, or it killed its worker); names the client and the round."""


class ReplyRefused(FedmllError):
    """A client's reply that the server does not accept; names the client and the reason."""


class UpdateDiverged(ReplyRefused):
    """A reply that is not accepted, for which the model that was sent may be to blame."""


class MergeRefused(FedmllError):
    """What a round's replies make together is not a model."""


class FederationError(FedmllError):
    """A real federation cannot go on: the server, the network or too many clients are gone. Nothing is lost."""


class TooFewReplies(FederationError):
    """A round got fewer good replies than it needs; it can be tried again."""


class RoundSpoilt(FederationError):
    """A reply could not be merged, and half of it may be in the sums; the round is done again without its client. Or
    the model was spoilt that the round began with: it is done again from the one to take `instead`."""

    def __init__(self, text: str, instead: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.instead = instead


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence: `; did you mean 'fedprox'?`, or the list of what is known when nothing is near."""
    choices = sorted(known)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(choices)}."


def printable(text: object, most: int = SHOWN) -> str:
    """What came from another machine, fit for a terminal and for one line of a log: no control characters (escape
    sequences, line breaks, marks that turn the writing round), and not longer than a person reads."""
    start = str(text)[: 4 * most]  # megabytes need not be looked through
    clean = " ".join("".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in start).split())
    return clean if len(clean) <= most and len(start) == len(str(text)) else f"{clean[:most]} …"
