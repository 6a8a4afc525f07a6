"""`fedmll data get`, `check` and `show`: published datasets, before anything is trained on them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedmll.cli.options import Plugins, Root, Set, SkipUnreadable, load_files, parse_settings
from fedmll.cli.tables import console, plain_table, say
from fedmll.errors import ConfigError

if TYPE_CHECKING:
    from fedmll.data.dataset import Splits

Name = Annotated[str, typer.Argument(help="A data source (see `fedmll data list`).")]


def register(app: typer.Typer) -> None:
    app.command("get")(get_data)
    app.command("check")(check_data)
    app.command("show")(show_data)


def loaded(name: str, root: Path | None, skip_unreadable: bool, settings: list[str] | None) -> Splits:
    """The data as an experiment with these settings of [data] reads it."""
    from fedmll.cli.display import RunProgress
    from fedmll.data import sources
    from fedmll.settings import Data

    said = parse_settings(settings)
    wrong = next((key for key in said if not key.startswith("data.")), None)
    if wrong is not None:
        raise ConfigError(f"--set {wrong} says nothing here: only data.… does.")
    values: dict[str, Any] = {key.removeprefix("data."): value for key, value in said.items()}
    data = Data(**values | {"name": name, "root": root, "skip_unreadable": skip_unreadable})
    with RunProgress(0) as progress:
        return sources.load(
            data.name, data.root, data.size, 0, data.composition, progress.preparing, data.reading,
            require_positives=False,
        )  # fmt: skip


def get_data(
    name: Name,
    root: Annotated[Path, typer.Option("--root", help="The folder it goes to.")],
) -> None:
    """Download a dataset that may be had freely; goes on where it was cut, and checks the published hash.

    Example:  [bold]fedmll data get voc:2007 --root DATA[/]
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from fedmll.data.published import downloads, unpack
    from fedmll.models.download import fetch

    wanted = downloads(name)
    root.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        for part in wanted:
            bar = progress.add_task(part.file, total=None)

            def show(done: int, total: int | None, bar: Any = bar) -> None:
                progress.update(bar, completed=done, total=total)

            fetched = fetch(part.url, root / part.file, part.digest, show)
            unpacked = unpack(root / part.file, root)
            here = "is downloaded" if fetched else "was here already"
            say(f"{part.file} {here}, with the published hash{'; unpacked' if unpacked else ''}")
    say(f"use it with --data {name} --root {root}; look at it with `fedmll data check {name} --root {root}`")


def check_data(
    name: Name,
    root: Root = None,
    skip_unreadable: SkipUnreadable = False,
    settings: Set = None,
    plugins: Plugins = None,
) -> None:
    """Read a whole dataset and compare its counts with the published ones; an error says all that is missing.

    Exit code 1: the counts differ.
    """
    from fedmll.data.published import counts

    load_files(plugins)
    splits = loaded(name, root, skip_unreadable, settings)
    for note in splits.notes:
        say(note)
    found = counts(name, splits)
    rows = [
        (count.part, f"{count.found:,}", "" if count.published is None else f"{count.published:,}") for count in found
    ]
    console.print(plain_table(name, ("samples", "found", "published"), rows))
    train = splits.train
    present = (train.labels == 1).sum(axis=0)
    ordered = sorted(zip(train.classes, present.tolist(), strict=True), key=lambda pair: -pair[1])
    say(f"{len(train.classes)} classes; in training: " + ", ".join(f"{label} {many:,}" for label, many in ordered[:30]))
    wrong = [count for count in found if not count.agrees]
    for count in wrong:
        difference = (count.published or 0) - count.found
        say(f"{count.part}: {abs(difference):,} samples {'are missing' if difference > 0 else 'too many'}")
    if wrong:
        raise typer.Exit(1)
    published = any(count.published is not None for count in found)
    say(
        "complete: every count is the published one" if published else "read without a problem; no counts are published"
    )


def show_data(
    name: Name,
    root: Root = None,
    out: Annotated[Path, typer.Option("--out", help="The picture.")] = Path("contact-sheet.png"),
    count: Annotated[int, typer.Option("--count", help="How many images.", min=1, max=120)] = 24,
    split: Annotated[str, typer.Option("--split", help="train, validation or test.")] = "train",
    seed: Annotated[int, typer.Option("--seed", help="Which images.")] = 0,
    skip_unreadable: SkipUnreadable = False,
    settings: Set = None,
    plugins: Plugins = None,
) -> None:
    """A contact sheet: images of a dataset with their labels below, to see whether they fit."""
    from fedmll.analysis import contact_sheet

    load_files(plugins)
    if split not in ("train", "validation", "test"):
        raise ConfigError(f"--split is train, validation or test; it is '{split}'.")
    data = getattr(loaded(name, root, skip_unreadable, settings), split)
    if data is None:
        raise ConfigError(f"'{name}' has no validation data of its own.")
    contact_sheet.draw(out, data, contact_sheet.chosen(data, count, seed))
    console.print(f"picture in {out}", soft_wrap=True)
