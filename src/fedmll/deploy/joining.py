"""A client's side of a real federation: look at the server, then serve it until the run is over.

The SuperNode is started again when it ends (the server was restarted, the network was away); what cannot get better by
waiting (a key that the server does not know, a certificate that does not hold) ends with an error that says so."""

from __future__ import annotations

import datetime
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

from fedmll.data.images.cache import Progress, silent
from fedmll.deploy import keys, turned_away
from fedmll.deploy.audit import Audit
from fedmll.deploy.estimate import GIGABYTE
from fedmll.deploy.own_folder import FLOWER, clear_cache, occupied, private
from fedmll.deploy.sentences import plain
from fedmll.deploy.site import Site
from fedmll.deploy.site_worker import SiteWorker, remember_site
from fedmll.errors import ConfigError, FederationError
from fedmll.running.observers import INTERRUPTED

LOOK_SECONDS = 5
CLOCK_SECONDS = 10  # a message that seems older than this may be refused
RESTART_SECONDS = 1
LAST_WORD_SECONDS = 2


@dataclass(frozen=True)
class Access:
    """How a client reaches its server."""

    server: str  # host:port
    ca: Path | None  # None: insecure
    key: Path | None
    patience: float = 43_200  # seconds without the server until giving up: a night
    passphrase: str | None = None  # of the key

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.server.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(
                f"The server is HOST:PORT, for example federation.example.org:8000; it got '{self.server}'."
            )
        return host.strip("[]"), int(port)

    @property
    def marks(self) -> dict[str, str]:
        """The fingerprints of the key and of the CA, as `fedmll keys list` shows them."""
        if self.ca is None or self.key is None:
            return {"key": "none (--insecure)"}
        return {"key": keys.mark_of(self.key, self.passphrase), "ca": keys.fingerprint(self.ca.read_bytes())}


def join(
    site: Site, access: Access, show: Callable[[str], None], report: bool = False, progress: Progress = silent
) -> None:
    """Serve the federation until the run is over; then, if wanted, report what it was worth here. What it writes is for
    its owner only; prepared images do not stay."""
    for path in (access.ca, access.key):
        if path is not None and not path.is_file():
            raise ConfigError(f"{path} does not exist; `fedmll keys` makes keys and says what to send to whom.")
    for path in site.files:
        if not path.exists():
            raise ConfigError(f"{path} does not exist (--weights).")
    with private(), occupied(site.memory, site.name):
        try:
            with audited(site, access, show):
                worker = _serve(site, access, show)
            if report and worker is not None:
                from fedmll.deploy.worth import report_at_the_end

                report_at_the_end(worker, show, progress)
        finally:
            if not site.keep_cache:
                clear_cache(site.memory)


@contextmanager
def audited(site: Site, access: Access, show: Callable[[str], None]) -> Iterator[None]:
    """The audit's first and last line of a join."""
    audit = Audit(site.memory)
    audit.write("join", name=site.name, server=access.server, **access.marks)
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            audit.write("end", why=plain(str(error) or INTERRUPTED))
        raise
    audit.write("end", why="the run is over")
    show(f"{audit.path}: the last hash is {audit.last}")


def _serve(site: Site, access: Access, show: Callable[[str], None]) -> SiteWorker | None:
    """The worker that has the common model, if it came."""
    from fedmll.deploy.flower.executor import Executor
    from fedmll.deploy.flower.processes import Child, Node, free_port, new_secret
    from fedmll.deploy.flower.site_app import standing

    look(access, show)
    _compare_clocks(access, show)
    folder = site.memory / FLOWER
    site_file, secret = folder / "site.json", new_secret(folder)
    remember_site(site, site_file)
    deadline = time.monotonic() + access.patience
    while True:
        node = Node(
            access.server,
            free_port(),
            str(folder),
            str(secret),
            access.patience,
            None if access.ca is None else str(access.ca),
            None if access.key is None else str(access.key),
            access.passphrase,
        )
        child = Child("supernode", node)
        try:
            executor = Executor(node.port, secret, site_file, site.limits.max_memory * GIGABYTE)
            show(f"{site.name} waits for {access.server}")
            executor.serve(lambda child=child: not (child.ended() or standing.declined))  # type: ignore[misc]
            if standing.declined:
                time.sleep(LAST_WORD_SECONDS)  # the SuperNode sends the refusal on
        finally:
            child.stop()
        if standing.declined:
            raise FederationError(standing.declined)
        if executor.over and standing.farewell:
            if standing.worker is None:
                show("the common model did not come; ask the server's operator for it")
            show("the run is over")
            return standing.worker
        _explain(site, access, child.said())
        if executor.served:
            deadline = time.monotonic() + access.patience
        if time.monotonic() > deadline:
            raise FederationError(
                f"{access.server} did not come back in {access.patience:g} s (--patience). If its run ended meanwhile, "
                "ask its operator for the model."
            )
        show("the connection was lost; trying again")
        time.sleep(RESTART_SECONDS)


def look(access: Access, show: Callable[[str], None]) -> None:
    """Whether the server is there and is who it should be. A server that is not there yet is waited for."""
    host, port = access.host_and_port
    deadline, told = time.monotonic() + access.patience, False
    while True:
        try:
            with socket.create_connection((host, port), LOOK_SECONDS) as plain:
                _shake_hands(plain, host, access)
                return
        except ssl.SSLCertVerificationError as error:
            raise FederationError(
                f"{access.server} does not show a certificate of your consortium's CA ({error.verify_message}). Is "
                f"{access.ca} the ca.crt that the server's operator sent, and is '{host}' a name in its certificate "
                "(`fedmll keys init --host …`)?"
            ) from None
        except ssl.SSLError as error:
            raise FederationError(
                f"{access.server} does not speak TLS ({error.reason}). Its operator may have started it with "
                "--insecure; ask for TLS."
            ) from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise FederationError(f"{access.server} is not reachable: {error}.") from None
            if not told:
                show(f"{access.server} is not there yet ({error}); waiting")
                told = True
            time.sleep(RESTART_SECONDS)


def seconds_ahead(access: Access) -> float | None:
    """That this machine is ahead of the server, whose answers are dated; None: it does not say."""
    host, port = access.host_and_port
    connection: http.client.HTTPConnection
    if access.ca is None:
        connection = http.client.HTTPConnection(host, port, timeout=LOOK_SECONDS)
    else:
        context = ssl.create_default_context(cafile=str(access.ca))
        connection = http.client.HTTPSConnection(host, port, timeout=LOOK_SECONDS, context=context)
    try:
        connection.request("GET", "/")
        theirs = parsedate_to_datetime(connection.getresponse().getheader("date", ""))
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return (datetime.datetime.now(datetime.UTC) - theirs).total_seconds()


def _compare_clocks(access: Access, show: Callable[[str], None]) -> None:
    off = seconds_ahead(access)
    if off is not None and abs(off) > CLOCK_SECONDS:
        show(f"warning: {clock_words(off)}")


def clock_words(off: float) -> str:
    text = f"this machine is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the server"
    wrong = ": set its clock (NTP), or its messages are refused as not fresh"
    return text + ("" if abs(off) <= CLOCK_SECONDS else wrong)


def _shake_hands(plain: socket.socket, host: str, access: Access) -> None:
    if access.ca is not None:
        context = ssl.create_default_context(cafile=str(access.ca))
        with context.wrap_socket(plain, server_hostname=host):
            return
    # --insecure: a TLS server does not answer plain HTTP with HTTP
    plain.sendall(b"GET /v1/fleet/ HTTP/1.0\r\n\r\n")
    if not plain.recv(16).startswith(b"HTTP/"):
        raise FederationError(
            f"{access.server} does not take plain HTTP: it speaks TLS. Join with --ca and --key, without --insecure."
        )


def _explain(site: Site, access: Access, said: str) -> None:
    """An error where waiting does not help."""
    refusal = turned_away.heard(said, access.server, site.name, access.key)
    if refusal is not None:
        raise FederationError(refusal)
    if "Unable to parse the private key" in said:
        raise ConfigError(f"{access.key} is not a key made by `fedmll keys new`.")
