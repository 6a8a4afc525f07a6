"""Replies as the server gets them from its SuperLink: what the port knows of them counts, not what they say."""

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

from fedmll.deploy.flower import port
from fedmll.deploy.flower.link import CarefulGrid, OwnLink
from fedmll.errors import FederationError


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


def pulled(runtime: Runtime) -> FlowerMessage:
    grid = CarefulGrid("127.0.0.1:1", True, token="t")
    grid._client, grid._run = runtime, SimpleNamespace(run_id=7)  # type: ignore[assignment]
    CarefulGrid.run = property(lambda self: self._run)  # type: ignore[assignment, method-assign]
    (reply,) = grid.pull_messages(["the question"])
    return reply


@pytest.fixture
def claimed(monkeypatch: pytest.MonkeyPatch) -> FlowerMessage:
    monkeypatch.setattr(CarefulGrid, "run", CarefulGrid.run)  # put back afterwards
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
    return FlowerMessage(RecordDict({"about": ConfigRecord({"json": "{}"})}), 9, "train")


def test_a_reply_is_from_whom_the_port_says(claimed: FlowerMessage) -> None:
    runtime = Runtime(claimed)
    reply = pulled(runtime)
    assert reply.metadata.src_node_id == 5  # its content says 1: the server itself
    assert reply.metadata.reply_to_message_id == "the question"
    assert reply.content.config_records["about"]["json"] == "{}"
    assert runtime.confirmed == [claimed.object_id]


@pytest.mark.parametrize("broken", [b"", b"garbage", b"Message 0,3\x00{}", b"ArrayRecord 5,0\x00"])
def test_a_reply_that_cannot_be_put_together_is_an_error_reply(claimed: FlowerMessage, broken: bytes) -> None:
    good = Runtime(claimed).contents
    for name in good:
        reply = pulled(Runtime(claimed, good | {name: broken or b" "}))
        assert reply.has_error()
        assert reply.error.code == ErrorCode.UNKNOWN
        assert "it cannot be read" in str(reply.error.reason)
        assert reply.metadata.src_node_id == 5


def test_a_reply_whose_objects_are_gone_is_asked_for_again(claimed: FlowerMessage) -> None:
    reply = pulled(Runtime(claimed, {}))
    assert reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE


def test_the_server_hears_what_its_link_notices_before_it_says_that_it_ended(tmp_path: Path) -> None:
    port.Notices(tmp_path).tell("site-a is refused")
    said: list[str] = []
    child = SimpleNamespace(ended=lambda: True, log=tmp_path / "superlink.log")
    own = OwnLink(None, child, tmp_path, said.append)  # type: ignore[arg-type]
    with pytest.raises(FederationError, match="ended by itself"):
        own.alive()
    assert said == ["site-a is refused"]
