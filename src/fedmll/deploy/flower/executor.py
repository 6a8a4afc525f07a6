"""Does a SuperNode's tasks in one process that stays, with the ClientApp of the installed fedmll.

Flower would start a process a message (Python, torch, data: seconds) and run the code that the server sent along; here
the data and the model stay loaded, and no code of the server's is ever run at a site."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
from flwr.app import Message as FlowerMessage

from fedmll.deploy.flower.inflating import BOUNDS
from fedmll.deploy.flower.internals import (
    AcquireTaskRequest,
    HeartbeatSender,
    ProtobufClientInterceptor,
    RuntimeHttpClient,
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SendTaskHeartbeatRequest,
    SubStatus,
    SuperExecAuthHttpInterceptor,
    TaskType,
    pull_task_input,
    push_message,
    push_task_output,
)
from fedmll.deploy.flower.site_app import BYE, app, complain

IDLE_SECONDS = 0.1
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


def acquirer(address: str, secret: bytes, ca: bytes | None = None) -> RuntimeHttpClient:
    """A client that may ask a SuperNode or a SuperLink for tasks."""
    return RuntimeHttpClient.from_server_address(
        address,
        ca is None,
        ca,
        [
            RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[ACQUIRE]),
        ],
    )


def acquire(client: RuntimeHttpClient, kind: TaskType) -> str | None:
    """The token of a task that waits, if there is one."""
    response = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
    return response.token or None


def heartbeat(client: RuntimeHttpClient) -> HeartbeatSender:
    """Flower's own sends SIGINT to the process when a task is no longer wanted; here it is only no longer reported."""

    def beat() -> bool:
        with suppress(httpx.HTTPError):
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        return True

    sender = HeartbeatSender(beat)
    sender.start()
    return sender


class Executor:
    """Takes tasks from the SuperNode at `port` of this machine."""

    def __init__(self, port: int, secret_file: Path, site_file: Path, largest: float) -> None:
        """No array of the server's may have more than `largest` bytes."""
        BOUNDS.install()
        BOUNDS.allow(int(largest))
        self.address, self.site_file = f"127.0.0.1:{port}", site_file
        self.client = acquirer(self.address, secret_file.read_bytes())
        self.over = False  # the server said that the run is over
        self.served = False  # at least one message came

    def serve(self, alive: Callable[[], bool]) -> None:
        """Until the run is over, or the SuperNode is gone."""
        while alive() and not self.over:
            try:
                token = acquire(self.client, TaskType.CLIENT_APP)
                if token is not None:
                    self._do(token)
            except httpx.HTTPError:
                token = None  # the SuperNode is starting, or gone
            except Exception as error:  # a message that Flower cannot put together; the server asks again, or goes on
                complain(f"ignored: a message that cannot be read ({type(error).__name__}: {error})")
                token = None
            if token is None:
                time.sleep(IDLE_SECONDS)
        if self.over:
            time.sleep(2)  # the SuperNode sends the farewell on

    def _do(self, token: str) -> None:
        interceptors: list[ProtobufClientInterceptor] = [
            RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
            RuntimeTokenHttpInterceptor(token),
        ]
        client = RuntimeHttpClient.from_server_address(self.address, True, None, interceptors)
        sender = heartbeat(client)
        try:
            message, context, _, _ = pull_task_input(client)  # the server's bundle of code is not looked at
            context.node_config["site"] = str(self.site_file)
            reply: FlowerMessage = app(message, context)
            self.served = True
            push_message(client, reply, context)
            push_task_output(client, context, SubStatus.COMPLETED, "")  # stays on this machine
            self.over = message.metadata.message_type == BYE
        finally:
            sender.stop()
            client.close()
