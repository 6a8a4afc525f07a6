"""Starting and ending the SuperLink and the SuperNode (see children.py), and what they are told."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fedmll.errors import ConfigError, FederationError

START_SECONDS = 60
FOLDER = "flower"  # in a run's folder
CHILD = "fedmll.deploy.flower.children"


@dataclass(frozen=True)
class Link:
    """How a SuperLink is run."""

    host: str
    port: int
    folder: str  # Flower's own files, the log
    secret_file: str  # whoever knows it may take the run's ServerApp task
    nodes: dict[str, str]  # name → public key (PEM); empty: everybody may come (insecure)
    certificate: str | None = None  # with key and CA: TLS; None: insecure
    key: str | None = None
    ca: str | None = None
    passphrase: str | None = None  # of the key
    revoked: str | None = None  # the list of revoked keys

    @property
    def insecure(self) -> bool:
        return self.certificate is None


@dataclass(frozen=True)
class Node:
    """How a SuperNode is run."""

    server: str  # host:port
    port: int  # of its Runtime API, on this machine only
    folder: str
    secret_file: str
    patience: float  # seconds without the server before it gives up
    ca: str | None = None  # None: insecure
    key: str | None = None
    passphrase: str | None = None  # of the key


class Child:
    """A child process that writes a log and dies with us, however we end."""

    def __init__(self, kind: str, setting: Link | Node) -> None:
        folder = Path(setting.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.kind, self.log = kind, folder / f"{kind}.log"
        with os.fdopen(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            os.fchmod(log.fileno(), 0o600)  # also one of an earlier version
            self.said_before = os.fstat(log.fileno()).st_size
            self.process = subprocess.Popen(
                [sys.executable, "-m", CHILD, kind, str(os.getpid())],
                stdin=subprocess.PIPE,  # what it is told holds a passphrase: neither a file nor an argument
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | quiet_flower(folder),
                start_new_session=True,  # Ctrl-C is for us; we end it
            )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:  # it may have ended already
            pipe.write(json.dumps(asdict(setting)).encode())

    def ended(self) -> bool:
        return self.process.poll() is not None

    def said(self) -> str:
        """What it wrote since it was started."""
        with self.log.open("rb") as log:
            log.seek(self.said_before)
            return log.read().decode(errors="replace")

    def stop(self) -> None:
        if not self.ended():
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def quiet_flower(home: Path) -> dict[str, str]:
    """Flower's environment: offline, silent, and its files in our folder."""
    return {
        "FLWR_HOME": str(home.resolve() / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
    }


def new_secret(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".secret"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))
    return path


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_address(host: str, port: int) -> None:
    """Whether a server can listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"Cannot listen on {host}:{port}: {error.strerror}. Another server may be running; stop it, or choose "
                "another port with --listen HOST:PORT."
            ) from None


def start_link(setting: Link) -> Child:
    """A SuperLink that answers."""
    check_address(setting.host, setting.port)
    child = Child("superlink", setting)
    until = time.monotonic() + START_SECONDS
    while not child.ended() and time.monotonic() < until:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex((local_host(setting.host), setting.port)) == 0:
                return child
        time.sleep(0.1)
    child.stop()
    raise FederationError(f"Flower's SuperLink did not start; its last words are in {child.log}.")


def local_host(host: str) -> str:
    """How a server that listens on `host` is reached from the same machine."""
    return "127.0.0.1" if host in ("0.0.0.0", "", "::") else host
