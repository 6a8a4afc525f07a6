"""A real federation on loopback: a real SuperLink, three real SuperNodes, TLS and keys, real images; kills."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

import httpx
from flwr.supercore.constant import TaskType
from sites import FUSION, NAMES, Consortium, write_consortium

from fedmll import run
from fedmll.deploy.flower.executor import acquire, acquirer
from fedmll.deploy.flower.processes import free_port, quiet_flower

COMMAND = [sys.executable, str(Path(__file__).parent / "sites.py"), "fedmll"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class World:
    """Processes that end with the test, whatever happens; each one leads a group of its own."""

    def __init__(self, consortium: Consortium, folder: Path) -> None:
        self.consortium, self.folder = consortium, folder
        self.port = free_port()
        self.out = folder / "run"
        self.processes: list[subprocess.Popen[bytes]] = []

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
        file = self.folder / "experiment.toml"
        file.write_text(self.consortium.server(**changes).to_toml())
        address = f"127.0.0.1:{self.port}"
        options = ["--clients", ",".join(NAMES), "--listen", address, "--keys", self.consortium.keys, "--out", self.out]
        return self.start("server", "server", file, *options, "--min-clients", "2", "--join-timeout", "120", *more)

    def join(self, name: str, key: str | None = None, log: str | None = None, *more: str) -> subprocess.Popen[bytes]:
        home = self.consortium.folder
        options: list[str | Path] = ["--name", name, "--csv", home / name / "labels.csv", "--images", home / "images"]
        options += ["--memory", self.folder / f"memory-{log or name}", "--patience", "100", "--device", "cpu", "--yes"]
        if "--insecure" not in more:
            options += ["--ca", self.consortium.keys / "ca.crt", "--key", self.consortium.keys / f"{key or name}.key"]
        return self.start(log or name, "join", f"localhost:{self.port}", *options, *more)

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


@pytest.fixture(scope="module")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    return write_consortium(tmp_path_factory.mktemp("consortium"))


@pytest.fixture
def world(consortium: Consortium, tmp_path: Path) -> Iterator[World]:
    here = World(consortium, tmp_path)
    try:
        yield here
    finally:
        here.close()


def same_weights(consortium: Consortium, out: Path, **changes: Any) -> bool:
    """As the local engine's, on the same data."""
    found, expected = load_file(out / "model.safetensors"), run(consortium.local(**changes)).weights
    return all(torch.allclose(found[k].float(), v.float(), rtol=0, atol=1e-5) for k, v in expected.items())


@pytest.mark.parametrize(
    "changes",
    [
        {"method__name": "fedavg"},
        {"method__name": "fedmlp", "method__t1": 1, "method__T0": 0.2, "method__T1": 0.3, "training__rounds": 3},
        {"method__name": "private-fedavg", "method__loss": "sigmoid"},
        FUSION,
    ],
    ids=lambda changes: changes.get("method__name", "fusion"),
)
def test_three_sites_reach_the_weights_of_the_local_engine(world: World, changes: dict[str, Any]) -> None:
    server = world.serve(**changes)
    joined = [world.join(name) for name in NAMES]
    assert world.ended(server) == 0, world.said("server")
    for process in joined:
        assert world.ended(process, 30) == 0  # told that the run is over
    assert same_weights(world.consortium, world.out, **changes)
    assert [row["clients"] for row in world.rows()] == [3] * len(world.rows())
    assert "site-c: 50 images, all readable" in world.said("site-c")
    assert not (world.folder / ".flwr").exists()  # Flower left nothing in the home folder
    if changes.get("method__name") == "private-fedavg":
        assert "digit-2" not in world.said("site-c")


def test_a_killed_site_is_left_out_and_taken_back(world: World) -> None:
    changes = {"method__name": "test-drifting-slowly", "method__seconds": 2.0, "training__rounds": 8}
    server = world.serve("--round-timeout", "15", **changes)
    joined = {name: world.join(name) for name in NAMES}
    world.until_said("site-b", "round 1:")
    time.sleep(2.5)  # in the middle of its round 2
    kill(joined["site-b"])
    world.until(lambda: any(row["clients"] == 2 for row in world.rows()))
    world.join("site-b")
    assert world.ended(server) == 0, world.said("server")
    counts = [row["clients"] for row in world.rows()]
    assert counts[0] == 3
    assert 2 in counts
    assert counts[-1] == 3, counts
    assert "site-b is left out" in world.said("server")
    assert max(row["seconds"] for row in world.rows()) < 20  # by its deadline


def test_a_site_comes_late_and_another_leaves(world: World) -> None:
    """The run starts when two have come and the time is over; Ctrl-C at a site is a goodbye that the server repeats."""
    changes = {"method__name": "test-drifting-slowly", "method__seconds": 0.5, "training__rounds": 20}
    server = world.serve("--start-with", "2", "--join-timeout", "12", **changes)
    leaver = world.join("site-a")
    world.join("site-b")
    world.until_said("server", "starts without site-c; it may come later")
    world.join("site-c")
    world.until((world.out / "metrics.jsonl").exists)
    world.until(lambda: any(row["clients"] == 3 for row in world.rows()))
    leaver.send_signal(signal.SIGINT)
    assert world.ended(leaver, 30) == 130
    assert world.ended(server) == 0, world.said("server")
    said = " ".join(world.said("server").split())
    assert "site-c is here: 50 images, 7 classes annotated; it takes part from round" in said
    assert "site-a has left: its program was ended there" in said
    assert "site-c is left out" not in said
    counts = [row["clients"] for row in world.rows()]
    assert (counts[0], max(counts), counts[-1]) == (2, 3, 2), counts


def test_a_killed_server_is_resumed_to_the_same_weights(world: World) -> None:
    """With a method whose clients remember: what they learnt in the round that was lost must not count twice."""
    changes = {"method__name": "test-drifting-slowly", "method__seconds": 1.5, "training__rounds": 4}
    server = world.serve(**changes)
    joined = [world.join(name) for name in NAMES]
    for number in (2, 3):
        world.until(lambda number=number: (world.out / "metrics.jsonl").exists() and len(world.rows()) >= number - 1)  # type: ignore[misc]
        time.sleep(1.5)  # the clients are at work on the next round, or have just replied
        kill(server)
        assert len(world.rows()) < 4
        server = world.start("server", "resume", world.out)
    assert world.ended(server) == 0, world.said("server")
    for process in joined:
        assert world.ended(process, 30) == 0  # they were there all the time
    assert [row["round"] for row in world.rows()] == [1, 2, 3, 4]
    changes["method__seconds"] = 0.0
    assert same_weights(world.consortium, world.out, **changes)


def test_a_killed_supernode_is_started_again(world: World) -> None:
    """Only Flower's process is killed: the client starts another, and the round is not lost."""
    changes = {"method__name": "test-drifting-slowly", "method__seconds": 1.5, "training__rounds": 3}
    server = world.serve(**changes)
    for name in NAMES:
        world.join(name)
    world.until_said("site-b", "round 1:")
    time.sleep(2)
    nodes = [
        int(path.parts[2])
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"supernode" in path.read_bytes() and parent_of(int(path.parts[2])) == world.processes[2].pid
    ]
    assert len(nodes) == 1
    os.kill(nodes[0], signal.SIGKILL)
    assert world.ended(server) == 0, world.said("server")
    assert [row["clients"] for row in world.rows()] == [3, 3, 3]
    changes["method__seconds"] = 0.0
    assert same_weights(world.consortium, world.out, **changes)


def parent_of(process: int) -> int:
    return int((Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[1])


def test_bad_replies_are_refused_by_name(world: World) -> None:
    server = world.serve(method__name="test-evil", training__rounds=5)
    for name in NAMES:
        world.join(name)
    assert world.ended(server) == 0, world.said("server")
    assert [row["clients"] for row in world.rows()] == [2, 2, 2, 2, 3]
    said = world.said("server")
    for number, reason in enumerate(("NaN or infinite", "not torch.float32", "key backdoor", "moved by the norm"), 1):
        (line,) = [text for text in said.splitlines() if f"round {number}: the reply of" in text]
        assert "site-b is refused" in line
        assert reason in line


def test_who_has_no_registered_key_stays_out(world: World) -> None:
    server = world.serve(training__rounds=1)
    world.until(lambda: socket.socket().connect_ex(("127.0.0.1", world.port)) == 0)
    address = f"127.0.0.1:{world.port}"

    # Flower's own node without a key, and plain HTTP
    flower = [str(Path(sys.executable).parent / "flower-supernode"), "--isolation", "process"]
    options = ["--superlink", address, "--port", str(free_port()), "--host", "127.0.0.1"]
    with pytest.MonkeyPatch.context() as patch:
        for key, value in quiet_flower(world.folder / "stranger").items():
            patch.setenv(key, value)
        certificate = world.consortium.keys / "ca.crt"
        keyless = world.start("keyless", *options, "--root-certificates", certificate, command=flower)
    stranger = world.join("site-a", key="stranger", log="stranger")  # a key that nobody registered
    plain = world.join("site-a", None, "plain", "--insecure")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{address}/v1/fleet/", timeout=5)
    # with TLS: nobody starts runs, registers nodes or takes the server's task
    trust = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(verify=trust, base_url=f"https://{address}") as client:
        for path in ("/v1/control/start-run", "/v1/control/register-node", "/docs", "/v1/responses"):
            assert client.post(path).status_code == 403
    with pytest.raises(httpx.HTTPStatusError) as refusal:
        acquire(acquirer(address, b"a guess", certificate.read_bytes()), TaskType.SERVER_APP)
    assert refusal.value.response.status_code == 401
    world.ended(keyless, 60)
    assert "SuperNode ID" not in world.said("keyless")  # what a node says once it is in
    assert world.ended(stranger, 60) == 2
    assert "does not know the key of site-a" in world.said("stranger").replace("\n", " ")
    assert world.ended(plain, 60) == 2
    assert "it speaks TLS" in world.said("plain").replace("\n", " ")

    # a registered key under another's name is refused by name; the right ones then do the run
    impostor = world.join("site-a", key="site-b", log="impostor")
    world.until_said("server", "site-b is refused: it calls itself 'site-a', and its key is that of 'site-b'")
    kill(impostor)
    for name in NAMES:
        world.join(name)
    assert world.ended(server) == 0, world.said("server")


def test_another_ca_is_not_trusted(world: World) -> None:
    world.serve(training__rounds=1)
    world.until(lambda: socket.socket().connect_ex(("127.0.0.1", world.port)) == 0)
    from fedmll.deploy import keys

    keys.init(world.folder / "other", [])
    home = world.consortium.folder
    options: list[str | Path] = [
        "--name",
        "site-a",
        "--csv",
        home / "site-a" / "labels.csv",
        "--images",
        home / "images",
    ]
    options += ["--ca", world.folder / "other" / "ca.crt", "--key", world.consortium.keys / "site-a.key"]
    process = world.start("a", "join", f"localhost:{world.port}", *options, "--memory", world.folder / "m")
    assert world.ended(process, 60) == 2
    assert "does not show a certificate of your consortium's CA" in world.said("a").replace("\n", " ")


def test_a_rehearsal_is_one_command(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fedmll",
        "server",
        "--simulate",
        "2",
        "--rounds",
        "1",
        "--track",
        "--out",
        tmp_path / "run",
    ]
    command += ["--set", "data.limit=120", "--set", "model.channels=[4,8]"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["clients"] == 2
    assert "client_mean" not in summary["metrics"]
    assert "macro_auc" in summary["metrics"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert events.Scalars("test/macro_auc")[-1].value == pytest.approx(summary["metrics"]["macro_auc"], rel=1e-6)


def test_the_same_apps_on_flowers_simulation_engine(consortium: Consortium, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (flwr[simulation])")
    from fedmll.deploy.site import Site
    from fedmll.deploy.site_worker import remember_site

    home = consortium.folder
    for name in NAMES:
        site = Site(name, home / name / "labels.csv", home / "images", tmp_path / name, device="cpu")
        remember_site(site, tmp_path / "sites" / f"{name}.json")
    (tmp_path / "experiment.toml").write_text(consortium.server().to_toml())
    command = [sys.executable, "-m", "fedmll.deploy.flower.server_app", tmp_path / "experiment.toml"]
    command += ["--sites", tmp_path / "sites", "--out", tmp_path / "run"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert same_weights(consortium, tmp_path / "run")
