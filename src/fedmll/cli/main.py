"""The command `fedmll`: its commands `run` and `resume`, and the registration of all others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.markup import escape

from fedmll.cli import compare, data, methods, predict, reproduce, runs, security, server, site
from fedmll.cli.options import (
    Address,
    Device,
    EngineKind,
    ExperimentArguments,
    Plugins,
    Track,
    Workers,
    drop_none,
    experiment_options,
    fill_optional_values,
    interruptible,
    new_run_folder,
    split_names,
)
from fedmll.core import files
from fedmll.core.addresses import parse_address
from fedmll.core.errors import ConfigError, FedmllError
from fedmll.core.processes import is_out_of_memory
from fedmll.core.text import printable

LESS_MEMORY = (
    "Lower training.batch_size, data.size, model.channels or model.width, use fewer worker processes (--workers), or a "
    "machine with more memory."
)

app = typer.Typer(
    help="Federated multi-label learning: simulate federations, compare methods, run real federations.\n\n"
    "Enable shell completion with [bold]fedmll --install-completion[/].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(wanted: bool) -> None:
    if wanted:
        from fedmll import __version__

        print(f"fedmll {__version__}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True)
    ] = False,
) -> None: ...


@app.command()
@experiment_options(
    *("method", "data", "root", "backbone", "clients", "rounds", "seed"),
    *("engine", "address", "workers", "device", "skip_unreadable"),
    published=True,
)
def run(
    arguments: ExperimentArguments,
    out: Annotated[Path | None, typer.Option(help="The folder of the run. Default: a new folder in runs/.")] = None,
    track: Track = None,
) -> None:
    """Run one experiment: simulate a federation on this machine, print a table of results and write a run folder.

    Examples:  [bold]fedmll run[/]  ·  [bold]fedmll run --method fedprox --data ml-cifar10 --root DATA --rounds 50[/]
    """
    experiment = arguments.experiment()
    from fedmll.cli import display
    from fedmll.training import round_loop
    from fedmll.training.trackers import add_trackers

    out = out or new_run_folder(f"{Path(experiment.data.name).stem}-{experiment.method.name}-s{experiment.seed}")
    with display.RunProgress(experiment.training.rounds) as progress, interruptible(f"fedmll resume {out}"):
        result = round_loop.run(experiment, out, callback=add_trackers(split_names(track), out, progress))
    display.show_result(result)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    rounds: Annotated[int | None, typer.Option(help="Continue up to this round, even if the run has finished.")] = None,
    from_round: Annotated[
        int | None, typer.Option(min=1, help="Repeat the run from this round on; the last two checkpoints are kept.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="The name of the data, if its file has moved.")] = None,
    root: Annotated[Path | None, typer.Option(help="The folder of the data, if it has moved.")] = None,
    engine: EngineKind = None,
    address: Address = None,
    workers: Workers = None,
    device: Device = None,
    plugins: Plugins = None,
    track: Track = None,
    drop: server.Drop = None,
    min_clients: server.MinClients = None,
    start_with: server.StartWith = None,
    round_timeout: server.RoundTimeout = None,
    listen: server.Listen = None,
    status: server.Status = None,
    passphrase_file: server.PassphraseFile = None,
    yes: server.Yes = False,
) -> None:
    """Continue a run that was stopped or killed, from its last checkpoint, with the same result as without the stop.

    Examples:  [bold]fedmll resume runs/first[/]  ·  [bold]fedmll resume runs/first --rounds 40[/]
    """
    from fedmll.cli import display
    from fedmll.runs.run_folder import RunFolder
    from fedmll.training import round_loop
    from fedmll.training.trackers import add_trackers

    code = {} if plugins is None else {"plugins": [str(file.absolute()) for file in plugins]}
    total = rounds or RunFolder(folder).load_experiment(code).training.rounds
    changes = drop_none(drop=drop, min_clients=min_clients, start_with=start_with, round_timeout=round_timeout)
    listening = None if listen is None else parse_address(listen, "--listen", example="0.0.0.0:8000")
    changes |= drop_none(address=listening, status=status)
    where = drop_none(kind=engine, address=address, workers=workers, device=device)
    if (folder / "server.json").is_file():  # the server of a real federation
        if rounds or data or root or where or plugins:
            raise ConfigError(f"A real federation continues with its original settings. {server.CHANGEABLE}")
        server.resume_server(folder, total, changes, passphrase_file, split_names(track), yes, from_round)
        return
    if changes or yes:
        raise ConfigError(f"{folder} is not a real federation. {server.CHANGEABLE}")
    if from_round is not None:
        round_loop.return_to_round(folder, from_round)
    with display.RunProgress(total) as progress, interruptible(f"fedmll resume {folder}"):
        result = round_loop.resume(
            folder,
            callback=add_trackers(split_names(track), folder, progress),
            engine=where,
            rounds=rounds,
            data=drop_none(name=data, root=root),
            plugins=plugins,
        )
    display.show_result(result)


for module in (compare, reproduce, runs, predict, methods):
    module.register(app)
app.add_typer(data.data_app, name="data")
app.add_typer(data.weights_app, name="weights")
server.register(app)
site.register(app)
app.add_typer(security.keys_app, name="keys")
app.add_typer(security.audit_app, name="audit")


def main() -> None:
    try:
        app(fill_optional_values(sys.argv[1:]))
    except FedmllError as error:
        fail(str(error), 2)
    except (OSError, MemoryError, RuntimeError) as error:
        text = files.describe_file_error(error) if isinstance(error, OSError) else None
        if is_out_of_memory(error):
            text = f"Memory ran out ({str(error).splitlines()[0] if str(error) else 'no memory'}). {LESS_MEMORY}"
        if text is None:
            raise
        fail(text, 1)


def fail(text: str, status: int) -> NoReturn:
    from fedmll.cli.output import errors

    lines = "\n".join(printable(line, 4000) for line in text.splitlines())
    errors.print(f"[red]error:[/] {escape(lines)}", soft_wrap=True, highlight=False)
    sys.exit(status)


if __name__ == "__main__":
    main()
