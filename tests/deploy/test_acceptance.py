"""A federation between machines, as near as one machine comes to it: a server, four sites and one that only validates,
each in a network namespace of its own, TLS with a certificate for the server's address. One site comes late, one's link
is cut, one is stopped past the deadline, one's disk is full. The run ends, everybody is named and has the model, and
the weights are those of a simulation of what happened.

`FEDMLL_CUT_SECONDS=60 pytest tests/deploy/test_acceptance.py -m slow` cuts for a minute; here it is shorter."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

import consortium as consortium_module
from consortium import Consortium, replayed, write_consortium
from real_federation import COMMAND, World, parent_of

from fedmll.config.experiment import Experiment
from fedmll.deploy.flower.client_app import EVALUATE, MODEL, TRAIN
from fedmll.deploy.security import certificates, client_keys
from fedmll.deploy.security.audit_log import FILE, verify_audit_log
from fedmll.deploy.server.serve import study_digest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CUT_SECONDS = float(os.environ.get("FEDMLL_CUT_SECONDS", "15"))
ROUND_SECONDS = 12
DISK = "300m"  # `join` does not begin with less than 0.2 GB
CUT, STOPPED, FULL, LATE, VALIDATING = "site-a", "site-b", "site-c", "site-d", "test"  # what happens to whom
NAMES = (CUT, STOPPED, FULL, LATE)
SETTINGS: dict[str, Any] = {
    "method__name": "test-drifting-slowly",  # its clients remember
    "method__seconds": 0.5,
    "training__rounds": 16 + int(CUT_SECONDS // 5),
}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Network(World):
    """Processes in namespaces: `server`, where a bridge is, and one a site."""

    def __init__(self, consortium: Consortium, folder: Path) -> None:
        super().__init__(consortium, folder)
        self.mark, self.mounted, self.made = f"fm{os.getpid()}", list[Path](), list[str]()
        self.address = "10.231.7.1"
        self._space("server")
        hub = self.space("server")
        ip("-n", hub, "link", "add", "hub", "type", "bridge")
        ip("-n", hub, "addr", "add", f"{self.address}/24", "dev", "hub")
        ip("-n", hub, "link", "set", "hub", "up")
        for number, name in enumerate((*NAMES, VALIDATING), 2):
            self._space(name)
            ip("-n", hub, "link", "add", name, "type", "veth", "peer", "name", "up0", "netns", self.space(name))
            ip("-n", hub, "link", "set", name, "master", "hub")
            ip("-n", self.space(name), "addr", "add", f"10.231.7.{number}/24", "dev", "up0")
            ip("-n", self.space(name), "link", "set", "up0", "up")
            self.connect(name, True)

    def space(self, name: str) -> str:
        return f"{self.mark}-{name}"

    def _space(self, name: str) -> None:
        ip("netns", "add", self.space(name))
        self.made.append(self.space(name))
        ip("-n", self.space(name), "link", "set", "lo", "up")

    def connect(self, name: str, up: bool) -> None:
        ip("-n", self.space("server"), "link", "set", name, "up" if up else "down")

    def within(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self.space(name), *COMMAND]

    def small_disk(self, name: str) -> Path:
        folder = self.folder / f"memory-{name}"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)], check=True)
        self.mounted.append(folder)
        return folder

    def serve(self, *more: str, **changes: Any) -> subprocess.Popen[bytes]:
        file, experiment = self.folder / "experiment.toml", self.consortium.server(**changes)
        file.write_text(experiment.to_toml())
        self.digest = study_digest(Experiment.load(file), len(NAMES))
        options = ["--clients", ",".join(NAMES), "--listen", f"{self.address}:{self.port}", "--out", self.out]
        options += ["--keys", self.consortium.keys, "--min-clients", "1", "--round-timeout", str(ROUND_SECONDS)]
        options += ["--join-timeout", "120", "--validators", VALIDATING, *more]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RETURN_SECONDS", "1")
            return self.start("server", "server", file, *options, command=self.within("server"))

    def take_part(self, name: str) -> subprocess.Popen[bytes]:
        home, secret = self.consortium.folder, self.consortium.keys
        options = ["--name", name, "--csv", home / name / "labels.csv", "--images", home / "images", "--device", "cpu"]
        options += ["--state-dir", self.folder / f"memory-{name}", "--patience", "200", "--approve", self.digest]
        options += ["--ca", secret / "ca.crt", "--key", secret / f"{name}.key"]
        command, more = ("validate", ()) if name == VALIDATING else ("join", ("--no-report",))
        return self.start(name, command, f"{self.address}:{self.port}", *options, *more, command=self.within(name))

    def audit(self) -> list[dict[str, Any]]:
        path = self.out / FILE
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def happened(self, event: str, client: str, after: int = 0, **facts: Any) -> bool:
        wanted = {"event": event, "client": client} | facts
        return any(wanted.items() <= line.items() and line.get("round", 0) >= after for line in self.audit())

    def round(self) -> int:
        return max((line["round"] for line in self.audit() if "round" in line), default=0)

    def until_happened(self, event: str, client: str, after: int = 0, **facts: Any) -> None:
        self.until(lambda: self.happened(event, client, after, **facts))

    def close(self) -> None:
        super().close()
        for folder in self.mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)
        for space in self.made:
            subprocess.run(["ip", "netns", "del", space], check=False)


def possible() -> str | None:
    if os.getuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    name = f"fm{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    if made.returncode:
        return "network namespaces cannot be made here"
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True)
        subprocess.run(["umount", folder], capture_output=True)
    return None if mounted.returncode == 0 else "a tmpfs cannot be mounted here"


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    reason = possible()
    if reason is not None:
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consortium_module, "NAMES", (*NAMES, VALIDATING))
        patch.setattr(
            consortium_module,
            "SIZES",
            {**{name: consortium_module.SIZES[name] for name in NAMES[:3]}, LATE: 40, "test": 120},
        )
        consortium = write_consortium(tmp_path / "consortium")
    here = Network(consortium, tmp_path)
    certificates.create_server_certificate(consortium.keys, [here.address])
    try:
        yield here
    finally:
        here.close()


def family(process: subprocess.Popen[bytes]) -> list[int]:
    """A process and its children."""
    everybody = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    found = [process.pid]
    for number in everybody:
        try:
            found += [number] if parent_of(number) == process.pid else []
        except OSError:
            continue
    return found


def fill(folder: Path) -> Path:
    path = folder / "filling"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return path


def happen(network: Network) -> subprocess.Popen[bytes]:
    """Everything, one after the other; the server's process."""
    disk = network.small_disk(FULL)
    server = network.serve("--start-with", "3", **SETTINGS)
    network.connect(LATE, False)
    joined = {name: network.take_part(name) for name in (*NAMES, VALIDATING)}
    network.until(lambda: network.round() >= 2)
    network.connect(LATE, True)  # it comes in round 2, or a little later: from the next round on it takes part
    filling = fill(disk)
    network.until_happened("rejected", FULL)
    filling.unlink()
    network.until_happened("joined", LATE)
    network.until_happened("reply", LATE)

    network.connect(CUT, False)
    cut = time.monotonic()
    stopped = family(joined[STOPPED])
    for number in stopped:
        os.kill(number, signal.SIGSTOP)
    network.until_happened("skipped", STOPPED)
    for number in reversed(stopped):
        os.kill(number, signal.SIGCONT)
    network.until_happened("skipped", CUT)
    time.sleep(max(0.0, cut + CUT_SECONDS - time.monotonic()))
    network.connect(CUT, True)
    back = network.round()
    for name in NAMES:
        network.until_happened("reply", name, back)
    return server


def took_part(audit: list[dict[str, Any]], rounds: int) -> dict[int, set[str]]:
    who: dict[int, set[str]] = {number: set() for number in range(1, rounds + 1)}
    for line in audit:
        if line["event"] == "reply" and line["kind"] == TRAIN:
            who[line["round"]].add(line["client"])
        elif line["event"] == "rejected" and "round" in line:
            who[line["round"]].discard(line["client"])
    return who


def test_federation_survives_interruptions_and_bad_clients(network: Network) -> None:
    server = happen(network)
    assert network.ended(server, 240) == 0, network.said("server")
    for process in network.processes[1:]:
        assert network.ended(process, 40) == 0  # everybody was told that the run is over
    audit = network.audit()
    joined = {line["client"]: line for line in audit if line["event"] == "joined"}
    assert joined.keys() == {*NAMES, VALIDATING}
    assert joined[LATE]["first_round"] >= 3
    marks = {row[0].removesuffix(".pub"): row[3] for row in client_keys.list_keys(network.consortium.keys)}
    assert {name: line["key"] for name, line in joined.items()} == {name: marks[name] for name in joined}
    (full, *_) = [line["text"] for line in audit if line["event"] == "rejected" and line["client"] == FULL]
    assert "its disk is full" in full
    said = " ".join(network.said("server").split())
    for name in (CUT, STOPPED):
        assert f"{name} is skipped (" in said
    assert f"{FULL} is rejected: its disk is full" in said
    assert f"starts without {LATE}, which may join later" in said
    assert "is tried again" not in said
    state_folders = [network.folder / f"memory-{name}" for name in (*NAMES, VALIDATING)]
    for folder in (network.out, *state_folders):
        assert verify_audit_log(folder / FILE).first_bad_line is None
    assert max(row["seconds"] for row in network.rows()) < 3 * ROUND_SECONDS  # by its deadline, and a test

    who = took_part(audit, SETTINGS["training__rounds"])
    assert [len(who[row["round"]]) for row in network.rows()] == [row["clients"] for row in network.rows()]
    assert {line["kind"] for line in audit if line["event"] == "sent" and line["client"] == VALIDATING} == {
        EVALUATE,
        MODEL,
    }
    assert json.loads((network.out / "site_metrics.json").read_text())["sites"].keys() == {VALIDATING}
    found = load_file(network.out / "model.safetensors")
    for folder in state_folders:
        mine = load_file(folder / "model.safetensors")
        assert all(torch.equal(mine[name], tensor) for name, tensor in found.items())
    settings = SETTINGS | {"method__seconds": 0.0}
    expected = replayed(network.consortium, network.folder, lambda name, number: name in who[number], **settings)
    for name, tensor in expected.items():
        assert torch.allclose(found[name].float(), tensor.float(), rtol=0, atol=1e-5), name
