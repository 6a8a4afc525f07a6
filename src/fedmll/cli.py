"""The command line: parse, call the library, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedmll import cli_data, cli_federation
from fedmll.cli_options import (
    OWN,
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
    parse_value,
    stoppable,
    with_optional_value,
)
from fedmll.errors import ConfigError, FedmllError

if TYPE_CHECKING:
    from fedmll.display import RunProgress
    from fedmll.runner import Observer

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
    from fedmll.tracking import TensorBoard, Together

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
    from fedmll import display, runner

    out = out or fresh_folder(f"{Path(experiment.data.name).stem}-{experiment.method.name}-s{experiment.seed}")
    with display.RunProgress(experiment.training.rounds) as progress, stoppable(f"fedmll resume {out}"):
        result = runner.run(experiment, out, observer=watched(progress, out, track))
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
    from fedmll import display, runner

    total = rounds or runner.experiment_in(folder).training.rounds
    if (folder / "server.json").is_file():  # a real federation's server
        from fedmll import deployment

        if rounds or data or root or workers is not None or device:
            raise ConfigError("A federation between machines is resumed as it was started: without options.")
        with display.FederationProgress(total) as watch, stoppable(f"fedmll resume {folder}"):
            display.show_result(deployment.go_on(folder, watch))
        return
    with display.RunProgress(total) as progress, stoppable(f"fedmll resume {folder}"):
        result = runner.resume(
            folder,
            observer=watched(progress, folder, track),
            engine=given(workers=workers, device=device),
            rounds=rounds,
            data=given(name=data, root=root),
        )
    display.show_result(result)


@app.command()
def compare(
    file: File = None,
    method_names: Annotated[
        str, typer.Option("--methods", help="Names, comma-separated; options as fedprox:mu=0.1+weights=equal.")
    ] = "centralized,fedavg,fedavg-pl,fedprox",
    seeds: Annotated[str, typer.Option("--seeds", help="Comma-separated.")] = "0,1,2",
    data: DataName = None,
    root: Root = None,
    backbone: Backbone = None,
    clients: Clients = None,
    rounds: Rounds = None,
    workers: Workers = None,
    device: Device = None,
    skip_unreadable: SkipUnreadable = False,
    out: Annotated[Path | None, typer.Option("--out", help="The grid's folder. The same one again: goes on.")] = None,
    tune: Annotated[
        str | None,
        typer.Option("--tune", help="e.g. training.lr=1e-4,3e-4,1e-3: each method's best on validation data."),
    ] = None,
    vary: Annotated[
        str | None, typer.Option("--vary", help="e.g. partition.labels_per_client=2,5,10: every method at every value.")
    ] = None,
    metrics: Annotated[str | None, typer.Option("--metrics", help="The table's columns, comma-separated.")] = None,
    against: Annotated[
        str | None, typer.Option("--against", help="A row: also show the margins over it, paired by seed.")
    ] = None,
    settings: Set = None,
    as_published: Published = None,
) -> None:
    """Compare methods over seeds on the same data: mean ± std in the terminal, table.md and table.csv."""
    from fedmll import display, files, grid

    if as_published == OWN:
        raise ConfigError("In a comparison all rows train alike: say whose paper, for example --as-published fedmlp.")
    base = experiment_from(
        file,
        {
            "data.name": data,
            "data.root": root,
            "data.skip_unreadable": skip_unreadable or None,
            "model.backbone": backbone,
            "partition.clients": clients,
            "training.rounds": rounds,
            "engine.workers": workers,
            "engine.device": device,
        },
        settings,
        as_published,
    )
    key, values = parse_values("--tune", tune)
    names = grid.crossed([name.strip() for name in method_names.split(",")], *parse_values("--vary", vary))
    out = out or fresh_folder(f"compare-{Path(base.data.name).stem}")
    variants = [grid.parse_variant(name, parse_value) for name in names]
    plan = grid.Grid(base, variants, parse_seeds(seeds), out, None if key is None else (key, values), against)
    with display.RunProgress(plan.rounds) as progress, stoppable(f"the same command with --out {out}"):

        def watch(cell: grid.Cell) -> display.RunProgress:
            progress.label = f"{cell.variant.label}, seed {cell.seed}"
            return progress

        comparison = plan.go(watch, progress.skip)
    columns = metrics.split(",") if metrics else grid.SHOWN
    tables = [grid.table(comparison, columns)]
    if against is not None:
        tables.append(grid.margins(comparison, against, columns))
    files.write(out / "table.md", "\n".join(display.markdown(*table) for table in tables))
    grid.write_csv(comparison, out / "table.csv")
    title = f"{base.data.name}, {base.training.rounds} rounds, seeds {seeds}; test data, mean ± std"
    for table in tables:
        display.console.print(display.plain_table(title, *table))
    display.console.print(f"tables and every run in {out}", soft_wrap=True)


def parse_seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--seeds takes whole numbers, comma-separated, for example 0,1,2; it got '{text}'."
        ) from None


def parse_values(option: str, text: str | None) -> tuple[str | None, list[Any]]:
    if text is None:
        return None, []
    key, equals, values = text.partition("=")
    if not equals or "." not in key:
        raise ConfigError(f"{option} takes section.key=a,b,c, for example training.lr=1e-4,3e-4,1e-3; it got '{text}'.")
    return key, [parse_value(value) for value in values.split(",")]


@app.command("methods")
def list_methods(name: Annotated[str | None, typer.Argument(help="One method, in full.")] = None) -> None:
    """The methods; with a name: its paper, its options and the paper's training settings."""
    from fedmll import display, methods

    if name is None:
        rows = [(known, cls.summary) for known, cls in methods.registry().items()]
        table = display.plain_table("methods", ("name", "what it does"), rows)
        table.columns[1].justify = "left"
        display.console.print(table)
        return
    cls = methods.find(name)
    display.console.print(escape((sys.modules[cls.__module__].__doc__ or cls.summary).strip()), highlight=False)
    options = {key: field.default for key, field in cls.Options.model_fields.items()}
    display.console.print(display.options_table(f"[method] name = '{name}'", options))
    if cls.published:
        display.console.print(display.options_table("as published (--as-published)", cls.published | cls.unpublished))


app.add_typer(cli_data.data_app, name="data")
cli_federation.register(app)


def main() -> None:
    try:
        app(with_optional_value(sys.argv[1:]))
    except FedmllError as error:
        from fedmll.display import errors

        errors.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
