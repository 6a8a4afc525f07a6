"""The server's connection to its SuperLink: it takes the run's task, and with it Flower's Grid."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Error, Message

from fedmll.core.addresses import format_address
from fedmll.core.errors import FederationError
from fedmll.core.text import printable
from fedmll.deploy.flower.child_processes import ChildProcess, SuperLinkSettings, local_host, start_superlink
from fedmll.deploy.flower.executor import acquire_task, open_task_client, start_heartbeat
from fedmll.deploy.flower.flower_internals import (
    ConfirmMessageReceivedRequest,
    ErrorCode,
    HttpGrid,
    ObjectPullError,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SubStatus,
    TaskIdentity,
    TaskType,
    connect_directly,
    inflate_object_from_contents,
    iterate_object_tree,
    make_message,
    make_pull_object_fn_protobuf,
    message_from_proto,
    pull_objects,
    run_from_proto,
    runtime_client,
    set_retry_time,
)
from fedmll.deploy.flower.records import ARRAY_LIMIT
from fedmll.deploy.flower.request_guard import read_notices

TASK_SECONDS = 30  # to get the run's task from a SuperLink that has just started
RETRY_SECONDS = 60  # for which requests to a SuperLink that does not answer are repeated
Notify = Callable[[str], None]


class CheckedGrid(HttpGrid):
    """Takes the sender, the receiver and the answered message of a reply from the port.

    Flower's own Grid takes them from the reply's content, which the client wrote, and ends the server if a reply cannot
    be assembled. Here that becomes an error reply.
    """

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        client = runtime_client(self)
        found = client.PullMessages(PullAppMessagesRequest(message_ids=message_ids))
        return [
            self._pull(client, proto, tree)
            for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True)
        ]

    def _pull(self, client: Any, proto: Any, tree: Any) -> Message:
        run, metadata = self.run.run_id, message_from_proto(proto).metadata
        pull = make_pull_object_fn_protobuf(client.PullObject, self.node, run)
        try:
            contents = pull_objects([part.object_id for part in iterate_object_tree(tree)], pull)
            client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=metadata.message_id)
            )
            ARRAY_LIMIT.start_message()
            message: Any = inflate_object_from_contents(metadata.message_id, contents)
            if message.has_error():
                return make_message(metadata, error=message.error)
            return make_message(metadata, content=message.content)
        except httpx.HTTPError:
            raise  # the SuperLink is the cause, not the client
        except ObjectPullError as error:
            return make_message(metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, printable(error)))
        except Exception as error:  # anything that a client can send
            return make_message(metadata, error=Error(ErrorCode.UNKNOWN, f"it cannot be read ({type(error).__name__})"))


class SuperLinkConnection:
    """A running SuperLink and the Grid of its only run."""

    def __init__(self, grid: HttpGrid, child: ChildProcess, folder: Path, notify: Notify) -> None:
        self.grid, self.child, self.folder, self.notify = grid, child, folder, notify
        self.notices_read = 0  # bytes of the file of notices

    def check_alive(self) -> None:
        """Pass on the notices of the SuperLink's process, and raise a FederationError if it has ended."""
        texts, self.notices_read = read_notices(self.folder, self.notices_read)
        for text in texts:
            self.notify(text)
        if self.child.has_ended():
            raise FederationError(f"Flower's SuperLink has ended unexpectedly; see the end of {self.child.log}.")


@contextmanager
def run_superlink(settings: SuperLinkSettings, notify: Notify = lambda _: None) -> Iterator[SuperLinkConnection]:
    """Start a SuperLink and take the run's task; stop both at the end of the block."""
    child = start_superlink(settings)
    try:
        ca = None if settings.ca is None else Path(settings.ca).read_bytes()
        address = format_address(local_host(settings.host), settings.port)
        connect_directly(local_host(settings.host))
        token = _acquire_server_task(address, Path(settings.secret_file).read_bytes(), ca, child)
        grid = CheckedGrid(address, ca is None, ca, token=token)
        set_retry_time(grid, RETRY_SECONDS)
        client = runtime_client(grid)
        sender = start_heartbeat(client)
        try:
            task = client.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
            TaskIdentity.node_id = task.context.node_id
            grid.set_run(run_from_proto(task.run))
            yield SuperLinkConnection(grid, child, Path(settings.folder), notify)
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details=""))
        except httpx.HTTPError as error:
            raise FederationError(
                f"The SuperLink has stopped answering ({type(error).__name__}); see the end of {child.log}."
            ) from None
        finally:
            sender.stop()
            grid.close()
    finally:
        child.stop()


def _acquire_server_task(address: str, secret: bytes, ca: bytes | None, child: ChildProcess) -> str:
    client = open_task_client(address, secret, ca)
    until = time.monotonic() + TASK_SECONDS
    try:
        while time.monotonic() < until and not child.has_ended():
            try:
                token = acquire_task(client, TaskType.SERVER_APP)
                if token is not None:
                    return token
            except httpx.TransportError as error:
                if "CERTIFICATE" in str(error).upper():
                    raise FederationError(f"The server's own certificate is not valid: {error}.") from None
            time.sleep(0.2)
    finally:
        client.close()
    raise FederationError(f"The SuperLink gave its server no task; see the end of {child.log}.")
