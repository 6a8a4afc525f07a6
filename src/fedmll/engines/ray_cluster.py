"""The connection to Ray: a cluster at an address, or Ray on this machine. Nothing else starts or stops Ray.

Ray sends no usage statistics. What it starts on this machine listens on 127.0.0.1 only.
"""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import socket
import threading
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from fedmll.config.settings import EngineSettings
from fedmll.core.addresses import parse_address
from fedmll.core.errors import ConfigError
from fedmll.core.versions import fedmll_version, package_version

START_SECONDS = 180.0  # for Ray, a node or an actor to answer; a busy machine needs a minute to import torch
CONNECT_SECONDS = 20.0
LOOPBACK = "127.0.0.1"
AUTO = "auto"
_connected: str | None = None  # the address of the cluster that this process uses
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the future behaviour; without it Ray prints a warning
    "RAY_DEDUP_LOGS": "0",
}


def import_ray() -> Any:
    """The module ray, with our settings."""
    os.environ |= ENVIRONMENT
    try:
        import ray
    except ImportError:
        raise ConfigError("engine.kind = 'ray' needs Ray, which is not installed: pip install 'fedmll[ray]'.") from None
    return ray


def connect(setting: EngineSettings) -> None:
    """Connect this process to the cluster of the setting, or start Ray on this machine. Once per process.

    Raises:
        ConfigError: the cluster does not answer, has another version, or this machine is not one of its nodes.
    """
    global _connected
    ray, address = import_ray(), setting.address
    if address is not None:
        _check_address(address)
    if ray.is_initialized():
        if address not in (None, AUTO, _connected):
            raise ConfigError(
                f"engine.address = '{address}', but this process uses another Ray already. Start another process."
            )
        return
    if address is None:
        _start_here(ray, setting)
    else:
        _connect_to(ray, address)
    _connected = address


def _start_here(ray: Any, setting: EngineSettings) -> None:
    cores = len(os.sched_getaffinity(0))
    count = max(cores, setting.workers) if isinstance(setting.workers, int) else cores
    constants = ray._private.ray_constants
    clusters, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False  # its servers then bind 127.0.0.1
    try:
        failure = "Ray did not start on this machine"
        _init(ray, failure, address="local", num_cpus=count, _node_ip_address=LOOPBACK, include_dashboard=False)
    finally:
        constants.ENABLE_RAY_CLUSTER = clusters


def _check_address(address: str) -> None:
    """Raise a ConfigError if nothing listens at an address."""
    if "://" in address:
        raise ConfigError(
            f"engine.address = '{address}': Ray Client is not supported. Run the command on a node of the cluster, "
            "with --address auto."
        )
    if address != AUTO:
        host, port = parse_address(address, "--address", example="10.0.0.1:6379")
        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()
        except OSError as error:
            raise ConfigError(
                f"No Ray cluster answers at {address} ({error.strerror or error}). Start its first node there with "
                "`ray start --head`, or leave --address out: Ray then starts on this machine."
            ) from None


def _connect_to(ray: Any, address: str) -> None:
    failed = list[BaseException]()

    def attempt() -> None:
        try:
            _init(ray, f"The Ray cluster at {address} cannot be used", address=address)
        except BaseException as error:
            failed.append(error)

    # In a thread: what accepts connections and is not Ray may let Ray wait for minutes.
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(START_SECONDS)
    if thread.is_alive():
        raise ConfigError(f"The Ray cluster at {address} did not answer within {START_SECONDS:.0f} seconds.")
    if failed:
        raise failed[0]


def _init(ray: Any, failure: str, **options: Any) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(**options, log_to_driver=False, configure_logging=False, logging_level="ERROR")
    except (RuntimeError, ValueError, OSError, TimeoutError, ray.exceptions.RayError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"{failure} ({type(error).__name__}: {text[:400].rstrip('.')}). This machine must be a node of the "
            "cluster, and all nodes need the same versions of Python and Ray."
        ) from None
    finally:
        if threading.current_thread() is threading.main_thread():  # Ray installs handlers of its own
            for number, handler in before.items():
                signal.signal(number, handler)


@cache
def installed_versions() -> dict[str, str]:
    """What the bits of a result depend on, and the code of fedmll itself."""
    digest, root = hashlib.blake2b(digest_size=8), Path(__file__).parents[1]
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    versions = {name: package_version(name) or "not installed" for name in ("torch", "numpy")}
    return {"fedmll": fedmll_version(), "Python": platform.python_version()} | versions | {"code": digest.hexdigest()}


def check_nodes() -> None:
    """Compare the versions of all nodes with those here.

    Raises:
        ConfigError: with the name of the node that has other versions, or that does not answer.
    """
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def inspect_node() -> dict[str, str]:  # a nested function is sent as code: a node may have no fedmll, or another
        import platform

        try:
            from fedmll.engines.ray_cluster import installed_versions
        except ImportError:
            return {"fedmll": "none, or one without Ray", "Python": platform.python_version()}
        return installed_versions()

    def start(node: str) -> Any:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        return ray.remote(inspect_node).options(num_cpus=0, scheduling_strategy=strategy, max_retries=2).remote()

    nodes = {start(node["NodeID"]): describe_node(node) for node in ray.nodes() if node["Alive"]}
    ready, waiting = ray.wait(list(nodes), num_returns=len(nodes), timeout=START_SECONDS)
    if waiting:
        raise ConfigError(
            f"The node {nodes[waiting[0]]} of the Ray cluster did not answer within {START_SECONDS:.0f} seconds."
        )
    own = installed_versions()
    for reference in ready:
        try:
            found = ray.get(reference)
        except ray.exceptions.RayError as error:
            raise ConfigError(
                f"The node {nodes[reference]} of the Ray cluster cannot run anything ({type(error).__name__})."
            ) from None
        other = next((name for name, version in own.items() if found.get(name) != version), None)
        if other == "code":
            raise ConfigError(
                f"The node {nodes[reference]} has fedmll {own['fedmll']} with other source files than this machine. "
                "Install the same fedmll on every node."
            )
        if other is not None:
            raise ConfigError(
                f"The node {nodes[reference]} has {other} {found.get(other)}, and this machine has {own[other]}. "
                "Install the same versions on every node."
            )


def describe_node(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def disconnect() -> None:
    """Disconnect from the cluster. Ray that was started on this machine ends. A process does so when it ends."""
    ray = import_ray()
    with suppress(Exception):
        ray.shutdown()
