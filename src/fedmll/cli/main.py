"""The command line: parse, call the library, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedmll.cli import compare, data, federation
from fedmll.cli.options import (
    Backbone,
    Clients,
    DataName,
    Device,
    File,
    MethodName,
    Published,
    Root,
    Rounds,
    Seed,
    Set,
    SkipUnreadable,
    Track,
    Workers,
    experiment_from,
    fresh_folder,
    given,
    stoppable,
    with_optional_value,
)
from fedmll.errors import ConfigError, FedmllError

if TYPE_CHECKING:
    from fedmll.cli.display import RunProgress
    from fedmll.runs.loop import Observer

app = typer.Typer(
    help="Federated multi-label learning: simulate federations, compare methods.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def watched(progress: RunProgress, out: Path, track: bool) -> Observer:
    if not track:
        return progress
    from fedmll.runs.tracking import TensorBoard, Together

    return Together(progress, TensorBoard(out))


@app.command()
def run(
    file: File = None,
    method: MethodName = None,
    data: DataName = None,
    root: Root = None,
    backbone: Backbone = None,
    clients: Clients = None,
    rounds: Rounds = None,
    seed: Seed = None,
    workers: Workers = None,
    device: Device = None,
    skip_unreadable: SkipUnreadable = False,
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder. Default: a new one in runs/.")] = None,
    settings: Set = None,
    as_published: Published = None,
    track: Track = False,
) -> None:
    """Run one experiment: a federation on this machine, a table at the end, a folder that can be resumed.

    Examples:  [bold]fedmll run[/]  ·  [bold]fedmll run --method fedprox --data ml-cifar10 --root DATA --rounds 50[/]
    """
    experiment = experiment_from(
        file,
        {
            "method.name": method,
            "data.name": data,
            "data.root": root,
            "data.skip_unreadable": skip_unreadable or None,
            "model.backbone": backbone,
            "partition.clients": clients,
            "training.rounds": rounds,
            "seed": seed,
            "engine.workers": workers,
            "engine.device": device,
        },
        settings,
        as_published,
    )
    from fedmll.cli import display
    from fedmll.runs import loop

    out = out or fresh_folder(f"{Path(experiment.data.name).stem}-{experiment.method.name}-s{experiment.seed}")
    with display.RunProgress(experiment.training.rounds) as progress, stoppable(f"fedmll resume {out}"):
        result = loop.run(experiment, out, observer=watched(progress, out, track))
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
    track: Track = False,
) -> None:
    """Go on with a run that was stopped or killed, from its last checkpoint, to the very same result.

    Examples:  [bold]fedmll resume runs/first[/]  ·  [bold]fedmll resume runs/first --rounds 40[/]
    """
    from fedmll.cli import display
    from fedmll.runs import loop

    total = rounds or loop.experiment_in(folder).training.rounds
    if (folder / "server.json").is_file():  # a real federation's server
        from fedmll.deploy import serving

        if rounds or data or root or workers is not None or device:
            raise ConfigError("A federation between machines is resumed as it was started: without options.")
        with display.FederationProgress(total) as watch, stoppable(f"fedmll resume {folder}"):
            display.show_result(serving.go_on(folder, watch))
        return
    with display.RunProgress(total) as progress, stoppable(f"fedmll resume {folder}"):
        result = loop.resume(
            folder,
            observer=watched(progress, folder, track),
            engine=given(workers=workers, device=device),
            rounds=rounds,
            data=given(name=data, root=root),
        )
    display.show_result(result)


compare.register(app)


@app.command("methods")
def list_methods(name: Annotated[str | None, typer.Argument(help="One method, in full.")] = None) -> None:
    """The methods; with a name: its paper, its options and the paper's training settings."""
    from fedmll import methods, registry
    from fedmll.cli import display

    if name is None:
        rows = [(known, cls.summary) for known, cls in registry.all_of("method").items()]
        table = display.plain_table("methods", ("name", "what it does"), rows)
        table.columns[1].justify = "left"
        display.console.print(table)
        return
    cls = methods.find(name)
    display.console.print(escape((sys.modules[cls.__module__].__doc__ or cls.summary).strip()), highlight=False)
    symbols = {option: f" ({symbol})" for symbol, option in cls.symbols.items()}
    options = {key + symbols.get(key, ""): field.default for key, field in cls.Options.model_fields.items()}
    display.console.print(display.options_table(escape(f"[method] name = '{name}'"), options))
    if cls.published:
        display.console.print(display.options_table("as published (--as-published)", cls.published | cls.unpublished))


app.add_typer(data.data_app, name="data")
federation.register(app)


def main() -> None:
    try:
        app(with_optional_value(sys.argv[1:]))
    except FedmllError as error:
        from fedmll.cli.display import errors

        errors.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
