"""Each name of Flower that is not public, and that we use: a version that lacks one, or changed it, fails here."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from flwr.app import Message, RecordDict

import fedmll.deploy.flower
from fedmll.deploy.flower import flower_internals

FOLDER = Path(fedmll.deploy.flower.__file__).parent
PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation"}
NAMES = {
    "flwr.app.message": "make_message",
    "flwr.cli.build": "build_fab_from_files",
    "flwr.cli.config_utils": "get_fab_metadata",
    "flwr.common.constant": "HEARTBEAT_DEFAULT_INTERVAL NOOP_ACCOUNT_NAME NOOP_FLWR_AID SUPERLINK_NODE_ID "
    "SYSTEM_TIME_TOLERANCE TIMESTAMP_HEADER TIMESTAMP_TOLERANCE ErrorCode SubStatus",
    "flwr.common.serde": "message_from_proto run_from_proto",
    "flwr.proto.message_pb2": "ConfirmMessageReceivedRequest",
    "flwr.proto.runtime_pb2": "AcquireTaskRequest PullAppMessagesRequest PullTaskInputRequest PushTaskOutputRequest "
    "SendTaskHeartbeatRequest",
    "flwr.supercore.constant": "FLEET_HTTP_PUBLIC_KEY_HEADER FLEET_HTTP_SIGNATURE_HEADER NOOP_FEDERATION_ID TaskType",
    "flwr.supercore.date": "now",
    "flwr.supercore.error": "FlowerError",
    "flwr.supercore.fab": "Fab",
    "flwr.supercore.heartbeat": "HeartbeatSender",
    "flwr.supercore.inflatable": "inflatable_utils",
    "flwr.supercore.inflatable.inflatable_object": "get_object_body get_object_children_ids_from_object_content "
    "iterate_object_tree",
    "flwr.supercore.inflatable.inflatable_protobuf_utils": "make_pull_object_fn_protobuf",
    "flwr.supercore.inflatable.inflatable_utils": "ObjectPullError inflate_object_from_contents pull_objects",
    "flwr.supercore.interceptors": "RuntimeTokenHttpInterceptor RuntimeVersionHttpInterceptor "
    "SuperExecAuthHttpInterceptor",
    "flwr.supercore.primitives.asymmetric": "bytes_to_public_key sign_message verify_signature",
    "flwr.supercore.protobuf.client": "ProtobufClient ProtobufClientInterceptor",
    "flwr.supercore.runtime": "RuntimeHttpClient",
    "flwr.supercore.task_identity": "TaskIdentity",
    "flwr.superlink.grid": "HttpGrid",
    "flwr.superlink.main": "create_app",
    "flwr.superlink.servicer.fleet": "fleet_handlers",
    "flwr.supernode.cli": "flower_supernode",
    "flwr.supernode.runtime.run_clientapp": "pull_task_input push_message push_task_output",
}
MODULES = {  # taken whole, and what is used or replaced in them
    "flwr.superlink.cli.flower_superlink": "_parse_superlink_lifespan_config SuperLinkLifespan",
    "flwr.supernode.start_client_internal": "time",
    "flwr.supernode.fleet_http_connection": "NodeAuthHttpInterceptor",
    "flwr.supernode.cli.flower_supernode": "load_ssh_private_key",
    "flwr.supercore.inflatable.inflatable_utils": "inflatable_class_registry",
    "flwr.superlink.servicer.fleet.fleet_handlers": "push_messages push_object",
}
EACH = [(module, name) for table in (NAMES, MODULES) for module, names in table.items() for name in names.split()]


@pytest.mark.parametrize(("module", "name"), EACH)
def test_flower_has_every_name_that_is_used(module: str, name: str) -> None:
    assert hasattr(import_module(module), name)


def imported(path: Path) -> set[tuple[str, str]]:
    """Module and name of all that a file takes from Flower, also by import_module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
            found |= {(str(node.module), alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names if alias.name.split(".")[0] == "flwr"}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("flwr."):
            found.add((node.value, ""))
    return found


def test_only_one_module_uses_what_is_not_public() -> None:
    for path in FOLDER.glob("*.py"):
        if path.name != "flower_internals.py":
            assert {module for module, _ in imported(path)} <= PUBLIC, path.name
            for inside in ("_runtime_client", "_retry_invoker", "linkstate", "object_store.store"):
                assert inside not in path.read_text(), path.name


def test_every_name_is_listed_here() -> None:
    expected = {(module, name) for module, names in NAMES.items() for name in names.split()}
    expected |= {(module, "") for module in MODULES if "inflatable" not in module and "handlers" not in module}
    assert imported(Path(flower_internals.__file__)) == expected


def test_flowers_objects_have_the_attributes_that_are_used() -> None:
    grid = inspect.getsource(flower_internals.HttpGrid)
    for inside in ("self._runtime_client", "self._retry_invoker", "def set_run", "def get_nodes", "def push_messages"):
        assert inside in grid, inside
    client = flower_internals.RuntimeHttpClient
    calls = ("PullMessages", "PullObject", "ConfirmMessageReceived", "AcquireTask", "SendTaskHeartbeat")
    for name in (*calls, "PullTaskInput", "PushTaskOutput", "from_server_address", "close"):
        assert hasattr(client, name), name
    assert "time.sleep" in inspect.getsource(import_module("flwr.supernode.start_client_internal"))


def test_a_superlink_is_started_and_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state behind it, as it is used: nodes, the run, replies that are complete."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", [])
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 32)
    options = ["--insecure", "--isolation", "process", "--superexec-auth-secret-file", str(secret)]
    app, config, state, handlers = flower_internals.create_superlink(
        [*options, "--disable-runtime-dependency-installation"]
    )
    assert callable(app)
    assert hasattr(config, "ssl_keyfile")
    assert hasattr(config, "ssl_certfile")
    assert callable(handlers.push_messages)
    assert callable(handlers.push_object)
    from fedmll.deploy.flower.child_processes import APP

    flower_internals.register_nodes_and_run(
        state, {"site-a": "a key"}, {"pyproject.toml": APP.encode(), "README.md": b"fedmll"}
    )
    (node,) = state.get_node_info()
    assert node.name == "site-a"
    flower_internals.allow_immediate_return(state)
    assert state.activate_node(node.node_id, 30.0)
    assert state.activate_node(node.node_id, 30.0)  # Flower's own refuses it for a minute
    flower_internals.deliver_complete_replies_only(state)
    assert state.get_message_res(message_ids=set(), run_id=1) == []
    assert state.message_ins_id_to_message_res_id == {}
    assert flower_internals.stored_children("nothing", state.object_store) is None


def test_make_message_keeps_the_metadata() -> None:
    (
        flower_internals.TaskIdentity.run_id,
        flower_internals.TaskIdentity.node_id,
        flower_internals.TaskIdentity.task_id,
    ) = 7, 1, 1
    message = Message(RecordDict(), 3, "train")
    again = flower_internals.make_message(message.metadata, content=message.content)
    assert again.metadata.dst_node_id == 3
