"""The server's TLS: a certificate authority and the server's certificate. The CA's key is needed for signing only, so
it may lie on a machine that is never connected: `request` at the server, `sign` where the CA is."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from fedmll import files
from fedmll.deploy.private import (
    ExtendedKeyUsageOID,
    NameOID,
    ec,
    hashes,
    pem,
    private_key,
    serialization,
    write_private,
    x509,
)
from fedmll.errors import ConfigError

CA_DAYS, SERVER_DAYS = 3650, 825
SOON_DAYS = 30
ALWAYS = ("localhost", "127.0.0.1", "::1")  # the server itself comes this way


def init(folder: Path, hosts: Sequence[str], passphrase: str | None = None) -> list[Path]:
    """A CA (kept if it is there already) and a certificate for the server under these names; the files."""
    if not (folder / "ca.crt").exists():
        new_ca(folder, passphrase)
    ca, ca_key = _authority(folder, passphrase)
    key = ec.generate_private_key(ec.SECP384R1())
    names = _names(hosts)
    certificate = _certificate(names[0], key.public_key(), ca, ca_key, [_host(name) for name in names], SERVER_DAYS)
    write_private(folder / "server.key", pem(key, passphrase), replace=True)
    files.write(folder / "server.crt", certificate.public_bytes(serialization.Encoding.PEM))
    return [folder / name for name in ("ca.crt", "ca.key", "server.crt", "server.key")]


def new_ca(folder: Path, passphrase: str | None = None) -> list[Path]:
    """A CA alone: its certificate and its key."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(folder / "ca.key", pem(key, passphrase))
    ca = _certificate("fedmll CA", key.public_key(), None, key, [], CA_DAYS)
    files.write(folder / "ca.crt", ca.public_bytes(serialization.Encoding.PEM))
    return [folder / "ca.crt", folder / "ca.key"]


def request(folder: Path, hosts: Sequence[str], passphrase: str | None = None) -> list[Path]:
    """At a server without the CA's key: its own key, and what the CA is asked to sign."""
    key = ec.generate_private_key(ec.SECP384R1())
    names = _names(hosts)
    asked = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(_name(names[0]))
        .add_extension(x509.SubjectAlternativeName([_host(name) for name in names]), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_private(folder / "server.key", pem(key, passphrase), replace=True)
    files.write(folder / "server.csr", asked.public_bytes(serialization.Encoding.PEM))
    return [folder / "server.csr", folder / "server.key"]


def sign(folder: Path, file: Path, passphrase: str | None = None) -> Path:
    """Where the CA's key lies: the certificate for a server's request, beside the request."""
    try:
        asked = x509.load_pem_x509_csr(file.read_bytes())
        names = list(asked.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"{file} is not a request made by `fedmll keys request` ({error}).") from None
    key = asked.public_key()
    if not asked.is_signature_valid or not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{file} is not signed with the key that it names; ask the server's operator for it again.")
    ca, ca_key = _authority(folder, passphrase)
    subject = next((str(name.value) for name in names), "server")
    certificate = _certificate(subject, key, ca, ca_key, names, SERVER_DAYS)
    out = file.with_suffix(".crt")
    files.write(out, certificate.public_bytes(serialization.Encoding.PEM))
    return out


def hosts_of(file: Path) -> list[str]:
    """The names that a request or a certificate holds for."""
    load = x509.load_pem_x509_csr if file.suffix == ".csr" else x509.load_pem_x509_certificate
    found = load(file.read_bytes()).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [str(name.value) for name in found.value]


def server_files(folder: Path) -> tuple[Path, Path, Path]:
    """Certificate, key and CA of the server."""
    wanted = folder / "server.crt", folder / "server.key", folder / "ca.crt"
    missing = [path.name for path in wanted if not path.is_file()]
    if missing:
        raise ConfigError(
            f"{folder} lacks {', '.join(missing)}. Make them by `fedmll keys init --host NAME-OF-THIS-SERVER`."
        )
    over = [path.name for path in (wanted[0], wanted[2]) if _days_left(path) <= 0]
    if over:
        raise ConfigError(
            f"{', '.join(over)} in {folder} is out of date, so no client would connect. Make it anew by `fedmll keys "
            "init --host NAME-OF-THIS-SERVER` (`fedmll keys list` shows all dates)."
        )
    return wanted


def ending(folder: Path) -> list[str]:
    """A note for each certificate that ends soon."""
    left = {path.name: _days_left(path) for path in (folder / "server.crt", folder / "ca.crt")}
    return [
        f"{name} ends in {days} days; renew it with `fedmll keys init`"
        for name, days in left.items()
        if days < SOON_DAYS
    ]


def dates(file: Path) -> tuple[datetime.datetime, datetime.datetime]:
    """From when until when a certificate holds."""
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
    except ValueError:
        raise ConfigError(f"{file} is not a certificate; make it anew by `fedmll keys init`.") from None
    return certificate.not_valid_before_utc, certificate.not_valid_after_utc


def _days_left(file: Path) -> int:
    return (dates(file)[1] - datetime.datetime.now(datetime.UTC)).days


def _authority(folder: Path, passphrase: str | None) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key_file, ca_file = folder / "ca.key", folder / "ca.crt"
    if not key_file.is_file() or not ca_file.is_file():
        raise ConfigError(
            f"{folder} lacks ca.key or ca.crt, so no certificate can be signed here. If the CA is on another machine: "
            "`fedmll keys request` here, `fedmll keys sign` there. Otherwise start anew in an empty folder."
        )
    return x509.load_pem_x509_certificate(ca_file.read_bytes()), private_key(key_file.read_bytes(), passphrase)


def _names(hosts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*hosts, *ALWAYS]))


def _name(subject: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject[:64])])


def _certificate(
    subject: str,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Certificate | None,
    issuer_key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[x509.GeneralName],
    days: int,
) -> x509.Certificate:
    name = _name(subject)
    now = datetime.datetime.now(datetime.UTC)
    authority = issuer is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name if issuer is None else issuer.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(_usage(authority), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
    )
    if not authority:
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
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
