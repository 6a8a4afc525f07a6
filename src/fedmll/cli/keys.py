"""The commands about keys: made, listed, replaced, revoked; a certificate authority on a machine of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmll.cli.tables import console, plain_table

keys_app = typer.Typer(help="Certificates and keys of a federation between machines.", no_args_is_help=True)

Folder = Annotated[Path, typer.Option("--dir", help="Where the keys lie.")]
Hosts = Annotated[
    list[str] | None, typer.Option("--host", help="A name or address the clients reach the server by; repeatable.")
]
Name = Annotated[str, typer.Argument(help="A client's name in the federation.")]
Passphrase = Annotated[
    bool,
    typer.Option("--passphrase", help="Private keys are encrypted; asked for, or from FEDMLL_PASSPHRASE or a file."),
]
PassphraseFile = Annotated[Path | None, typer.Option("--passphrase-file", help="Its first line is the passphrase.")]
KEYS = Path("keys")


def show(text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)


def _new_passphrase(wanted: bool, file: Path | None) -> str | None:
    from fedmll.deploy.private import ask_passphrase

    return ask_passphrase("A new passphrase: ", file, new=True) if wanted or file is not None else None


def _ca_passphrase(folder: Path, wanted: bool, file: Path | None) -> str | None:
    """Of the CA's key that is there; otherwise a new one, if wanted."""
    from fedmll.deploy.private import passphrase_of

    if (folder / "ca.key").is_file():
        return passphrase_of(folder / "ca.key", file)
    return _new_passphrase(wanted, file)


@keys_app.command("init")
def init(
    host: Hosts = None, folder: Folder = KEYS, passphrase: Passphrase = False, passphrase_file: PassphraseFile = None
) -> None:
    """At the server: a certificate authority and the server's certificate. Again: a new certificate, the same CA."""
    from fedmll.deploy import certificates

    certificates.init(folder, host or [], _ca_passphrase(folder, passphrase, passphrase_file))
    show(f"the server's certificate holds for: {', '.join(certificates.hosts_of(folder / 'server.crt'))}")
    show(f"[bold]send to every client:[/] {folder / 'ca.crt'}")
    show(f"[bold]keep here, show nobody:[/] {folder / 'ca.key'}, {folder / 'server.key'}")
    show(f"put each client's NAME.pub into {folder}, then: fedmll server FILE.toml --clients NAME,NAME")
    if not host:
        show("[yellow]only this machine can reach it under these names;[/] add --host NAME-OF-THIS-SERVER")


@keys_app.command("ca")
def ca(folder: Folder = Path("ca"), passphrase: Passphrase = False, passphrase_file: PassphraseFile = None) -> None:
    """On a machine that may stay offline: a certificate authority alone. It signs what `request` makes."""
    from fedmll.deploy import certificates

    certificates.new_ca(folder, _new_passphrase(passphrase, passphrase_file))
    show(f"[bold]send to the server and every client:[/] {folder / 'ca.crt'}")
    show(f"[bold]keep here, show nobody:[/] {folder / 'ca.key'}")
    show(f"sign a server's request: fedmll keys sign server.csr --dir {folder}")


@keys_app.command("request")
def request(
    host: Hosts = None, folder: Folder = KEYS, passphrase: Passphrase = False, passphrase_file: PassphraseFile = None
) -> None:
    """At a server whose CA is elsewhere: the server's key, and a request for its certificate."""
    from fedmll.deploy import certificates

    certificates.request(folder, host or [], _new_passphrase(passphrase, passphrase_file))
    show(f"[bold]take to the CA:[/] {folder / 'server.csr'}; it gives back server.crt, which goes into {folder}")
    show(f"[bold]keep here, show nobody:[/] {folder / 'server.key'}")


@keys_app.command("sign")
def sign(
    file: Annotated[Path, typer.Argument(metavar="SERVER.csr", help="What `fedmll keys request` made.")],
    folder: Folder = Path("ca"),
    passphrase_file: PassphraseFile = None,
) -> None:
    """Where the CA's key lies: sign a server's request. Look at the names before you hand the certificate over."""
    from fedmll.deploy import certificates

    out = certificates.sign(folder, file, _ca_passphrase(folder, False, passphrase_file))
    show(f"{out} holds for: {', '.join(certificates.hosts_of(out))}; take it and {folder / 'ca.crt'} to the server")


@keys_app.command("new")
def new(
    name: Name, folder: Folder = KEYS, passphrase: Passphrase = False, passphrase_file: PassphraseFile = None
) -> None:
    """At a client: its key pair. The public half goes to the server's operator, the private half nowhere."""
    from fedmll.deploy import keys

    private, public = keys.new_node(folder, name, _new_passphrase(passphrase, passphrase_file))
    show(f"[bold]send to the server's operator:[/] {public}")
    show(f"[bold]keep here, show nobody:[/] {private}")
    show(f"put the ca.crt that the operator sends you into {folder}")


@keys_app.command("rotate")
def rotate(
    name: Name, folder: Folder = KEYS, passphrase: Passphrase = False, passphrase_file: PassphraseFile = None
) -> None:
    """At a client: a new key pair; the old one stays as NAME.key.old until the server has the new public half."""
    from fedmll.deploy import keys

    private, public = keys.rotate(folder, name, _new_passphrase(passphrase, passphrase_file))
    show(f"[bold]send to the server's operator:[/] {public}; it counts from the server's next start or resume on")
    show(f"[bold]keep here, show nobody:[/] {private}; until then join with --key {private}.old")


@keys_app.command("revoke")
def revoke(name: Name, folder: Folder = KEYS) -> None:
    """At the server: never take a client's present key again. A server that is running notices within seconds."""
    from fedmll.deploy import keys

    mark = keys.revoke(folder, name)
    show(f"revoked: the key of {name} ({mark}), in {folder / keys.REVOKED}")
    show(f"its new {name}.pub goes into {folder}; or go on without it: fedmll resume FOLDER --drop {name}")


@keys_app.command("list")
def list_keys(folder: Folder = KEYS) -> None:
    """What lies here: since when, until when, and the fingerprints to compare by telephone."""
    from fedmll.deploy import keys

    rows = keys.listed(folder)
    console.print(plain_table(str(folder), ("file", "made", "ends", "fingerprint"), rows, words=True))
