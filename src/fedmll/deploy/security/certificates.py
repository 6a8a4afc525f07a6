"""TLS for the server: a certificate authority (CA) and the server's certificate.

The CA's key is needed for signing only, so it may be kept on an offline machine:
`create_signing_request` at the server, `sign_request` where the CA is.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.deploy.security.private_keys import (
    ExtendedKeyUsageOID,
    NameOID,
    check_private_file,
    ec,
    encode_private_key,
    hashes,
    load_private_key,
    serialization,
    write_private_file,
    x509,
)

CA_DAYS, SERVER_DAYS = 3650, 825
WARNING_DAYS = 30  # before a certificate expires
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")  # the server connects to itself under these names


def create_server_certificate(folder: Path, hosts: Sequence[str], passphrase: str | None = None) -> list[Path]:
    """Create a CA, unless the folder has one, and a certificate for the server.

    Args:
        folder: where the files are written.
        hosts: names and addresses under which clients reach the server.
        passphrase: encrypts the private keys.

    Returns:
        The files.
    """
    if not (folder / "ca.crt").exists():
        create_ca(folder, passphrase)
    ca, ca_key = _load_ca(folder, passphrase)
    key = ec.generate_private_key(ec.SECP384R1())
    names = _with_local_hosts(hosts)
    certificate = _issue_certificate(
        names[0], key.public_key(), ca, ca_key, [_host_name(name) for name in names], SERVER_DAYS
    )
    write_private_file(folder / "server.key", encode_private_key(key, passphrase), replace=True)
    files.write_atomic(folder / "server.crt", certificate.public_bytes(serialization.Encoding.PEM))
    return [folder / name for name in ("ca.crt", "ca.key", "server.crt", "server.key")]


def create_ca(folder: Path, passphrase: str | None = None) -> list[Path]:
    """Create a CA; return its certificate and its private key."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_private_file(folder / "ca.key", encode_private_key(key, passphrase))
    ca = _issue_certificate("fedmll CA", key.public_key(), None, key, [], CA_DAYS)
    files.write_atomic(folder / "ca.crt", ca.public_bytes(serialization.Encoding.PEM))
    return [folder / "ca.crt", folder / "ca.key"]


def create_signing_request(folder: Path, hosts: Sequence[str], passphrase: str | None = None) -> list[Path]:
    """At a server without the CA's key: create the server's key and a signing request; return both files."""
    key = ec.generate_private_key(ec.SECP384R1())
    names = _with_local_hosts(hosts)
    signing_request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(_common_name(names[0]))
        .add_extension(x509.SubjectAlternativeName([_host_name(name) for name in names]), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_private_file(folder / "server.key", encode_private_key(key, passphrase), replace=True)
    files.write_atomic(folder / "server.csr", signing_request.public_bytes(serialization.Encoding.PEM))
    return [folder / "server.csr", folder / "server.key"]


def sign_request(folder: Path, file: Path, passphrase: str | None = None) -> Path:
    """On the machine with the CA's key: sign a server's request; return the certificate, next to the request."""
    try:
        signing_request = x509.load_pem_x509_csr(file.read_bytes())
        names = list(signing_request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"{file} is not a request made by `fedmll keys request` ({error}).") from None
    key = signing_request.public_key()
    if not signing_request.is_signature_valid or not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(
            f"{file} is not signed with the key that it contains; ask the server's operator to send it again."
        )
    ca, ca_key = _load_ca(folder, passphrase)
    subject = next((str(name.value) for name in names), "server")
    certificate = _issue_certificate(subject, key, ca, ca_key, names, SERVER_DAYS)
    out = file.with_suffix(".crt")
    files.write_atomic(out, certificate.public_bytes(serialization.Encoding.PEM))
    return out


def read_hosts(file: Path) -> list[str]:
    """The host names and addresses in a request or a certificate."""
    load = x509.load_pem_x509_csr if file.suffix == ".csr" else x509.load_pem_x509_certificate
    found = load(file.read_bytes()).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [str(name.value) for name in found.value]


def find_tls_files(folder: Path) -> tuple[Path, Path, Path]:
    """The server's certificate, its key and the CA's certificate; a ConfigError if one is missing or has expired."""
    paths = folder / "server.crt", folder / "server.key", folder / "ca.crt"
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(
            f"{folder} does not contain {', '.join(missing)}. Create the files with `fedmll keys init --host "
            "NAME-OF-THIS-SERVER`."
        )
    expired = [path.name for path in (paths[0], paths[2]) if _days_left(path) <= 0]
    if expired:
        raise ConfigError(
            f"{', '.join(expired)} in {folder} has expired, so no client would connect. Renew it with `fedmll keys "
            "init --host NAME-OF-THIS-SERVER` (`fedmll keys list` shows all dates)."
        )
    return paths


def expiry_warnings(folder: Path) -> list[str]:
    """One text for each certificate that expires soon."""
    left = {path.name: _days_left(path) for path in (folder / "server.crt", folder / "ca.crt")}
    return [
        f"{name} expires in {days} days; renew it with `fedmll keys init`"
        for name, days in left.items()
        if days < WARNING_DAYS
    ]


def certificate_fingerprint(content: bytes) -> str:
    """SHA-256 of a certificate (PEM), by which a site and the server know which server is meant."""
    return x509.load_pem_x509_certificate(content).fingerprint(hashes.SHA256()).hex()


def validity_period(file: Path) -> tuple[datetime.datetime, datetime.datetime]:
    """From when until when a certificate is valid."""
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
    except ValueError:
        raise ConfigError(f"{file} is not a certificate; create it again with `fedmll keys init`.") from None
    return certificate.not_valid_before_utc, certificate.not_valid_after_utc


def _days_left(file: Path) -> int:
    return (validity_period(file)[1] - datetime.datetime.now(datetime.UTC)).days


def _load_ca(folder: Path, passphrase: str | None) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key_file, ca_file = folder / "ca.key", folder / "ca.crt"
    if not key_file.is_file() or not ca_file.is_file():
        raise ConfigError(
            f"{folder} does not contain ca.key and ca.crt, so no certificate can be signed here. If the CA is on "
            "another machine, use `fedmll keys request` here and `fedmll keys sign` there. Otherwise start with an "
            "empty folder."
        )
    check_private_file(key_file)
    return x509.load_pem_x509_certificate(ca_file.read_bytes()), load_private_key(key_file.read_bytes(), passphrase)


def _with_local_hosts(hosts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*hosts, *LOCAL_HOSTS]))


def _common_name(subject: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject[:64])])


def _issue_certificate(
    subject: str,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Certificate | None,
    issuer_key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[x509.GeneralName],
    days: int,
) -> x509.Certificate:
    name = _common_name(subject)
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
        .add_extension(_key_usage(authority), critical=True)
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


def _key_usage(authority: bool) -> x509.KeyUsage:
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


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
