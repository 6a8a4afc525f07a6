"""Network addresses given as HOST:PORT."""

from __future__ import annotations

import ipaddress

from fedmll.core.errors import ConfigError


def is_address(text: str) -> bool:
    """Whether a text has the form HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and int(port) < 65536


def parse_address(
    text: str, option: str, *, example: str = "127.0.0.1:8080", any_port: bool = False
) -> tuple[str, int]:
    """Split HOST:PORT into the host (IPv6 without its brackets) and the port.

    Args:
        text: what the user entered, for example `federation.example.org:8000` or `[::1]:8000`.
        option: the name of the option, for the error message.
        example: a valid value, for the error message.
        any_port: accept port 0, which lets the operating system choose a free port.

    Raises:
        ConfigError: the text is not HOST:PORT.
    """
    host, _, port = text.rpartition(":")
    if not is_address(text) or (int(port) == 0 and not any_port):
        raise ConfigError(f"{option} takes HOST:PORT, for example {example}; it got '{text}'.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def format_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
