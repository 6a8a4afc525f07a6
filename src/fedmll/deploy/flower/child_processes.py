"""Flower's SuperLink and SuperNode as child processes.

`ChildProcess` starts one, passes it its settings and stops it. `main` is what runs in the child: Flower's own entry
points, with these differences:
- Flower 1.41 serves everything on one port, and its Control API (start a run with any code, register any node) needs no
  password there. Here the SuperLink answers nodes only (`/v1/fleet/`), and the Runtime API only from this machine and
  with a secret. The nodes and the one run are registered before the port opens. A client is authenticated before its
  request is read, and can reply only for itself (request_guard.py).
- The SuperNode runs no code from the server: its tasks go to executor.py, which always runs the installed fedmll.
- A node that was killed may return at once, and a node asks for messages more often.
- Telemetry, update checks and installs are off; Flower's files stay in the run's folder; a child ends with its parent.
- Connections within this machine use no proxy of the environment.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedmll.core.addresses import format_address
from fedmll.core.errors import ConfigError, FederationError
from fedmll.core.processes import end_with_parent
from fedmll.deploy.security.certificates import certificate_fingerprint
from fedmll.deploy.security.private_keys import load_private_key, without_passphrase

START_SECONDS = 60
FOLDER = "flower"  # in the run's folder
MODULE = "fedmll.deploy.flower.child_processes"  # not __name__, which is __main__ in a child
POLL_SECONDS = 0.5  # how often a SuperNode asks for messages; Flower's own 3 s would be half of a short round
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class SuperLinkSettings:
    """The settings of a SuperLink."""

    host: str
    port: int
    folder: str  # for Flower's own files and the log
    secret_file: str  # whoever knows the secret may take the run's ServerApp task
    nodes: dict[str, str]  # name → public key (PEM); empty: every node may connect (insecure)
    certificate: str | None = None  # with key and CA: TLS; None: insecure
    key: str | None = None
    ca: str | None = None
    passphrase: str | None = None  # of the key
    revoked: str | None = None  # the list of revoked keys

    @property
    def insecure(self) -> bool:
        return self.certificate is None


@dataclass(frozen=True, kw_only=True)
class SuperNodeSettings:
    """The settings of a SuperNode."""

    server: str  # host:port
    port: int  # of its Runtime API, on this machine only
    folder: str
    secret_file: str
    patience: float  # seconds without the server after which it gives up
    ca: str | None = None  # None: insecure
    key: str | None = None
    passphrase: str | None = None  # of the key
    server_certificate: str = ""  # the fingerprint of the server's certificate, for which requests are signed


class ChildProcess:
    """A SuperLink or SuperNode. It writes a log and ends with this process, however this one ends."""

    def __init__(self, kind: str, settings: SuperLinkSettings | SuperNodeSettings) -> None:
        folder = Path(settings.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.kind, self.log = kind, folder / f"{kind}.log"
        with os.fdopen(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            os.fchmod(log.fileno(), 0o600)
            self.log_start = os.fstat(log.fileno()).st_size
            self.process = subprocess.Popen(
                [sys.executable, "-m", MODULE, kind, str(os.getpid())],
                stdin=subprocess.PIPE,  # the settings contain a passphrase, so they are neither a file nor an argument
                stdout=log,
                stderr=subprocess.STDOUT,
                env=without_passphrase(os.environ) | flower_environment(folder),
                start_new_session=True,  # Ctrl-C reaches this process only, which then stops the child
            )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:  # it may have ended already
            pipe.write(json.dumps(asdict(settings)).encode())

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def read_log(self) -> str:
        """What this process wrote to the log."""
        with self.log.open("rb") as log:
            log.seek(self.log_start)
            return log.read().decode(errors="replace")

    def stop(self) -> None:
        if not self.has_ended():
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def flower_environment(home: Path) -> dict[str, str]:
    """Environment variables for Flower: no telemetry, no downloads, its files in `home`, no proxy for loopback."""
    return no_proxy_for_loopback(os.environ) | {
        "FLWR_HOME": str(home.resolve() / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
    }


def no_proxy_for_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep loopback connections away from a proxy, whatever the environment says.

    Proxies and exceptions for other hosts stay as they are. In Python and in gRPC the variables in lower case take
    precedence, and gRPC reads `no_grpc_proxy` before `no_proxy`.
    """
    if not any(name.lower().endswith("_proxy") for name in environment):
        return {}  # the system's own proxy settings are used only if no such variable is set
    upper = environment.get("NO_PROXY", "")
    exceptions = {"NO_PROXY": upper, "no_proxy": environment.get("no_proxy", upper)}
    if "no_grpc_proxy" in environment:
        exceptions["no_grpc_proxy"] = environment["no_grpc_proxy"]
    return {name: _with_loopback(value) for name, value in exceptions.items()}


def _with_loopback(hosts: str) -> str:
    if hosts.strip() == "*":  # no proxy at all; in a longer list `*` would lose this meaning
        return "*"
    return ",".join(dict.fromkeys([*LOOPBACK, *filter(None, map(str.strip, hosts.split(",")))]))


def write_secret(folder: Path) -> Path:
    """Write a new random secret to a file that only its owner can read."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".secret"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))
    return path


def open_listener(host: str, port: int) -> socket.socket:
    """A socket that listens on an IPv4 or IPv6 address. `::` accepts IPv4 connections too, where the system can.

    Raises:
        ConfigError: no server can listen there.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {format_address(host, port)}: {error.strerror}. Another server may be running; stop it, "
            "or choose another port with --listen HOST:PORT."
        ) from None


def find_free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def start_superlink(settings: SuperLinkSettings) -> ChildProcess:
    """Start a SuperLink and wait until it accepts connections."""
    open_listener(settings.host, settings.port).close()
    child = ChildProcess("superlink", settings)
    until = time.monotonic() + START_SECONDS
    while not child.has_ended() and time.monotonic() < until:
        with suppress(OSError), socket.create_connection((local_host(settings.host), settings.port), 1):
            return child
        time.sleep(0.1)
    child.stop()
    raise FederationError(f"Flower's SuperLink did not start; see the end of {child.log}.")


def local_host(host: str) -> str:
    """The address at which a server that listens on `host` is reached from the same machine."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


# ---- in the child process


def _run_superlink(settings: SuperLinkSettings) -> None:
    import uvicorn

    from fedmll.deploy.flower import flower_internals
    from fedmll.deploy.flower.request_guard import (
        ClientAuthenticator,
        NoticeWriter,
        ReplyPushGuard,
        RequestGuard,
        TimeoutProtocol,
        set_process_limits,
    )

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
        assert settings.certificate is not None
        authenticator = ClientAuthenticator(
            nodes=settings.nodes,
            server=certificate_fingerprint(Path(settings.certificate).read_bytes()),
            notify=notices.write,
            revoked_file=revoked_file,
        )
    listener = open_listener(settings.host, settings.port)
    uvicorn_config = uvicorn.Config(
        RequestGuard(app, authenticator),
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile_password=settings.passphrase,
        loop="asyncio",
        http=TimeoutProtocol,
        ws="none",
        access_log=False,
        log_level="error",  # strangers can cause any number of warnings
    )
    uvicorn.Server(uvicorn_config).run(sockets=[listener])


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
serverapp = "fedmll.deploy.server.serve:run_federation"
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
    flower_internals.run_supernode(
        arguments, ShortSleep, lambda interceptor: _sign_requests(interceptor, settings.server_certificate), load_key
    )


def _sign_requests(interceptor: Any, server: str) -> Any:
    """Sign every request for this server, path and body, and identify the start of this SuperNode.

    Two programs with one key can be distinguished by the instance. The reason for which the port rejects a request is
    written to the log, where `join` reads it.
    """
    from fedmll.deploy.flower.flower_internals import TIMESTAMP_HEADER, FlowerError
    from fedmll.deploy.flower.request_guard import INSTANCE_HEADER, sign_request

    instance = secrets.token_hex(8)

    class SigningInterceptor(interceptor):
        def intercept(self, context: Any, call_next: Any) -> Any:
            def sign_and_send(context: Any) -> Any:
                request = context.request
                headers = sign_request(
                    self._private_key, server, request.url.path, request.read(), request.headers[TIMESTAMP_HEADER]
                )
                request.headers.update(headers | {INSTANCE_HEADER: instance})
                return call_next(context)

            response = super().intercept(context, sign_and_send)
            if response.status_code == 401:  # Flower ends without a message
                error = FlowerError.from_json(response.text)
                if error is not None:
                    print(f"[code: {error.code}] {error.message}", flush=True)
            return response

    return SigningInterceptor


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
