"""The server's end of a SuperLink: the run's task is ours, and with it Flower's Grid."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Error, Message

from fedmll.deploy.flower.executor import acquire, acquirer, heartbeat
from fedmll.deploy.flower.internals import (
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
    be_patient,
    inflate_object_from_contents,
    iterate_object_tree,
    make_message,
    make_pull_object_fn_protobuf,
    message_from_proto,
    pull_objects,
    run_from_proto,
    runtime_client,
)
from fedmll.deploy.flower.port import new_notices
from fedmll.deploy.flower.processes import Child, Link, local_host, start_link
from fedmll.errors import FederationError, printable

TASK_SECONDS = 30  # to get the run's task from a SuperLink that just started
Notice = Callable[[str], None]
LINK_SECONDS = 60  # how long a SuperLink that does not answer is tried again


class CarefulGrid(HttpGrid):
    """Flower's own believes the sender, the receiver and what is replied to that a reply's content claims, and ends the
    server when it cannot be put together. Here it is as the port has it, and what cannot be read is an error reply."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        client = runtime_client(self)
        found = client.PullMessages(PullAppMessagesRequest(message_ids=message_ids))
        return [
            self._pulled(client, proto, tree)
            for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True)
        ]

    def _pulled(self, client: Any, proto: Any, tree: Any) -> Message:
        run, metadata = self.run.run_id, message_from_proto(proto).metadata
        pull = make_pull_object_fn_protobuf(client.PullObject, self.node, run)
        try:
            contents = pull_objects([part.object_id for part in iterate_object_tree(tree)], pull)
            client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=metadata.message_id)
            )
            message: Any = inflate_object_from_contents(metadata.message_id, contents)
            if message.has_error():
                return make_message(metadata, error=message.error)
            return make_message(metadata, content=message.content)
        except httpx.HTTPError:
            raise  # the SuperLink, not the client
        except ObjectPullError as error:
            return make_message(metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, printable(error)))
        except Exception as error:  # whatever a client can think of
            return make_message(metadata, error=Error(ErrorCode.UNKNOWN, f"it cannot be read ({type(error).__name__})"))


class OwnLink:
    def __init__(self, grid: HttpGrid, child: Child, folder: Path, notice: Notice) -> None:
        self.grid, self.child, self.folder, self.notice = grid, child, folder, notice
        self.heard = 0

    def alive(self) -> None:
        texts, self.heard = new_notices(self.folder, self.heard)
        for text in texts:
            self.notice(text)
        if self.child.ended():
            raise FederationError(f"Flower's SuperLink ended by itself; its last words are in {self.child.log}.")


@contextmanager
def own_link(setting: Link, notice: Notice = lambda _: None) -> Iterator[OwnLink]:
    """Start a SuperLink, take the run's task, end both."""
    child = start_link(setting)
    try:
        ca = None if setting.ca is None else Path(setting.ca).read_bytes()
        address = f"{local_host(setting.host)}:{setting.port}"
        token = _token(address, Path(setting.secret_file).read_bytes(), ca, child)
        grid = CarefulGrid(address, ca is None, ca, token=token)
        be_patient(grid, LINK_SECONDS)
        client = runtime_client(grid)
        sender = heartbeat(client)
        try:
            task = client.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
            TaskIdentity.node_id = task.context.node_id
            grid.set_run(run_from_proto(task.run))
            yield OwnLink(grid, child, Path(setting.folder), notice)
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
