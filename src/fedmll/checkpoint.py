"""Checkpoints: the server's state as safetensors, and a JSON beside it that makes it valid.

The JSON is written last, holds the tensor file's checksum, and carries one of its own: a checkpoint without both is
no checkpoint. The last two are kept; a damaged one is passed over for the one before it, with a warning.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from fedmll import files
from fedmll.errors import CheckpointError
from fedmll.message import Tensors

VERSION = 1
KEPT = 2


@dataclass
class Checkpoint:
    round: int
    state: Tensors
    fingerprint: str  # of the experiment that it belongs to
    best: dict[str, float] = field(default_factory=dict)  # round and value of the best validation so far
    memories: dict[int, int] = field(default_factory=dict)  # client → round of its memory


def save(folder: Path, checkpoint: Checkpoint) -> None:
    stem = f"{checkpoint.round:06d}"
    tensors = folder / f"{stem}.safetensors"
    with files.replacing(tensors) as temporary:
        save_file({name: t.contiguous() for name, t in checkpoint.state.items()}, temporary)
    facts: dict[str, Any] = {
        "version": VERSION,
        "round": checkpoint.round,
        "fingerprint": checkpoint.fingerprint,
        "best": checkpoint.best,
        "memories": checkpoint.memories,
        "sha256": files.checksum(tensors),
    }
    files.write(folder / f"{stem}.json", json.dumps(facts | {"self": _digest(facts)}))
    for path in sorted(folder.glob("*.json"))[:-KEPT]:
        path.unlink()
    valid = {path.stem for path in folder.glob("*.json")}
    for path in folder.glob("*.safetensors"):
        if path.stem not in valid:
            path.unlink()


def load(folder: Path, fingerprint: str) -> tuple[Checkpoint | None, list[str]]:
    """The newest good checkpoint (None if there is none), and a warning for each damaged one passed over."""
    warnings: list[str] = []
    for path in sorted(folder.glob("*.json"), reverse=True):
        facts = _read(path)
        if facts is None:
            warnings.append(
                f"Checkpoint {path.name} is damaged (its checksum does not fit); the one before it is used."
            )
            continue
        if facts["version"] != VERSION:
            raise CheckpointError(
                f"Checkpoint {path} has format version {facts['version']}; this fedmll reads version {VERSION}. Resume "
                "it with the fedmll that wrote it."
            )
        if facts["fingerprint"] != fingerprint:
            raise CheckpointError(
                f"Checkpoint {path} belongs to another experiment (fingerprint {facts['fingerprint']}, here "
                f"{fingerprint}). Nothing was changed. Use another --out folder, or restore the experiment.toml that "
                "the run was started with."
            )
        memories = {int(client): round for client, round in facts["memories"].items()}
        state = load_file(path.with_suffix(".safetensors"))
        return Checkpoint(facts["round"], state, fingerprint, facts["best"], memories), warnings
    return None, warnings


def memories(folder: Path) -> set[tuple[int, int]]:
    """(client, round) of every memory that a kept checkpoint refers to."""
    found: set[tuple[int, int]] = set()
    for path in folder.glob("*.json"):
        facts = _read(path)
        if facts is not None:
            found |= {(int(client), round) for client, round in facts["memories"].items()}
    return found


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any] | None:
    """The facts of a checkpoint whose two files are whole, else None."""
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        digest = facts.pop("self")
        tensors = path.with_suffix(".safetensors")
        whole = digest == _digest(facts) and files.checksum(tensors) == facts["sha256"]
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return facts if whole else None
