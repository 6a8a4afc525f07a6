"""Partition files: which client has which samples and annotates which classes, for others who use the same federation.

`fedmll data freeze` writes such a file and `partition.kind = "file"` reads it. It is JSON, also for other frameworks:

format      1
data        the name of the data, for people
classes     names, in the order of the targets
samples     number of training samples of the source (after data.limit)
targets     a hash of their targets: other data is rejected
clients     a list of {name, train, held_out, annotates}: positions in the training data, names of classes
changed     [position, class, target] of targets that the partition changed: -1 unknown, 0 absent
files       the image file of each training sample, if the source has files
checksum    SHA-256 of all other fields, as JSON without blanks and with sorted keys
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import ConfigError
from fedmll.core.files import write_atomic
from fedmll.core.registry import register
from fedmll.data.dataset import UNKNOWN
from fedmll.data.federation import Federation
from fedmll.data.partition import Partition, PartitionRequest, rule_counts

FORMAT = 1


def write_partition_file(federation: Federation, path: Path) -> str:
    """Write a federation's partition file and return its checksum."""
    if federation.server is not None:
        raise ConfigError("A partition file cannot contain samples of the server; set partition.server to 0.")
    if federation.experiment.partition.kind == "feature-skew":
        raise ConfigError("A partition file cannot contain changed images (partition.kind = 'feature-skew').")
    before, after = federation.source.labels, federation.true_labels
    changed = np.argwhere(before != after)
    position = {int(row): place for place, row in enumerate(federation.source.rows)}
    held_rows = [federation.held_out.rows[federation.held_out_owners == c] for c in range(len(federation.names))]
    clients = [
        {
            "name": name,
            "train": federation.samples[client].tolist(),
            "held_out": sorted(position[int(row)] for row in held_rows[client]),
            "annotates": [federation.train.classes[c] for c in np.flatnonzero(federation.annotated[client])],
        }
        for client, name in enumerate(federation.names)
    ]
    values: dict[str, Any] = {
        "format": FORMAT,
        "data": federation.experiment.data.label,
        "classes": list(federation.train.classes),
        "samples": len(federation.source),
        "targets": targets_hash(before),
        "clients": clients,
        "changed": [[int(row), int(column), int(after[row, column])] for row, column in changed],
    }
    if federation.source.files is not None:
        values["files"] = federation.source.files[federation.source.rows].tolist()
    values["checksum"] = _checksum(values)
    write_atomic(path, json.dumps(values, ensure_ascii=False, separators=(",", ":")))
    return str(values["checksum"])


def targets_hash(labels: NDArray[np.int8]) -> str:
    return hashlib.sha256(np.ascontiguousarray(labels).tobytes()).hexdigest()


def _checksum(values: dict[str, Any]) -> str:
    rest = {name: value for name, value in values.items() if name != "checksum"}
    text = json.dumps(rest, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@register("partition", "file")
def from_file(request: PartitionRequest) -> Partition:
    """The partition in a file of `fedmll data freeze` (`partition.file`)."""
    if request.file is None:
        raise ConfigError("partition.kind = 'file' needs partition.file, a file of `fedmll data freeze`.")
    values = _read(request.file)
    where, classes = f"'{request.file}'", request.classes
    if tuple(values["classes"]) != classes:
        raise ConfigError(f"{where} was written for other classes ({len(values['classes'])}; here {len(classes)}).")
    if values["samples"] != len(request.labels) or values["targets"] != targets_hash(request.labels):
        raise ConfigError(
            f"{where} was written for other training data: {values['samples']} samples of {values['data']}; here there "
            f"are {len(request.labels)}, or their targets differ. Use the same settings data.… (and the same seed, if "
            "data.limit or composites are used) as when it was written."
        )
    column = {name: place for place, name in enumerate(classes)}
    clients = values["clients"]
    annotated = np.zeros((len(clients), len(classes)), dtype=bool)
    for row, client in enumerate(clients):
        annotated[row, [column[name] for name in client["annotates"]]] = True
    labels = request.labels
    if values["changed"]:
        labels = labels.copy()
        rows, columns, targets = np.array(values["changed"]).T
        labels[rows, columns] = targets
    held_out = tuple(np.array(client["held_out"], dtype=np.int64) for client in clients)
    return Partition(
        clients=tuple(np.sort(np.array(one["train"] + one["held_out"], dtype=np.int64)) for one in clients),
        names=tuple(client["name"] for client in clients),
        allowed=np.broadcast_to(np.True_, annotated.shape),
        labels=labels,
        report=rule_counts(withheld=int((labels[request.labels != labels] == UNKNOWN).sum())),
        annotated=annotated,
        held_out=held_out,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']}; only {FORMAT} is supported")
        checksum = values["checksum"]
    except OSError as error:
        raise ConfigError(f"partition.file = '{path}' cannot be read ({error.strerror}).") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"partition.file = '{path}' is not a file of `fedmll data freeze` ({error}).") from None
    if checksum != _checksum(values):
        raise ConfigError(f"partition.file = '{path}' was changed after it was written: its checksum differs.")
    return values
