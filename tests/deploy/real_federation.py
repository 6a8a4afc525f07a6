"""A real federation on this machine: the server and its sites are processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from consortium import NAMES, Consortium, write_consortium

from fedmll.config.experiment import Experiment
from fedmll.deploy.flower.child_processes import find_free_port
from fedmll.deploy.server.serve import study_digest

COMMAND = [sys.executable, str(Path(__file__).parent / "consortium.py"), "fedmll"]


class World:
    """Processes that end with the test, whatever happens; each one leads a group of its own."""

    def __init__(self, consortium: Consortium, folder: Path) -> None:
        self.consortium, self.folder = consortium, folder
        self.port = find_free_port()
        self.out = folder / "run"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.digest = ""  # of the study, which the sites approve

    def start(self, log: str, *arguments: str | Path, command: list[str] = COMMAND) -> subprocess.Popen[bytes]:
        environment = os.environ | {"HOME": str(self.folder), "COLUMNS": "200"}
        with (self.folder / f"{log}.log").open("ab") as file:
            process = subprocess.Popen(
                [*command, *map(str, arguments)],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def serve(self, *more: str, **changes: Any) -> subprocess.Popen[bytes]:
        file, experiment = self.folder / "experiment.toml", self.consortium.server(**changes)
        file.write_text(experiment.to_toml())
        self.digest = study_digest(Experiment.load(file), len(NAMES))
        address = f"127.0.0.1:{self.port}"
        options = ["--clients", ",".join(NAMES), "--listen", address]
        options += ["--keys", str(self.consortium.keys), "--out", str(self.out)]
        return self.start("server", "server", file, *options, "--min-clients", "2", "--join-timeout", "120", *more)

    def join(
        self, name: str, key: str | None = None, log: str | None = None, *more: str, server: str | None = None
    ) -> subprocess.Popen[bytes]:
        home = self.consortium.folder
        options: list[str | Path] = ["--name", name, "--csv", home / name / "labels.csv", "--images", home / "images"]
        options += ["--state-dir", self.folder / f"memory-{log or name}", "--patience", "100", "--device", "cpu"]
        options += [] if "--approve" in more else ["--approve", self.digest]
        if "--insecure" not in more:
            options += ["--ca", self.consortium.keys / "ca.crt", "--key", self.consortium.keys / f"{key or name}.key"]
        return self.start(log or name, "join", server or f"localhost:{self.port}", *options, *more)

    def said(self, log: str) -> str:
        path = self.folder / f"{log}.log"
        return path.read_text() if path.exists() else ""

    def until(self, true: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, self.said("server") + "".join(self.said(name) for name in NAMES)
            time.sleep(0.1)

    def until_said(self, log: str, text: str, seconds: float = 120) -> None:
        self.until(lambda: text in self.said(log), seconds)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    def ended(self, process: subprocess.Popen[bytes], seconds: float = 150) -> int:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.said("server") + "".join(self.said(name) for name in NAMES)) from None

    def close(self) -> None:
        for process in self.processes:
            kill(process)
        # the SuperLink and the SuperNodes die with their parents, by themselves
        deadline = time.monotonic() + 5
        while left := children_left(self.folder):
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    return write_consortium(tmp_path_factory.mktemp("consortium"))


@pytest.fixture
def world(consortium: Consortium, tmp_path: Path) -> Iterator[World]:
    processes = World(consortium, tmp_path)
    try:
        yield processes
    finally:
        processes.close()


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL, to this one process only."""
    if process.poll() is None:
        process.kill()
    process.wait()


def children_left(folder: Path) -> list[int]:
    """Processes that write into the folder's logs."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if str(entry.readlink()).startswith(str(folder)):
                found.append(int(entry.parts[2]))
        except OSError:
            continue
    return found


def parent_of(process: int) -> int:
    return int((Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[1])
