"""The command compare: methods × seeds on the same data, and the tables of them."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedmll.cli.options import (
    OWN,
    ExperimentArguments,
    Track,
    experiment_options,
    interruptible,
    new_run_folder,
    split_names,
)
from fedmll.core.errors import ConfigError

if TYPE_CHECKING:
    from fedmll.comparison.results import Comparison


def register(app: typer.Typer) -> None:
    app.command()(compare)


@experiment_options(
    *("data", "root", "backbone", "clients", "rounds", "engine", "address", "workers", "device", "skip_unreadable"),
    published=True,
)
def compare(
    arguments: ExperimentArguments,
    methods: Annotated[
        str, typer.Option(help="Methods, comma-separated; with options: fedprox:mu=0.1+weighting=equal.")
    ] = "centralized,fedavg,fedavg-pl,fedprox",
    seeds: Annotated[str, typer.Option(help="Seeds, comma-separated.")] = "0,1,2",
    out: Annotated[
        Path | None, typer.Option(help="The folder of the comparison. An existing comparison is continued.")
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[METHOD:]key=a,b,c",
            help="Choose the best value per method on the validation data: training.lr=1e-4,3e-4; for one method: "
            "fedprox:mu=0.01,0.1. Repeatable: all combinations.",
        ),
    ] = None,
    tune_seed: Annotated[
        int | None, typer.Option(help="The seed for --tune; it need not be in --seeds. Default: the first seed.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="section.key=a,b,c",
            help="Run each method with each value: partition.labels_per_client=2,5,10. Repeatable: all combinations.",
        ),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="Columns of the table, comma-separated; `description` describes the method.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="A row of the table: also test the differences to it, paired by seed.")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed runs again.")] = False,
    jobs: Annotated[
        int,
        typer.Option(min=1, help="The number of runs at the same time, one process each (without workers by default)."),
    ] = 1,
    track: Track = None,
) -> None:
    """Compare methods over several seeds on the same data: a table of mean ± std, also as table.md, .csv and .tex.

    A failed run does not stop the others and is named in the table. Exit code 1: all runs failed.
    """
    if arguments.published == OWN:
        raise ConfigError(
            "In a comparison all rows use the same training settings: name a method, for example --as-published fedmlp."
        )
    numbers, tuned, varied = parse_seeds(seeds), parse_values("--tune", tune), parse_values("--vary", vary)
    base = arguments.experiment()
    from fedmll.cli.display import RunProgress
    from fedmll.comparison import compare as running
    from fedmll.comparison.results import DEFAULT_METRICS

    columns = [name.strip() for name in metrics.split(",")] if metrics else DEFAULT_METRICS
    out = out or new_run_folder(f"compare-{Path(base.data.name).stem}")
    hint = f"the same command with --out {out} (what is finished: {out / 'table.md'})"
    with RunProgress() as progress, interruptible(hint):
        found = running.compare(
            base,
            [name.strip() for name in re.split(r",(?![^\[]*\])", methods)],  # not at the commas of a list
            numbers,
            out,
            tune=tuned,
            tune_seed=tune_seed,
            vary=varied,
            metrics=columns,
            against=against,
            retry_failed=retry_failed,
            callback=progress,
            jobs=jobs,
            track=split_names(track),
            command=shlex.join(["fedmll", *sys.argv[1:]]),
        )
    show(f"{base.data.label}, {base.training.rounds} rounds, seeds {seeds}; test data, mean ± std", found, out)
    if not found.finished:
        raise typer.Exit(1)


def show(title: str, found: Comparison, out: Path) -> None:
    from fedmll.cli.output import print_markup, print_table, say

    for place, (header, rows) in enumerate(found.tables):
        print_table("" if place else title, header, rows)
    for note in found.notes:
        print_markup(f"[yellow]note:[/] {escape(note)}")
    say(f"tables and every run in {out}")


def parse_seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--seeds takes whole numbers, comma-separated, for example 0,1,2; it got '{text}'."
        ) from None
    if twice := repeated(seeds):
        raise ConfigError(f"--seeds names {twice[0]} twice; give each seed once.")
    return seeds


def parse_values(option: str, texts: Sequence[str] | None) -> dict[str, list[Any]]:
    """section.key → values, each as in a TOML file."""
    from fedmll.config.toml_values import parse_value

    choices: dict[str, list[Any]] = {}
    for text in texts or []:
        key, _, listed = text.partition("=")
        own = option == "--tune" and ":" in key
        if not listed or not (own or "." in key) or (":" in key and not own):
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
