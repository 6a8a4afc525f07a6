"""Certificates and keys of a federation: a certificate authority and the server's certificate (TLS), and a key pair a
client. A private key never travels; it is written with mode 0600, in a folder that only its owner can list."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from fedmll import files
from fedmll.errors import ConfigError

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise ConfigError(
        f"A real federation needs Flower, and '{error.name}' is not installed: pip install 'fedmll[flower]'."
    ) from None

CA_DAYS, SERVER_DAYS = 3650, 825
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
ALWAYS = ("localhost", "127.0.0.1", "::1")  # the server itself comes this way


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"'{name}' cannot be a client's name: use letters, digits, '-', '_' and '.', beginning with a letter or "
            "digit, at most 63."
        )
    return name


def init(folder: Path, hosts: Sequence[str]) -> list[Path]:
    """A CA (kept if it is there already) and a certificate for the server under these names; the files."""
    ca_key_file, ca_file = folder / "ca.key", folder / "ca.crt"
    if ca_file.exists():
        ca_key = _private_key(ca_key_file)
        ca = x509.load_pem_x509_certificate(ca_file.read_bytes())
    else:
        ca_key = ec.generate_private_key(ec.SECP384R1())
        ca = _certificate("fedmll CA", ca_key, None, ca_key, [], CA_DAYS)
        _write_private(ca_key_file, _pem(ca_key))
        files.write(ca_file, ca.public_bytes(serialization.Encoding.PEM))
    key = ec.generate_private_key(ec.SECP384R1())
    names = list(dict.fromkeys([*hosts, *ALWAYS]))
    certificate = _certificate(names[0], key, ca, ca_key, names, SERVER_DAYS)
    _write_private(folder / "server.key", _pem(key), replace=True)
    files.write(folder / "server.crt", certificate.public_bytes(serialization.Encoding.PEM))
    return [ca_file, ca_key_file, folder / "server.crt", folder / "server.key"]


def new_node(folder: Path, name: str) -> tuple[Path, Path]:
    """A client's key pair: the private file, the public file."""
    private, public = folder / f"{check_name(name)}.key", folder / f"{name}.pub"
    key = ec.generate_private_key(ec.SECP384R1())
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    _write_private(private, text)
    files.write(public, _public_pem(key.public_key()))
    return private, public


def registered(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Name → public key (PEM) of every client, from NAME.pub in the folder. Every key has one name."""
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


def server_files(folder: Path) -> tuple[Path, Path, Path]:
    """Certificate, key and CA of the server."""
    wanted = folder / "server.crt", folder / "server.key", folder / "ca.crt"
    missing = [path.name for path in wanted if not path.is_file()]
    if missing:
        raise ConfigError(
            f"{folder} lacks {', '.join(missing)}. Make them by `fedmll keys init --host NAME-OF-THIS-SERVER`."
        )
    return wanted


def _certificate(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    issuer_key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    days: int,
) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject[:64])])
    now = datetime.datetime.now(datetime.UTC)
    authority = issuer is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(_usage(authority), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
    )
    if not authority:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    if not path.is_file():
        raise ConfigError(f"{path} is missing, so no certificate can be signed; start anew in an empty folder.")
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _write_private(path: Path, content: bytes, replace: bool = False) -> None:
    """Mode 0600 from the first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists() and not replace:
        raise ConfigError(f"{path} exists already; nothing was changed. Remove it first if it should be made anew.")
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
