"""The clients' key pairs: create, register, rotate, revoke; and the label sets that are registered with them.

A client creates its key pair and sends NAME.pub to the server's operator. The private key never leaves the client.

A client with private labels knows its own classes only. The operator registers them in NAME.labels, one class per
line, and the client receives the rows of its registered classes only. Otherwise a client could name any class and
receive its row, and the answer to a guess would reveal whether the class exists.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.core.text import suggest
from fedmll.deploy.error_codes import JoinRejected, RejectionCode
from fedmll.deploy.security.certificates import validity_period
from fedmll.deploy.security.private_keys import (
    UnsupportedAlgorithm,
    check_private_file,
    ec,
    encode_private_key,
    load_private_key,
    serialization,
    write_private_file,
)

REVOKED_FILE = "revoked.txt"
REVOKED_LINE = re.compile(r"([0-9a-f]{32}) [A-Za-z0-9._-]+ ([0-9-]{10})")  # fingerprint, name, date
CREATED = re.compile(rb"created on ([0-9-]{10})")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

LabelSets = Mapping[str, frozenset[str]]  # by client


def check_client_name(name: str) -> str:
    """Return the name; a ConfigError if it is not allowed."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"'{name}' cannot be a client's name: use letters, digits, '-', '_' and '.', beginning with a letter or "
            "digit, at most 63 characters."
        )
    return name


def create_client_key(folder: Path, name: str, passphrase: str | None = None) -> tuple[Path, Path]:
    """Create a client's key pair; return the file of the private key and the file of the public key."""
    private, public = folder / f"{check_client_name(name)}.key", folder / f"{name}.pub"
    key = ec.generate_private_key(ec.SECP384R1())
    if passphrase is None:  # the format that Flower's own nodes need
        text = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
    else:
        text = encode_private_key(key, passphrase)
    write_private_file(private, text)
    comment = f"fedmll client {name}, created on {_today()}\n"
    files.write_atomic(public, comment.encode() + _public_pem(key.public_key()))
    return private, public


def rotate_client_key(folder: Path, name: str, passphrase: str | None = None) -> tuple[Path, Path]:
    """At a client: create a new key pair. The old one is kept as NAME.key.old until the server has the new public key.

    Returns:
        The file of the private key and the file of the public key.
    """
    private, public = folder / f"{check_client_name(name)}.key", folder / f"{name}.pub"
    if not private.is_file():
        raise ConfigError(f"{private} does not exist, so it cannot be replaced; `fedmll keys new {name}` creates it.")
    kept = {path: path.with_name(path.name + ".old") for path in (private, public)}
    if kept[private].exists():  # it may be the only key that the server knows
        raise ConfigError(
            f"{kept[private]} exists: the key was replaced before, and nothing was changed now. If the server accepts "
            f"the new key, delete {kept[private].name} and {kept[public].name}, then rotate again. Otherwise send "
            f"{public.name} to its operator first."
        )
    for path, old in kept.items():
        if path.exists():
            path.replace(old)
    return create_client_key(folder, name, passphrase)


def revoke_client_key(folder: Path, name: str) -> str:
    """At the server: never accept this client's current key again. A running server notices it too.

    Returns:
        The fingerprint of the key.
    """
    (key,) = _read_public_keys(folder, [name]).values()
    revoked, path = fingerprint(key.encode()), folder / REVOKED_FILE
    if revoked not in read_revoked_keys(path):
        before = path.read_text() if path.is_file() else ""
        files.write_atomic(path, f"{before}{revoked} {name} {_today()}\n")
    return revoked


def read_revoked_keys(path: Path) -> dict[str, str]:
    """Fingerprint → date, of a file of revoked keys.

    Raises:
        ConfigError: the file is damaged. Nobody can say then which keys are revoked, so none may be accepted.
    """
    if not os.path.lexists(path):  # a link to a file that is missing is damaged
        return {}
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        text = ""
    lines = [REVOKED_LINE.fullmatch(line) for line in text.splitlines()]
    if not lines or not text.endswith("\n") or None in lines:
        raise ConfigError(
            f"{path}, the list of revoked keys, is damaged, so no client is accepted. Restore it from a copy, or "
            f"delete it and revoke each key again (`fedmll keys revoke NAME`)."
        )
    return {found[1]: found[2] for found in lines if found is not None}


def fingerprint(content: bytes) -> str:
    """The fingerprint of a public key or certificate in PEM format."""
    return hashlib.sha256(content).hexdigest()[:32]


def private_key_fingerprint(file: Path, passphrase: str | None = None) -> str:
    """The fingerprint of the public key that belongs to a private key."""
    check_private_file(file)
    try:
        return fingerprint(_public_pem(load_private_key(file.read_bytes(), passphrase).public_key()))
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{file} is not a key made by `fedmll keys new`.") from None


def creation_date(file: Path) -> str:
    """The date in the first line of a public key file."""
    found = CREATED.search(file.read_bytes()[:200])
    return found[1].decode() if found else "unknown"


def list_keys(folder: Path) -> list[tuple[str, str, str, str]]:
    """File name, creation date, expiry (or revocation) and fingerprint of every certificate and public key."""
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}; `fedmll keys init` or `fedmll keys new NAME` creates it.")
    rows = []
    for path in sorted(folder.glob("*.crt")):
        since, until = validity_period(path)
        rows.append((path.name, f"{since:%Y-%m-%d}", f"{until:%Y-%m-%d}", fingerprint(path.read_bytes())))
    revoked = read_revoked_keys(folder / REVOKED_FILE)
    for path in sorted(folder.glob("*.pub")):
        (key,) = _read_public_keys(folder, [path.stem]).values()
        mark = fingerprint(key.encode())
        rows.append((path.name, creation_date(path), f"revoked {revoked[mark]}" if mark in revoked else "", mark))
    return rows


def load_public_keys(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Name → public key (PEM) of every client, from NAME.pub in the folder.

    Raises:
        ConfigError: a key is missing, invalid, revoked, or belongs to two clients.
    """
    keys, revoked = _read_public_keys(folder, names), read_revoked_keys(folder / REVOKED_FILE)
    for name, key in keys.items():
        date = revoked.get(fingerprint(key.encode()))
        if date is not None:
            raise ConfigError(
                f"The key of {name} was revoked on {date}. Put its new {name}.pub into {folder} (the client creates it "
                f"with `fedmll keys rotate {name}`), or continue without this client (`fedmll resume --drop {name}`)."
            )
    return keys


def read_label_sets(folder: Path, names: Sequence[str], classes: Sequence[str]) -> LabelSets:
    """Read the label sets of these clients from NAME.labels in the folder of keys."""
    missing = [name for name in names if not (folder / f"{name}.labels").is_file()]
    if missing:
        raise ConfigError(
            f"This method keeps label sets private, and {folder} does not say which classes {', '.join(missing)} may "
            f"have: write {missing[0]}.labels there, one class per line, as the client told you."
        )
    label_sets = {}
    for name in names:
        lines = (line.strip() for line in (folder / f"{name}.labels").read_text(encoding="utf-8").splitlines())
        label_sets[name] = frozenset(line for line in lines if line and not line.startswith("#"))
        unknown = sorted(label_sets[name] - set(classes))
        if unknown:
            raise ConfigError(
                f"{folder / f'{name}.labels'} has the class '{unknown[0]}', which this federation does not have"
                f"{suggest(unknown[0], classes)}"
            )
    return label_sets


def check_label_set(label_sets: LabelSets, name: str, claimed: Sequence[str]) -> None:
    """Reject a client that claims other classes than those that are registered.

    The text is the same for all classes that are not registered, whether they exist or not.
    """
    if not set(claimed) <= label_sets[name]:
        raise JoinRejected(RejectionCode.OTHER, "its label set is not the one that is registered with its key")


def _read_public_keys(folder: Path, names: Sequence[str]) -> dict[str, str]:
    missing = [name for name in names if not (folder / f"{check_client_name(name)}.pub").is_file()]
    if missing:
        raise ConfigError(
            f"{folder} does not contain the public key of {', '.join(missing)}: put {missing[0]}.pub there. The client "
            f"creates it with `fedmll keys new {missing[0]}` and sends you that file (never the .key)."
        )
    keys: dict[str, str] = {}
    for name in names:
        path = folder / f"{name}.pub"
        try:
            key = serialization.load_pem_public_key(path.read_bytes())
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ConfigError(f"{path} is not a public key made by `fedmll keys new`; ask {name} to send it again.")
        text = _public_pem(key).decode()
        other = next((known for known, value in keys.items() if value == text), None)
        if other is not None:
            raise ConfigError(f"{other} and {name} have the same public key; each client needs a key of its own.")
        keys[name] = text
    return keys


def _public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _today() -> str:
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
