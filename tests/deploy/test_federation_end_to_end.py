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
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

import httpx
from consortium import FUSION, NAMES, Consortium
from flwr.supercore.constant import TaskType
from real_federation import World, children_left, consortium, kill, parent_of, world  # noqa: F401 (fixtures)

from fedmll import run
from fedmll.core.small_groups import MIN_GROUP_SIZE
from fedmll.deploy.flower.child_processes import find_free_port, flower_environment
from fedmll.deploy.flower.executor import acquire_task, open_task_client
from fedmll.methods.framework import task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def same_weights(consortium: Consortium, out: Path, **changes: Any) -> bool:  # noqa: F811
    """Whether a run has the weights of the local engine on the same data, under the sites' policy for small groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "Task", partial(task.Task, min_group_size=MIN_GROUP_SIZE))
        found, expected = load_file(out / "model.safetensors"), run(consortium.local(**changes)).weights
    return all(torch.allclose(found[k].float(), v.float(), rtol=0, atol=1e-5) for k, v in expected.items())


@pytest.mark.parametrize(
    "changes",
    [
        {"method__name": "fedavg"},
        {"method__name": "fedavg", "method__average": "centered-clipping"},
        {"method__name": "fedmlp", "method__t1": 1, "method__T0": 0.2, "method__T1": 0.3, "training__rounds": 3},
        {"method__name": "private-fedavg", "method__loss": "sigmoid"},
        FUSION,
    ],
    ids=lambda changes: changes.get("method__average", changes.get("method__name", "fusion")),
)
def test_three_sites_reach_the_weights_of_the_local_engine(world: World, changes: dict[str, Any]) -> None:  # noqa: F811
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


def test_a_killed_site_is_skipped_and_accepted_again(world: World) -> None:  # noqa: F811
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
    assert "site-b is skipped" in world.said("server")
    assert max(row["seconds"] for row in world.rows()) < 20  # by its deadline


def test_a_site_joins_late_and_another_leaves(world: World) -> None:  # noqa: F811
    """The run starts with two sites when the join timeout is over. A site that is stopped with Ctrl-C is reported."""
    changes = {"method__name": "test-drifting-slowly", "method__seconds": 0.5, "training__rounds": 26}
    server = world.serve("--start-with", "2", "--join-timeout", "40", **changes)
    leaver = world.join("site-a")
    world.join("site-b")
    world.until_said("server", "starts without site-c, which may join later")
    world.join("site-c")
    world.until((world.out / "metrics.jsonl").exists)
    world.until(lambda: any(row["clients"] == 3 for row in world.rows()))
    leaver.send_signal(signal.SIGINT)
    assert world.ended(leaver, 30) == 130
    assert world.ended(server, 240) == 0, world.said("server")
    said = " ".join(world.said("server").split())
    assert "site-c has joined: 50 images, 7 annotated classes; it takes part from round" in said
    assert "site-a has left: its program was stopped there" in said
    assert "site-c is skipped" not in said
    counts = [row["clients"] for row in world.rows()]
    assert (counts[0], max(counts), counts[-1]) == (2, 3, 2), counts


def test_a_killed_server_is_resumed_to_the_same_weights(world: World) -> None:  # noqa: F811
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


def test_a_killed_supernode_is_started_again(world: World) -> None:  # noqa: F811
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


def test_bad_replies_are_rejected_by_name(world: World) -> None:  # noqa: F811
    server = world.serve(method__name="test-evil", training__rounds=5)
    for name in NAMES:
        world.join(name)
    assert world.ended(server) == 0, world.said("server")
    assert [row["clients"] for row in world.rows()] == [2, 2, 2, 2, 3]
    said = world.said("server")
    for number, reason in enumerate(("NaN or infinite", "not torch.float32", "an unknown key", "moved by the norm"), 1):
        (line,) = [text for text in said.splitlines() if f"round {number}: the reply of" in text]
        assert "site-b is rejected" in line
        assert reason in line


def test_a_site_without_a_registered_key_is_rejected(world: World) -> None:  # noqa: F811
    server = world.serve(training__rounds=1)
    world.until(lambda: socket.socket().connect_ex(("127.0.0.1", world.port)) == 0)
    address = f"127.0.0.1:{world.port}"

    # Flower's own node without a key, and plain HTTP
    flower = [str(Path(sys.executable).parent / "flower-supernode"), "--isolation", "process"]
    options = ["--superlink", address, "--port", str(find_free_port()), "--host", "127.0.0.1"]
    with pytest.MonkeyPatch.context() as patch:
        for key, value in flower_environment(world.folder / "stranger").items():
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
        acquire_task(open_task_client(address, b"a guess", certificate.read_bytes()), TaskType.SERVER_APP)
    assert refusal.value.response.status_code == 401
    world.ended(keyless, 60)
    assert "SuperNode ID" not in world.said("keyless")  # what a node says once it is in
    assert world.ended(stranger, 60) == 2
    assert "does not know the key of site-a" in world.said("stranger").replace("\n", " ")
    assert world.ended(plain, 60) == 2
    assert "it uses TLS" in world.said("plain").replace("\n", " ")

    # a registered key under another's name is rejected by name; the right ones then do the run
    impostor = world.join("site-a", key="site-b", log="impostor")
    world.until_said("server", "site-b is rejected: it calls itself by another name, and its key is that of 'site-b'")
    kill(impostor)
    for name in NAMES:
        world.join(name)
    assert world.ended(server) == 0, world.said("server")


def test_another_study_than_the_approved_one_ends_the_join_and_nothing_leaves(world: World) -> None:  # noqa: F811
    world.serve(training__rounds=1)
    shown = f"the study's digest is {world.digest}"
    other = "0" * 64
    site = world.join("site-a", None, None, "--approve", other)
    assert world.ended(site) == 2
    said = " ".join(world.said("site-a").split())
    assert f"The server asks for the study {world.digest}, and you approved the study {other} (--approve)." in said
    assert "Ask the server's operator what changed" in said
    assert shown in " ".join(world.said("server").split())
    assert "nobody at the site has approved" in world.said("server")
    audit = [json.loads(line) for line in (world.folder / "memory-site-a" / "audit.jsonl").read_text().splitlines()]
    assert [line["study"] for line in audit if line["event"] == "rejected"] == [world.digest]
    assert not any(line["event"] == "left" for line in audit)


def test_another_ca_is_not_trusted(world: World) -> None:  # noqa: F811
    world.serve(training__rounds=1)
    world.until(lambda: socket.socket().connect_ex(("127.0.0.1", world.port)) == 0)
    from fedmll.deploy.security import certificates

    certificates.create_server_certificate(world.folder / "other", [])
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
    process = world.start("a", "join", f"localhost:{world.port}", *options, "--state-dir", world.folder / "m")
    assert world.ended(process, 60) == 2
    assert "does not present a certificate of your consortium's CA" in world.said("a").replace("\n", " ")


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
