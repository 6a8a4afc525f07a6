"""A rehearsal of a federation on one machine.

An experiment's data becomes folders of images, one per client, with keys, a server and clients as they would be between
machines.
"""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedmll.config.experiment import Experiment
from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.data import federation
from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN, Dataset
from fedmll.data.images.cache import Progress, no_progress
from fedmll.deploy import file_references
from fedmll.deploy.security import certificates
from fedmll.deploy.security import client_keys as keys
from fedmll.deploy.security.private_keys import without_passphrase
from fedmll.deploy.server.serve import study_digest

CELLS = {PRESENT: "1", ABSENT: "0", UNKNOWN: ""}


def write_folder(data: Dataset, folder: Path) -> Path:
    """Write images as PNG and their labels as CSV, as a site would have them. Returns the path of the CSV file."""
    (folder / "images").mkdir(parents=True)
    rows = []
    for place in range(len(data)):
        pixels = data.samples(np.array([place]))[0]
        name = f"{place:06d}.png"
        Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).save(folder / "images" / name)
        rows.append([name, *(CELLS[int(label)] for label in data.labels[place])])
    return write_labels(folder / "labels.csv", data.classes, rows)


def write_labels(path: Path, classes: Sequence[str], rows: Sequence[Sequence[str]]) -> Path:
    """Write labels as CSV, without empty columns: a class that a site does not annotate is not in its file."""
    kept = [0, *(column for column in range(1, len(classes) + 1) if any(row[column] for row in rows))]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([cells[column] for column in kept] for cells in [["image", *classes], *rows])
    files.write_atomic(path, text.getvalue())
    return path


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A rehearsal whose data and keys are written."""

    names: tuple[str, ...]
    experiment: Experiment  # as it was, with the server's test data in a folder
    folder: Path
    digest: str  # of the study, which its clients approve

    @property
    def keys(self) -> Path:
        return self.folder / "keys"


def client_names(clients: int) -> tuple[str, ...]:
    return tuple(f"client-{number + 1}" for number in range(clients))


def prepare_rehearsal(
    experiment: Experiment, clients: int, folder: Path, progress: Progress = no_progress
) -> Rehearsal:
    """Divide the experiment's data, write it to folders in `folder`, which must not exist, and create keys."""
    if folder.exists():
        raise ConfigError(
            f"{folder}, the folder for the images of a rehearsal's clients, exists already. Remove it, or choose "
            "another folder with --out."
        )
    changes: dict[str, Any] = {"partition.holdout": 0.0}
    if experiment.sites is None:
        kind = {"natural": "iid", "auto": "dirichlet"}.get(experiment.partition.kind, experiment.partition.kind)
        changes |= {"partition.clients": clients, "partition.kind": kind}
    divided = federation.build(experiment.changed(changes), progress)
    if len(divided.names) != clients:
        raise ConfigError(
            f"The sites of this experiment have {len(divided.names)} clients ({', '.join(divided.names[:8])}); use "
            f"--simulate {len(divided.names)}."
        )
    names = client_names(clients)
    for name, rows in zip(names, divided.samples, strict=True):
        own = divided.train.subset(rows)
        write_folder(own, folder / name)
        keys.create_client_key(folder / "keys", name)
        known = np.array(own.classes)[(own.labels != UNKNOWN).any(axis=0)]
        files.write_atomic(folder / "keys" / f"{name}.labels", "".join(f"{label}\n" for label in known))
    test = write_folder(divided.test, folder / "server")
    certificates.create_server_certificate(folder / "keys", [])
    rehearsed = experiment.changed(
        {
            "data.name": f"folder:{test}",
            "data.root": str(test.parent / "images"),
            "data.size": divided.test.sample_shape[1:],
            "partition.kind": "natural",
            "sites": None,
            "study": None,
            "annotation.kind": "none",
            "annotation.missing": 0,
            # the rest as by default: it was applied when the data was divided
            **dict.fromkeys(("data.limit", "data.top_classes", "data.group", "data.window", "partition.clients")),
            **dict.fromkeys(("data.classes", "data.ignore"), ()),
            "data.layout": "quadrants",
            "data.singles": "proportional",
            "data.pairs": "proportional",
        }
    )
    return Rehearsal(names=names, experiment=rehearsed, folder=folder, digest=study_digest(rehearsed, clients))


def join_command(rehearsal: Rehearsal, name: str, server: str, insecure: bool) -> list[str]:
    folder = rehearsal.folder / name
    command = [sys.executable, "-m", "fedmll", "join", server, "--name", name]
    command += ["--csv", str(folder / "labels.csv"), "--images", str(folder / "images")]
    command += ["--state-dir", str(folder / "memory"), "--patience", "120", "--min-images", "1", "--no-report"]
    command += ["--approve", rehearsal.digest]
    command += [word for file in rehearsal.experiment.plugins for word in ("--plugin", file)]
    command += [word for file in file_references.find_files(rehearsal.experiment) for word in ("--weights", str(file))]
    if insecure:
        return [*command, "--insecure"]
    return [*command, "--ca", str(rehearsal.keys / "ca.crt"), "--key", str(rehearsal.keys / f"{name}.key")]


@contextmanager
def running_clients(rehearsal: Rehearsal, server: str, insecure: bool) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run every client as a process of its own, which writes NAME/join.log, for the time of the block."""
    clients = []
    try:
        for name in rehearsal.names:
            with (rehearsal.folder / name / "join.log").open("wb") as log:
                command = join_command(rehearsal, name, server, insecure)
                environment = without_passphrase(os.environ)
                clients.append(
                    subprocess.Popen(
                        command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
                    )
                )
        yield clients
        for client in clients:
            client.wait(30)
    finally:
        for client in clients:
            client.terminate()
        for client in clients:
            try:
                client.wait(10)
            except subprocess.TimeoutExpired:
                client.kill()
