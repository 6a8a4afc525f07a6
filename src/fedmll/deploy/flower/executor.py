"""Runs a SuperNode's tasks in one process that stays, with the ClientApp of the installed fedmll.

Flower would start one process per message (Python, torch, data: seconds) and run the code that the server sent. Here
the data and the model stay loaded, and no code of the server runs at a site.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
from flwr.app import Message as FlowerMessage

from fedmll.deploy.flower.client_app import BYE, app, show_once
from fedmll.deploy.flower.flower_internals import (
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
from fedmll.deploy.flower.records import ARRAY_LIMIT

IDLE_SECONDS = 0.1
FORWARD_SECONDS = 2  # in which the SuperNode forwards the last reply
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


def open_task_client(address: str, secret: bytes, ca: bytes | None = None) -> RuntimeHttpClient:
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


def acquire_task(client: RuntimeHttpClient, kind: TaskType) -> str | None:
    """The token of a waiting task, or None."""
    response = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
    return response.token or None


def start_heartbeat(client: RuntimeHttpClient) -> HeartbeatSender:
    """Report that a task is being worked on.

    Flower's own heartbeat sends SIGINT to the process when the task was cancelled; this one ignores that.
    """

    def beat() -> bool:
        with suppress(httpx.HTTPError):
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        return True

    sender = HeartbeatSender(beat)
    sender.start()
    return sender


class TaskExecutor:
    """Runs the tasks of the SuperNode whose Runtime API is at a port of this machine."""

    def __init__(self, port: int, secret_file: Path, site_file: Path, max_array_bytes: float) -> None:
        ARRAY_LIMIT.install()
        ARRAY_LIMIT.allow(int(max_array_bytes))
        self.address, self.site_file = f"127.0.0.1:{port}", site_file
        self.client = open_task_client(self.address, secret_file.read_bytes())
        self.run_ended = False  # the server has said so
        self.has_answered = False  # at least one message was answered

    def serve(self, is_alive: Callable[[], bool]) -> None:
        """Run tasks until the run ends, or `is_alive` says that the SuperNode has ended."""
        while is_alive() and not self.run_ended:
            try:
                token = acquire_task(self.client, TaskType.CLIENT_APP)
                if token is not None:
                    self._run_task(token)
            except httpx.HTTPError:
                token = None  # the SuperNode is starting, or has ended
            except Exception as error:  # a message that Flower cannot assemble; the server asks again, or continues
                show_once(f"ignored: a message that cannot be read ({type(error).__name__}: {error})")
                token = None
            if token is None:
                time.sleep(IDLE_SECONDS)
        if self.run_ended:
            time.sleep(FORWARD_SECONDS)

    def _run_task(self, token: str) -> None:
        interceptors: list[ProtobufClientInterceptor] = [
            RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
            RuntimeTokenHttpInterceptor(token),
        ]
        client = RuntimeHttpClient.from_server_address(self.address, True, None, interceptors)
        sender = start_heartbeat(client)
        try:
            ARRAY_LIMIT.start_message()
            message, context, _, _ = pull_task_input(client)  # the server's bundle of code is ignored
            context.node_config["site"] = str(self.site_file)
            reply: FlowerMessage = app(message, context)
            self.has_answered = True
            push_message(client, reply, context)
            push_task_output(client, context, SubStatus.COMPLETED, "")  # stays on this machine
            self.run_ended = message.metadata.message_type == BYE
        finally:
            sender.stop()
            client.close()
