"""Everything that fedmll uses of Flower beyond its public modules (`flwr.app`, `flwr.clientapp`, `flwr.serverapp`,
`flwr.simulation`).

It may change with any version of Flower. All of it is imported here, and tests/deploy/test_flower_internals.py checks
each name, so that an incompatible version fails there first. Tested with 1.41 and 1.42.
"""

from __future__ import annotations

import hashlib
import ipaddress
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

import httpx
from flwr.app.message import make_message as make_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.common.constant import SUPERLINK_NODE_ID as SUPERLINK_NODE_ID
from flwr.common.constant import SYSTEM_TIME_TOLERANCE as SYSTEM_TIME_TOLERANCE
from flwr.common.constant import TIMESTAMP_HEADER as TIMESTAMP_HEADER
from flwr.common.constant import TIMESTAMP_TOLERANCE as TIMESTAMP_TOLERANCE
from flwr.common.constant import ErrorCode as ErrorCode
from flwr.common.constant import SubStatus as SubStatus
from flwr.common.serde import message_from_proto as message_from_proto
from flwr.common.serde import run_from_proto as run_from_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest as ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest as AcquireTaskRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest as PullAppMessagesRequest
from flwr.proto.runtime_pb2 import PullTaskInputRequest as PullTaskInputRequest
from flwr.proto.runtime_pb2 import PushTaskOutputRequest as PushTaskOutputRequest
from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest as SendTaskHeartbeatRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER as FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.constant import FLEET_HTTP_SIGNATURE_HEADER as FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.constant import NOOP_FEDERATION_ID
from flwr.supercore.constant import TaskType as TaskType
from flwr.supercore.date import now as now
from flwr.supercore.error import FlowerError as FlowerError
from flwr.supercore.heartbeat import HeartbeatSender as HeartbeatSender
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import get_object_body as get_object_body
from flwr.supercore.inflatable.inflatable_object import (
    get_object_children_ids_from_object_content as get_object_children_ids_from_object_content,
)
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree as iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf as make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError as ObjectPullError
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents as inflate_object_from_contents
from flwr.supercore.inflatable.inflatable_utils import pull_objects as pull_objects
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor as RuntimeTokenHttpInterceptor
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor as RuntimeVersionHttpInterceptor
from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor as SuperExecAuthHttpInterceptor
from flwr.supercore.primitives.asymmetric import bytes_to_public_key as bytes_to_public_key
from flwr.supercore.primitives.asymmetric import sign_message as sign_message
from flwr.supercore.primitives.asymmetric import verify_signature as verify_signature
from flwr.supercore.protobuf.client import ProtobufClient as ProtobufClient
from flwr.supercore.protobuf.client import ProtobufClientInterceptor as ProtobufClientInterceptor
from flwr.supercore.runtime import RuntimeHttpClient as RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity as TaskIdentity
from flwr.superlink.grid import HttpGrid as HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input as pull_task_input
from flwr.supernode.runtime.run_clientapp import push_message as push_message
from flwr.supernode.runtime.run_clientapp import push_task_output as push_task_output

# ---- all HTTP clients: connections within this machine never go through a proxy

_this_machine: set[str] = set()  # its own addresses that are not loopback


def connect_directly(host: str) -> None:
    """From now on no client of this process uses a proxy for this address, which is one of this machine."""
    _this_machine.add(host.strip("[]").lower())


def is_direct(host: str) -> bool:
    """Whether connections to this host stay on this machine."""
    host = host.strip("[]").lower()
    if host in _this_machine or host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


_open_client: Any = ProtobufClient.__init__


def _open_directly(self: Any, base_url: str, **options: Any) -> None:
    """Flower's client uses the environment's proxies (HTTP_PROXY, ALL_PROXY, …) for loopback too; this does not."""
    _open_client(self, base_url, **options)
    if is_direct(urlsplit(base_url).hostname or ""):
        proxied = self._client
        self._client = httpx.Client(
            verify=options.get("verify", True), timeout=proxied.timeout, follow_redirects=True, trust_env=False
        )
        proxied.close()


_every_client: Any = ProtobufClient
_every_client.__init__ = _open_directly


# ---- the server's grid


def runtime_client(grid: HttpGrid) -> Any:
    return grid._runtime_client


def set_retry_time(grid: HttpGrid, seconds: float) -> None:
    """Set for how long requests to a SuperLink that does not answer are repeated."""
    grid._retry_invoker.max_time = seconds


def register_array_class(array_class: Any) -> None:
    """Set the class with which Flower assembles arrays in this process."""
    inflatable_utils.inflatable_class_registry["Array"] = array_class


# ---- the SuperLink


def create_superlink(arguments: Sequence[str]) -> tuple[Any, Any, Any, Any]:
    """What `flower-superlink` with these arguments would run: the HTTP app, its configuration, the state of the
    SuperLink, and the module of functions that answer nodes."""
    from flwr.superlink.main import create_app
    from flwr.superlink.servicer.fleet import fleet_handlers

    flower = import_module("flwr.superlink.cli.flower_superlink")
    sys.argv = ["flower-superlink", *arguments]
    config = flower._parse_superlink_lifespan_config()
    app = create_app(config, flower.SuperLinkLifespan)
    return app, config, app.state.linkstate_factory.state(), fleet_handlers


def register_nodes_and_run(state: Any, nodes: Mapping[str, str], bundle: Mapping[str, bytes]) -> None:
    """Register the nodes' keys under their names, and the only run, with its bundle of files."""
    from flwr.cli.build import build_fab_from_files
    from flwr.cli.config_utils import get_fab_metadata
    from flwr.supercore.fab import Fab

    for name, public_key in nodes.items():
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public_key.encode(), HEARTBEAT_DEFAULT_INTERVAL, name=name)
    content, _ = build_fab_from_files(dict(bundle))
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    fab_id, fab_version = get_fab_metadata(content)
    state.store_fab(fab)
    state.federation_manager.ensure_default_federations_exist(flwr_aid=NOOP_FLWR_AID)
    state.create_run(
        fab_id, fab_version, fab.hash_str, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
    )


def allow_immediate_return(state: Any) -> None:
    """Let a node that was killed return at once.

    For Flower it counts as online for another minute and is rejected that long. The request guard has checked that no
    other program uses its key.
    """
    activate = state.activate_node

    def activate_again(node_id: int, heartbeat_interval: float) -> bool:
        state.deactivate_node(node_id)
        return bool(activate(node_id, heartbeat_interval))

    state.activate_node = activate_again


def deliver_complete_replies_only(state: Any) -> None:
    """Deliver a reply when all of it has arrived.

    Flower delivers it earlier; the receiver then waits for the rest, for hours if the sender wants that.
    """
    get_replies = state.get_message_res

    def is_complete(message_id: str) -> bool:
        reply = state.message_ins_id_to_message_res_id.get(message_id)
        entry = None if reply is None else state.object_store.store.get(reply)
        waiting = [] if entry is None else [entry]
        while waiting:
            entry = waiting.pop()
            if not entry.is_available:
                return False
            waiting += [state.object_store.store[child] for child in entry.child_object_ids]
        return True

    def get_message_res(message_ids: set[str], run_id: int) -> Any:
        with state.lock, state.object_store.lock_store:
            ready = {message_id for message_id in message_ids if is_complete(message_id)}
        return get_replies(message_ids=ready, run_id=run_id)

    state.get_message_res = get_message_res


def stored_children(object_id: str, store: Any) -> list[str] | None:
    """The children of an object in the SuperLink's store; None if the object is not there."""
    known = store.store.get(object_id)
    return None if known is None else list(known.child_object_ids)


# ---- the SuperNode


def run_supernode(
    arguments: Sequence[str], time_module: Any, wrap_interceptor: Callable[[type], type], load_key: Any | None
) -> None:
    """Run `flower-supernode` with these arguments and replacements: `time` in its loop, a subclass of the interceptor
    that signs its requests, and the function that loads its private key, if given."""
    from flwr.supernode.cli import flower_supernode

    loop: Any = import_module("flwr.supernode.start_client_internal")
    loop.time = time_module  # the module's only use of it
    connection: Any = import_module("flwr.supernode.fleet_http_connection")
    connection.NodeAuthHttpInterceptor = wrap_interceptor(connection.NodeAuthHttpInterceptor)
    if load_key is not None:
        command: Any = import_module("flwr.supernode.cli.flower_supernode")
        command.load_ssh_private_key = load_key
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()
