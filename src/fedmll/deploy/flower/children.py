"""What runs in the child processes: Flower's SuperLink and SuperNode.

They are Flower's own, started through its own entry points, with these differences:
- Flower 1.41 serves everything on one port, and its Control API (start a run with any code, register any node) asks for
  no password there. Our SuperLink answers nodes only (`/v1/fleet/`); the Runtime API only from this machine, with a
  secret; the nodes and the one run are put in before the port opens. Who comes proves it before its request is read
  (guard.py), and replies only for itself (port.py).
- The SuperNode runs no code from the server: its tasks go to our executor, which always runs the installed fedmll.
- A node that was killed may return at once, and a node asks for messages more often.
- Telemetry, update checks and installs are off; Flower's files stay in our folder; a child dies with its parent.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from fedmll.deploy.flower.processes import Link, Node
from fedmll.deploy.private import private_key

POLL_SECONDS = 0.5  # how often a SuperNode asks for messages; Flower's own 3 s make half of a short round


def _superlink(setting: Link) -> None:
    import uvicorn

    from fedmll.deploy.flower import internals
    from fedmll.deploy.flower.guard import Door, Guard
    from fedmll.deploy.flower.port import ImpatientProtocol, Notices, Pushes, be_impatient

    arguments = ["--host", setting.host, "--port", str(setting.port), "--isolation", "process"]
    arguments += ["--superexec-auth-secret-file", setting.secret_file, "--disable-runtime-dependency-installation"]
    if setting.insecure:
        arguments += ["--insecure"]
    else:
        assert setting.certificate is not None and setting.key is not None and setting.ca is not None
        arguments += ["--ssl-certfile", setting.certificate, "--ssl-keyfile", setting.key]
        arguments += ["--ssl-ca-certfile", setting.ca, "--enable-supernode-auth"]
    app, config, state, handlers = internals.superlink(arguments)
    internals.register(state, setting.nodes, {"pyproject.toml": APP.encode(), "README.md": b"fedmll"})
    internals.let_nodes_return(state)
    internals.only_complete(state)
    notices = Notices(Path(setting.folder))
    revoked = None if setting.revoked is None else Path(setting.revoked)
    Pushes(handlers, Path(setting.folder))
    be_impatient()
    uvicorn.run(
        Guard(app, None if setting.insecure else Door(setting.nodes, notices.tell, revoked)),
        host=setting.host,
        port=setting.port,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile_password=setting.passphrase,
        loop="asyncio",
        http=ImpatientProtocol,
        ws="none",
        access_log=False,
        log_level="error",  # warnings are what strangers send
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
clientapp = "fedmll.deploy.flower.site_app:app"

[tool.flwr.app.config]
"""


def _supernode(setting: Node) -> None:
    from fedmll.deploy.flower import internals

    class Impatient:
        @staticmethod
        def sleep(seconds: float) -> None:
            time.sleep(min(seconds, POLL_SECONDS))

    arguments = ["--superlink", setting.server, "--isolation", "process", "--host", "127.0.0.1"]
    arguments += ["--port", str(setting.port), "--superexec-auth-secret-file", setting.secret_file]
    arguments += ["--max-wait-time", str(setting.patience)]
    if setting.ca is None:
        arguments += ["--insecure"]
    else:
        arguments += ["--root-certificates", setting.ca]
    if setting.key is not None:
        arguments += ["--auth-supernode-private-key", setting.key]
    encrypted = setting.passphrase is not None
    load_key = (lambda content, _: private_key(content, setting.passphrase)) if encrypted else None
    internals.supernode(arguments, Impatient, _name_instance, load_key)


def _name_instance(interceptor: Any) -> Any:
    """Every request says which start of a SuperNode it is from: two programs with one key are told apart. And why the
    port refuses a request is in the log, where `join` finds it."""
    from fedmll.deploy.flower.guard import INSTANCE_HEADER
    from fedmll.deploy.flower.internals import FlowerError

    instance = secrets.token_hex(8)

    class Signed(interceptor):
        def intercept(self, context: Any, call_next: Any) -> Any:
            context.request.headers[INSTANCE_HEADER] = instance
            response = super().intercept(context, call_next)
            if response.status_code == 401:  # Flower ends without a word
                error = FlowerError.from_json(response.text)
                if error is not None:
                    print(f"[code: {error.code}] {error.message}", flush=True)
            return response

    return Signed


def _die_with(parent: int) -> None:
    """However the parent ends (SIGKILL too), this process ends with it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    kind, parent = sys.argv[1], int(sys.argv[2])
    _die_with(parent)
    os.umask(0o077)  # what Flower writes is nobody else's business
    values = json.loads(sys.stdin.read())
    try:
        _superlink(Link(**values)) if kind == "superlink" else _supernode(Node(**values))
    finally:
        # Flower's own threads would keep a SuperNode that has lost its server alive for ever
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
