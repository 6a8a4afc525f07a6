"""Registered label sets of clients with private labels, which know their own classes only.

The operator registers them with the clients' keys (`keys/NAME.labels`, one class per line), and a client receives the
rows of its registered classes only. Otherwise a client could name any class and receive its row, and the answer to a
guess would reveal whether the class exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedmll.core.errors import ConfigError
from fedmll.core.text import suggest
from fedmll.deploy.error_codes import JoinRejected, RejectionCode

LabelSets = Mapping[str, frozenset[str]]  # by client


def read_label_sets(folder: Path, names: Sequence[str], classes: Sequence[str]) -> LabelSets:
    """Read the label sets of these clients from NAME.labels in the folder of keys."""
    missing = [name for name in names if not (folder / f"{name}.labels").is_file()]
    if missing:
        raise ConfigError(
            f"This method keeps label sets private, and {folder} does not say which classes {', '.join(missing)} may "
            f"have: write {missing[0]}.labels there, one class per line, as the client told you."
        )
    label_sets = {}
    for name in names:
        lines = (line.strip() for line in (folder / f"{name}.labels").read_text(encoding="utf-8").splitlines())
        label_sets[name] = frozenset(line for line in lines if line and not line.startswith("#"))
        unknown = sorted(label_sets[name] - set(classes))
        if unknown:
            raise ConfigError(
                f"{folder / f'{name}.labels'} has the class '{unknown[0]}', which this federation does not have"
                f"{suggest(unknown[0], classes)}"
            )
    return label_sets


def check_label_set(label_sets: LabelSets, name: str, claimed: Sequence[str]) -> None:
    """Reject a client that claims other classes than those that are registered.

    The text is the same for all classes that are not registered, whether they exist or not.
    """
    if not set(claimed) <= label_sets[name]:
        raise JoinRejected(RejectionCode.OTHER, "its label set is not the one that is registered with its key")
