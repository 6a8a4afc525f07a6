"""Private keys and their passphrases. A key file has mode 0600, in a folder that only its owner can list."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path

from fedmll.core.errors import ConfigError

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
MIN_LENGTH = 8  # characters of a passphrase


def encode_private_key(key: ec.EllipticCurvePrivateKey, passphrase: str | None = None) -> bytes:
    """The key as PEM, encrypted if there is a passphrase."""
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase is not None:
        encryption = serialization.BestAvailableEncryption(passphrase.encode())
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def load_private_key(content: bytes, passphrase: str | None = None) -> ec.EllipticCurvePrivateKey:
    """Load a key in PEM or OpenSSH format.

    Raises:
        ValueError: it is not an elliptic-curve key, or the passphrase is wrong.
    """
    load = serialization.load_ssh_private_key if b"OPENSSH" in content[:64] else serialization.load_pem_private_key
    try:
        key = load(content, None if passphrase is None else passphrase.encode())
    except TypeError as error:  # the passphrase is missing, or the key has none
        if passphrase is None:
            raise ValueError(str(error)) from None
        key = load(content, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not an elliptic-curve key")
    return key


def read_passphrase(path: Path, file: Path | None = None) -> str | None:
    """The passphrase of a private key, from the file, the environment or the keyboard; None if the key has none.

    Raises:
        ConfigError: the passphrase is wrong.
    """
    content = path.read_bytes()
    if b"ENCRYPTED" not in content:
        return None
    passphrase = ask_passphrase(f"Passphrase of {path}: ", file)
    try:
        load_private_key(content, passphrase)
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"The passphrase of {path} is wrong.") from None
    return passphrase


def ask_passphrase(prompt: str, file: Path | None = None, new: bool = False) -> str:
    """A passphrase from the file, the environment or the keyboard. A new one is typed twice."""
    if file is not None:
        try:
            passphrase = file.read_text().splitlines()[0]
        except (OSError, UnicodeDecodeError, IndexError):
            raise ConfigError(
                f"{file} contains no passphrase. The first line of the file must be the passphrase."
            ) from None
    elif PASSPHRASE in os.environ:
        passphrase = os.environ[PASSPHRASE]
    elif sys.stdin.isatty():
        passphrase = getpass.getpass(prompt)
        if new and getpass.getpass("Repeat the passphrase: ") != passphrase:
            raise ConfigError("The two passphrases differ; nothing was created.")
    else:
        raise ConfigError(
            f"A passphrase is needed, and there is no terminal: use --passphrase-file, or set {PASSPHRASE}."
        )
    if new and len(passphrase) < MIN_LENGTH:
        raise ConfigError(f"A passphrase needs at least {MIN_LENGTH} characters; nothing was created.")
    return passphrase


def write_private_file(path: Path, content: bytes, replace: bool = False) -> None:
    """Write a file that has mode 0600 from the first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists() and not replace:
        raise ConfigError(f"{path} already exists; nothing was changed. To replace it, remove it first.")
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
