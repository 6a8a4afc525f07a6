"""`fedmll join`: connect a site to the server and serve it until the run is over.

The SuperNode is restarted when it ends (the server was restarted, the network failed). Errors that waiting cannot
solve, such as a key that the server does not know or an invalid certificate, end the join with a message.
"""

from __future__ import annotations

import datetime
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path

from fedmll.core.errors import ConfigError, FederationError
from fedmll.core.network import parse_address
from fedmll.core.text import printable
from fedmll.data.images.cache import Progress, no_progress
from fedmll.deploy.error_codes import MAX_LINE, explain_rejection
from fedmll.deploy.security import client_keys
from fedmll.deploy.security.audit_log import AuditLog
from fedmll.deploy.site.memory_estimate import GIGABYTE
from fedmll.deploy.site.site_config import Site, write_site_file
from fedmll.deploy.site.site_folder import FLOWER, clear_cache, lock_folder, private_files
from fedmll.deploy.site.worker import SiteWorker
from fedmll.training.callbacks import INTERRUPTED

CONNECT_SECONDS = 5
MAX_CLOCK_OFFSET = 10  # seconds; messages that seem older may be rejected
RESTART_SECONDS = 1
FLUSH_SECONDS = 2  # until the SuperNode has forwarded the last reply


@dataclass(frozen=True, kw_only=True)
class ServerAccess:
    """How a site reaches its server."""

    server: str  # HOST:PORT
    ca: Path | None  # the certificate of the consortium's certificate authority; None: no TLS (--insecure)
    key: Path | None  # the site's private key; None: --insecure
    patience: float = 43_200  # seconds without the server until the site gives up; the default is a night
    passphrase: str | None = None  # the passphrase of the key

    @property
    def host_and_port(self) -> tuple[str, int]:
        return parse_address(self.server, "The server", example="federation.example.org:8000")

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of the key and of the CA, as `fedmll keys list` shows them."""
        if self.ca is None or self.key is None:
            return {"key": "none (--insecure)"}
        return {
            "key": client_keys.private_key_fingerprint(self.key, self.passphrase),
            "ca": client_keys.fingerprint(self.ca.read_bytes()),
        }


def join(
    site: Site,
    access: ServerAccess,
    show: Callable[[str], None],
    report: bool = False,
    progress: Progress = no_progress,
) -> None:
    """Serve the federation until the run is over.

    All written files are readable by their owner only. Prepared images are deleted at the end, unless they are kept.

    Args:
        site: the site.
        access: how the server is reached.
        show: prints one line.
        report: at the end, compare the federated model with a local one (benefit_report.py).
        progress: called with the progress of the report.
    """
    for path in (access.ca, access.key):
        if path is not None and not path.is_file():
            raise ConfigError(f"{path} does not exist. `fedmll keys` creates keys and shows which file goes to whom.")
    for path in site.local_files:
        if not path.exists():
            raise ConfigError(f"{path} does not exist (--weights).")
    site = replace(site, needs_approval=True)  # the only other way is a digest (--approve)
    with private_files(), lock_folder(site.state_dir, site.name):
        try:
            with audit_join(site, access, show):
                worker = _serve(site, access, show)
            if report and worker is not None:
                from fedmll.deploy.site.benefit_report import report_after_run

                report_after_run(worker, show, progress)
        finally:
            if not site.keep_cache:
                clear_cache(site.state_dir)


@contextmanager
def audit_join(site: Site, access: ServerAccess, show: Callable[[str], None]) -> Iterator[None]:
    """Write the first and the last line of a join to the audit log."""
    audit = AuditLog(site.state_dir)
    audit.write("join", name=site.name, server=access.server, **access.fingerprints)
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            audit.write("end", reason=printable(str(error) or INTERRUPTED, MAX_LINE))
        raise
    audit.write("end", reason="the run is over")
    show(f"{audit.path}: the last hash is {audit.last_hash}")


def _serve(site: Site, access: ServerAccess, show: Callable[[str], None]) -> SiteWorker | None:
    """Serve until the run is over; the worker that received the final model, or None."""
    from fedmll.deploy.flower.child_processes import ChildProcess, SuperNodeSettings, find_free_port, write_secret
    from fedmll.deploy.flower.client_app import join_state
    from fedmll.deploy.flower.executor import TaskExecutor

    wait_for_server(access, show)
    _warn_about_clock(access, show)
    folder = site.state_dir / FLOWER
    site_file, secret = folder / "site.json", write_secret(folder)
    write_site_file(site, site_file)
    deadline = time.monotonic() + access.patience
    while True:
        settings = SuperNodeSettings(
            server=access.server,
            port=find_free_port(),
            folder=str(folder),
            secret_file=str(secret),
            patience=access.patience,
            ca=None if access.ca is None else str(access.ca),
            key=None if access.key is None else str(access.key),
            passphrase=access.passphrase,
        )
        child = ChildProcess("supernode", settings)
        try:
            executor = TaskExecutor(settings.port, secret, site_file, site.limits.max_memory * GIGABYTE)
            show(f"{site.name} waits for {access.server}")
            executor.serve(lambda child=child: not (child.has_ended() or join_state.not_approved))  # type: ignore[misc]
            if join_state.not_approved:
                time.sleep(FLUSH_SECONDS)
        finally:
            child.stop()
        if join_state.not_approved:
            raise FederationError(join_state.not_approved)
        if executor.run_ended and join_state.run_ended:
            if join_state.worker_with_model is None:
                show("the final model did not arrive; ask the server's operator for it")
            show("the run is over")
            return join_state.worker_with_model
        rejection = explain_rejection(child.read_log(), access.server, site.name, access.key)
        if rejection is not None:  # waiting does not help
            raise FederationError(rejection)
        if executor.has_answered:
            deadline = time.monotonic() + access.patience
        if time.monotonic() > deadline:
            raise FederationError(
                f"{access.server} was not reachable for {access.patience:g} s (--patience). If its run ended "
                "meanwhile, ask its operator for the model."
            )
        show("the connection was lost; trying again")
        time.sleep(RESTART_SECONDS)


def wait_for_server(access: ServerAccess, show: Callable[[str], None]) -> None:
    """Wait until the server answers, for at most `access.patience` seconds, and check its certificate.

    Raises:
        FederationError: the server is not reachable, or its certificate is not valid.
    """
    host, port = access.host_and_port
    deadline, is_shown = time.monotonic() + access.patience, False
    while True:
        try:
            with socket.create_connection((host, port), CONNECT_SECONDS) as connection:
                _check_tls(connection, host, access)
                return
        except ssl.SSLCertVerificationError as error:
            raise FederationError(
                f"{access.server} does not present a certificate of your consortium's CA ({error.verify_message}). Is "
                f"{access.ca} the ca.crt that the server's operator sent, and is '{host}' a name in its certificate "
                "(`fedmll keys init --host …`)?"
            ) from None
        except ssl.SSLError as error:
            raise FederationError(
                f"{access.server} does not use TLS ({error.reason}). Its operator may have started it with --insecure; "
                "ask for TLS."
            ) from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise FederationError(f"{access.server} is not reachable: {error}.") from None
            if not is_shown:
                show(f"{access.server} is not reachable yet ({error}); waiting")
                is_shown = True
            time.sleep(RESTART_SECONDS)


def _check_tls(connection: socket.socket, host: str, access: ServerAccess) -> None:
    if access.ca is not None:
        context = ssl.create_default_context(cafile=str(access.ca))
        with context.wrap_socket(connection, server_hostname=host):
            return
    # --insecure: a server with TLS does not answer plain HTTP with HTTP
    connection.sendall(b"GET /v1/fleet/ HTTP/1.0\r\n\r\n")
    if not connection.recv(16).startswith(b"HTTP/"):
        raise FederationError(
            f"{access.server} does not accept plain HTTP: it uses TLS. Join with --ca and --key, without --insecure."
        )


def measure_clock_offset(access: ServerAccess) -> float | None:
    """Seconds by which this machine's clock is ahead of the server's; None: the server's answer has no date."""
    host, port = access.host_and_port
    connection: http.client.HTTPConnection
    if access.ca is None:
        connection = http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
    else:
        context = ssl.create_default_context(cafile=str(access.ca))
        connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=context)
    try:
        connection.request("GET", "/")
        server_time = parsedate_to_datetime(connection.getresponse().getheader("date", ""))
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return (datetime.datetime.now(datetime.UTC) - server_time).total_seconds()


def describe_clock_offset(offset: float) -> str:
    text = f"this machine's clock is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} the server's"
    if abs(offset) <= MAX_CLOCK_OFFSET:
        return text
    return f"{text}: set it (NTP), otherwise the server rejects your messages as too old or too new"


def _warn_about_clock(access: ServerAccess, show: Callable[[str], None]) -> None:
    offset = measure_clock_offset(access)
    if offset is not None and abs(offset) > MAX_CLOCK_OFFSET:
        show(f"warning: {describe_clock_offset(offset)}")
