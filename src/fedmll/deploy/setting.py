"""How a federation's server is run: what server.json keeps, and what may change when the run is resumed."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedmll import files
from fedmll.deploy import keys
from fedmll.errors import ConfigError, nearest
from fedmll.running.thresholds import checked_calibration, thresholds_for

FILE, SITES = "server.json", "sites.json"


@dataclass(frozen=True)
class Server:
    """How a federation's server is run. Nothing of it changes a result, but the clients' names."""

    clients: tuple[str, ...]
    host: str = "0.0.0.0"
    port: int = 8000
    keys: str | None = "keys"  # None: insecure
    min_clients: int = 2
    round_timeout: float = 600
    join_timeout: float = 1800  # until those that the run starts with have come
    tries: int = 3  # of a round that gets too few replies
    max_share: float = 1.0  # of one client in an average by size, among those who are asked
    dropped: tuple[str, ...] = ()  # takes no further part, and keeps its place in the list
    validators: tuple[str, ...] = ()  # they only test the common model, and are no clients
    start_with: int | None = None  # clients that must have come before round 1; None: all
    status: str | None = None  # HOST:PORT of the operator's page
    thresholds: str = "f1"  # what they are chosen for, from the sites' validation counts: running/thresholds.py
    calibrate: str = "none"
    run: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        if not self.clients:
            raise ConfigError("--clients names nobody; write for example --clients hospital-a,hospital-b.")
        for name in self.everybody:
            keys.check_name(name)
        if len(set(self.everybody)) != len(self.everybody):
            raise ConfigError("--clients and --validators name somebody twice; each needs a name of its own.")
        if not 1 <= self.min_clients <= len(self.taking_part):
            raise ConfigError(f"--min-clients {self.min_clients} is not possible with {len(self.taking_part)} clients.")
        if not self.min_clients <= self.needed <= len(self.taking_part):
            raise ConfigError(
                f"--start-with {self.needed} is not possible with {len(self.taking_part)} clients, of which a round "
                f"needs {self.min_clients} (--min-clients)."
            )
        thresholds_for(self.thresholds)
        checked_calibration(self.calibrate)
        if not 0 < self.max_share <= 1:
            raise ConfigError(f"--max-share {self.max_share:g} is not a share; it is more than 0, and at most 1.")
        if not all(0 < seconds < math.inf for seconds in (self.round_timeout, self.join_timeout)):
            raise ConfigError("--round-timeout and --join-timeout are seconds, more than 0.")
        if not 0 < self.port < 65536 or self.tries < 1:
            raise ConfigError(f"The port {self.port} is not from 1 to 65535, or a round is tried {self.tries} times.")

    @property
    def taking_part(self) -> tuple[str, ...]:
        return tuple(name for name in self.clients if name not in self.dropped)

    @property
    def everybody(self) -> tuple[str, ...]:
        """Who may connect has a key here; validators come after the clients."""
        return (*self.clients, *self.validators)

    @property
    def invited(self) -> tuple[str, ...]:
        return (*self.taking_part, *self.validators)

    @property
    def needed(self) -> int:
        """How many must have come before round 1."""
        return len(self.taking_part) if self.start_with is None else self.start_with


def save(server: Server, out: Path) -> None:
    files.write(out / FILE, json.dumps(asdict(server), indent=2) + "\n")


def server_in(out: Path) -> Server:
    path = out / FILE
    try:
        values = json.loads(path.read_text())
        kinds = {each.name: str(each.type) for each in fields(Server)}
        wrong = [name for name, value in values.items() if not _fits(value, kinds[name])]
        if wrong:
            raise ValueError(f"{wrong[0]} is {values[wrong[0]]!r}")
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return Server(**values | lists)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"{path}, which says how this server is run (clients, address, keys), cannot be read: {error}. Put it back "
            "from a copy; the run's results and checkpoints are not touched."
        ) from None


def _fits(value: Any, kind: str) -> bool:
    if kind.startswith("tuple"):
        return isinstance(value, list) and all(isinstance(name, str) for name in value)
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
    return (value is None and "None" in kind) or (
        isinstance(value, kinds[kind.partition(" ")[0]]) and not isinstance(value, bool)
    )


def change(
    out: Path,
    *,
    drop: Sequence[str] = (),
    min_clients: int | None = None,
    start_with: int | None = None,
    round_timeout: float | None = None,
    address: tuple[str, int] | None = None,
    status: str | None = None,
) -> Server:
    """For the rest of a run: other deadlines, another address, without some of the clients."""
    server = server_in(out)
    for name in drop:
        if name not in server.clients:
            raise ConfigError(f"--drop {name}: there is no such client in this run{nearest(name, server.clients)}")
    kept = set(server.clients) if begun(out) else _came(out)
    gone = tuple(name for name in server.clients if name in drop and name not in kept)  # nothing depends on them yet
    values: dict[str, Any] = {
        "clients": tuple(name for name in server.clients if name not in gone),
        "dropped": tuple(dict.fromkeys((*server.dropped, *(name for name in drop if name not in gone)))),
    }
    left = [name for name in values["clients"] if name not in values["dropped"]]
    values["min_clients"] = min(server.min_clients, max(1, len(left))) if min_clients is None else min_clients
    if start_with is not None:
        values["start_with"] = start_with
    elif server.start_with is not None:
        values["start_with"] = min(server.start_with, max(1, len(left)))
    values |= {name: given for name, given in (("round_timeout", round_timeout), ("status", status)) if given}
    if address is not None:
        values |= dict(zip(("host", "port"), address, strict=True))
    changed = replace(server, **values)
    if changed != server:
        save(changed, out)
    return changed


def begun(out: Path) -> bool:
    """Whether a round is done: clients are then known by their places in the list."""
    return any((out / "checkpoint").glob("*"))


def _came(out: Path) -> set[str]:
    """Who has introduced itself."""
    path = out / SITES
    try:
        return set(dict(json.loads(path.read_text()))) if path.is_file() else set()
    except (ValueError, TypeError):
        raise unreadable_sites(path) from None


def unreadable_sites(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}, which says what each client has, cannot be read. Put it back from a copy; or move it away: every "
        "client then introduces itself anew, and it is not noticed if its data changed since the run began."
    )
