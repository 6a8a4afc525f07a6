"""The main function of the child processes: Flower's SuperLink and SuperNode.

They are started through Flower's own entry points, with these differences:
- Flower 1.41 serves everything on one port, and its Control API (start a run with any code, register any node) needs no
  password there. Here the SuperLink answers nodes only (`/v1/fleet/`), and the Runtime API only from this machine and
  with a secret. The nodes and the one run are registered before the port opens. A client is authenticated before its
  request is read (request_guard.py), and can reply only for itself (superlink_port.py).
- The SuperNode runs no code from the server: its tasks go to executor.py, which always runs the installed fedmll.
- A node that was killed may return at once, and a node asks for messages more often.
- Telemetry, update checks and installs are off; Flower's files stay in the run's folder; a child ends with its parent.
- Connections within this machine use no proxy of the environment (flower_internals.py, child_processes.py).
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from fedmll.core.processes import end_with_parent
from fedmll.deploy.flower.child_processes import SuperLinkSettings, SuperNodeSettings
from fedmll.deploy.security.private_keys import load_private_key

POLL_SECONDS = 0.5  # how often a SuperNode asks for messages; Flower's own 3 s would be half of a short round


def _run_superlink(settings: SuperLinkSettings) -> None:
    import uvicorn

    from fedmll.deploy.flower import flower_internals
    from fedmll.deploy.flower.request_guard import ClientAuthenticator, RequestGuard
    from fedmll.deploy.flower.superlink_port import NoticeWriter, ReplyPushGuard, TimeoutProtocol, set_process_limits

    arguments = ["--host", settings.host, "--port", str(settings.port), "--isolation", "process"]
    arguments += ["--superexec-auth-secret-file", settings.secret_file, "--disable-runtime-dependency-installation"]
    if settings.insecure:
        arguments += ["--insecure"]
    else:
        assert settings.certificate is not None and settings.key is not None and settings.ca is not None
        arguments += ["--ssl-certfile", settings.certificate, "--ssl-keyfile", settings.key]
        arguments += ["--ssl-ca-certfile", settings.ca, "--enable-supernode-auth"]
    app, config, state, handlers = flower_internals.create_superlink(arguments)
    bundle = {"pyproject.toml": APP.encode(), "README.md": b"fedmll"}
    flower_internals.register_nodes_and_run(state, settings.nodes, bundle)
    flower_internals.allow_immediate_return(state)
    flower_internals.deliver_complete_replies_only(state)
    notices = NoticeWriter(Path(settings.folder))
    revoked_file = None if settings.revoked is None else Path(settings.revoked)
    ReplyPushGuard(Path(settings.folder)).install(handlers)
    set_process_limits()
    authenticator = None
    if not settings.insecure:
        authenticator = ClientAuthenticator(nodes=settings.nodes, notify=notices.write, revoked_file=revoked_file)
    uvicorn.run(
        RequestGuard(app, authenticator),
        host=settings.host,
        port=settings.port,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile_password=settings.passphrase,
        loop="asyncio",
        http=TimeoutProtocol,
        ws="none",
        access_log=False,
        log_level="error",  # strangers can cause any number of warnings
    )


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
clientapp = "fedmll.deploy.flower.client_app:app"

[tool.flwr.app.config]
"""


def _run_supernode(settings: SuperNodeSettings) -> None:
    from fedmll.deploy.flower import flower_internals

    class ShortSleep:
        @staticmethod
        def sleep(seconds: float) -> None:
            time.sleep(min(seconds, POLL_SECONDS))

    arguments = ["--superlink", settings.server, "--isolation", "process", "--host", "127.0.0.1"]
    arguments += ["--port", str(settings.port), "--superexec-auth-secret-file", settings.secret_file]
    arguments += ["--max-wait-time", str(settings.patience)]
    if settings.ca is None:
        arguments += ["--insecure"]
    else:
        arguments += ["--root-certificates", settings.ca]
    if settings.key is not None:
        arguments += ["--auth-supernode-private-key", settings.key]
    encrypted = settings.passphrase is not None
    load_key = (lambda content, _: load_private_key(content, settings.passphrase)) if encrypted else None
    flower_internals.run_supernode(arguments, ShortSleep, _add_instance_header, load_key)


def _add_instance_header(interceptor: Any) -> Any:
    """Identify the start of this SuperNode in every request, so that two programs with one key can be distinguished.

    The reason for which the port rejects a request is written to the log, where `join` reads it.
    """
    from fedmll.deploy.flower.flower_internals import FlowerError
    from fedmll.deploy.flower.request_guard import INSTANCE_HEADER

    instance = secrets.token_hex(8)

    class InstanceInterceptor(interceptor):
        def intercept(self, context: Any, call_next: Any) -> Any:
            context.request.headers[INSTANCE_HEADER] = instance
            response = super().intercept(context, call_next)
            if response.status_code == 401:  # Flower ends without a message
                error = FlowerError.from_json(response.text)
                if error is not None:
                    print(f"[code: {error.code}] {error.message}", flush=True)
            return response

    return InstanceInterceptor


def main() -> None:
    kind, parent = sys.argv[1], int(sys.argv[2])
    end_with_parent(parent, watch=True)
    os.umask(0o077)  # only the owner can read what Flower writes
    values = json.loads(sys.stdin.read())
    try:
        if kind == "superlink":
            _run_superlink(SuperLinkSettings(**values))
        else:
            _run_supernode(SuperNodeSettings(**values))
    finally:
        # Flower's threads would keep a SuperNode that has lost its server alive forever
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
