"""Label sets of clients that know their own classes only. The operator registers them with the clients' keys
(`keys/NAME.labels`, a class a line), and a client is served the rows of its registered classes only. Otherwise whoever
names a class would be sent its row, and the answer to a guess would say whether there is such a class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedmll.errors import ConfigError, ReplyRefused, nearest

Registered = Mapping[str, frozenset[str]]


def registered(folder: Path, names: Sequence[str], classes: Sequence[str]) -> Registered:
    """Name → its classes, from NAME.labels in the folder of keys."""
    missing = [name for name in names if not (folder / f"{name}.labels").is_file()]
    if missing:
        raise ConfigError(
            f"This method keeps label sets private, and {folder} does not say which classes {', '.join(missing)} may "
            f"have: write {missing[0]}.labels there, a class a line, as the client told you."
        )
    found = {}
    for name in names:
        lines = (line.strip() for line in (folder / f"{name}.labels").read_text(encoding="utf-8").splitlines())
        found[name] = frozenset(line for line in lines if line and not line.startswith("#"))
        strange = sorted(found[name] - set(classes))
        if strange:
            raise ConfigError(
                f"{folder / f'{name}.labels'} has the class '{strange[0]}', which this federation does not have"
                f"{nearest(strange[0], classes)}"
            )
    return found


def check(sets: Registered, name: str, claimed: Sequence[str]) -> None:
    """One answer to everything that is not registered, whether there is such a class or not."""
    if not set(claimed) <= sets[name]:
        raise ReplyRefused("the label set that it says it has is not the one registered with its key")
