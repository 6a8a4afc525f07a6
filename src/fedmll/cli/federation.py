"""The command of a federation's operator: server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedmll.cli.options import Asked, Settings, Track, asks, fresh_folder, names_in, stoppable
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
Status = Annotated[
    str | None, typer.Option("--status", metavar="HOST:PORT", help="Of a server: a page that says how the run stands.")
]
Yes = Annotated[
    bool, typer.Option("--yes", help="Of a server: start also where a class or a site has no labels, without asking.")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: for a rehearsal only.")]
CHANGEABLE = (
    "--drop, --min-clients, --start-with, --round-timeout, --listen and --status change a server; nothing else does."
)
INSECURE = (
    "[bold red]--insecure: nothing is encrypted and nobody is checked.[/] Everybody on the network can read the "
    "models, pretend to be the server or a client, and poison the result. For a rehearsal on one machine only."
)


def register(app: typer.Typer) -> None:
    app.command()(server)
    app.command()(exclude)


@asks("method", "rounds", "seed", "skip_unreadable")
def server(
    asked: Asked,
    settings: Settings = None,
    clients: Annotated[str, typer.Option("--clients", help="The clients' names, comma-separated.")] = "",
    validators: Annotated[
        str, typer.Option("--validators", help="Names of who only tests (`fedmll validate`), comma-separated.")
    ] = "",
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
    thresholds: Annotated[
        str,
        typer.Option(help="What the model's thresholds are for: f1, recall=0.9, precision=0.8, find=0.9 (as in tune)."),
    ] = "f1",
    calibrate: Annotated[
        str, typer.Option(help="Also the probabilities, from the sites' counts: platt, temperature, none.")
    ] = "none",
    yes: Yes = False,
    listen: Annotated[
        str | None, typer.Option("--listen", help="HOST:PORT. Default: 0.0.0.0:8000; --insecure: 127.0.0.1:8000.")
    ] = None,
    keys: Annotated[
        Path, typer.Option("--keys", help="The folder with the server's certificate and the clients' .pub files.")
    ] = Path("keys"),
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    simulate: Annotated[
        int | None, typer.Option("--simulate", metavar="K", help="Rehearse with K clients on this machine.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder. Default: a new one in runs/.")] = None,
    status: Status = None,
    track: Track = None,
) -> None:
    """Run a federation between machines: wait for the clients, train, evaluate. The folder can be resumed.

    Examples:  [bold]fedmll server study.toml --clients hospital-a,hospital-b[/]  ·  [bold]fedmll server --simulate 3[/]
    """
    from fedmll.cli import display
    from fedmll.deploy import label_counts, rehearsal, serving
    from fedmll.running.tracking import check, tracked

    check(names_in(track))
    experiment = asked.experiment()
    out = out or fresh_folder(f"server-{experiment.method.name}-s{experiment.seed}")
    host, port = address_in(listen or ("127.0.0.1:8000" if insecure or simulate else "0.0.0.0:8000"))
    warn_of_status(status)
    if insecure:
        display.errors.print(INSECURE)
    names, sites = names_in(clients), Path(f"{out}-sites")
    if simulate is not None:
        from fedmll.deploy.flower.processes import free_port

        if names or simulate < 1:
            raise ConfigError("--simulate K makes K clients of its own, 1 or more; leave --clients out.")
        names, keys = rehearsal.called(simulate), sites / "keys"
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
        validators=names_in(validators),
        start_with=start_with,
        status=status,
        thresholds=thresholds,
        calibrate=calibrate,
    )
    played = None
    if simulate is not None:  # after the options were found good
        with display.RunProgress(0) as progress:
            played = rehearsal.prepare(experiment, simulate, sites, progress.preparing)
        experiment = played.experiment
    confirm = label_counts.beforehand if yes or played is not None else label_counts.at_terminal
    with display.FederationProgress(experiment.training.rounds) as progress, stoppable(f"fedmll resume {out}"):
        watch = tracked(names_in(track), out, progress)
        if played is None:
            result = serving.serve(experiment, setting, out, watch, passphrase_file, confirm)
        else:
            with rehearsal.joined(played, f"127.0.0.1:{port}", insecure):
                result = serving.serve(experiment, setting, out, watch, confirm=confirm)
    display.show_result(result)
    show_by_site(out)


def exclude(
    folder: Annotated[Path, typer.Argument(help="The run's folder, of a server that is running.")],
    name: Annotated[str, typer.Argument(help="A client of it.")],
    readmit: Annotated[bool, typer.Option("--readmit", help="Take it back.")] = False,
) -> None:
    """Take a client out of a run that goes on, from the next round on, and perhaps back. It is told that it is out.

    Example:  [bold]fedmll exclude study hospital-c[/]  ·  a key that was copied: [bold]fedmll keys revoke hospital-c[/]
    """
    from fedmll.cli import display
    from fedmll.deploy import barring

    (barring.readmit if readmit else barring.exclude)(folder, name)
    display.say(f"{name} is {'readmitted to' if readmit else 'excluded from'} {folder}, from the next round on")


def go_on(
    folder: Path,
    rounds: int,
    changes: dict[str, Any],
    passphrase_file: Path | None,
    track: Sequence[str] = (),
    yes: bool = False,
) -> None:
    """`fedmll resume` of a server's folder."""
    from fedmll.cli import display
    from fedmll.deploy import label_counts, serving, setting
    from fedmll.running.tracking import check, tracked

    check(track)

    warn_of_status(changes.get("status"))
    setting.change(folder, **changes)
    with display.FederationProgress(rounds) as watch, stoppable(f"fedmll resume {folder}"):
        confirm = label_counts.beforehand if yes else label_counts.at_terminal
        display.show_result(serving.go_on(folder, tracked(track, folder, watch), passphrase_file, confirm))
    show_by_site(folder)


def show_by_site(folder: Path) -> None:
    """The table of what the sites counted, if they did."""
    from rich.markup import escape

    from fedmll.cli.tables import console, plain_table, say
    from fedmll.running import federated

    found = federated.overview(folder)
    if found is not None:
        header, rows, notes = found
        console.print(
            plain_table(
                "from the sites' counts, mean over classes, %", header, [list(map(escape, row)) for row in rows]
            )
        )
        for note in notes:
            say(note)


def warn_of_status(address: str | None) -> None:
    """It has no password."""
    from fedmll.cli import display
    from fedmll.deploy.status import address_in, is_loopback

    if address is not None and not is_loopback(address_in(address)[0]):
        display.errors.print(
            f"[bold yellow]--status {address}: who reaches this address sees the clients' names and errors.[/] "
            "There is no password and no encryption; 127.0.0.1 is for this machine alone."
        )


def address_in(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--listen takes HOST:PORT, for example 0.0.0.0:8000; it got '{text}'.")
    return host, int(port)
