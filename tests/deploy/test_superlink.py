"""Replies as the server receives them from its SuperLink: their sender is taken from the port."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from flwr.app import ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from fedmll.core.errors import FederationError
from fedmll.deploy.flower import request_guard
from fedmll.deploy.flower.superlink import CheckedGrid, SuperLinkConnection


class Runtime:
    """A SuperLink that has one reply."""

    def __init__(self, claimed: FlowerMessage, contents: dict[str, bytes] | None = None) -> None:
        objects = get_all_nested_objects(claimed)
        self.contents = {name: thing.deflate() for name, thing in objects.items()} if contents is None else contents
        self.tree = get_object_tree(claimed)
        self.proto = message_to_proto(remove_content_from_message(claimed))
        self.proto.metadata.message_id = claimed.object_id
        self.proto.metadata.src_node_id, self.proto.metadata.reply_to_message_id = 5, "the question"
        self.confirmed: list[str] = []

    def PullMessages(self, _: Any) -> Any:
        return SimpleNamespace(messages_list=[self.proto], message_object_trees=[self.tree])

    def PullObject(self, request: Any) -> PullObjectResponse:
        content = self.contents.get(request.object_id)
        return PullObjectResponse(
            object_found=content is not None, object_available=content is not None, object_content=content or b""
        )

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed.append(request.message_object_id)


def pull_reply(runtime: Runtime) -> FlowerMessage:
    grid = CheckedGrid("127.0.0.1:1", True, token="t")
    grid._client, grid._run = runtime, SimpleNamespace(run_id=7)  # type: ignore[assignment]
    CheckedGrid.run = property(lambda self: self._run)  # type: ignore[assignment, method-assign]
    (reply,) = grid.pull_messages(["the question"])
    return reply


@pytest.fixture
def claimed(monkeypatch: pytest.MonkeyPatch) -> FlowerMessage:
    monkeypatch.setattr(CheckedGrid, "run", CheckedGrid.run)  # put back afterwards
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
    return FlowerMessage(RecordDict({"info": ConfigRecord({"json": "{}"})}), 9, "train")


def test_the_sender_of_a_reply_is_taken_from_the_port(claimed: FlowerMessage) -> None:
    runtime = Runtime(claimed)
    reply = pull_reply(runtime)
    assert reply.metadata.src_node_id == 5  # its content says 1: the server itself
    assert reply.metadata.reply_to_message_id == "the question"
    assert reply.content.config_records["info"]["json"] == "{}"
    assert runtime.confirmed == [claimed.object_id]


@pytest.mark.parametrize("broken", [b"", b"garbage", b"Message 0,3\x00{}", b"ArrayRecord 5,0\x00"])
def test_a_reply_that_cannot_be_assembled_is_an_error_reply(claimed: FlowerMessage, broken: bytes) -> None:
    good = Runtime(claimed).contents
    for name in good:
        reply = pull_reply(Runtime(claimed, good | {name: broken or b" "}))
        assert reply.has_error()
        assert reply.error.code == ErrorCode.UNKNOWN
        assert "it cannot be read" in str(reply.error.reason)
        assert reply.metadata.src_node_id == 5


def test_a_reply_whose_objects_are_gone_is_asked_for_again(claimed: FlowerMessage) -> None:
    reply = pull_reply(Runtime(claimed, {}))
    assert reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE


def test_notices_of_the_superlink_are_passed_on_before_its_end_is_reported(tmp_path: Path) -> None:
    request_guard.NoticeWriter(tmp_path).write("site-a is rejected")
    said: list[str] = []
    child = SimpleNamespace(has_ended=lambda: True, log=tmp_path / "superlink.log")
    own = SuperLinkConnection(None, child, tmp_path, said.append)  # type: ignore[arg-type]
    with pytest.raises(FederationError, match="has ended unexpectedly"):
        own.check_alive()
    assert said == ["site-a is rejected"]
