"""`fedmll data`: look at data sources, at who has what, and pack images (get, check, show: fedmll.cli.datasets)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmll.cli.options import (
    Asked,
    Classes,
    Group,
    Ignore,
    Plugins,
    Root,
    SkipUnreadable,
    Window,
    asks,
    load_files,
    names_in,
    window_in,
)
from fedmll.cli.tables import console, plain_table, say

if TYPE_CHECKING:
    from fedmll.data.federation import Federation

OFTEN = 5  # pairs of classes that are named

data_app = typer.Typer(help="Get, check and look at data; divide it; pack your own images.", no_args_is_help=True)


@data_app.command("list")
def list_data(root: Root = None, plugins: Plugins = None) -> None:
    """The data sources and whether they are at hand (in --root, if they need one)."""
    from fedmll.data import sources

    load_files(plugins)
    rows = [
        (
            source.name,
            source.description,
            "" if source.classes is None else str(source.classes),
            "" if source.samples is None else f"{source.samples:,}",
            source.licence,
            "yes" if source.available else "no",
        )
        for source in sources.describe_sources(root)
    ]
    header = ("name", "what it is", "classes", "samples", "licence", "at hand")
    console.print(plain_table("data sources", header, rows, words=True))


def divided(asked: Asked) -> Federation:
    from fedmll.cli.display import RunProgress
    from fedmll.data import federation

    experiment = asked.experiment()
    with RunProgress(0) as progress:
        return federation.build(experiment, progress.preparing)


@data_app.command("describe")
@asks("data", "root", "clients", "seed", "skip_unreadable")
def describe_data(
    asked: Asked,
    out: Annotated[Path, typer.Option("--out", help="The picture.")] = Path("label-map.png"),
) -> None:
    """Who has what: the client × class map of an experiment, how many labels a sample has and which come together."""
    import numpy as np

    from fedmll.analysis import label_map, labels

    found = divided(asked)
    for note in found.notes:
        say(note)
    counts = label_map.label_map(found.train.labels, found.samples)
    console.print(label_map.table(counts, found.names, found.train.classes))
    label_map.draw(out, counts.positives, found.names, found.train.classes, counts.known)
    touched = ", ".join(f"{count} samples {rule}" for rule, count in found.report.items() if count)
    held_out = f"; {len(found.held_out)} held out for validation" if len(found.held_out) else ""
    console.print(f"{found.sizes.sum()} training samples{held_out}{'; ' + touched if touched else ''}")
    together = labels.count(found.train.labels[np.concatenate(found.samples)])
    say(labels.sentence(together))
    often = [f"{one} and {other} ({count:,})" for one, other, count in together.pairs(found.train.classes, OFTEN)]
    if often:
        say(f"most often together: {', '.join(often)}")
    second = out.with_name(f"{out.stem}-co-occurrence{out.suffix}")
    labels.draw(second, together, found.train.classes)
    console.print(f"pictures in {out} and {second}", soft_wrap=True)


@data_app.command("freeze")
@asks("data", "root", "clients", "seed", "skip_unreadable")
def freeze_data(
    asked: Asked,
    out: Annotated[Path, typer.Option("--out", help="The file, JSON.")],
) -> None:
    """Write who has which sample and annotates what: the same federation for everybody, in every framework.

    Example:  [bold]fedmll data freeze mine.toml --out mine.json[/], then --set partition.kind=file --set
    partition.file=mine.json
    """
    from fedmll.data.freeze import freeze

    found = divided(asked)
    checksum = freeze(found, out)
    say(f"{len(found.names)} clients, {found.sizes.sum()} samples; checksum {checksum[:16]}")
    console.print(f'federation in {out}; use it with partition.kind = "file", partition.file', soft_wrap=True)


@data_app.command("coverage")
@asks("data", "root", "clients", "rounds", "seed", "skip_unreadable")
def label_coverage(
    asked: Asked,
    out: Annotated[Path | None, typer.Option("--out", help="All counts as CSV, a line a round.")] = None,
) -> None:
    """Which labels the clients of each round have; a label absent from all of them learns nothing in that round."""
    from fedmll import files
    from fedmll.analysis import coverage

    found = divided(asked)
    classes, total = found.train.classes, found.experiment.training.rounds
    counts = coverage.coverage(found, total)
    header, rows = coverage.table(counts, classes)
    console.print(plain_table(f"clients a round that have a label, {total} rounds", header, rows))
    if out is not None:
        files.write(out, coverage.as_csv(counts, classes))
        console.print(f"every round in {out}", soft_wrap=True)


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
    from fedmll.cli.display import RunProgress
    from fedmll.data.images.pack import pack
    from fedmll.settings import Reading

    reading = Reading(names_in(classes), names_in(ignore), group, window_in(window), skip_unreadable, by_options=True)
    with RunProgress(0) as progress:
        notes = pack(csv, root, out, size=size, progress=progress.preparing, reading=reading)
    for note in notes:
        say(note)
    console.print(f"packed into {out}; use it with --data packed:{out}", soft_wrap=True)
