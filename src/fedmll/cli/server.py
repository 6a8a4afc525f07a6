"""The commands of a federation's operator: server and exclude."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedmll.cli.options import (
    ExperimentArguments,
    Settings,
    Track,
    experiment_options,
    interruptible,
    new_run_folder,
    split_names,
)
from fedmll.cli.output import errors, print_table, say
from fedmll.core.addresses import is_loopback, parse_address
from fedmll.core.errors import ConfigError

PassphraseFile = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file", help="A file whose first line is the private key's passphrase. Or set FEDMLL_PASSPHRASE."
    ),
]
Drop = Annotated[
    list[str] | None,
    typer.Option("--drop", metavar="NAME", help="For a real federation: continue without this client; repeatable."),
]
MinClients = Annotated[
    int | None,
    typer.Option("--min-clients", help="For a real federation: the number of valid replies that a round needs."),
]
StartWith = Annotated[
    int | None,
    typer.Option("--start-with", metavar="N", help="Start when N clients have joined; the others may join later."),
]
RoundTimeout = Annotated[
    float | None, typer.Option("--round-timeout", help="For a real federation: seconds that a round may take.")
]
Listen = Annotated[str | None, typer.Option("--listen", help="For a real federation: another HOST:PORT.")]
Status = Annotated[
    str | None,
    typer.Option("--status", metavar="HOST:PORT", help="For a real federation: serve a page with its status."),
]
Yes = Annotated[
    bool,
    typer.Option("--yes", help="For a real federation: start without asking, even if a class or a site has no labels."),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS and no keys: for a rehearsal only.")]
CHANGEABLE = (
    "In a real federation, only --drop, --min-clients, --start-with, --round-timeout, --listen and --status can be "
    "changed."
)
INSECURE = (
    "[bold red]--insecure: nothing is encrypted, and nobody is authenticated.[/] Everybody on the network can read the "
    "models, pretend to be the server or a client, and poison the result. Use it for a rehearsal on one machine only."
)


def register(app: typer.Typer) -> None:
    app.command()(server)
    app.command()(exclude)


@experiment_options("method", "rounds", "seed", "skip_unreadable")
def server(
    arguments: ExperimentArguments,
    settings: Settings = None,
    clients: Annotated[str, typer.Option(help="The clients' names, comma-separated.")] = "",
    validators: Annotated[
        str, typer.Option(help="Names of sites that only test (`fedmll validate`), comma-separated.")
    ] = "",
    min_clients: Annotated[
        int | None, typer.Option(help="The number of valid replies that a round needs. Default: 2.")
    ] = None,
    start_with: StartWith = None,
    round_timeout: Annotated[float, typer.Option(help="Seconds that a round may take.")] = 600,
    join_timeout: Annotated[
        float, typer.Option(help="Seconds in which all clients, or --start-with of them, must join.")
    ] = 1800,
    max_share: Annotated[float, typer.Option(help="The largest share of one client in an average by size.")] = 1.0,
    thresholds: Annotated[
        str,
        typer.Option(help="Goal of the thresholds: f1, recall=0.9, precision=0.8, conformal_recall=0.9 (as in tune)."),
    ] = "f1",
    calibrate: Annotated[
        str, typer.Option(help="Calibrate the probabilities with the sites' histograms: platt, temperature, none.")
    ] = "none",
    yes: Yes = False,
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT. Default: 0.0.0.0:8000; --insecure: 127.0.0.1:8000.")
    ] = None,
    keys: Annotated[
        Path, typer.Option(help="The folder with the server's certificate and the clients' .pub files.")
    ] = Path("keys"),
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    simulate: Annotated[int | None, typer.Option(metavar="K", help="Rehearse with K clients on this machine.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder. Default: a new one in runs/.")] = None,
    status: Status = None,
    track: Track = None,
) -> None:
    """Run a federation between machines: wait for the clients, train, evaluate. The folder can be resumed.

    Examples:  [bold]fedmll server study.toml --clients hospital-a,hospital-b[/]  ·  [bold]fedmll server --simulate 3[/]
    """
    from fedmll.cli import display
    from fedmll.core.text import confirm_always, confirm_at_terminal
    from fedmll.deploy.server import rehearsal
    from fedmll.deploy.server.serve import serve
    from fedmll.deploy.server.server_settings import ServerSettings
    from fedmll.training.trackers import add_trackers, check_trackers

    check_trackers(split_names(track))
    experiment = arguments.experiment()
    out = out or new_run_folder(f"server-{experiment.method.name}-s{experiment.seed}")
    host, port = parse_address(listen or ("127.0.0.1:8000" if insecure or simulate else "0.0.0.0:8000"), "--listen")
    warn_about_status_page(status)
    if insecure:
        errors.print(INSECURE)
    names, sites = split_names(clients), Path(f"{out}-sites")
    if simulate is not None:
        from fedmll.deploy.flower.child_processes import find_free_port

        if names or simulate < 1:
            raise ConfigError("--simulate K creates K clients of its own, 1 or more; leave --clients out.")
        names, keys = rehearsal.client_names(simulate), sites / "keys"
        port = port if listen else find_free_port()
    server_settings = ServerSettings(
        clients=names,
        host=host,
        port=port,
        keys=None if insecure else str(keys),
        min_clients=min(2, len(names)) if min_clients is None else min_clients,
        round_timeout=round_timeout,
        join_timeout=join_timeout,
        max_share=max_share,
        validators=split_names(validators),
        start_with=start_with,
        status=status,
        thresholds=thresholds,
        calibrate=calibrate,
    )
    rehearsed = None
    if simulate is not None:  # after the options were validated
        with display.RunProgress(0) as progress:
            rehearsed = rehearsal.prepare_rehearsal(experiment, simulate, sites, progress.on_setup_progress)
        experiment = rehearsed.experiment
    confirm = confirm_always if yes or rehearsed is not None else confirm_at_terminal
    with display.FederationProgress(experiment.training.rounds) as progress, interruptible(f"fedmll resume {out}"):
        callback = add_trackers(split_names(track), out, progress)
        if rehearsed is None:
            result = serve(
                experiment, server_settings, out, callback=callback, passphrase_file=passphrase_file, confirm=confirm
            )
        else:
            with rehearsal.running_clients(rehearsed, f"127.0.0.1:{port}", insecure):
                result = serve(experiment, server_settings, out, callback=callback, confirm=confirm)
    display.show_result(result)
    show_site_metrics(out)


def exclude(
    folder: Annotated[Path, typer.Argument(help="The run folder of a running server.")],
    name: Annotated[str, typer.Argument(help="One of its clients.")],
    readmit: Annotated[bool, typer.Option("--readmit", help="Readmit the client.")] = False,
) -> None:
    """Exclude a client from a running federation, from the next round on, or readmit it. The client receives a message.

    Example:  [bold]fedmll exclude study hospital-c[/]  ·  if its key was copied: [bold]fedmll keys revoke hospital-c[/]
    """
    from fedmll.deploy.server import exclusions

    (exclusions.readmit if readmit else exclusions.exclude)(folder, name)
    say(f"{name} is {'readmitted to' if readmit else 'excluded from'} {folder}, from the next round on")


def resume_server(
    folder: Path,
    rounds: int,
    changes: dict[str, Any],
    passphrase_file: Path | None,
    track: Sequence[str] = (),
    yes: bool = False,
    from_round: int | None = None,
) -> None:
    """`fedmll resume` of a server's folder. `changes` are the arguments of `change_server_settings`."""
    from fedmll.cli import display
    from fedmll.core.text import confirm_always, confirm_at_terminal
    from fedmll.deploy.server import serve
    from fedmll.training.trackers import add_trackers, check_trackers

    check_trackers(track)
    warn_about_status_page(changes.get("status"))
    with display.FederationProgress(rounds) as progress, interruptible(f"fedmll resume {folder}"):
        result = serve.resume_server(
            folder,
            callback=add_trackers(track, folder, progress),
            passphrase_file=passphrase_file,
            confirm=confirm_always if yes else confirm_at_terminal,
            changes=changes,
            from_round=from_round,
        )
    display.show_result(result)
    show_site_metrics(folder)


def show_site_metrics(folder: Path) -> None:
    """Print the table of metrics from the sites' histograms, if the run has one."""
    from fedmll.training import federated_evaluation

    table = federated_evaluation.site_metrics_table(folder)
    if table is not None:
        header, rows, notes = table
        title = "from the sites' histograms, mean over classes, %"
        print_table(title, header, rows)
        for note in notes:
            say(note)


def warn_about_status_page(address: str | None) -> None:
    """The page has no password, so warn if other machines can reach it."""

    if address is not None and not is_loopback(parse_address(address, "--status", any_port=True)[0]):
        errors.print(
            f"[bold yellow]--status {address}: whoever reaches this address sees the clients' names and errors.[/] "
            "There is no password and no encryption; with 127.0.0.1 only this machine can reach it."
        )
