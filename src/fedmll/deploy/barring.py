"""Who is kept out of a run that goes on: excluded by its operator, from the next round on, until readmitted
(`excluded.json` in the run's folder); or with a key that was revoked, at once and for good."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedmll import files
from fedmll.deploy import keys, setting
from fedmll.errors import ConfigError, nearest

FILE = "excluded.json"
EXCLUDED, REVOKED = "it is excluded by the operator", "its key was revoked"


@dataclass
class Bars:
    """As the files say now; a server looks at them while it runs."""

    out: Path | None = None
    keys: Path | None = None
    marks: Mapping[str, str] = field(default_factory=dict)  # name → fingerprint

    def excluded(self) -> frozenset[str]:
        return frozenset() if self.out is None else frozenset(excluded_in(self.out))

    def revoked(self) -> frozenset[str]:
        if self.keys is None:
            return frozenset()
        listed = keys.revoked_in(self.keys / keys.REVOKED)
        return frozenset(name for name, mark in self.marks.items() if mark in listed)


def excluded_in(out: Path) -> dict[str, str]:
    """Name → since when."""
    path = out / FILE
    if not path.is_file():
        return {}
    try:
        return {str(name): str(since) for name, since in json.loads(path.read_text()).items()}
    except (ValueError, AttributeError):
        raise ConfigError(
            f"{path}, which says who is excluded, cannot be read. Move it away: nobody is then."
        ) from None


def exclude(out: Path, name: str) -> None:
    """From the next round on. So many stay as a round needs."""
    server, known = _known(out, name), excluded_in(out)
    left = [each for each in server.taking_part if each not in known and each != name]
    if len(left) < server.min_clients:
        raise ConfigError(
            f"Without {name} there are {len(left)} clients, and a round needs {server.min_clients} (--min-clients). "
            f"Stop the server, then: fedmll resume {out} --drop {name} --min-clients {max(1, len(left))}"
        )
    _write(out, known | {name: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})


def readmit(out: Path, name: str) -> None:
    _known(out, name)
    known = excluded_in(out)
    if name not in known:
        raise ConfigError(f"{name} is not excluded from the run in {out}.")
    _write(out, {each: since for each, since in known.items() if each != name})


def _known(out: Path, name: str) -> setting.Server:
    if not (out / setting.FILE).is_file():
        raise ConfigError(f"{out} is no folder of a server's run.")
    server = setting.server_in(out)
    if name not in server.taking_part:
        raise ConfigError(f"There is no client '{name}' in the run in {out}{nearest(name, server.taking_part)}")
    return server


def _write(out: Path, known: Mapping[str, str]) -> None:
    files.write(out / FILE, json.dumps(known, indent=2) + "\n")
