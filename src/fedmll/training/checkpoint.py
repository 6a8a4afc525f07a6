"""Checkpoints: the server's state in one tensor file per checkpoint, which notices damage (`core.tensor_files`).

A checkpoint is whole if its file and every client state that it refers to are. The last two checkpoints are kept. A
damaged one is renamed with a warning, and the one before it is used. Nothing that cannot be read is deleted, nor any
client state that it may refer to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fedmll.core import files
from fedmll.core.errors import CheckpointError, ConfigError
from fedmll.core.message import Tensors
from fedmll.core.tensor_files import DamagedFile, read_facts, read_tensors, write_tensors
from fedmll.engines.client_state import KEPT, StateVersions

FORMAT_VERSION = 6  # 6: with the checksum of metrics.jsonl
BEST_PREFIX = "best/"  # of the best round's tensors in a checkpoint
CHECKPOINT_FILES = "[0-9]*.safetensors"


@dataclass(kw_only=True)
class Checkpoint:
    round: int
    state: Tensors
    fingerprint: str  # of the experiment
    best: dict[str, float] = field(default_factory=dict)  # round and value of the best validation so far
    client_states: dict[int, int] = field(default_factory=dict)  # client → the round of its state
    metrics_checksum: str = ""  # of metrics.jsonl up to this round


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    facts = {
        "version": FORMAT_VERSION,
        "round": checkpoint.round,
        "fingerprint": checkpoint.fingerprint,
        "best": checkpoint.best,
        "client_states": checkpoint.client_states,
        "metrics_checksum": checkpoint.metrics_checksum,
    }
    write_tensors(folder / f"{checkpoint.round:06d}.safetensors", checkpoint.state, facts)
    for path in sorted(folder.glob(CHECKPOINT_FILES))[:-KEPT]:
        path.unlink()


def load_checkpoint(
    folder: Path,
    fingerprint: str,
    find_damaged_state: Callable[[int, int], str | None] = lambda client, round: None,
    before: int | None = None,
) -> tuple[Checkpoint | None, list[str]]:
    """Load the newest whole checkpoint of an experiment.

    Args:
        folder: the folder of the checkpoints.
        fingerprint: of the experiment.
        find_damaged_state: (client, round) → why this client state cannot be used, or None.
        before: only checkpoints of earlier rounds than this one.

    Returns:
        The checkpoint, or None if there is none; and one warning for each damaged checkpoint.
    """
    warnings: list[str] = []
    find_damaged_state = cache(find_damaged_state)  # both checkpoints may refer to the same state
    checkpoint = None
    for path in sorted(folder.glob(CHECKPOINT_FILES), reverse=True):
        if before is not None and int(path.stem) >= before:
            continue
        try:
            facts = read_facts(path)
            _check_belongs_to(path, facts, fingerprint)
            states = {int(client): round for client, round in facts["client_states"].items()}
            for client, round in states.items():
                if damage := find_damaged_state(client, round):
                    raise DamagedFile(damage)
            checkpoint = Checkpoint(
                round=facts["round"],
                state=read_tensors(path),
                fingerprint=fingerprint,
                best=facts["best"],
                client_states=states,
                metrics_checksum=facts["metrics_checksum"],
            )
            break
        except DamagedFile as error:
            renamed = files.move_damaged_file(path).name
            warnings.append(
                f"Checkpoint {path.name} cannot be used: {error} It was renamed to {renamed}, and no client state is "
                "deleted while that file exists."
            )
    if warnings:
        start = "starts again from round 1" if checkpoint is None else f"continues after round {checkpoint.round}"
        warnings[-1] += f" The run {start}; its result is the same."
    return checkpoint, warnings


def without_best_model(state: Tensors) -> Tensors:
    """The server's state in a checkpoint, without the tensors of the best model so far."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(BEST_PREFIX)}


def discard_checkpoints(folder: Path, from_round: int) -> None:
    """Delete the checkpoints of this round and of later ones, so that the run continues with this round."""
    rounds = sorted(int(path.stem) for path in folder.glob(CHECKPOINT_FILES))
    if from_round != 1 and from_round - 1 not in rounds:
        possible = " or ".join(f"--from-round {round}" for round in (1, *(round + 1 for round in rounds)))
        raise ConfigError(
            f"--from-round {from_round} needs the checkpoint after round {from_round - 1}, and {folder} has none. "
            f"Possible here: {possible}."
        )
    for round in rounds:
        if round >= from_round:
            (folder / f"{round:06d}.safetensors").unlink()


def check_fingerprint(folder: Path, fingerprint: str) -> None:
    """Raise CheckpointError if the folder has checkpoints of another experiment. No tensors are read."""
    for path in folder.glob(CHECKPOINT_FILES):
        try:
            _check_belongs_to(path, read_facts(path), fingerprint)
        except DamagedFile:
            continue  # `load_checkpoint` warns


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
    if any(folder.glob("*.damaged-*")):
        return None
    versions = StateVersions()
    for path in folder.glob(CHECKPOINT_FILES):
        try:
            versions |= {(int(client), round) for client, round in read_facts(path)["client_states"].items()}
        except DamagedFile:
            return None
    return versions
