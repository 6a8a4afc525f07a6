"""The server's end of a SuperLink: the run's task is ours, and with it Flower's Grid."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from flwr.common.constant import SubStatus
from flwr.common.serde import run_from_proto
from flwr.proto.runtime_pb2 import PullTaskInputRequest, PushTaskOutputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedmll.deploy.flower.executor import acquire, acquirer, heartbeat
from fedmll.deploy.flower.processes import Child, Link, local_host, start_link
from fedmll.errors import FederationError

TASK_SECONDS = 30  # to get the run's task from a SuperLink that just started
LINK_SECONDS = 60  # how long a SuperLink that does not answer is tried again


class OwnLink:
    def __init__(self, grid: HttpGrid, child: Child) -> None:
        self.grid, self.child = grid, child

    def alive(self) -> None:
        if self.child.ended():
            raise FederationError(f"Flower's SuperLink ended by itself; its last words are in {self.child.log}.")


@contextmanager
def own_link(setting: Link) -> Iterator[OwnLink]:
    """Start a SuperLink, take the run's task, end both."""
    child = start_link(setting)
    try:
        ca = None if setting.ca is None else Path(setting.ca).read_bytes()
        address = f"{local_host(setting.host)}:{setting.port}"
        token = _token(address, Path(setting.secret_file).read_bytes(), ca, child)
        grid = HttpGrid(address, ca is None, ca, token=token)
        grid._retry_invoker.max_time = LINK_SECONDS
        client = grid._runtime_client
        sender = heartbeat(client)
        try:
            task = client.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
            TaskIdentity.node_id = task.context.node_id
            grid.set_run(run_from_proto(task.run))
            yield OwnLink(grid, child)
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details=""))
        except httpx.HTTPError as error:
            raise FederationError(
                f"The SuperLink does not answer any more ({type(error).__name__}); its last words are in {child.log}."
            ) from None
        finally:
            sender.stop()
            grid.close()
    finally:
        child.stop()


def _token(address: str, secret: bytes, ca: bytes | None, child: Child) -> str:
    client = acquirer(address, secret, ca)
    until = time.monotonic() + TASK_SECONDS
    try:
        while time.monotonic() < until and not child.ended():
            try:
                token = acquire(client, TaskType.SERVER_APP)
                if token is not None:
                    return token
            except httpx.TransportError as error:
                if "CERTIFICATE" in str(error).upper():
                    raise FederationError(f"The server's own certificate does not hold: {error}.") from None
            time.sleep(0.2)
    finally:
        client.close()
    raise FederationError(f"The SuperLink gave no task to its own server; its last words are in {child.log}.")
