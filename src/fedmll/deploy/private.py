"""Private keys and their passphrases."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path

from fedmll.errors import ConfigError

try:
    from cryptography import x509 as x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes as hashes
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID as ExtendedKeyUsageOID
    from cryptography.x509.oid import NameOID as NameOID
except ImportError as error:
    raise ConfigError(
        f"A real federation needs Flower, and '{error.name}' is not installed: pip install 'fedmll[flower]'."
    ) from None

PASSPHRASE = "FEDMLL_PASSPHRASE"
SHORTEST = 8  # characters of a passphrase


def pem(key: ec.EllipticCurvePrivateKey, passphrase: str | None = None) -> bytes:
    plain = serialization.NoEncryption()
    hidden = plain if passphrase is None else serialization.BestAvailableEncryption(passphrase.encode())
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden)


def private_key(content: bytes, passphrase: str | None = None) -> ec.EllipticCurvePrivateKey:
    """Of either form. ValueError: it is none, or the passphrase is wrong."""
    load = serialization.load_ssh_private_key if b"OPENSSH" in content[:64] else serialization.load_pem_private_key
    try:
        key = load(content, None if passphrase is None else passphrase.encode())
    except TypeError as error:  # a passphrase is missing, or given for a key that has none
        if passphrase is None:
            raise ValueError(str(error)) from None
        key = load(content, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not an elliptic-curve key")
    return key


def passphrase_of(path: Path, file: Path | None = None) -> str | None:
    """The passphrase of a private key, if it has one: from the file, the environment or the keyboard. It is tried."""
    content = path.read_bytes()
    if b"ENCRYPTED" not in content:
        return None
    passphrase = ask_passphrase(f"Passphrase of {path}: ", file)
    try:
        private_key(content, passphrase)
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"This is not the passphrase of {path}.") from None
    return passphrase


def ask_passphrase(prompt: str, file: Path | None = None, new: bool = False) -> str:
    if file is not None:
        try:
            found = file.read_text().splitlines()[0]
        except (OSError, UnicodeDecodeError, IndexError):
            raise ConfigError(f"{file} holds no passphrase: it should be its first line.") from None
    elif PASSPHRASE in os.environ:
        found = os.environ[PASSPHRASE]
    elif sys.stdin.isatty():
        found = getpass.getpass(prompt)
        if new and getpass.getpass("The same again: ") != found:
            raise ConfigError("The two are not the same; nothing was made.")
    else:
        raise ConfigError(
            f"A passphrase is needed and nobody is there to type it: use --passphrase-file, or set {PASSPHRASE}."
        )
    if new and len(found) < SHORTEST:
        raise ConfigError(f"A passphrase has {SHORTEST} characters or more; nothing was made.")
    return found


def write_private(path: Path, content: bytes, replace: bool = False) -> None:
    """Mode 0600 from the first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists() and not replace:
        raise ConfigError(f"{path} exists already; nothing was changed. Remove it first if it should be made anew.")
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
