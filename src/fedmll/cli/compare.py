"""The command compare: methods × seeds on the same data, and the tables of them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedmll.cli.options import (
    OWN,
    Backbone,
    Clients,
    DataName,
    Device,
    File,
    Published,
    Root,
    Rounds,
    Set,
    SkipUnreadable,
    Workers,
    experiment_from,
    fresh_folder,
    parse_value,
    stoppable,
)
from fedmll.errors import ConfigError

if TYPE_CHECKING:
    from fedmll.runs.comparison import Comparison, Table


def register(app: typer.Typer) -> None:
    app.command()(compare)


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
        list[str] | None,
        typer.Option(
            "--tune",
            metavar="section.key=a,b,c",
            help="e.g. training.lr=1e-4,3e-4,1e-3: each method's best on validation data. Several: all combinations.",
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="section.key=a,b,c",
            help="e.g. partition.labels_per_client=2,5,10: every method at every value. Several: all combinations.",
        ),
    ] = None,
    metrics: Annotated[str | None, typer.Option("--metrics", help="The table's columns, comma-separated.")] = None,
    against: Annotated[
        str | None, typer.Option("--against", help="A row: also show the margins over it, paired by seed.")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try again what failed before.")] = False,
    settings: Set = None,
    as_published: Published = None,
) -> None:
    """Compare methods over seeds on the same data: mean ± std in the terminal, table.md and table.csv.

    A run that fails does not stop the others: the table says so. Exit code 1: every run failed.
    """
    from fedmll.cli import display
    from fedmll.runs import comparison, grid

    if as_published == OWN:
        raise ConfigError("In a comparison all rows train alike: say whose paper, for example --as-published fedmlp.")
    columns = parse_metrics(metrics) if metrics else list(comparison.SHOWN)
    numbers, tuned, varied = parse_seeds(seeds), parse_values("--tune", tune), parse_values("--vary", vary)
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
    out = out or fresh_folder(f"compare-{Path(base.data.name).stem}")
    variants = [grid.parse_variant(name.strip(), parse_value) for name in method_names.split(",")]
    plan = grid.Grid(base, grid.crossed(variants, varied), numbers, out, tuned, against)
    go_on = f"the same command with --out {out} (what is finished: {out / 'table.md'})"
    with display.RunProgress(plan.rounds) as progress, stoppable(go_on):

        def watch(cell: comparison.Cell) -> display.RunProgress:
            progress.label = str(cell)
            return progress

        try:
            plan.go(watch, progress.skip, retry_failed)
        finally:  # what is finished is worth a table, however it ends
            found = plan.comparison()
            tables, notes = comparison.tables(found, columns, against), comparison.notes(found, columns)
            if found.finished or found.failed:
                write(found, tables, notes, out)
    show(f"{base.data.label}, {base.training.rounds} rounds, seeds {seeds}; test data, mean ± std", tables, notes)
    display.console.print(f"tables and every run in {out}", soft_wrap=True)
    if not found.finished:
        raise typer.Exit(1)


def write(found: Comparison, tables: Sequence[Table], notes: Sequence[str], out: Path) -> None:
    from fedmll import files
    from fedmll.cli import display
    from fedmll.runs import comparison

    parts = [display.markdown(*table) for table in tables]
    parts += ["".join(f"- {note}\n" for note in notes)] if notes else []
    files.write(out / "table.md", "\n".join(parts))
    comparison.write_csv(found, out / "table.csv")


def show(title: str, tables: Sequence[Table], notes: Sequence[str]) -> None:
    from fedmll.cli import display

    for header, rows in tables:
        display.console.print(display.plain_table(title, header, [[escape(text) for text in row] for row in rows]))
    for note in notes:
        display.console.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True, highlight=False)


def parse_seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--seeds takes whole numbers, comma-separated, for example 0,1,2; it got '{text}'."
        ) from None
    if twice := repeated(seeds):
        raise ConfigError(f"--seeds names {twice[0]} twice; the same run twice says nothing about the spread.")
    return seeds


def parse_metrics(text: str) -> list[str]:
    """Names of metrics, checked before anything runs."""
    from fedmll.evaluation.pooled import METRICS
    from fedmll.runs.comparison import COSTS

    known, names = [*METRICS, *COSTS], [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean '{close[0]}'?" if close else "."
            raise ConfigError(f"There is no metric '{name}' (--metrics){hint} Known: {', '.join(known)}.")
    return names


def parse_values(option: str, texts: Sequence[str] | None) -> dict[str, list[Any]]:
    """section.key → values, each as in a TOML file."""
    choices: dict[str, list[Any]] = {}
    for text in texts or []:
        key, _, listed = text.partition("=")
        if not listed or "." not in key:
            raise ConfigError(
                f"{option} takes section.key=a,b,c, for example training.lr=1e-4,3e-4,1e-3; it got '{text}'."
            )
        if key in choices:
            raise ConfigError(f"{option} names {key} twice; give all of its values at once, {key}=a,b,c.")
        values = parse_value(f"[{listed}]")  # a list of lists keeps its inner commas; bare words are no TOML list
        choices[key] = values if isinstance(values, list) else [parse_value(value) for value in listed.split(",")]
        if twice := repeated(choices[key]):
            raise ConfigError(f"{option} {text} names {twice[0]} twice.")
    return choices


def repeated(values: Sequence[Any]) -> list[Any]:
    return [value for place, value in enumerate(values) if value in values[:place]]
