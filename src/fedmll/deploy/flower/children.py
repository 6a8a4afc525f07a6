"""What runs in the child processes: Flower's SuperLink and SuperNode.

They are Flower's own, started through its own entry points, with these differences:
- Flower 1.41 serves everything on one port, and its Control API (start a run with any code, register any node) asks for
  no password there. Our SuperLink answers nodes only (`/v1/fleet/`); the Runtime API only from this machine, with a
  secret; the nodes and the one run are put in before the port opens.
- The SuperNode runs no code from the server: its tasks go to our executor, which always runs the installed fedmll.
- A node that was killed may return at once, and a node asks for messages more often.
- Telemetry, update checks and installs are off; Flower's files stay in our folder; a child dies with its parent.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fedmll.deploy.flower.processes import Link, Node

POLL_SECONDS = 0.5  # how often a SuperNode asks for messages; Flower's own 3 s make half of a short round
OPEN_TO_NODES = "/v1/fleet/"
OPEN_TO_THIS_MACHINE = "/v1/runtime/"
LOOPBACK = ("127.0.0.1", "::1")


def _superlink(setting: Link) -> None:
    import uvicorn
    from flwr.superlink.main import create_app

    flower = import_module("flwr.superlink.cli.flower_superlink")

    arguments = ["--host", setting.host, "--port", str(setting.port), "--isolation", "process"]
    arguments += ["--superexec-auth-secret-file", setting.secret_file, "--disable-runtime-dependency-installation"]
    if setting.insecure:
        arguments += ["--insecure"]
    else:
        assert setting.certificate is not None and setting.key is not None and setting.ca is not None
        arguments += ["--ssl-certfile", setting.certificate, "--ssl-keyfile", setting.key]
        arguments += ["--ssl-ca-certfile", setting.ca, "--enable-supernode-auth"]
    sys.argv = ["flower-superlink", *arguments]
    config = flower._parse_superlink_lifespan_config()
    app = create_app(config, flower.SuperLinkLifespan)
    _prepare(app.state.linkstate_factory.state(), setting.nodes)
    uvicorn.run(
        Guard(app),
        host=setting.host,
        port=setting.port,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        access_log=False,
        log_level="warning",
    )


def _prepare(state: Any, nodes: Mapping[str, str]) -> None:
    """Register the nodes' keys under their names, and create the one run."""
    from flwr.cli.build import build_fab_from_files
    from flwr.cli.config_utils import get_fab_metadata
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
    from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
    from flwr.supercore.fab import Fab

    for name, public_key in nodes.items():
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public_key.encode(), HEARTBEAT_DEFAULT_INTERVAL, name=name)
    _let_nodes_return(state)
    content, _ = build_fab_from_files({"pyproject.toml": APP.encode(), "README.md": b"fedmll"})
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    fab_id, fab_version = get_fab_metadata(content)
    state.store_fab(fab)
    state.federation_manager.ensure_default_federations_exist(flwr_aid=NOOP_FLWR_AID)
    state.create_run(
        fab_id, fab_version, fab.hash_str, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
    )


def _let_nodes_return(state: Any) -> None:
    """A node that was killed counts as online for another minute, and Flower refuses it so long when it comes back. It
    has the key, so it is the same one: it may return at once."""
    activate = state.activate_node

    def activate_again(node_id: int, heartbeat_interval: float) -> bool:
        state.deactivate_node(node_id)
        return bool(activate(node_id, heartbeat_interval))

    state.activate_node = activate_again


APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedmll-app"
version = "1.0.0"
description = "fedmll, as installed: this bundle holds no code"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedmll"

[tool.flwr.app.components]
serverapp = "fedmll.deploy.flower.server_app:app"
clientapp = "fedmll.deploy.flower.site_app:app"

[tool.flwr.app.config]
"""


class Guard:
    """In front of Flower's HTTP app: nodes reach the Fleet API, this machine the Runtime API, nobody anything else."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or self.allowed(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

    @staticmethod
    def allowed(scope: Any) -> bool:
        if scope["type"] != "http":
            return False
        path, client = scope["path"], (scope.get("client") or ("",))[0]
        return path.startswith(OPEN_TO_NODES) or (path.startswith(OPEN_TO_THIS_MACHINE) and client in LOOPBACK)


def _supernode(setting: Node) -> None:
    from flwr.supernode.cli import flower_supernode

    loop = import_module("flwr.supernode.start_client_internal")

    class Impatient:
        @staticmethod
        def sleep(seconds: float) -> None:
            time.sleep(min(seconds, POLL_SECONDS))

    loop.time = Impatient  # type: ignore[attr-defined]  # the module's only use of it
    arguments = ["--superlink", setting.server, "--isolation", "process", "--host", "127.0.0.1"]
    arguments += ["--port", str(setting.port), "--superexec-auth-secret-file", setting.secret_file]
    arguments += ["--max-wait-time", str(setting.patience)]
    if setting.ca is None:
        arguments += ["--insecure"]
    else:
        arguments += ["--root-certificates", setting.ca]
    if setting.key is not None:
        arguments += ["--auth-supernode-private-key", setting.key]
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def _die_with(parent: int) -> None:
    """However the parent ends (SIGKILL too), this process ends with it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    kind, file, parent = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    _die_with(parent)
    values = json.loads(file.read_text())
    file.unlink()
    try:
        _superlink(Link(**values)) if kind == "superlink" else _supernode(Node(**values))
    finally:
        # Flower's own threads would keep a SuperNode that has lost its server alive for ever
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
