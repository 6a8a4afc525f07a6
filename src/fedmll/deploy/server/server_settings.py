"""The settings of a federation's server: server.json, and what may change when the run is resumed."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.core.text import suggest
from fedmll.deploy.security.client_keys import check_client_name
from fedmll.evaluation.thresholds import parse_goal, validate_calibration

SETTINGS_FILE, INTRODUCTIONS_FILE = "server.json", "sites.json"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of a federation's server. Of these only the clients' names affect the result."""

    clients: tuple[str, ...]  # the names of the clients
    host: str = "0.0.0.0"  # the address to listen on
    port: int = 8000  # the port to listen on
    keys: str | None = "keys"  # the folder of keys; None: insecure
    min_clients: int = 2  # how many valid replies a round needs
    round_timeout: float = 600  # seconds that a round may take
    join_timeout: float = 1800  # seconds in which the clients that the run starts with must join
    max_attempts: int = 3  # how often a round with too few replies is tried
    max_share: float = 1.0  # the largest share of one client in an average by size
    dropped: tuple[str, ...] = ()  # clients that take no further part; they keep their index
    validators: tuple[str, ...] = ()  # names of sites that only evaluate the model
    start_with: int | None = None  # how many clients must have joined before round 1; None: all
    status: str | None = None  # HOST:PORT of the status page
    thresholds: str = "f1"  # what thresholds are chosen for, from the sites' histograms (evaluation/thresholds.py)
    calibrate: str = "none"  # the calibration of probabilities
    announced: int | None = None  # the number of clients in the setup that sites approve; None: all of `clients`
    run: str = field(default_factory=lambda: secrets.token_hex(8))  # the name of the run

    def __post_init__(self) -> None:
        if not self.clients:
            raise ConfigError("--clients is empty; write for example --clients hospital-a,hospital-b.")
        for name in self.all_names:
            check_client_name(name)
        if len(set(self.all_names)) != len(self.all_names):
            raise ConfigError("--clients and --validators contain a name twice; each needs a name of its own.")
        count = len(self.participants)
        if not 1 <= self.min_clients <= count:
            raise ConfigError(f"--min-clients {self.min_clients} is not possible with {count} clients.")
        if not self.min_clients <= self.clients_to_start <= count:
            raise ConfigError(
                f"--start-with {self.clients_to_start} is not possible with {count} clients, of which a round needs "
                f"{self.min_clients} (--min-clients)."
            )
        parse_goal(self.thresholds)
        validate_calibration(self.calibrate)
        if not 0 < self.max_share <= 1:
            raise ConfigError(f"--max-share {self.max_share:g} is not a share: it must be more than 0 and at most 1.")
        if not all(0 < seconds < math.inf for seconds in (self.round_timeout, self.join_timeout)):
            raise ConfigError("--round-timeout and --join-timeout are seconds, more than 0.")
        if not 0 < self.port < 65536:
            raise ConfigError(f"The port {self.port} is not from 1 to 65535.")
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts is {self.max_attempts}; a round is tried at least once.")

    @property
    def participants(self) -> tuple[str, ...]:
        """The clients that are not dropped."""
        return tuple(name for name in self.clients if name not in self.dropped)

    @property
    def all_names(self) -> tuple[str, ...]:
        """All clients, then the validators; the position of a name is its index."""
        return (*self.clients, *self.validators)

    @property
    def invited(self) -> tuple[str, ...]:
        """Who may connect: the clients that are not dropped, and the validators."""
        return (*self.participants, *self.validators)

    @property
    def announced_clients(self) -> int:
        """The number of clients in the setup that sites approve. Dropping a client that never joined keeps it."""
        return len(self.clients) if self.announced is None else self.announced

    @property
    def clients_to_start(self) -> int:
        """How many clients must have joined before round 1."""
        return len(self.participants) if self.start_with is None else self.start_with


def write_server_settings(settings: ServerSettings, out: Path) -> None:
    files.write_atomic(out / SETTINGS_FILE, json.dumps(asdict(settings), indent=2) + "\n")


def read_server_settings(out: Path) -> ServerSettings:
    """Read server.json, and raise a ConfigError if it was damaged."""
    path = out / SETTINGS_FILE
    try:
        values = json.loads(path.read_text())
        types = {each.name: str(each.type) for each in fields(ServerSettings)}
        wrong = [name for name, value in values.items() if not _has_type(value, types[name])]
        if wrong:
            raise ValueError(f"{wrong[0]} is {values[wrong[0]]!r}")
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return ServerSettings(**values | lists)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"{path}, the settings of this server (clients, address, keys), cannot be read: {error}. Restore it from a "
            "copy; the run's results and checkpoints are not affected."
        ) from None


def _has_type(value: Any, annotation: str) -> bool:
    if annotation.startswith("tuple"):
        return isinstance(value, list) and all(isinstance(name, str) for name in value)
    types: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
    return (value is None and "None" in annotation) or (
        isinstance(value, types[annotation.partition(" ")[0]]) and not isinstance(value, bool)
    )


def change_server_settings(
    out: Path,
    *,
    drop: Sequence[str] = (),
    min_clients: int | None = None,
    start_with: int | None = None,
    round_timeout: float | None = None,
    address: tuple[str, int] | None = None,
    status: str | None = None,
) -> ServerSettings:
    """Change the settings for the rest of a run; None: a setting stays. Clients in `drop` take no further part."""
    settings = read_server_settings(out)
    for name in drop:
        if name not in settings.clients:
            raise ConfigError(f"--drop {name}: there is no such client in this run{suggest(name, settings.clients)}")
    kept = set(settings.clients) if has_begun(out) else _joined(out)
    removed = tuple(name for name in settings.clients if name in drop and name not in kept)  # nothing depends on them
    values: dict[str, Any] = {
        "clients": tuple(name for name in settings.clients if name not in removed),
        "dropped": tuple(dict.fromkeys((*settings.dropped, *(name for name in drop if name not in removed)))),
    }
    if removed:
        values["announced"] = settings.announced_clients
    count = max(1, sum(name not in values["dropped"] for name in values["clients"]))
    values["min_clients"] = min(settings.min_clients, count) if min_clients is None else min_clients
    if start_with is not None:
        values["start_with"] = start_with
    elif settings.start_with is not None:
        values["start_with"] = min(settings.start_with, count)
    values |= {name: value for name, value in (("round_timeout", round_timeout), ("status", status)) if value}
    if address is not None:
        values |= dict(zip(("host", "port"), address, strict=True))
    changed = replace(settings, **values)
    if changed != settings:
        write_server_settings(changed, out)
    return changed


def has_begun(out: Path) -> bool:
    """Whether a round is done. From then on clients are known by their indices."""
    return any((out / "checkpoint").glob("*"))


def _joined(out: Path) -> set[str]:
    """The clients that have introduced themselves."""
    path = out / INTRODUCTIONS_FILE
    try:
        return set(dict(json.loads(path.read_text()))) if path.is_file() else set()
    except (ValueError, TypeError):
        raise unreadable_introductions(path) from None


def unreadable_introductions(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}, the description of each client's data, cannot be read. Restore it from a copy. Or move it away: "
        "every client then introduces itself again, and a change of its data since the run began is not detected."
    )
