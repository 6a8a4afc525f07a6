"""The command reproduce: a table of a paper, run here, beside the published figures."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedmll.cli.compare import parse_seeds
from fedmll.cli.options import Device, Root, Set, Track, Workers, drop_none, interruptible, parse_settings, split_names
from fedmll.cli.output import print_markup, print_table, say
from fedmll.config.presets import (
    PREFIX,
    SMALL,
    PresetTable,
    load_preset,
    preset_names,
    read_papers,
    read_published,
    read_table,
)
from fedmll.core.errors import ConfigError


def register(app: typer.Typer) -> None:
    app.command()(reproduce)


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="PAPER/TABLE", help="A table, for example fednca-ml/1.")] = None,
    list_tables: Annotated[
        bool, typer.Option("--list", help="List all tables and figures, what each needs, and whether it is here.")
    ] = False,
    claims: Annotated[
        Path | None,
        typer.Option(
            help="A folder with folders of this command: judge the papers' claims by them, and write claims.md and "
            "claims.csv there."
        ),
    ] = None,
    small: Annotated[
        bool, typer.Option("--small", help="A small variant: few images and rounds, a frozen backbone.")
    ] = False,
    groups: Annotated[
        str | None, typer.Option(help="Only these column groups of the table, comma-separated. Default: all.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, comma-separated.")] = "0,1,2",
    root: Root = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder of all runs and tables. Default: runs/reproduce-PAPER-TABLE.")
    ] = None,
    settings: Set = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed runs again.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="The number of runs at the same time.")] = 1,
    workers: Workers = None,
    device: Device = None,
    track: Track = None,
) -> None:
    """Run a table of a paper and print the results beside the published figures. The same command continues.

    The tables are also in reproduction.md, .csv and .tex. Exit code 1: all runs failed.

    Examples:  [bold]fedmll reproduce --list[/]  ·  [bold]fedmll reproduce fednca-ml/1 --small --root DATA[/]
    """
    if list_tables:
        show_list(root, small)
        return
    if claims is not None:
        if name is not None:
            raise ConfigError("--claims judges tables that were run before: leave the name of the table out.")
        show_claims(claims)
        return
    if name is None:
        raise ConfigError("Name a table, for example `fedmll reproduce fednca-ml/1 --small`; --list shows all.")
    name = name.removeprefix(PREFIX)
    options = {"data.root": root, "engine.workers": workers, "engine.device": device}
    overrides = drop_none(**options) | parse_settings(settings)
    numbers = parse_seeds(seeds)
    read_table(name, small)  # a misspelt name is refused before torch is imported
    from fedmll.cli.display import RunProgress
    from fedmll.comparison import reproduce as running

    ending = f"-{SMALL}" if small else ""
    out = out or Path("runs") / f"reproduce-{name.replace('/', '-')}{ending}"
    with RunProgress() as progress, interruptible(f"the same command (finished runs are in {out})"):
        found = running.reproduce(
            name,
            out,
            small=small,
            groups=split_names(groups),
            seeds=numbers,
            overrides=overrides,
            retry_failed=retry_failed,
            jobs=jobs,
            callback=progress,
            track=split_names(track),
            command=shlex.join(["fedmll", *sys.argv[1:]]),
        )
    say(found.title)
    for title, (header, rows) in found.tables:
        print_table(title, header, rows)
    for note in found.notes:
        print_markup(f"[yellow]note:[/] {escape(note)}")
    say(f"tables and every run in {out}; `fedmll report {out}` makes a page of it")
    if not found.finished_runs:
        raise typer.Exit(1)


def show_claims(folder: Path) -> None:
    """Print and write which claims of the papers hold in the tables of a folder."""
    from fedmll.comparison.claims import judge_claims

    judged = judge_claims(folder)
    judged.write(folder)
    for name in judged.records:
        print_table(name, *judged.table_of(name), words=True)
    print_table("claims", *judged.summary)
    for claim in judged.not_run:
        print_markup(f"[yellow]note:[/] {escape(f'not run: {claim.table}: {claim.statement}')}")
    say(f"the page is {folder / 'claims.md'}")


def show_list(root: Path | None, small: bool) -> None:
    """Print all tables and figures."""
    tables = [read_table(name, small) for name in preset_names()]
    lines = []
    for table in tables:
        figures = sum(len(found) for (name, _), found in read_published().items() if name == table.name)
        needs = {need: here for values in experiments(table, small) for need, here in find_needs(values, root).items()}
        missing = [need for need, here in needs.items() if not here]
        here = "yes" if not missing else "without " + ", ".join(missing)
        rows = f"{len(table.comparison_rows)} × {len(table.groups)}"
        lines.append([table.name, table.what, rows, str(figures or "–"), ", ".join(needs) or "–", here])
    title = "tables, small variants" if small else "tables"
    print_table(title, ("name", "contents", "rows × groups", "published figures", "needs", "here"), lines, words=True)
    others = [
        [f"{paper}, Figure {number}", figure["what"], figure["command"]]
        for paper, content in read_papers().items()
        for number, figure in content.get("figures", {}).items()
    ]
    print_table("figures that other commands make", ("figure", "contents", "command"), others, words=True)
    for table in tables:
        for row, reason in table.unavailable.items():
            print_markup(f"[yellow]note:[/] {escape(f'{table.name}: row {row} cannot be run: {reason}')}")
    unverified = [(name, figure) for (name, _), found in read_published().items() for figure in found if figure.note]
    for name, figure in unverified:
        print_markup(f"[yellow]note:[/] {escape(f'{name}, {figure.row}, {figure.metric}: {figure.note}')}")


def experiments(table: PresetTable, small: bool) -> list[dict[str, Any]]:
    """The values of the experiments of all column groups."""
    return [load_preset("/".join(filter(None, [table.name, group, SMALL if small else ""]))) for group in table.groups]


def find_needs(values: dict[str, Any], root: Path | None) -> dict[str, bool]:
    """The data and weights of an experiment, and whether they are on this machine. What is on the Hugging Face hub
    counts as being here."""
    from fedmll.core import registry
    from fedmll.models.pretrained_weights import PUBLISHED

    data = values["data"]["name"]
    kind, _, argument = data.removeprefix("ml-").partition(":")
    source = registry.find("source", kind)
    needs = {
        data: ((root or Path()) / argument).is_file()
        if source.file
        else source.available(root) or source.available(None)
    }
    weights = values.get("model", {}).get("weights")
    if weights is not None:
        needs[weights] = weights not in PUBLISHED or PUBLISHED[weights].path.is_file()
    encoder = values.get("method", {}).get("encoder")
    return needs | ({encoder: True} if encoder else {})
