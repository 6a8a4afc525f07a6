"""Clients that may not take part in a run, while it is running.

The operator excludes a client from the next round on, and may readmit it (`excluded.json` in the run's folder). A
client whose key was revoked is rejected at once and permanently.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.core.text import suggest
from fedmll.deploy.security.client_keys import REVOKED_FILE, read_revoked_keys
from fedmll.deploy.server.server_settings import SETTINGS_FILE, ServerSettings, read_server_settings

EXCLUDED_FILE = "excluded.json"


@dataclass
class Exclusions:
    """The exclusions as the files are at the moment; a server reads them while it runs."""

    out: Path | None = None  # the run's folder; None: no client is excluded
    keys: Path | None = None  # the folder of keys; None: no key is revoked
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # by name: of the client's key
    known_revoked: set[str] = field(default_factory=set)  # fingerprints: a key that was revoked once stays revoked

    def excluded(self) -> frozenset[str]:
        return frozenset() if self.out is None else frozenset(read_excluded(self.out))

    def revoked(self) -> frozenset[str]:
        if self.keys is None:
            return frozenset()
        with suppress(ConfigError):  # if the list is damaged, the port accepts nobody, and the operator is told there
            self.known_revoked |= read_revoked_keys(self.keys / REVOKED_FILE).keys()
        return frozenset(name for name, fingerprint in self.fingerprints.items() if fingerprint in self.known_revoked)


def read_excluded(out: Path) -> dict[str, str]:
    """The excluded clients: name → since when."""
    path = out / EXCLUDED_FILE
    if not path.is_file():
        return {}
    try:
        return {str(name): str(since) for name, since in json.loads(path.read_text()).items()}
    except (ValueError, AttributeError):
        raise ConfigError(
            f"{path}, the list of excluded clients, cannot be read. Move it away: then no client is excluded."
        ) from None


def exclude(out: Path, name: str) -> None:
    """Exclude a client from the next round on. As many clients remain as a round needs."""
    settings, excluded = _read_settings(out, name), read_excluded(out)
    remaining = [each for each in settings.participants if each not in excluded and each != name]
    if len(remaining) < settings.min_clients:
        raise ConfigError(
            f"Without {name} there are {len(remaining)} clients, and a round needs {settings.min_clients} "
            f"(--min-clients). Stop the server, then: fedmll resume {out} --drop {name} --min-clients "
            f"{max(1, len(remaining))}"
        )
    _write_excluded(out, excluded | {name: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})


def readmit(out: Path, name: str) -> None:
    """Readmit an excluded client from the next round on."""
    _read_settings(out, name)
    excluded = read_excluded(out)
    if name not in excluded:
        raise ConfigError(f"{name} is not excluded from the run in {out}.")
    _write_excluded(out, {each: since for each, since in excluded.items() if each != name})


def _read_settings(out: Path, name: str) -> ServerSettings:
    if not (out / SETTINGS_FILE).is_file():
        raise ConfigError(f"{out} is not the folder of a server's run.")
    settings = read_server_settings(out)
    if name not in settings.participants:
        raise ConfigError(f"There is no client '{name}' in the run in {out}{suggest(name, settings.participants)}")
    return settings


def _write_excluded(out: Path, excluded: Mapping[str, str]) -> None:
    files.write_atomic(out / EXCLUDED_FILE, json.dumps(excluded, indent=2) + "\n")
