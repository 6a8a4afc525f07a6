"""How a site reaches its server: the address, TLS, the proxy of the site's network, and the clocks of both machines."""

from __future__ import annotations

import datetime
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from fedmll.core.addresses import is_loopback, parse_address
from fedmll.core.errors import ConfigError, FederationError
from fedmll.deploy.security import client_keys
from fedmll.deploy.security.certificates import certificate_fingerprint

CONNECT_SECONDS = 5
RETRY_SECONDS = 1
MAX_CLOCK_OFFSET = 10  # seconds; messages that seem older may be rejected


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

    @property
    def proxy(self) -> str | None:
        """HOST:PORT of the HTTP proxy that the environment names for this server; None: the connection is direct.

        Raises:
            ConfigError: the connection cannot go through this proxy.
        """
        host, _ = self.host_and_port
        proxies = getproxies()
        found = proxies.get("http" if self.ca is None else "https") or proxies.get("all")
        if found is None or is_loopback(host) or proxy_bypass(host):
            return None
        url = urlsplit(found if "://" in found else f"http://{found}")
        direct = f"If {host} can be reached directly, set NO_PROXY={host}."
        if url.scheme not in ("http", "https"):
            raise ConfigError(f"The proxy {url.scheme}://{url.hostname} is not an HTTP proxy (HTTPS_PROXY). {direct}")
        if self.ca is None:
            raise ConfigError(
                f"--insecure does not go through a proxy, and the environment names {url.hostname} (HTTP_PROXY). "
                f"{direct} Otherwise join with --ca and --key."
            )
        return f"{url.hostname}:{url.port or 80}"


@dataclass(frozen=True, kw_only=True)
class ServerAnswer:
    """What a site learns from the server before it joins."""

    certificate: str  # the server's certificate (PEM); empty without TLS
    clock_offset: float | None  # seconds by which this machine's clock is ahead; None: the answer has no date

    @property
    def fingerprint(self) -> str:
        return certificate_fingerprint(self.certificate.encode()) if self.certificate else ""


def wait_for_server(access: ServerAccess, show: Callable[[str], None]) -> ServerAnswer:
    """Wait until the server answers, for at most `access.patience` seconds, and check its certificate.

    Raises:
        FederationError: the server is not reachable, or waiting does not help.
    """
    proxy = access.proxy
    deadline, is_shown = time.monotonic() + access.patience, False
    while True:
        try:
            return _ask_server(access)
        except httpx.TransportError as error:
            _raise_if_permanent(error, access, proxy)
            way = "" if proxy is None else f" through the proxy {proxy} (HTTPS_PROXY)"
            if time.monotonic() > deadline:
                raise FederationError(f"{access.server} is not reachable{way}: {error}.") from None
            if not is_shown:
                show(f"{access.server} is not reachable yet{way} ({error}); waiting")
                is_shown = True
            time.sleep(RETRY_SECONDS)


def _ask_server(access: ServerAccess) -> ServerAnswer:
    """Connect as the SuperNode will connect: with the same library, proxy and CA."""
    host, _ = access.host_and_port
    try:
        verify = False if access.ca is None else ssl.create_default_context(cafile=str(access.ca))
    except OSError:
        raise ConfigError(f"{access.ca} is not a certificate; ask the server's operator for ca.crt again.") from None
    scheme = "http" if access.ca is None else "https"
    with (
        httpx.Client(verify=verify, timeout=CONNECT_SECONDS, trust_env=not is_loopback(host)) as client,
        client.stream("GET", f"{scheme}://{access.server}/") as response,
    ):
        tls = response.extensions["network_stream"].get_extra_info("ssl_object")
        certificate = "" if tls is None else ssl.DER_cert_to_PEM_cert(tls.getpeercert(True))
        try:
            server_time = parsedate_to_datetime(response.headers.get("date", ""))
        except ValueError:
            return ServerAnswer(certificate=certificate, clock_offset=None)
    offset = (datetime.datetime.now(datetime.UTC) - server_time).total_seconds()
    return ServerAnswer(certificate=certificate, clock_offset=offset)


def _raise_if_permanent(error: httpx.TransportError, access: ServerAccess, proxy: str | None) -> None:
    """Raise a FederationError if waiting does not help."""
    host, _ = access.host_and_port
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    tls_error = next((each for each in causes if isinstance(each, ssl.SSLError)), None)
    if isinstance(tls_error, ssl.SSLCertVerificationError):
        text = (
            f"{access.server} does not present a certificate of your consortium's CA ({tls_error.verify_message}). Is "
            f"{access.ca} the ca.crt that the server's operator sent, and is '{host}' a name in its certificate "
            "(`fedmll keys init --host …`)?"
        )
        if proxy is not None:
            text += (
                f" The proxy {proxy} may replace certificates to read the traffic: ask your network's administrator "
                f"to exempt {host}."
            )
        raise FederationError(text) from None
    if tls_error is not None:
        raise FederationError(
            f"{access.server} does not use TLS ({tls_error.reason}). Its operator may have started it with --insecure; "
            "ask for TLS."
        ) from None
    if access.ca is None and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        raise FederationError(
            f"{access.server} does not accept plain HTTP: it uses TLS. Join with --ca and --key, without --insecure."
        ) from None
    if isinstance(error, httpx.ProxyError) and not str(error).startswith("5"):  # 5xx: the server may start later
        raise FederationError(
            f"The proxy {proxy} (HTTPS_PROXY) refuses the connection to {access.server}: {error}. Ask your network's "
            f"administrator to allow it (CONNECT). If {host} can be reached directly, set NO_PROXY={host}."
        ) from None


def describe_clock_offset(offset: float) -> str:
    text = f"this machine's clock is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} the server's"
    if abs(offset) <= MAX_CLOCK_OFFSET:
        return text
    return f"{text}: set it (NTP), otherwise the server rejects your messages as too old or too new"
