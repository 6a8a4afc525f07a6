"""`fedmll keys`: create and manage certificates and keys. `fedmll audit`: verify an audit log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmll.cli.output import print_markup, print_table
from fedmll.core.errors import ConfigError

keys_app = typer.Typer(help="Create and manage the certificates and keys of a real federation.", no_args_is_help=True)

Folder = Annotated[Path, typer.Option("--dir", help="The folder with the keys.")]
Hosts = Annotated[
    list[str] | None, typer.Option("--host", help="A name or address under which clients reach the server; repeatable.")
]
Name = Annotated[str, typer.Argument(help="A client's name in the federation.")]
Passphrase = Annotated[
    bool,
    typer.Option(
        "--passphrase", help="Encrypt private keys with a passphrase: typed, from FEDMLL_PASSPHRASE or from a file."
    ),
]
PassphraseFile = Annotated[
    Path | None, typer.Option("--passphrase-file", help="A file whose first line is the passphrase.")
]
KEYS = Path("keys")


def _new_passphrase(wanted: bool, file: Path | None) -> str | None:
    from fedmll.deploy.security.private_keys import ask_passphrase

    return ask_passphrase("New passphrase: ", file, new=True) if wanted or file is not None else None


def _ca_passphrase(folder: Path, wanted: bool, file: Path | None) -> str | None:
    """The passphrase of the existing CA key; for a new CA a new passphrase, if wanted."""
    from fedmll.deploy.security.private_keys import read_passphrase

    if (folder / "ca.key").is_file():
        return read_passphrase(folder / "ca.key", file)
    return _new_passphrase(wanted, file)


@keys_app.command("init")
def init(
    host: Hosts = None, folder: Folder = KEYS, passphrase: Passphrase = False, passphrase_file: PassphraseFile = None
) -> None:
    """At the server: create a certificate authority (CA) and the server's certificate.

    If the folder has a CA, only the certificate is renewed.
    """
    from fedmll.deploy.security import certificates

    certificates.create_server_certificate(folder, host or [], _ca_passphrase(folder, passphrase, passphrase_file))
    print_markup(f"the server's certificate is valid for: {', '.join(certificates.read_hosts(folder / 'server.crt'))}")
    print_markup(f"[bold]send to every client:[/] {folder / 'ca.crt'}")
    print_markup(f"[bold]keep secret:[/] {folder / 'ca.key'}, {folder / 'server.key'}")
    print_markup(f"put each client's NAME.pub into {folder}, then: fedmll server FILE.toml --clients NAME,NAME")
    if not host:
        print_markup(
            "[yellow]under these names only this machine can reach the server;[/] add --host NAME-OF-THIS-SERVER"
        )


@keys_app.command("ca")
def ca(folder: Folder = Path("ca"), passphrase: Passphrase = False, passphrase_file: PassphraseFile = None) -> None:
    """On a machine that may stay offline: create a certificate authority (CA), which signs the requests of servers."""
    from fedmll.deploy.security import certificates

    certificates.create_ca(folder, _new_passphrase(passphrase, passphrase_file))
    print_markup(f"[bold]send to the server and every client:[/] {folder / 'ca.crt'}")
    print_markup(f"[bold]keep secret:[/] {folder / 'ca.key'}")
    print_markup(f"sign a server's request: fedmll keys sign server.csr --dir {folder}")


@keys_app.command("request")
def request(
    host: Hosts = None, folder: Folder = KEYS, passphrase: Passphrase = False, passphrase_file: PassphraseFile = None
) -> None:
    """At a server whose CA is on another machine: create the server's key and a signing request."""
    from fedmll.deploy.security import certificates

    certificates.create_signing_request(folder, host or [], _new_passphrase(passphrase, passphrase_file))
    print_markup(
        f"[bold]take to the CA:[/] {folder / 'server.csr'}; the CA returns server.crt, which goes into {folder}"
    )
    print_markup(f"[bold]keep secret:[/] {folder / 'server.key'}")


@keys_app.command("sign")
def sign(
    file: Annotated[Path, typer.Argument(metavar="SERVER.csr", help="The request that `fedmll keys request` created.")],
    folder: Folder = Path("ca"),
    passphrase_file: PassphraseFile = None,
) -> None:
    """On the machine with the CA's key: sign a server's request.

    Check the printed names before you hand the certificate over.
    """
    from fedmll.deploy.security import certificates

    out = certificates.sign_request(folder, file, _ca_passphrase(folder, False, passphrase_file))
    print_markup(
        f"{out} is valid for: {', '.join(certificates.read_hosts(out))}; take it and {folder / 'ca.crt'} to the server"
    )


@keys_app.command("new")
def new(
    name: Name, folder: Folder = KEYS, passphrase: Passphrase = False, passphrase_file: PassphraseFile = None
) -> None:
    """At a client: create its key pair. Send the public key to the server's operator; never send the private key."""
    from fedmll.deploy.security import client_keys

    private, public = client_keys.create_client_key(folder, name, _new_passphrase(passphrase, passphrase_file))
    print_markup(f"[bold]send to the server's operator:[/] {public}")
    print_markup(f"[bold]keep secret:[/] {private}")
    print_markup(f"put the ca.crt that the operator sends you into {folder}")


@keys_app.command("rotate")
def rotate(
    name: Name, folder: Folder = KEYS, passphrase: Passphrase = False, passphrase_file: PassphraseFile = None
) -> None:
    """At a client: create a new key pair. The old one is kept as NAME.key.old until the server has the new key."""
    from fedmll.deploy.security import client_keys

    private, public = client_keys.rotate_client_key(folder, name, _new_passphrase(passphrase, passphrase_file))
    print_markup(
        f"[bold]send to the server's operator:[/] {public}; it is valid from the server's next start or resume on"
    )
    print_markup(f"[bold]keep secret:[/] {private}; until then join with --key {private}.old")


@keys_app.command("revoke")
def revoke(name: Name, folder: Folder = KEYS) -> None:
    """At the server: never accept a client's current key again. A running server notices it within seconds."""
    from fedmll.deploy.security import client_keys

    fingerprint = client_keys.revoke_client_key(folder, name)
    print_markup(f"revoked: the key of {name} ({fingerprint}), in {folder / client_keys.REVOKED_FILE}")
    print_markup(
        f"put its new {name}.pub into {folder}; or continue without this client: fedmll resume FOLDER --drop {name}"
    )


@keys_app.command("list")
def list_keys(folder: Folder = KEYS) -> None:
    """List the certificates and public keys with their dates, and fingerprints to compare by telephone."""
    from fedmll.deploy.security import client_keys

    rows = client_keys.list_keys(folder)
    print_table(str(folder), ("file", "created", "expires", "fingerprint"), rows, words=True)


# ---- Audit logs

audit_app = typer.Typer(help="Verify the audit log of a server or a site (audit.jsonl).", no_args_is_help=True)


@audit_app.callback()
def audit() -> None: ...  # without it Typer would leave out the word `verify`


@audit_app.command("verify")
def verify(
    path: Annotated[
        Path, typer.Argument(metavar="FILE_OR_FOLDER", help="audit.jsonl, or the folder that contains it.")
    ],
    last: Annotated[
        str | None, typer.Option(metavar="HASH", help="The last hash, as it was printed: checks that the end is there.")
    ] = None,
    kept: Annotated[
        Path | None,
        typer.Option("--kept", metavar="FILE_OR_FOLDER", help="A site's audit log: look for the hashes that it kept."),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option("--certificate", metavar="SERVER.crt", help="With --kept: also check the server's signatures."),
    ] = None,
) -> None:
    """Check that every line of an audit log fits the line before it.

    Exit code 0: all lines fit; 1: a line does not fit, and the first such line is shown. A missing end is only noticed
    with --last or --kept. The last hash is printed at the end of a run. Every site keeps the server's last hash of each
    round, with the server's signature.

    Examples:  [bold]fedmll audit verify study --last 5b1c…[/]  ·  [bold]fedmll audit verify study --kept hospital-a[/]
    """
    from fedmll.deploy.security import audit_log

    if last is not None and not audit_log.HASH.fullmatch(last):
        raise ConfigError(f"--last takes a hash of 64 hexadecimal digits; it got '{last}'.")
    file = path / audit_log.FILE if path.is_dir() else path
    result = audit_log.verify_audit_log(file)
    if result.first_bad_line is not None:
        print_markup(f"[red]line {result.first_bad_line} does not fit:[/] {result.reason}")
        raise typer.Exit(1)
    for number in result.incomplete:
        print_markup(
            f"line {number} reports an incomplete line before it. A killed process or a full disk causes this, and so "
            "does cutting off the end of the line that was the last one then"
        )
    if kept is not None:
        _verify_kept(file, kept / audit_log.FILE if kept.is_dir() else kept, certificate)
    if last is None:
        print_markup(
            f"ok: {result.lines} lines, the last hash is {result.last_hash}. To check the end, use --last HASH"
        )
        return
    line = audit_log.find_line(file, last)
    if line is None:
        print_markup(f"[red]no line has the hash {last}:[/] the end is missing, or the whole file was rewritten")
        raise typer.Exit(1)
    print_markup(f"ok: {result.lines} lines; line {line} has that hash, and {result.lines - line} lines follow it")


def _verify_kept(file: Path, site_log: Path, certificate: Path | None) -> None:
    """Check that the hashes that a site received from the server are lines of the server's log."""
    from fedmll.deploy.security import audit_log

    if certificate is not None and not certificate.is_file():
        raise ConfigError(f"There is no {certificate} (--certificate).")
    heads = audit_log.read_heads(site_log)
    for head in heads:
        if certificate is not None and not head.is_signed_by(certificate.read_bytes()):
            print_markup(
                f"[red]round {head.round}: the hash {head.hash} is not signed with the key of {certificate}[/]"
            )
            raise typer.Exit(1)
        if audit_log.find_line(file, head.hash) is None:
            print_markup(
                f"[red]round {head.round}: no line has the hash {head.hash}, which the server sent to the site:[/] "
                "lines were changed or removed since"
            )
            raise typer.Exit(1)
    signed = "" if certificate is None else f" and are signed with the key of {certificate}"
    print_markup(f"{len(heads)} hashes that the site kept are in the log{signed}")
