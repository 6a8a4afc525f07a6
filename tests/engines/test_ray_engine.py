"""The Ray engine: the same bits as the local engine; lost actors; nodes with other data, versions or plug-ins."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedmll.config.settings import EngineSettings
from fedmll.core.errors import ClientError, ConfigError
from fedmll.core.message import Tensors
from fedmll.engines.ray_worker import PackedTensor, RayWorker, pack_tensor, unpack_tensor
from fedmll.testing import experiment
from fedmll.training.callbacks import Callback, Result
from fedmll.training.round_loop import resume, run

pytest.importorskip("ray", reason="Ray is not installed (extra ray)")

from fedmll.engines import ray_cluster
from fedmll.engines.ray_engine import RayEngine, plan_actors
from fedmll.engines.ray_pool import ActorResources, keep_actors

RAY = {"engine__kind": "ray", "engine__workers": 2}
SGD = {"training__optimizer": "sgd", "training__lr": 0.1}
FROZEN = {"model__freeze": "backbone", "model__weights": "random"}
PLUGIN = """
import os, signal
from pathlib import Path
from fedmll.core.registry import register
from fedmll.methods.framework.base import Part, PartOptions
from fedmll.methods.framework.method import Method
from fedmll.methods.losses import UnknownAsNegative

class Killing(Part):
    name = "test-ray-killing"
    class Options(PartOptions):
        flag: str = ""
        always: bool = False
    def on_round_start(self, client_round):
        flag = Path(self.options.flag)
        if client_round.number == 2 and client_round.client.name == "c001":
            if self.options.always or not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)

@register("method", "test-ray-dying")
class Dying(Method):
    name = "test-ray-dying"
    parts = (UnknownAsNegative, Killing)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray on this machine, with a cache of its own. All tests of the module share its actors."""
    cache = str(tmp_path_factory.mktemp("cache"))
    before, os.environ["FEDMLL_CACHE"] = os.environ.get("FEDMLL_CACHE"), cache
    ray_cluster.connect(EngineSettings(kind="ray", workers=2))
    with keep_actors():
        yield
    ray_cluster.disconnect()
    if before is None:
        del os.environ["FEDMLL_CACHE"]
    else:
        os.environ["FEDMLL_CACHE"] = before


class Warnings(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_warning(self, text: str) -> None:
        self.texts.append(text)


def assert_same(one: Result, other: Result) -> None:
    assert one.weights.keys() == other.weights.keys()
    assert all(torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items())
    assert one.summary["metrics"] == other.summary["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        {},
        SGD | {"method__name": "scaffold", "training__rounds": 3},  # with client state
        {"method__name": "local-only"},  # one model per client, which the client keeps
        {"method__name": "fedmlp", "annotation__kind": "missing", "annotation__missing": 3},  # closing and opening
        {"model__norm": "batch"},
        FROZEN,
        FROZEN | {"model__width": 8},  # tokens instead of means
        {"method__name": "centralized"},
        {"training__clients_per_batch": 2, **FROZEN},
    ],
    ids=str,
)
def test_weights_are_those_of_the_local_engine(cluster: None, setting: dict[str, Any]) -> None:
    assert_same(run(experiment(**setting)), run(experiment(**setting, **RAY)))


@pytest.mark.slow
def test_a_lost_actor_changes_nothing(cluster: None, tmp_path: Path) -> None:
    plugin, flag = tmp_path / "dying.py", tmp_path / "flag"
    plugin.write_text(PLUGIN)
    flag.touch()
    setting = {"plugins": [str(plugin)], "method__name": "test-ray-dying", "method__flag": str(flag)}
    undisturbed = run(experiment(**setting))
    flag.unlink()
    seen = Warnings()
    found = run(experiment(**setting, **RAY), tmp_path / "run", callback=seen)
    assert flag.exists()
    assert_same(undisturbed, found)
    assert any("was lost" in text and "done again" in text for text in seen.texts)
    assert "was lost" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.slow
def test_a_job_that_always_kills_its_actor_is_named(cluster: None, tmp_path: Path) -> None:
    plugin = tmp_path / "dying.py"
    plugin.write_text(PLUGIN)
    setting = {"plugins": [str(plugin)], "method__name": "test-ray-dying", "method__always": True}
    with pytest.raises(ClientError, match="client c001 in round 2"):
        run(experiment(**setting, method__flag=str(tmp_path / "flag"), **RAY))


@pytest.mark.slow
def test_another_version_at_a_node_is_refused(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ray_cluster.installed_versions()
    for name, text in (("fedmll", "has fedmll"), ("Python", "has Python"), ("code", "other source files")):
        monkeypatch.setattr(ray_cluster, "installed_versions", lambda name=name: own | {name: "0.0"})
        with pytest.raises(ConfigError, match=f"The node .*127.0.0.1.* {text}"):
            ray_cluster.check_nodes()


@pytest.mark.slow
def test_other_data_at_a_node_is_refused_with_its_name(
    cluster: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The driver has other data than the actors read, and then a file that the actors do not find."""
    from fedmll.data import federation

    made = experiment(**RAY)
    data = federation.build(made)
    data.fingerprints["training"]["labels"] = "other"
    with pytest.raises(ConfigError, match=f"node {socket.gethostname()} .* has other data .*labels of the training"):
        RayEngine(data, tmp_path)
    file = tmp_path / "vectors.npz"
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(80, 5)).astype(np.float32), rng.integers(0, 2, (80, 3))
    np.savez(file, x_train=x, y_train=y, x_test=x, y_test=y)
    made = experiment(**RAY, data__name=f"features:{file}", data__limit=None, model__channels=(8,))
    data = federation.build(made)
    file.unlink()
    with pytest.raises(ConfigError, match=f"node {socket.gethostname()} .* cannot take part"):
        RayEngine(data, tmp_path)


@pytest.mark.slow
def test_ray_listens_on_loopback_only(cluster: None) -> None:
    ray = ray_cluster.import_ray()
    assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
    assert ray.get_runtime_context().gcs_address.startswith("127.0.0.1:")
    port = int(ray.nodes()[0]["NodeManagerPort"])
    listening = _listeners()
    assert listening[port] and all(address == "127.0.0.1" for address in listening[port])


def _listeners() -> dict[int, set[str]]:
    """The local addresses that each port listens on."""
    found: dict[int, set[str]] = {}
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, _, port = local.partition(":")
            if state == "0A":
                quad = bytes.fromhex(address[-8:])[::-1]
                found.setdefault(int(port, 16), set()).add(".".join(map(str, quad)))
    return found


@pytest.mark.slow
def test_a_killed_driver_resumes_and_leaves_no_process(tmp_path: Path) -> None:
    made = experiment(**SGD, method__name="scaffold", training__rounds=6, **RAY)
    (tmp_path / "experiment.toml").write_text(made.to_toml())
    command = [sys.executable, "-m", "fedmll", "run", "experiment.toml", "--out", "run"]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    until = time.monotonic() + 200
    while not (tmp_path / "run" / "checkpoint").is_dir() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.05)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert_same(
        run(made.changed({"engine.kind": "local", "engine.workers": 0})),
        resume(tmp_path / "run", engine={"kind": "local", "workers": 0}),
    )


def test_an_address_that_does_not_answer() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=f"No Ray cluster answers at {address}.*ray start"):
        run(experiment(engine__kind="ray", engine__address=address))
    assert time.monotonic() - begin < ray_cluster.CONNECT_SECONDS + 10
    for wrong, text in (("ray://127.0.0.1:10001", "Ray Client is not supported"), ("nowhere", "takes HOST:PORT")):
        with pytest.raises(ConfigError, match=text):
            run(experiment(engine__kind="ray", engine__address=wrong))


def test_an_address_is_for_ray_only() -> None:
    with pytest.raises(ConfigError, match=r"engine.address is for a Ray cluster"):
        run(experiment(engine__address="auto"))


@pytest.mark.parametrize(
    ("setting", "available", "count", "gpus"),
    [
        ({}, {"CPU": 8}, 8, 0),
        ({"workers": 3}, {"CPU": 8}, 3, 0),
        ({"workers": 0}, {"CPU": 8}, 1, 0),
        ({}, {"CPU": 8, "GPU": 2}, 2, 1),
        ({"device": "cpu"}, {"CPU": 8, "GPU": 2}, 8, 0),
        ({"device": "cuda", "per_device": 4}, {"CPU": 8, "GPU": 2}, 8, 0.25),
    ],
)
def test_actors_and_what_each_takes(
    setting: dict[str, Any], available: dict[str, float], count: int, gpus: float
) -> None:
    assert plan_actors(EngineSettings(kind="ray", **setting), available) == (count, ActorResources(gpus=gpus))


@pytest.mark.parametrize(
    ("setting", "available"),
    [
        ({"device": "cuda"}, {"CPU": 8}),
        ({"device": "cuda", "workers": 3}, {"CPU": 8, "GPU": 2}),
        ({"workers": 9}, {"CPU": 8}),
        ({"device": "cuda", "per_device": 8}, {"CPU": 8, "GPU": 2}),  # each actor also takes a CPU
    ],
)
def test_fewer_resources_than_asked_for(setting: dict[str, Any], available: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"the Ray cluster has .* GPUs|the Ray cluster has 8 CPUs"):
        plan_actors(EngineSettings(kind="ray", **setting), available)


@pytest.mark.parametrize("device", ["mps", "cuda:1"])
def test_a_device_of_one_machine_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="names a device of one machine"):
        plan_actors(EngineSettings(kind="ray", device=device), {"CPU": 8, "GPU": 2})


def test_python_objects_are_refused() -> None:
    rng = np.random.default_rng(0)
    data = (rng.integers(0, 255, (60, 1, 8, 8), dtype=np.uint8), rng.integers(0, 2, (60, 3)))
    from fedmll.data import federation
    from fedmll.training.python_objects import make_experiment

    made = make_experiment(experiment(data__limit=None), data=data)
    with pytest.raises(ConfigError, match="cannot use the Python object"):
        RayEngine(federation.build(made), Path())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor(3, dtype=torch.int64),
        torch.zeros(0, 4),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([True, False]),
    ],
)
def test_tensors_are_packed_and_unpacked(tensor: torch.Tensor) -> None:
    packed = pack_tensor(tensor)
    assert isinstance(packed, PackedTensor)
    packed.content.flags.writeable = False  # as in the object store
    for copy in (True, False):
        found = unpack_tensor(packed, copy=copy)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)


def test_a_worker_returns_errors_as_values() -> None:
    tensors: Tensors = {}
    failed, kind, _ = RayWorker().work([(tensors,)])  # no job, and no run was built
    assert (failed, kind) == ("failed", RuntimeError)
