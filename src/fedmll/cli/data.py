"""`fedmll data`: look at data sources, at who has what, and pack images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedmll.cli.options import (
    Classes,
    Clients,
    DataName,
    File,
    Group,
    Ignore,
    Root,
    Rounds,
    Seed,
    Set,
    SkipUnreadable,
    Window,
    experiment_from,
    names_in,
    window_in,
)

data_app = typer.Typer(help="Look at data sources, and pack your own images.", no_args_is_help=True)


@data_app.command("list")
def list_data(root: Root = None) -> None:
    """The data sources and whether they are at hand (in --root, if they need one)."""
    from fedmll.cli import display
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
    skip_unreadable: SkipUnreadable = False,
    settings: Set = None,
    out: Annotated[Path, typer.Option("--out", help="The picture.")] = Path("label-map.png"),
) -> None:
    """Who has what: the client × class map of an experiment, as a table and a picture."""
    from fedmll.analysis import label_map
    from fedmll.cli import display
    from fedmll.data import federation

    options = {"data.name": data, "data.root": root, "partition.clients": clients, "seed": seed}
    options["data.skip_unreadable"] = skip_unreadable or None
    experiment = experiment_from(file, options, settings)
    with display.RunProgress(0) as progress:
        divided = federation.build(experiment, progress.preparing)
    for note in divided.notes:
        display.console.print(escape(note), highlight=False, soft_wrap=True)
    counts = label_map.label_map(divided.train.labels, divided.samples)
    display.console.print(label_map.table(counts, divided.names, divided.train.classes))
    label_map.draw(out, counts.positives, divided.names, divided.train.classes, counts.known)
    touched = ", ".join(f"{count} samples {rule}" for rule, count in divided.report.items() if count)
    held_out = f"; {len(divided.held_out)} held out for validation" if len(divided.held_out) else ""
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
    skip_unreadable: SkipUnreadable = False,
    settings: Set = None,
    out: Annotated[Path | None, typer.Option("--out", help="All counts as CSV, a line a round.")] = None,
) -> None:
    """Which labels the clients of each round have; a label absent from all of them learns nothing in that round."""
    from fedmll import files
    from fedmll.analysis import coverage
    from fedmll.cli import display
    from fedmll.data import federation

    options = {"data.name": data, "data.root": root, "partition.clients": clients, "training.rounds": rounds}
    options |= {"seed": seed, "data.skip_unreadable": skip_unreadable or None}
    experiment = experiment_from(file, options, settings)
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
    classes: Classes = None,
    ignore: Ignore = None,
    group: Group = None,
    window: Window = None,
    skip_unreadable: SkipUnreadable = False,
) -> None:
    """Pack a folder of images and its CSV into one file, for --data packed:FILE.npz."""
    from fedmll.cli import display
    from fedmll.data.images.pack import pack
    from fedmll.settings import Reading

    reading = Reading(names_in(classes), names_in(ignore), group, window_in(window), skip_unreadable, by_options=True)
    with display.RunProgress(0) as progress:
        notes = pack(csv, root, out, size=size, progress=progress.preparing, reading=reading)
    for note in notes:
        display.console.print(escape(note), highlight=False, soft_wrap=True)
    display.console.print(f"packed into {out}; use it with --data packed:{out}", soft_wrap=True)
