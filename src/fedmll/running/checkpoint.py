"""Checkpoints: the server's state as safetensors, and a JSON beside it that makes it valid.

The JSON is written last, holds the tensor file's checksum, and carries one of its own: a checkpoint without both is
no checkpoint. The last two are kept. A damaged one is set aside (`.damaged`) with a warning and the one before it is
used: what cannot be read is never deleted, nor is any client memory that it may refer to.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from fedmll import files
from fedmll.engines.memory import KEPT, Versions
from fedmll.errors import CheckpointError
from fedmll.message import Tensors

VERSION = 3  # 3: what a method's parts keep is under their names
DAMAGED = ".damaged"


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
        "memories": {str(client): round for client, round in checkpoint.memories.items()},  # as JSON has them
        "sha256": files.checksum(tensors),
    }
    files.write(folder / f"{stem}.json", json.dumps(facts | {"self": _digest(facts)}))
    for path in sorted(folder.glob("*.json"))[:-KEPT]:
        path.unlink()  # first: without it the tensors are no checkpoint
        path.with_suffix(".safetensors").unlink(missing_ok=True)


def load(folder: Path, fingerprint: str) -> tuple[Checkpoint | None, list[str]]:
    """The newest good checkpoint (None if there is none), and a warning for each damaged one passed over."""
    warnings: list[str] = []
    for path in sorted(folder.glob("*.json"), reverse=True):
        facts = _facts(path)
        if facts is None or not _whole(path, facts):
            _set_aside(path)
            warnings.append(
                f"Checkpoint {path.name} is damaged (its checksum does not fit); the one before it is used. It was set "
                f"aside as {path.name}{DAMAGED}, and no client's memory is deleted while it is there."
            )
            continue
        _refuse_stranger(path, facts, fingerprint)
        memories = {int(client): round for client, round in facts["memories"].items()}
        state = load_file(path.with_suffix(".safetensors"))
        return Checkpoint(facts["round"], state, fingerprint, facts["best"], memories), warnings
    return None, warnings


def check_owner(folder: Path, fingerprint: str) -> None:
    """Refuse (CheckpointError) a folder whose checkpoints are another experiment's."""
    for path in folder.glob("*.json"):
        facts = _facts(path)
        if facts is not None:
            _refuse_stranger(path, facts, fingerprint)


def _refuse_stranger(path: Path, facts: dict[str, Any], fingerprint: str) -> None:
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


def memories(folder: Path) -> Versions | None:
    """(client, round) of every memory that a kept checkpoint refers to; None: a damaged one may refer to any."""
    if any(folder.glob(f"*{DAMAGED}")):
        return None
    found = Versions()
    for path in folder.glob("*.json"):
        facts = _facts(path)
        if facts is None:
            return None
        found |= {(int(client), round) for client, round in facts["memories"].items()}
    return found


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _facts(path: Path) -> dict[str, Any] | None:
    """What a checkpoint's JSON says, if it says what was written."""
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        return facts if facts.pop("self") == _digest(facts) else None
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def _whole(path: Path, facts: dict[str, Any]) -> bool:
    """Whether the tensors beside the JSON are those that were written."""
    try:
        return files.checksum(path.with_suffix(".safetensors")) == facts["sha256"]
    except OSError:
        return False


def _set_aside(path: Path) -> None:
    for damaged in (path, path.with_suffix(".safetensors")):
        if damaged.exists():
            damaged.rename(damaged.with_name(damaged.name + DAMAGED))
