"""The command line: parse, call the library, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedmll.cli import (
    audit,
    compare,
    data,
    datasets,
    federation,
    keys,
    methods,
    predict,
    presets,
    report,
    show,
    site,
    validate,
    weights,
)
from fedmll.cli.options import (
    Asked,
    Device,
    Plugins,
    Track,
    Workers,
    asks,
    fresh_folder,
    given,
    names_in,
    stoppable,
    with_optional_value,
)
from fedmll.errors import ConfigError, FedmllError, printable

app = typer.Typer(
    help="Federated multi-label learning: simulate federations, compare methods.\n\n"
    "Completion of names in your shell: [bold]fedmll --install-completion[/]",
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
        bool, typer.Option("--version", help="The version, and nothing else.", callback=show_version, is_eager=True)
    ] = False,
) -> None: ...


@app.command()
@asks(
    *("method", "data", "root", "backbone", "clients", "rounds", "seed", "workers", "device", "skip_unreadable"),
    published=True,
)
def run(
    asked: Asked,
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder. Default: a new one in runs/.")] = None,
    track: Track = None,
) -> None:
    """Run one experiment: a federation on this machine, a table at the end, a folder that can be resumed.

    Examples:  [bold]fedmll run[/]  ·  [bold]fedmll run --method fedprox --data ml-cifar10 --root DATA --rounds 50[/]
    """
    experiment = asked.experiment()
    from fedmll.cli import display
    from fedmll.running import loop
    from fedmll.running.tracking import tracked

    out = out or fresh_folder(f"{Path(experiment.data.name).stem}-{experiment.method.name}-s{experiment.seed}")
    with display.RunProgress(experiment.training.rounds) as progress, stoppable(f"fedmll resume {out}"):
        result = loop.run(experiment, out, observer=tracked(names_in(track), out, progress))
    display.show_result(result)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="A run's folder.")],
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="Go on to this round instead; a finished run goes on too.")
    ] = None,
    data: Annotated[str | None, typer.Option("--data", help="The data's name, if its file has moved.")] = None,
    root: Annotated[Path | None, typer.Option("--root", help="Where the data lies now, if it has moved.")] = None,
    workers: Workers = None,
    device: Device = None,
    plugins: Plugins = None,
    track: Track = None,
    drop: federation.Drop = None,
    min_clients: federation.MinClients = None,
    start_with: federation.StartWith = None,
    round_timeout: federation.RoundTimeout = None,
    listen: federation.Listen = None,
    status: federation.Status = None,
    passphrase_file: federation.PassphraseFile = None,
    yes: federation.Yes = False,
) -> None:
    """Go on with a run that was stopped or killed, from its last checkpoint, to the very same result.

    Examples:  [bold]fedmll resume runs/first[/]  ·  [bold]fedmll resume runs/first --rounds 40[/]
    """
    from fedmll.cli import display
    from fedmll.running import loop
    from fedmll.running.tracking import tracked

    code = {} if plugins is None else {"plugins": [str(file.absolute()) for file in plugins]}
    total = rounds or loop.experiment_in(folder, code).training.rounds
    changes = given(drop=drop, min_clients=min_clients, start_with=start_with, round_timeout=round_timeout)
    changes |= given(address=None if listen is None else federation.address_in(listen), status=status)
    if (folder / "server.json").is_file():  # a real federation's server
        if rounds or data or root or workers is not None or device or plugins:
            raise ConfigError(f"A federation between machines goes on as it began. {federation.CHANGEABLE}")
        federation.go_on(folder, total, changes, passphrase_file, names_in(track), yes)
        return
    if changes or yes:
        raise ConfigError(f"{folder} is not a federation between machines. {federation.CHANGEABLE}")
    with display.RunProgress(total) as progress, stoppable(f"fedmll resume {folder}"):
        result = loop.resume(
            folder,
            observer=tracked(names_in(track), folder, progress),
            engine=given(workers=workers, device=device),
            rounds=rounds,
            data=given(name=data, root=root),
            plugins=plugins,
        )
    display.show_result(result)


compare.register(app)
show.register(app)


predict.register(app)
report.register(app)
methods.register(app)
presets.register(app)
datasets.register(data.data_app)
app.add_typer(data.data_app, name="data")
app.add_typer(weights.weights_app, name="weights")
federation.register(app)
site.register(app)
validate.register(app)
app.add_typer(keys.keys_app, name="keys")
app.add_typer(audit.audit_app, name="audit")


def main() -> None:
    try:
        app(with_optional_value(sys.argv[1:]))
    except FedmllError as error:
        from fedmll.cli.tables import errors

        lines = "\n".join(printable(line, 4000) for line in str(error).splitlines())
        errors.print(f"[red]error:[/] {escape(lines)}", soft_wrap=True, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
