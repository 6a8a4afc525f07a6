"""The keys of a federation: the clients' key pairs, made, registered, replaced, revoked (the server's are in
certificates.py). A private key never travels; it is written with mode 0600, in a folder that only its owner can list.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from fedmll import files
from fedmll.deploy.certificates import dates
from fedmll.deploy.certificates import init as init
from fedmll.deploy.certificates import server_files as server_files
from fedmll.deploy.private import UnsupportedAlgorithm, ec, pem, private_key, serialization, write_private
from fedmll.errors import ConfigError

REVOKED = "revoked.txt"
MADE = re.compile(rb"made on ([0-9-]{10})")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"'{name}' cannot be a client's name: use letters, digits, '-', '_' and '.', beginning with a letter or "
            "digit, at most 63."
        )
    return name


def new_node(folder: Path, name: str, passphrase: str | None = None) -> tuple[Path, Path]:
    """A client's key pair: the private file, the public file."""
    private, public = folder / f"{check_name(name)}.key", folder / f"{name}.pub"
    key = ec.generate_private_key(ec.SECP384R1())
    if passphrase is None:  # as Flower's own nodes want it
        text = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
    else:
        text = pem(key, passphrase)
    write_private(private, text)
    about = f"fedmll client {name}, made on {datetime.datetime.now(datetime.UTC):%Y-%m-%d}\n"
    files.write(public, about.encode() + _public_pem(key.public_key()))
    return private, public


def rotate(folder: Path, name: str, passphrase: str | None = None) -> tuple[Path, Path]:
    """At a client: a new pair. The old one stays as NAME.key.old until the operator has the new public half."""
    private, public = folder / f"{check_name(name)}.key", folder / f"{name}.pub"
    if not private.is_file():
        raise ConfigError(f"{private} does not exist: there is nothing to replace; `fedmll keys new {name}` makes it.")
    for path in (private, public):
        if path.exists():
            path.replace(path.with_name(path.name + ".old"))
    return new_node(folder, name, passphrase)


def revoke(folder: Path, name: str) -> str:
    """At the server: this client's present key is never taken again, also by a server that is running; its
    fingerprint."""
    (key,) = _public(folder, [name]).values()
    mark, path = fingerprint(key.encode()), folder / REVOKED
    if mark not in revoked_in(path):
        before = path.read_text() if path.is_file() else ""
        files.write(path, f"{before}{mark} {name} {datetime.datetime.now(datetime.UTC):%Y-%m-%d}\n")
    return mark


def revoked_in(path: Path) -> dict[str, str]:
    """Fingerprint → when, of a list of revoked keys."""
    if not path.is_file():
        return {}
    lines = [line.split() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return {words[0]: words[-1] for words in lines}


def fingerprint(public_key: bytes) -> str:
    """Of a public key as PEM."""
    return hashlib.sha256(public_key).hexdigest()[:32]


def mark_of(file: Path, passphrase: str | None = None) -> str:
    """The fingerprint of the public half of a private key."""
    try:
        return fingerprint(_public_pem(private_key(file.read_bytes(), passphrase).public_key()))
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{file} is not a key made by `fedmll keys new`.") from None


def made_on(file: Path) -> str:
    """When a public key says it was made; older versions did not say it."""
    found = MADE.search(file.read_bytes()[:200])
    return found[1].decode() if found else "unknown"


def listed(folder: Path) -> list[tuple[str, str, str, str]]:
    """File, made, ends, fingerprint of every certificate and public key."""
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}; `fedmll keys init` or `fedmll keys new NAME` makes it.")
    rows = []
    for path in sorted(folder.glob("*.crt")):
        since, until = dates(path)
        rows.append((path.name, f"{since:%Y-%m-%d}", f"{until:%Y-%m-%d}", fingerprint(path.read_bytes())))
    revoked = revoked_in(folder / REVOKED)
    for path in sorted(folder.glob("*.pub")):
        (key,) = _public(folder, [path.stem]).values()
        mark = fingerprint(key.encode())
        rows.append((path.name, made_on(path), f"revoked {revoked[mark]}" if mark in revoked else "", mark))
    return rows


def registered(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Name → public key (PEM) of every client, from NAME.pub in the folder. Every key has one name; none is revoked."""
    found, revoked = _public(folder, names), revoked_in(folder / REVOKED)
    for name, key in found.items():
        when = revoked.get(fingerprint(key.encode()))
        if when is not None:
            raise ConfigError(
                f"The key of {name} was revoked on {when}. Put its new {name}.pub into {folder} (it makes one by "
                f"`fedmll keys rotate {name}`), or go on without it (`fedmll resume --drop {name}`)."
            )
    return found


def _public(folder: Path, names: Sequence[str]) -> dict[str, str]:
    missing = [name for name in names if not (folder / f"{check_name(name)}.pub").is_file()]
    if missing:
        raise ConfigError(
            f"{folder} lacks the public key of {', '.join(missing)}: put {missing[0]}.pub there. The client makes it "
            f"by `fedmll keys new {missing[0]}` and sends you that file (never the .key)."
        )
    found: dict[str, str] = {}
    for name in names:
        path = folder / f"{name}.pub"
        try:
            key = serialization.load_pem_public_key(path.read_bytes())
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ConfigError(f"{path} is not a public key made by `fedmll keys new`; ask {name} to send it again.")
        text = _public_pem(key).decode()
        other = next((known for known, value in found.items() if value == text), None)
        if other is not None:
            raise ConfigError(f"{other} and {name} have the same public key; each client needs a key of its own.")
        found[name] = text
    return found


def _public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
