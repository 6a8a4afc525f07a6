"""The command line: parse, call the library, print."""

from __future__ import annotations

import signal
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedmll import cli_federation
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
data_app = typer.Typer(help="Look at data sources, and pack your own images.", no_args_is_help=True)
app.add_typer(data_app, name="data")
cli_federation.register(app)

File = Annotated[Path | None, typer.Argument(metavar="FILE.toml", help="The experiment; without it, the defaults.")]
MethodName = Annotated[str | None, typer.Option("--method", help="A method (see `fedmll methods`).")]
DataName = Annotated[str | None, typer.Option("--data", help="A data source (see `fedmll data list`).")]
Root = Annotated[Path | None, typer.Option("--root", help="Where the data lies.", show_default=False)]
Backbone = Annotated[str | None, typer.Option("--backbone", help="convnet, resnet18, vit; mlp for feature vectors.")]
Clients = Annotated[int | None, typer.Option("--clients", help="How many clients.")]
Rounds = Annotated[int | None, typer.Option("--rounds", help="How many rounds.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The seed of everything random.")]
Workers = Annotated[int | None, typer.Option("--workers", help="Worker processes; 0: in this process. Default: cores.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or auto.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="section.key=value", help="Any setting, e.g. training.lr=3e-4.")
]
Track = Annotated[bool, typer.Option("--track", help="Also write curves for TensorBoard (extra `track`).")]
Published = Annotated[bool, typer.Option("--as-published", help="Train as the method's paper does (rounds, lr, …).")]


def parse_value(text: str) -> Any:
    """As in a TOML file; what is not TOML is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    values = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set takes section.key=value, for example training.lr=3e-4; it got '{setting}'.")
        values[key.strip()] = parse_value(value.strip())
    return values


def experiment_from(
    file: Path | None, options: dict[str, Any], settings: list[str] | None, published: bool = False
) -> Any:
    """The file's values, then the options, then --set; a method's published settings only where none of them speaks."""
    from fedmll import methods
    from fedmll.experiment import Experiment, merged, read_toml

    values = {} if file is None else read_toml(file)
    overrides = {key: value for key, value in options.items() if value is not None} | parse_settings(settings)
    values = merged(values, overrides)
    if published:
        method = methods.find(values.get("method", {}).get("name", "fedavg"))
        for key, value in method.published.items():
            section, _, name = key.partition(".")
            if name not in values.get(section, {}):
                values = merged(values, {key: value})
    return Experiment.make(values)


@contextmanager
def stoppable(hint: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM stop cleanly and say how to go on."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        from fedmll.display import errors

        errors.print(f"\nStopped. Go on with: [bold]{escape(hint)}[/]", soft_wrap=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def fresh_folder(name: str) -> Path:
    """runs/NAME, or runs/NAME-2, … : the first that does not exist."""
    base = Path("runs") / name.replace(":", "-").replace("/", "-")
    folder, number = base, 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


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
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder. Default: a new one in runs/.")] = None,
    settings: Set = None,
    as_published: Published = False,
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
    workers: Workers = None,
    device: Device = None,
    track: Track = False,
) -> None:
    """Go on with a run that was stopped or killed, from its last checkpoint, to the very same result."""
    from fedmll import display, runner

    engine = {key: value for key, value in (("workers", workers), ("device", device)) if value is not None}
    rounds = runner.experiment_in(folder).training.rounds
    if (folder / "server.json").is_file():  # a real federation's server
        from fedmll import deployment

        with display.FederationProgress(rounds) as watch, stoppable(f"fedmll resume {folder}"):
            display.show_result(deployment.go_on(folder, watch))
        return
    with display.RunProgress(rounds) as progress, stoppable(f"fedmll resume {folder}"):
        result = runner.resume(folder, observer=watched(progress, folder, track), engine=engine)
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
    out: Annotated[Path | None, typer.Option("--out", help="The grid's folder. The same one again: goes on.")] = None,
    tune: Annotated[
        str | None,
        typer.Option("--tune", help="e.g. training.lr=1e-4,3e-4,1e-3: each method's best on validation data."),
    ] = None,
    vary: Annotated[
        str | None, typer.Option("--vary", help="e.g. partition.labels_per_client=2,5,10: every method at every value.")
    ] = None,
    metrics: Annotated[str | None, typer.Option("--metrics", help="The table's columns, comma-separated.")] = None,
    settings: Set = None,
) -> None:
    """Compare methods over seeds on the same data: mean ± std in the terminal, table.md and table.csv."""
    from fedmll import display, files, grid

    base = experiment_from(
        file,
        {
            "data.name": data,
            "data.root": root,
            "model.backbone": backbone,
            "partition.clients": clients,
            "training.rounds": rounds,
            "engine.workers": workers,
            "engine.device": device,
        },
        settings,
    )
    key, values = parse_values("--tune", tune)
    names = grid.crossed([name.strip() for name in method_names.split(",")], *parse_values("--vary", vary))
    out = out or fresh_folder(f"compare-{Path(base.data.name).stem}")
    variants = [grid.parse_variant(name, parse_value) for name in names]
    plan = grid.Grid(base, variants, parse_seeds(seeds), out, None if key is None else (key, values))
    with display.RunProgress(plan.rounds) as progress, stoppable(f"the same command with --out {out}"):

        def watch(cell: grid.Cell) -> display.RunProgress:
            progress.label = f"{cell.variant.label}, seed {cell.seed}"
            return progress

        comparison = plan.go(watch, progress.skip)
    header, rows = grid.table(comparison, metrics.split(",") if metrics else grid.SHOWN)
    files.write(out / "table.md", display.markdown(header, rows))
    grid.write_csv(comparison, out / "table.csv")
    title = f"{base.data.name}, {base.training.rounds} rounds, seeds {seeds}; test data, mean ± std"
    display.console.print(display.plain_table(title, header, rows))
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
        display.console.print(display.options_table("as published (--as-published)", cls.published))


@data_app.command("list")
def list_data(root: Root = None) -> None:
    """The data sources and whether they are at hand (in --root, if they need one)."""
    from fedmll import display
    from fedmll.data import sources

    found = sources.describe_sources(root)
    rows = [(source.name, source.description, "yes" if source.available else "no") for source in found]
    table = display.plain_table("data sources", ("name", "what it is", "at hand"), rows)
    table.columns[1].justify = "left"
    display.console.print(table)


@data_app.command("describe")
def describe_data(
    file: File = None,
    data: DataName = None,
    root: Root = None,
    clients: Clients = None,
    seed: Seed = None,
    settings: Set = None,
    out: Annotated[Path, typer.Option("--out", help="The picture.")] = Path("label-map.png"),
) -> None:
    """Who has what: the client × class map of an experiment, as a table and a picture."""
    from fedmll import display, federation
    from fedmll.analysis import label_map

    options = {"data.name": data, "data.root": root, "partition.clients": clients, "seed": seed}
    experiment = experiment_from(file, options, settings)
    with display.RunProgress(0) as progress:
        divided = federation.build(experiment, progress.preparing)
    counts = label_map.label_map(divided.train.labels, divided.samples)
    display.console.print(label_map.table(counts, divided.names, divided.train.classes))
    label_map.draw(out, counts.positives, divided.names, divided.train.classes, counts.known)
    touched = ", ".join(f"{count} samples {rule}" for rule, count in divided.report.items() if count)
    held_out = "" if divided.validation_owner is None else f"; {len(divided.validation)} held out for validation"
    display.console.print(f"{divided.sizes.sum()} training samples{held_out}{'; ' + touched if touched else ''}")
    display.console.print(f"picture in {out}", soft_wrap=True)


@data_app.command("coverage")
def label_coverage(
    file: File = None,
    data: DataName = None,
    root: Root = None,
    clients: Clients = None,
    rounds: Rounds = None,
    seed: Seed = None,
    settings: Set = None,
    out: Annotated[Path | None, typer.Option("--out", help="All counts as CSV, a line a round.")] = None,
) -> None:
    """Which labels the clients of each round have; a label absent from all of them learns nothing in that round."""
    from fedmll import display, federation, files
    from fedmll.analysis import coverage

    options = {"data.name": data, "data.root": root, "partition.clients": clients, "training.rounds": rounds}
    experiment = experiment_from(file, options | {"seed": seed}, settings)
    with display.RunProgress(0) as progress:
        divided = federation.build(experiment, progress.preparing)
    classes, total = divided.train.classes, experiment.training.rounds
    counts = coverage.coverage(divided, total)
    header, rows = coverage.table(counts, classes)
    display.console.print(display.plain_table(f"clients a round that have a label, {total} rounds", header, rows))
    if out is not None:
        files.write(out, coverage.as_csv(counts, classes))
        display.console.print(f"every round in {out}", soft_wrap=True)


@data_app.command("pack")
def pack_data(
    csv: Annotated[Path, typer.Argument(help="A CSV with an image path a row and a column a class (1/0/blank).")],
    root: Annotated[Path, typer.Option("--root", help="The folder the paths start from.")],
    out: Annotated[Path, typer.Option("--out", help="The packed file, .npz.")],
    size: Annotated[int | None, typer.Option("--size", help="Images become size × size; default: as they are.")] = None,
) -> None:
    """Pack a folder of images and its CSV into one file, for --data packed:FILE.npz."""
    from fedmll import display
    from fedmll.data.pack import pack

    with display.RunProgress(0) as progress:
        pack(csv, root, out, size=size, progress=progress.preparing)
    display.console.print(f"packed into {out}; use it with --data packed:{out}", soft_wrap=True)


def main() -> None:
    try:
        app()
    except FedmllError as error:
        from fedmll.display import errors

        errors.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
