"""Exceptions with messages for people: what is wrong, where, and what to do.

The command line prints the message without a traceback and exits with status 2. Errors of the machine (a full disk, too
little memory) stay Python's OSError and MemoryError; the command line describes them and exits with status 1.
"""

from __future__ import annotations


class FedmllError(Exception):
    """An error that the user can correct. Its message is one paragraph."""


class DataError(FedmllError):
    """Data is missing, unreadable or different from what was declared."""


class ConfigError(FedmllError):
    """The experiment names something unknown or asks for something impossible."""


class CheckpointError(FedmllError):
    """A checkpoint is damaged or belongs to another experiment."""


class ClientError(FedmllError):
    """A client could not complete its round (training diverged or its worker died); names the client and the round."""


class ReplyRejected(FedmllError):
    """The server does not accept a client's reply; names the client and the reason."""


class UpdateDiverged(ReplyRejected):
    """A rejected reply whose cause may be the model that was sent to the client."""


class AggregationError(FedmllError):
    """The aggregate of a round's replies is not a valid model."""


class FederationError(FedmllError):
    """A real federation cannot continue: the server, the network or too many clients failed. No result is lost."""


class TooFewReplies(FederationError):
    """A round received fewer valid replies than it needs; it can be repeated."""
