"""The commands of a real federation: server, join, keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmll.cli.options import (
    Asked,
    Classes,
    Group,
    Ignore,
    Plugins,
    SkipUnreadable,
    Window,
    asks,
    fresh_folder,
    load_files,
    names_in,
    stoppable,
    window_in,
)
from fedmll.errors import ConfigError

keys_app = typer.Typer(help="Certificates and keys of a federation between machines.", no_args_is_help=True)

KeysFolder = Annotated[Path, typer.Option("--dir", help="Where the keys lie.")]
INSECURE = (
    "[bold red]--insecure: nothing is encrypted and nobody is checked.[/] Everybody on the network can read the "
    "models, pretend to be the server or a client, and poison the result. For a rehearsal on one machine only."
)


def register(app: typer.Typer) -> None:
    app.command()(server)
    app.command()(join)
    app.add_typer(keys_app, name="keys")


@asks("method", "rounds", "seed", "skip_unreadable")
def server(
    asked: Asked,
    clients: Annotated[str, typer.Option("--clients", help="The clients' names, comma-separated.")] = "",
    min_clients: Annotated[
        int | None, typer.Option("--min-clients", help="Good replies that a round needs. Default: 2.")
    ] = None,
    round_timeout: Annotated[float, typer.Option("--round-timeout", help="Seconds a round may take.")] = 600,
    join_timeout: Annotated[
        float, typer.Option("--join-timeout", help="Seconds until every client must have come once.")
    ] = 1800,
    max_share: Annotated[
        float, typer.Option("--max-share", help="The most that one client counts in an average by size.")
    ] = 1.0,
    listen: Annotated[
        str | None, typer.Option("--listen", help="HOST:PORT. Default: 0.0.0.0:8000; --insecure: 127.0.0.1:8000.")
    ] = None,
    keys: Annotated[
        Path, typer.Option("--keys", help="The folder with the server's certificate and the clients' .pub files.")
    ] = Path("keys"),
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: for a rehearsal only.")] = False,
    simulate: Annotated[
        int | None, typer.Option("--simulate", metavar="K", help="Rehearse with K clients on this machine.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder. Default: a new one in runs/.")] = None,
) -> None:
    """Run a federation between machines: wait for the clients, train, evaluate. The folder can be resumed.

    Examples:  [bold]fedmll server study.toml --clients hospital-a,hospital-b[/]  ·  [bold]fedmll server --simulate 3[/]
    """
    from fedmll.cli import display
    from fedmll.deploy import rehearsal, serving

    experiment = asked.experiment()
    out = out or fresh_folder(f"server-{experiment.method.name}-s{experiment.seed}")
    host, port = _address(listen or ("127.0.0.1:8000" if insecure or simulate else "0.0.0.0:8000"))
    if insecure:
        display.errors.print(INSECURE)
    names = names_in(clients)
    played = None
    if simulate is not None:
        from fedmll.deploy.flower.processes import free_port

        if names or simulate < 1:
            raise ConfigError("--simulate K makes K clients of its own, 1 or more; leave --clients out.")
        with display.RunProgress(0) as progress:
            played = rehearsal.prepare(experiment, simulate, Path(f"{out}-sites"), progress.preparing)
        names, keys, experiment = played.names, played.keys, played.experiment
        port = port if listen else free_port()
    setting = serving.Server(
        names,
        host,
        port,
        None if insecure else str(keys),
        min(2, len(names)) if min_clients is None else min_clients,
        round_timeout,
        join_timeout,
        max_share=max_share,
    )
    with display.FederationProgress(experiment.training.rounds) as progress, stoppable(f"fedmll resume {out}"):
        if played is None:
            result = serving.serve(experiment, setting, out, progress)
        else:
            with rehearsal.joined(played, f"127.0.0.1:{port}", insecure):
                result = serving.serve(experiment, setting, out, progress)
    display.show_result(result)


def join(
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The federation's server.")],
    name: Annotated[str, typer.Option("--name", help="Your name in the federation.")],
    csv: Annotated[Path, typer.Option("--csv", help="An image a row, a column a class: 1, 0 or blank (unknown).")],
    images: Annotated[Path, typer.Option("--images", help="The folder that the CSV's paths start from.")],
    data: Annotated[str, typer.Option("--data", help="The kind of data; 'folder' is the only one.")] = "folder",
    classes: Classes = None,
    ignore: Ignore = None,
    group: Group = None,
    window: Window = None,
    skip_unreadable: SkipUnreadable = False,
    ca: Annotated[Path, typer.Option("--ca", help="The CA's certificate, from the server's operator.")] = Path(
        "keys/ca.crt"
    ),
    key: Annotated[Path | None, typer.Option("--key", help="Your private key. Default: keys/NAME.key.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: for a rehearsal only.")] = False,
    memory: Annotated[
        Path | None, typer.Option("--memory", help="Where your client remembers. Default: fedmll-NAME.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or auto.")] = "auto",
    patience: Annotated[float, typer.Option("--patience", help="Seconds to wait for a server that is away.")] = 3600,
    plugins: Plugins = None,
) -> None:
    """Take part in a federation with your own images: check them, then serve until the run is over.

    Example:  [bold]fedmll join federation.example.org:8000 --name hospital-a --csv labels.csv --images scans[/]
    """
    from fedmll.cli import display
    from fedmll.deploy import joining, keys
    from fedmll.deploy.site import Site, check

    load_files(plugins)
    if data != "folder":
        raise ConfigError(f"--data takes 'folder' (a CSV and a folder of images); it got '{data}'.")
    folder = memory or Path(f"fedmll-{keys.check_name(name)}")
    site = Site(
        name,
        csv.resolve(),
        images.resolve(),
        folder.resolve(),
        names_in(classes),
        device,
        names_in(ignore),
        group,
        window_in(window),
        skip_unreadable,
    )
    with display.RunProgress(0) as progress:
        summary = check(site, progress.preparing)
    display.console.print(display.site_table(name, summary))
    for note in summary.notes:
        display.say(note)
    if insecure:
        display.errors.print(INSECURE)
    access = joining.Access(
        server, None if insecure else ca, None if insecure else key or Path(f"keys/{name}.key"), patience
    )
    with stoppable("the same command: nothing is lost"):
        joining.join(site, access, display.say)


@keys_app.command("init")
def keys_init(
    host: Annotated[
        list[str] | None, typer.Option("--host", help="A name or address the clients reach the server by; repeatable.")
    ] = None,
    folder: KeysFolder = Path("keys"),
) -> None:
    """At the server: a certificate authority and the server's certificate. Again: a new certificate, the same CA."""
    from fedmll.cli import display
    from fedmll.deploy import keys

    keys.init(folder, host or [])
    show = display.console.print
    show(f"the server's certificate holds for: {', '.join([*(host or []), *keys.ALWAYS])}", highlight=False)
    show(f"[bold]send to every client:[/] {folder / 'ca.crt'}", soft_wrap=True)
    show(f"[bold]keep here, show nobody:[/] {folder / 'ca.key'}, {folder / 'server.key'}", soft_wrap=True)
    show(f"put each client's NAME.pub into {folder}, then: fedmll server FILE.toml --clients NAME,NAME", soft_wrap=True)
    if not host:
        show("[yellow]only this machine can reach it under these names;[/] add --host NAME-OF-THIS-SERVER")


@keys_app.command("new")
def keys_new(
    name: Annotated[str, typer.Argument(help="Your name in the federation.")],
    folder: KeysFolder = Path("keys"),
) -> None:
    """At a client: its key pair. The public half goes to the server's operator, the private half nowhere."""
    from fedmll.cli import display
    from fedmll.deploy import keys

    private, public = keys.new_node(folder, name)
    display.console.print(f"[bold]send to the server's operator:[/] {public}", soft_wrap=True)
    display.console.print(f"[bold]keep here, show nobody:[/] {private}", soft_wrap=True)
    display.console.print(f"put the ca.crt that the operator sends you into {folder}", soft_wrap=True)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--listen takes HOST:PORT, for example 0.0.0.0:8000; it got '{text}'.")
    return host, int(port)
