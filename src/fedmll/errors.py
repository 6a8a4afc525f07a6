"""Errors that speak to a person: what is wrong, where, what to do. The command line prints them and exits with 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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


class FederationError(FedmllError):
    """A real federation cannot go on: the server, the network or too many clients are gone. Nothing is lost."""


class TooFewReplies(FederationError):
    """A round got fewer good replies than it needs; it can be tried again."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence: `; did you mean 'fedprox'?`, or the list of what is known when nothing is near."""
    choices = sorted(known)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(choices)}."
