"""comparison.json: what a comparison is, so that it can be read, shown and made again without the command at hand.

commands   each command that worked on it, with versions and, where there is one, the git commit of the folder that it
           was typed in and of fedmll's own source; the last is the latest
data       each data that its runs began with: name, samples, and a digest of labels and images
rows       every row and its runs: folder, seed, setting of --tune, state (finished, failed, open)
tables     as in table.md; notes too
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedmll import files
from fedmll.running.comparison import Cell, Comparison, Row
from fedmll.running.folder import COMPARISON, DATA, to_json
from fedmll.running.grid import Grid

PACKAGES = ("fedmll", "torch", "numpy", "scipy")
GIT_SECONDS = 5


class Record:
    def __init__(self, out: Path, command: str | None, plan: Grid) -> None:
        self.out, self.plan = out, plan
        commit = {"here": commit_of(Path.cwd()), "fedmll": commit_of(Path(__file__).parent, Path(__file__).name)}
        now = {"command": command, "versions": versions(), "commit": {k: v for k, v in commit.items() if v}}
        before = [
            entry for entry in commands_in(out) if {key: entry.get(key) for key in now} != now
        ]  # the same command again is one command
        self.commands = [*before, now | {"when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}]

    def write(self, found: Comparison) -> None:
        values = {
            "commands": self.commands,
            "data": self._data(),
            "seeds": found.seeds,
            "tune": {key: list(values) for key, values in found.tuned.items()},
            "tune_seed": self.plan.first if found.tuned else None,
            "metrics": list(found.metrics),
            "against": found.against,
            "done": all(row.done for row in found.rows),
            "rows": [self._row(row) for row in found.rows],
            "tables": [{"header": header, "rows": rows} for header, rows in found.tables],
            "notes": found.notes,
        }
        files.write(self.out / COMPARISON, to_json(values, indent=1) + "\n")

    def _row(self, row: Row) -> dict[str, Any]:
        runs = [
            {
                "folder": cell.folder.relative_to(self.out).as_posix(),
                "seed": cell.seed,
                "setting": cell.setting,
                "state": state_of(cell),
                "in_table": cell in row.cells,
            }
            for cell in row.runs
        ]
        return {"row": row.label, "settings": row.runs[0].variant.overrides, "chosen": row.setting, "runs": runs}

    def _data(self) -> list[dict[str, Any]]:
        """Once each, however many runs share it."""
        found: dict[str, dict[str, Any]] = {}
        for by_seed in self.plan.cells.values():
            for cell in (cell for cells in by_seed.values() for cell in cells):
                if (file := cell.folder / DATA).is_file():
                    facts = json.loads(file.read_text())
                    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()
                    samples = {part: known["samples"] for part, known in facts.items()}
                    found[digest] = {"name": cell.experiment.data.label, "digest": digest, "samples": samples}
        return list(found.values())


def state_of(cell: Cell) -> str:
    if cell.summary is not None:
        return "finished"
    return "open" if cell.failure is None else "failed"


def commands_in(out: Path) -> list[dict[str, Any]]:
    """Of an earlier record; one that cannot be read is no reason to stop, and is written anew."""
    try:
        found = json.loads((out / COMPARISON).read_text())["commands"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a source tree that is not installed
            found[package] = "0+source"
    return found


def commit_of(folder: Path, tracked: str | None = None) -> str | None:
    """The commit that a folder is at, with -dirty if files differ from it; None where there is none, or if it has
    nothing to do with the file `tracked` (an installed package in somebody's project)."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=GIT_SECONDS, check=False
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if tracked is not None and not git("ls-files", "--", tracked):
        return None
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or None
