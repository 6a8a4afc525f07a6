"""Frozen federations: who has which sample and annotates what, in a file, so that everybody has the same.

`fedmll data freeze` writes it; `partition.kind = "file"` reads it. It is JSON, for other frameworks too:

format      1
data        what it was made of, for a person
classes     names, in the order of the targets
samples     how many training samples the source has (after data.limit)
targets     a hash of their targets: other data is refused
clients     a list of {name, train, held_out, annotates}: positions in the training data, names of classes
changed     [position, class, target] of targets that the partition's rule changed: -1 unknown, 0 absent
files       the image file of each training sample, where the source says
checksum    sha256 of the rest, as JSON without blanks and with sorted keys
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.data.dataset import UNKNOWN
from fedmll.data.federation import Federation
from fedmll.data.partition import Partition, Request
from fedmll.errors import ConfigError
from fedmll.files import write
from fedmll.registry import register

FORMAT = 1


def freeze(found: Federation, path: Path) -> str:
    """Write the federation's file; its checksum."""
    if found.server is not None:
        raise ConfigError("A federation whose server holds samples (partition.server) cannot be frozen; set it to 0.")
    if found.experiment.partition.kind == "feature-skew":
        raise ConfigError("What images look like (partition.kind = 'feature-skew') is no part of a frozen federation.")
    before, after = found.source.labels, found.truth
    changed = np.argwhere(before != after)
    clients = []
    for client, name in enumerate(found.names):
        held = np.flatnonzero(found.held_out_owner == client)
        clients.append(
            {
                "name": name,
                "train": found.samples[client].tolist(),
                "held_out": _positions(found, held),
                "annotates": [found.train.classes[c] for c in np.flatnonzero(found.annotated[client])],
            }
        )
    values: dict[str, Any] = {
        "format": FORMAT,
        "data": found.experiment.data.label,
        "classes": list(found.train.classes),
        "samples": len(found.source),
        "targets": targets_hash(before),
        "clients": clients,
        "changed": [[int(row), int(column), int(after[row, column])] for row, column in changed],
    }
    if found.source.files is not None:
        values["files"] = found.source.files[found.source.rows].tolist()
    values["checksum"] = _checksum(values)
    write(path, json.dumps(values, ensure_ascii=False, separators=(",", ":")))
    return str(values["checksum"])


def _positions(found: Federation, held: NDArray[np.int64]) -> list[int]:
    """The places of held-out samples in the training data: a row of the store is one sample of it."""
    place = {int(row): position for position, row in enumerate(found.source.rows)}
    return sorted(place[int(row)] for row in found.held_out.rows[held])


def targets_hash(labels: NDArray[np.int8]) -> str:
    return hashlib.sha256(np.ascontiguousarray(labels).tobytes()).hexdigest()


def _checksum(values: dict[str, Any]) -> str:
    rest = {name: value for name, value in values.items() if name != "checksum"}
    text = json.dumps(rest, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@register("partition", "file")
def from_file(asked: Request) -> Partition:
    """As a file of `fedmll data freeze` says (partition.file): the same federation for everybody."""
    if asked.file is None:
        raise ConfigError("partition.kind = 'file' needs partition.file, a file of `fedmll data freeze`.")
    values = _read(asked.file)
    where, classes = f"'{asked.file}'", asked.classes
    if tuple(values["classes"]) != classes:
        raise ConfigError(f"{where} is of data with other classes ({len(values['classes'])}; here {len(classes)}).")
    if values["samples"] != len(asked.labels) or values["targets"] != targets_hash(asked.labels):
        raise ConfigError(
            f"{where} is of other training data: {values['samples']} samples of {values['data']}, and here are "
            f"{len(asked.labels)}, or their targets differ. Set data.… (and the seed, if data.limit or composites are "
            "drawn by it) as they were when it was written."
        )
    column = {name: place for place, name in enumerate(classes)}
    clients = values["clients"]
    annotated = np.zeros((len(clients), len(classes)), dtype=bool)
    for row, client in enumerate(clients):
        annotated[row, [column[name] for name in client["annotates"]]] = True
    labels = asked.labels
    if values["changed"]:
        labels = labels.copy()
        rows, columns, targets = np.array(values["changed"]).T
        labels[rows, columns] = targets
    held_out = tuple(np.array(client["held_out"], dtype=np.int64) for client in clients)
    trained = tuple(np.array(client["train"], dtype=np.int64) for client in clients)
    together = tuple(np.sort(np.concatenate(both)) for both in zip(trained, held_out, strict=True))
    allowed = np.broadcast_to(np.True_, annotated.shape)
    names = tuple(client["name"] for client in clients)
    report = dict.fromkeys(("dropped", "withheld", "negative", "moved_for_minimum"), 0)
    report["withheld"] = int((labels[asked.labels != labels] == UNKNOWN).sum())
    whole = Partition(together, names, allowed, labels, report)
    return replace(whole, annotated=annotated, held_out=held_out)


def _read(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']}, and {FORMAT} is known")
        checksum = values["checksum"]
    except OSError as error:
        raise ConfigError(f"partition.file = '{path}' cannot be read ({error.strerror}).") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"partition.file = '{path}' is no file of `fedmll data freeze` ({error}).") from None
    if checksum != _checksum(values):
        raise ConfigError(f"partition.file = '{path}' was changed since it was written: its checksum is another.")
    return values
