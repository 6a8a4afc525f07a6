"""One setup per join: a file next to the site file records the first setup that a site answered, and its answer.

A new join starts without a record. Until the next join the site rejects every other setup. Otherwise a server could
compare the answers to several setups (for example with several hold-out shares), and a difference can be one patient.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmll.core import files
from fedmll.deploy.error_codes import SiteError, SiteErrorCode

SUFFIX = ".setup"
MAX_NAMED = 8  # settings that an error message names


@dataclass(frozen=True)
class SetupRecord:
    """What the server asked for (`setup`), and the introduction that was sent (`answer`; None: not sent yet)."""

    setup: dict[str, Any]
    answer: dict[str, Any] | None = None

    def check_same_setup(self, setup: dict[str, Any]) -> None:
        """Raise a SiteError if this is not the setup that was answered."""
        names = find_differences(self.setup, setup)
        if names:
            shown = ", ".join(name.removeprefix("experiment.") for name in names[:MAX_NAMED])
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            raise SiteError(
                SiteErrorCode.SETUP,
                f"The server asks for a different setup than the one that this join has answered; {shown}{more} "
                "changed. A join answers one setup only. If the study changed, stop this join, ask the server's "
                "operator why, and join again: you then approve the new study.",
            )


def delete_setup_record(site_file: Path) -> None:
    """A new join starts: no setup was answered yet."""
    _path(site_file).unlink(missing_ok=True)


def read_setup_record(site_file: Path) -> SetupRecord | None:
    """The record of the current join; None: no setup was answered yet."""
    try:
        values = json.loads(_path(site_file).read_text())
        return SetupRecord(values["setup"], values["answer"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        raise SiteError(
            SiteErrorCode.SETUP,
            f"{_path(site_file)}, which records the setup that this join has answered, cannot be read. Stop this join "
            "and join again.",
        ) from None


def write_setup_record(site_file: Path, record: SetupRecord) -> None:
    files.write_atomic(_path(site_file), json.dumps({"setup": record.setup, "answer": record.answer}))


def find_differences(one: Any, other: Any, name: str = "") -> list[str]:
    """The names of the settings that differ. 1, 1.0 and true are different values, as in a digest."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({*one, *other}, key=str)
        return [
            found
            for key in keys
            for found in find_differences(one.get(key), other.get(key), f"{name}.{key}".strip("."))
        ]
    return [] if json.dumps(one) == json.dumps(other) else [name]


def _path(site_file: Path) -> Path:
    return site_file.with_suffix(SUFFIX)
