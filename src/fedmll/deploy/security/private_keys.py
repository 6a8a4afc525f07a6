"""Private key files and passphrases.

fedmll writes a key file with mode 0600, in a folder that only its owner can list. It refuses to use a key or a
passphrase file that other users can read, as ssh does.
"""

from __future__ import annotations

import getpass
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from fedmll.core.errors import ConfigError

try:
    from cryptography import x509 as x509
    from cryptography.exceptions import InvalidSignature as InvalidSignature
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


def check_private_file(path: Path) -> None:
    """Raise a ConfigError if other users can read the file, or if this user cannot.

    A file of root may be readable by its group, as PostgreSQL allows it: Kubernetes mounts secrets in this way.
    """
    try:
        status = path.stat()
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    allowed = 0o640 if status.st_uid == 0 and os.getuid() != 0 else 0o600
    if stat.S_IMODE(status.st_mode) & 0o077 & ~allowed:
        raise ConfigError(
            f"{path} can be read by other users of this machine (mode {stat.S_IMODE(status.st_mode):04o}), so it is "
            f"not used. Run `chmod 600 {path}`. If someone else may have read it, replace it (`fedmll keys --help`)."
        )


def read_passphrase(path: Path, file: Path | None = None) -> str | None:
    """The passphrase of a private key, from the file, the environment or the keyboard; None if the key has none.

    Raises:
        ConfigError: the passphrase is wrong, or other users can read the key or the passphrase's file.
    """
    check_private_file(path)
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
        check_private_file(file)
        source = f"The first line of {file}"
        try:
            passphrase = file.read_text().partition("\n")[0].removesuffix("\r")
        except UnicodeDecodeError:
            passphrase = ""
    elif PASSPHRASE in os.environ:
        passphrase, source = os.environ[PASSPHRASE], f"The environment variable {PASSPHRASE}"
    elif sys.stdin.isatty():
        passphrase, source = getpass.getpass(prompt), "What you typed"
        if new and getpass.getpass("Repeat the passphrase: ") != passphrase:
            raise ConfigError("The two passphrases differ; nothing was created.")
    else:
        raise ConfigError(
            f"A passphrase is needed, and there is no terminal: use --passphrase-file, or set {PASSPHRASE}."
        )
    if not passphrase:
        raise ConfigError(f"{source} is not a passphrase: it is empty or not text.")
    if new and len(passphrase) < MIN_LENGTH:
        raise ConfigError(f"A passphrase needs at least {MIN_LENGTH} characters; nothing was created.")
    return passphrase


def without_passphrase(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child process, which does not need the passphrase of a key."""
    return {name: value for name, value in environment.items() if name != PASSPHRASE}


def write_private_file(path: Path, content: bytes, replace: bool = False) -> None:
    """Write a file that has mode 0600 from the first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists() and not replace:
        raise ConfigError(f"{path} already exists; nothing was changed. To replace it, remove it first.")
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
