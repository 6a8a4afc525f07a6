"""Checkpoints: the server's state as a safetensors file, and a JSON file that makes it valid.

The JSON file is written last. It holds the checksum of the tensor file and a checksum of itself; without both there is
no checkpoint. The last two checkpoints are kept. A damaged one is renamed to `.damaged` with a warning, and the one
before it is used. Nothing that cannot be read is deleted, nor any client state that it may refer to.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from fedmll.core import files
from fedmll.core.errors import CheckpointError
from fedmll.core.message import Tensors
from fedmll.engines.client_state import KEPT, StateVersions

FORMAT_VERSION = 4  # 4: client states
DAMAGED_SUFFIX = ".damaged"


@dataclass(kw_only=True)
class Checkpoint:
    round: int
    state: Tensors
    fingerprint: str  # of the experiment
    best: dict[str, float] = field(default_factory=dict)  # round and value of the best validation so far
    client_states: dict[int, int] = field(default_factory=dict)  # client → the round of its state


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    stem = f"{checkpoint.round:06d}"
    tensors = folder / f"{stem}.safetensors"
    with files.atomic_replace(tensors) as temporary:
        save_file({name: t.contiguous() for name, t in checkpoint.state.items()}, temporary)
    facts: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "round": checkpoint.round,
        "fingerprint": checkpoint.fingerprint,
        "best": checkpoint.best,
        "client_states": {str(client): round for client, round in checkpoint.client_states.items()},
        "sha256": files.checksum(tensors),
    }
    files.write_atomic(folder / f"{stem}.json", json.dumps(facts | {"self": _digest(facts)}))
    for path in sorted(folder.glob("*.json"))[:-KEPT]:
        path.unlink()  # first: the tensors alone are not a checkpoint
        path.with_suffix(".safetensors").unlink(missing_ok=True)


def load_checkpoint(folder: Path, fingerprint: str) -> tuple[Checkpoint | None, list[str]]:
    """Load the newest valid checkpoint of an experiment.

    Returns:
        The checkpoint, or None if there is none; and one warning for each damaged checkpoint.
    """
    warnings: list[str] = []
    for path in sorted(folder.glob("*.json"), reverse=True):
        facts = _read_facts(path)
        if facts is None or not _tensors_match(path, facts):
            _rename_damaged(path)
            warnings.append(
                f"Checkpoint {path.name} is damaged (its checksum does not match); the one before it is used. It was "
                f"renamed to {path.name}{DAMAGED_SUFFIX}, and no client state is deleted while that file exists."
            )
            continue
        _check_belongs_to(path, facts, fingerprint)
        checkpoint = Checkpoint(
            round=facts["round"],
            state=load_file(path.with_suffix(".safetensors")),
            fingerprint=fingerprint,
            best=facts["best"],
            client_states={int(client): round for client, round in facts["client_states"].items()},
        )
        return checkpoint, warnings
    return None, warnings


def check_fingerprint(folder: Path, fingerprint: str) -> None:
    """Raise CheckpointError if the folder has checkpoints of another experiment. No tensors are read."""
    for path in folder.glob("*.json"):
        facts = _read_facts(path)
        if facts is not None:
            _check_belongs_to(path, facts, fingerprint)


def _check_belongs_to(path: Path, facts: dict[str, Any], fingerprint: str) -> None:
    if facts["version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"Checkpoint {path} has format version {facts['version']}; this fedmll reads version {FORMAT_VERSION}. "
            "Resume it with the fedmll version that wrote it."
        )
    if facts["fingerprint"] != fingerprint:
        raise CheckpointError(
            f"Checkpoint {path} belongs to another experiment (fingerprint {facts['fingerprint']}, here "
            f"{fingerprint}). Nothing was changed. Use another --out folder, or restore the experiment.toml that "
            "the run was started with."
        )


def referenced_client_states(folder: Path) -> StateVersions | None:
    """(client, round) of every client state that a checkpoint refers to; None if a damaged one may refer to any."""
    if any(folder.glob(f"*{DAMAGED_SUFFIX}")):
        return None
    versions = StateVersions()
    for path in folder.glob("*.json"):
        facts = _read_facts(path)
        if facts is None:
            return None
        versions |= {(int(client), round) for client, round in facts["client_states"].items()}
    return versions


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _read_facts(path: Path) -> dict[str, Any] | None:
    """The content of a checkpoint's JSON file; None if its checksum does not match."""
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        return facts if facts.pop("self") == _digest(facts) else None
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def _tensors_match(path: Path, facts: dict[str, Any]) -> bool:
    try:
        return files.checksum(path.with_suffix(".safetensors")) == facts["sha256"]
    except OSError:
        return False


def _rename_damaged(path: Path) -> None:
    for damaged in (path, path.with_suffix(".safetensors")):
        if damaged.exists():
            damaged.rename(damaged.with_name(damaged.name + DAMAGED_SUFFIX))
