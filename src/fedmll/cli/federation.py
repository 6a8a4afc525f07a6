"""The commands of a real federation: server, join."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedmll.cli.options import (
    Asked,
    Classes,
    Group,
    Ignore,
    Plugins,
    SkipUnreadable,
    Track,
    Window,
    asks,
    fresh_folder,
    load_files,
    names_in,
    stoppable,
    window_in,
)
from fedmll.errors import ConfigError

PassphraseFile = Annotated[
    Path | None,
    typer.Option("--passphrase-file", help="Its first line is the private key's passphrase. Or FEDMLL_PASSPHRASE."),
]
Drop = Annotated[
    list[str] | None, typer.Option("--drop", metavar="NAME", help="Of a server: go on without this client; repeatable.")
]
MinClients = Annotated[int | None, typer.Option("--min-clients", help="Of a server: good replies that a round needs.")]
StartWith = Annotated[
    int | None,
    typer.Option("--start-with", metavar="N", help="Start when N clients have come; the others may come later."),
]
RoundTimeout = Annotated[float | None, typer.Option("--round-timeout", help="Of a server: seconds a round may take.")]
Listen = Annotated[str | None, typer.Option("--listen", help="Of a server: another HOST:PORT.")]
CHANGEABLE = "--drop, --min-clients, --start-with, --round-timeout and --listen change a server, and nothing else does."
INSECURE = (
    "[bold red]--insecure: nothing is encrypted and nobody is checked.[/] Everybody on the network can read the "
    "models, pretend to be the server or a client, and poison the result. For a rehearsal on one machine only."
)


def register(app: typer.Typer) -> None:
    app.command()(server)
    app.command()(join)


@asks("method", "rounds", "seed", "skip_unreadable")
def server(
    asked: Asked,
    clients: Annotated[str, typer.Option("--clients", help="The clients' names, comma-separated.")] = "",
    min_clients: Annotated[
        int | None, typer.Option("--min-clients", help="Good replies that a round needs. Default: 2.")
    ] = None,
    start_with: StartWith = None,
    round_timeout: Annotated[float, typer.Option("--round-timeout", help="Seconds a round may take.")] = 600,
    join_timeout: Annotated[
        float, typer.Option("--join-timeout", help="Seconds until every client, or --start-with, must have come.")
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
    passphrase_file: PassphraseFile = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: for a rehearsal only.")] = False,
    simulate: Annotated[
        int | None, typer.Option("--simulate", metavar="K", help="Rehearse with K clients on this machine.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder. Default: a new one in runs/.")] = None,
    track: Track = None,
) -> None:
    """Run a federation between machines: wait for the clients, train, evaluate. The folder can be resumed.

    Examples:  [bold]fedmll server study.toml --clients hospital-a,hospital-b[/]  ·  [bold]fedmll server --simulate 3[/]
    """
    from fedmll.cli import display
    from fedmll.deploy import rehearsal, serving
    from fedmll.running.tracking import check, tracked

    check(names_in(track))
    experiment = asked.experiment()
    out = out or fresh_folder(f"server-{experiment.method.name}-s{experiment.seed}")
    host, port = address_in(listen or ("127.0.0.1:8000" if insecure or simulate else "0.0.0.0:8000"))
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
        start_with=start_with,
    )
    with display.FederationProgress(experiment.training.rounds) as progress, stoppable(f"fedmll resume {out}"):
        watch = tracked(names_in(track), out, progress)
        if played is None:
            result = serving.serve(experiment, setting, out, watch, passphrase_file)
        else:
            with rehearsal.joined(played, f"127.0.0.1:{port}", insecure):
                result = serving.serve(experiment, setting, out, watch)
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
    passphrase_file: PassphraseFile = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: for a rehearsal only.")] = False,
    memory: Annotated[
        Path | None, typer.Option("--memory", help="Where your client remembers. Default: fedmll-NAME.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or auto.")] = "auto",
    patience: Annotated[float, typer.Option("--patience", help="Seconds to wait for a server that is away.")] = 3600,
    yes: Annotated[bool, typer.Option("--yes", help="Approve the experiment without being asked.")] = False,
    weights: Annotated[
        list[Path] | None,
        typer.Option("--weights", metavar="FILE", help="Your copy of a file the experiment starts from; repeatable."),
    ] = None,
    keep_cache: Annotated[
        bool, typer.Option("--keep-cache", help="Keep the prepared images in the memory folder.")
    ] = False,
    max_rounds: Annotated[int, typer.Option("--max-rounds", help="Take part in no run with more rounds.")] = 1000,
    min_images: Annotated[int, typer.Option("--min-images", help="Train on so many images or not at all.")] = 10,
    max_memory: Annotated[float, typer.Option("--max-memory", help="Most GB for the model and a batch.")] = 4.0,
    methods: Annotated[str | None, typer.Option("--methods", help="The only methods you allow, comma-separated.")] = (
        None
    ),
    plugins: Plugins = None,
) -> None:
    """Take part in a federation with your own images: check them, then serve until the run is over.

    Example:  [bold]fedmll join federation.example.org:8000 --name hospital-a --csv labels.csv --images scans[/]
    """
    from fedmll.cli import display
    from fedmll.deploy import joining, keys
    from fedmll.deploy.approval import Limits
    from fedmll.deploy.private import passphrase_of
    from fedmll.deploy.site import Site, check
    from fedmll.methods import find

    load_files(plugins)
    if data != "folder":
        raise ConfigError(f"--data takes 'folder' (a CSV and a folder of images); it got '{data}'.")
    folder = memory or Path(f"fedmll-{keys.check_name(name)}")
    for method in names_in(methods):
        find(method)  # a slip of the pen is an error here, not a refusal later
    private = None if insecure else key or Path(f"keys/{name}.key")
    passphrase = passphrase_of(private, passphrase_file) if private is not None and private.is_file() else None
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
        tuple(file.resolve() for file in weights or ()),
        Limits(max_rounds, min_images, max_memory, names_in(methods)),
        not yes,
        keep_cache,
    )
    with display.RunProgress(0) as progress:
        summary = check(site, progress.preparing)
    display.console.print(display.site_table(name, summary))
    for note in summary.notes:
        display.say(note)
    if insecure:
        display.errors.print(INSECURE)
    access = joining.Access(server, None if insecure else ca, private, patience, passphrase)
    with stoppable("the same command: nothing is lost"):
        joining.join(site, access, display.say)


def go_on(
    folder: Path, rounds: int, changes: dict[str, Any], passphrase_file: Path | None, track: Sequence[str] = ()
) -> None:
    """`fedmll resume` of a server's folder."""
    from fedmll.cli import display
    from fedmll.deploy import serving, setting
    from fedmll.running.tracking import check, tracked

    check(track)

    setting.change(folder, **changes)
    with display.FederationProgress(rounds) as watch, stoppable(f"fedmll resume {folder}"):
        display.show_result(serving.go_on(folder, tracked(track, folder, watch), passphrase_file))


def address_in(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--listen takes HOST:PORT, for example 0.0.0.0:8000; it got '{text}'.")
    return host, int(port)
