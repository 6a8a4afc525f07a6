"""A rehearsal of a real federation on one machine: an experiment's data as folders of images, one a client, with keys,
a server and clients as they would be between machines."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from fedmll import files
from fedmll.data import federation
from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN, Dataset
from fedmll.data.images.cache import Progress, silent
from fedmll.deploy import keys, telling
from fedmll.errors import ConfigError
from fedmll.experiment import Experiment

CELLS = {PRESENT: "1", ABSENT: "0", UNKNOWN: ""}


def write_folder(data: Dataset, folder: Path) -> Path:
    """Images as PNG and their labels as CSV, as a site would have them; the CSV."""
    (folder / "images").mkdir(parents=True)
    rows = []
    for place in range(len(data)):
        pixels = data.samples(np.array([place]))[0]
        name = f"{place:06d}.png"
        Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).save(folder / "images" / name)
        rows.append([name, *(CELLS[int(label)] for label in data.labels[place])])
    return write_labels(folder / "labels.csv", data.classes, rows)


def write_labels(path: Path, classes: Sequence[str], rows: Sequence[Sequence[str]]) -> Path:
    """Without the columns that are blank everywhere: what a site does not annotate, its file does not have."""
    kept = [0, *(column for column in range(1, len(classes) + 1) if any(row[column] for row in rows))]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([cells[column] for column in kept] for cells in [["image", *classes], *rows])
    files.write(path, text.getvalue())
    return path


@dataclass(frozen=True)
class Rehearsal:
    names: tuple[str, ...]
    experiment: Experiment  # the same, with the server's test data in a folder
    folder: Path

    @property
    def keys(self) -> Path:
        return self.folder / "keys"


def called(clients: int) -> tuple[str, ...]:
    return tuple(f"client-{number + 1}" for number in range(clients))


def prepare(experiment: Experiment, clients: int, folder: Path, progress: Progress = silent) -> Rehearsal:
    """Divide the experiment's data, write it down, make keys. The clients hold out what the experiment says."""
    if folder.exists():
        raise ConfigError(
            f"{folder}, where the clients of a rehearsal have their images, is there already. Remove it, or choose "
            "another folder with --out."
        )
    kind = {"natural": "iid", "auto": "dirichlet"}.get(experiment.partition.kind, experiment.partition.kind)
    divided = federation.build(
        experiment.changed({"partition.clients": clients, "partition.kind": kind, "partition.holdout": 0.0}), progress
    )
    names = called(clients)
    for name, rows in zip(names, divided.samples, strict=True):
        own = divided.train.subset(rows)
        write_folder(own, folder / name)
        keys.new_node(folder / "keys", name)
        known = np.array(own.classes)[(own.labels != UNKNOWN).any(axis=0)]
        files.write(folder / "keys" / f"{name}.labels", "".join(f"{label}\n" for label in known))
    test = write_folder(divided.test, folder / "server")
    keys.init(folder / "keys", [])
    served = {
        "data.name": f"folder:{test}",
        "data.root": str(test.parent / "images"),
        "data.size": divided.test.sample_shape[1:],
        "data.limit": None,
    }
    changed = {
        "partition.kind": "natural",
        "partition.clients": None,
        "annotation.kind": "none",
        "annotation.missing": 0,
    }
    plain = {
        "data.layout": "quadrants",
        "data.singles": "proportional",
        "data.pairs": "proportional",
        "data.top_classes": None,
    }
    read = {"data.classes": (), "data.ignore": (), "data.group": None, "data.window": None}
    return Rehearsal(names, experiment.changed(served | changed | plain | read), folder)


def join_command(rehearsal: Rehearsal, name: str, server: str, insecure: bool) -> list[str]:
    folder = rehearsal.folder / name
    command = [sys.executable, "-m", "fedmll", "join", server, "--name", name]
    command += ["--csv", str(folder / "labels.csv"), "--images", str(folder / "images")]
    command += ["--memory", str(folder / "memory"), "--patience", "120", "--yes", "--min-images", "1", "--no-report"]
    command += [word for file in rehearsal.experiment.plugins for word in ("--plugin", file)]
    command += [word for file in telling.files_named(rehearsal.experiment) for word in ("--weights", str(file))]
    if insecure:
        return [*command, "--insecure"]
    return [*command, "--ca", str(rehearsal.keys / "ca.crt"), "--key", str(rehearsal.keys / f"{name}.key")]


@contextmanager
def joined(rehearsal: Rehearsal, server: str, insecure: bool) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Every client as a process of its own; its words in NAME/join.log. They end with the block."""
    clients = []
    try:
        for name in rehearsal.names:
            with (rehearsal.folder / name / "join.log").open("wb") as log:
                command = join_command(rehearsal, name, server, insecure)
                clients.append(
                    subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
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
