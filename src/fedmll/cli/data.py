"""`fedmll data`: list, download, check and show data; describe, freeze and pack it.

`fedmll weights`: initial weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedmll.cli.options import (
    Classes,
    ExperimentArguments,
    Group,
    Ignore,
    Plugins,
    Root,
    Set,
    SkipUnreadable,
    Window,
    experiment_options,
    load_plugin_files,
    parse_settings,
    parse_window,
    split_names,
)
from fedmll.cli.output import console, print_table, say
from fedmll.core.errors import ConfigError

if TYPE_CHECKING:
    from fedmll.core.download import DownloadProgress
    from fedmll.data.dataset import Splits
    from fedmll.data.federation import Federation


FREQUENT_PAIRS = 5  # pairs of classes to print

data_app = typer.Typer(
    help="List, download, check and show data; describe its partition; pack your own images.", no_args_is_help=True
)


@data_app.command("list")
def list_data(root: Root = None, plugins: Plugins = None) -> None:
    """List the data sources, and whether they are available (in --root, if they need it)."""
    from fedmll.data import sources

    load_plugin_files(plugins)
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
    header = ("name", "description", "classes", "samples", "licence", "available")
    print_table("data sources", header, rows, words=True)


def build_federation(arguments: ExperimentArguments) -> Federation:
    from fedmll.cli.display import RunProgress
    from fedmll.data import federation

    experiment = arguments.experiment()
    with RunProgress(0) as progress:
        return federation.build(experiment, progress.on_setup_progress)


@data_app.command("describe")
@experiment_options("data", "root", "clients", "seed", "skip_unreadable")
def describe_data(
    arguments: ExperimentArguments,
    out: Annotated[Path, typer.Option(help="The image file to write.")] = Path("label-map.png"),
    co_occurrence_of: Annotated[
        int, typer.Option(min=0, max=8, help="Also draw the co-occurrence of labels at the N largest clients.")
    ] = 0,
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Of several sites: write the number of labels of each site and class."),
    ] = None,
) -> None:
    """Show the data of an experiment: samples per client and class, labels per sample, frequent pairs of labels."""
    import numpy as np

    from fedmll.reports.figure import write_image
    from fedmll.reports.figures import label_statistics

    found = build_federation(arguments)
    for note in found.notes:
        say(note)
    classes = found.train.classes
    counts = label_statistics.count_labels(found.train.labels, found.samples)
    console.print(label_statistics.label_table(counts, found.names, classes))
    write_image(out, label_statistics.draw_label_map(counts.positives, found.names, classes, counts.known))
    if found.experiment.sites is not None:
        from fedmll.reports.figures.site_labels import site_label_table

        print_table("training data of each site: present / absent / unknown", *site_label_table(found))
    if csv is not None:
        write_site_labels(found, csv)
    touched = ", ".join(f"{count} samples {rule}" for rule, count in found.report.items() if count)
    held_out = f"; {len(found.held_out)} held out for validation" if len(found.held_out) else ""
    say(f"{found.sizes.sum()} training samples{held_out}{'; ' + touched if touched else ''}")
    statistics = label_statistics.label_statistics(found.train.labels[np.concatenate(found.samples)])
    say(label_statistics.describe_labels(statistics))
    pairs = statistics.frequent_pairs(classes, FREQUENT_PAIRS)
    if pairs:
        say("most frequent pairs: " + ", ".join(f"{one} and {other} ({count:,})" for one, other, count in pairs))
    second = out.with_name(f"{out.stem}-co-occurrence{out.suffix}")
    of_clients = {
        f"client {found.names[client]}": label_statistics.label_statistics(found.train.labels[found.samples[client]])
        for client in np.argsort(-found.sizes, kind="stable")[:co_occurrence_of]
    }
    label_statistics.write_co_occurrence(second, statistics, classes, of_clients)
    say(f"images written to {out} and {second}")


def write_site_labels(found: Federation, csv: Path) -> None:
    from fedmll.core import files
    from fedmll.reports.figures.site_labels import site_labels_csv

    if found.experiment.sites is None:
        raise ConfigError("--csv is for experiments with [[sites]]; this data has one source.")
    files.write_atomic(csv, site_labels_csv(found))
    say(f"labels of each site and class written to {csv}")


@data_app.command("freeze")
@experiment_options("data", "root", "clients", "seed", "skip_unreadable")
def freeze_data(
    arguments: ExperimentArguments, out: Annotated[Path, typer.Option(help="The JSON file to write.")]
) -> None:
    """Write the partition to a file (samples and annotated classes of each client), so that others can use the same
    one.

    Example:  [bold]fedmll data freeze mine.toml --out mine.json[/], then --set partition.kind=file --set
    partition.file=mine.json
    """
    from fedmll.data.partition_file import write_partition_file

    found = build_federation(arguments)
    checksum = write_partition_file(found, out)
    say(f"{len(found.names)} clients, {found.sizes.sum()} samples; checksum {checksum[:16]}")
    say(f'partition written to {out}; use it with partition.kind = "file", partition.file')


@data_app.command("coverage")
@experiment_options("data", "root", "clients", "rounds", "seed", "skip_unreadable")
def label_coverage(
    arguments: ExperimentArguments,
    out: Annotated[Path | None, typer.Option(help="Also write all counts as CSV, one line per round.")] = None,
) -> None:
    """Show which labels the clients of each round have. A label that no client of a round has is not learned in it."""
    from fedmll.core import files
    from fedmll.reports.figures import label_coverage as coverage

    found = build_federation(arguments)
    classes, total = found.train.classes, found.experiment.training.rounds
    counts = coverage.compute_coverage(found, total)
    header, rows = coverage.coverage_table(counts, classes)
    print_table(f"clients per round with each label, {total} rounds", header, rows)
    if out is not None:
        files.write_atomic(out, coverage.coverage_csv(counts, classes))
        say(f"all rounds written to {out}")


@data_app.command("pack")
def pack_data(
    csv: Annotated[
        Path, typer.Argument(help="A CSV with one row per image: its path and one column per class (1/0/blank).")
    ],
    root: Annotated[Path, typer.Option(help="The folder of the images; paths in the CSV are relative to it.")],
    out: Annotated[Path, typer.Option(help="The packed file to write, .npz.")],
    size: Annotated[int | None, typer.Option(help="Resize images to size × size. Default: no resizing.")] = None,
    classes: Classes = None,
    ignore: Ignore = None,
    group: Group = None,
    window: Window = None,
    skip_unreadable: SkipUnreadable = False,
) -> None:
    """Pack a folder of images and its CSV into one file, for --data packed:FILE.npz."""
    from fedmll.cli.display import RunProgress
    from fedmll.config.settings import ReadingOptions
    from fedmll.data.sources.packed import pack

    reading = ReadingOptions(
        classes=split_names(classes),
        ignore=split_names(ignore),
        group=group,
        window=parse_window(window),
        skip_unreadable=skip_unreadable,
        by_options=True,
    )
    with RunProgress(0) as progress:
        notes = pack(csv, root, out, size=size, progress=progress.on_setup_progress, reading=reading)
    for note in notes:
        say(note)
    say(f"packed into {out}; use it with --data packed:{out}")


Name = Annotated[str, typer.Argument(help="A data source (see `fedmll data list`).")]


def load_splits(name: str, root: Path | None, skip_unreadable: bool, settings: list[str] | None) -> Splits:
    """Load data with these settings of the section [data]."""
    from fedmll.cli.display import RunProgress
    from fedmll.config.experiment import Experiment
    from fedmll.data import sources

    overrides = parse_settings(settings)
    wrong = next((key for key in overrides if not key.startswith("data.")), None)
    if wrong is not None:
        raise ConfigError(f"--set {wrong} has no effect here; use only data.… settings.")
    given: dict[str, Any] = {"data.name": name, "data.root": root, "data.skip_unreadable": skip_unreadable}
    data = Experiment().changed(overrides | given).data
    with RunProgress(0) as progress:
        return sources.load(
            data.name, data.root, data.size, 0, data.composition, progress.on_setup_progress, data.reading,
            require_positives=False,
        )  # fmt: skip


@contextmanager
def download_bars() -> Iterator[Callable[[str], DownloadProgress]]:
    """Progress bars of downloads: call the yielded function with the name of a file to add its bar."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:

        def add_bar(name: str) -> DownloadProgress:
            bar = progress.add_task(name, total=None)
            return lambda done, total: progress.update(bar, completed=done, total=total)

        yield add_bar


@data_app.command("get")
def get_data(name: Name, root: Annotated[Path, typer.Option(help="The folder to download to.")]) -> None:
    """Download a freely available dataset and check its published hash. An interrupted download is continued.

    Example:  [bold]fedmll data get voc:2007 --root DATA[/]
    """
    from fedmll.core.download import download_file
    from fedmll.data.sources import find_downloads, unpack

    wanted = find_downloads(name)
    root.mkdir(parents=True, exist_ok=True)
    with download_bars() as add_bar:
        for part in wanted:
            fetched = download_file(part.url, root / part.file, part.digest, add_bar(part.file))
            unpacked = unpack(root / part.file, root)
            here = "was downloaded" if fetched else "exists already"
            say(f"{part.file} {here}, with the published hash{'; unpacked' if unpacked else ''}")
    say(f"use it with --data {name} --root {root}; check it with `fedmll data check {name} --root {root}`")


@data_app.command("check")
def check_data(
    name: Name,
    root: Root = None,
    skip_unreadable: SkipUnreadable = False,
    settings: Set = None,
    plugins: Plugins = None,
) -> None:
    """Read a whole dataset and compare its sample counts with the published ones. The error lists all missing files.

    Exit code 1: the counts differ.
    """
    from fedmll.data.sources import compare_counts

    load_plugin_files(plugins)
    splits = load_splits(name, root, skip_unreadable, settings)
    for note in splits.notes:
        say(note)
    found = compare_counts(name, splits)
    rows = [
        (count.part, f"{count.found:,}", "" if count.published is None else f"{count.published:,}") for count in found
    ]
    print_table(name, ("samples", "found", "published"), rows)
    train = splits.train
    present = (train.labels == 1).sum(axis=0)
    ordered = sorted(zip(train.classes, present.tolist(), strict=True), key=lambda pair: -pair[1])
    say(f"{len(train.classes)} classes; in training: " + ", ".join(f"{label} {many:,}" for label, many in ordered[:30]))
    wrong = [count for count in found if not count.agrees]
    for count in wrong:
        difference = (count.published or 0) - count.found
        say(f"{count.part}: {abs(difference):,} samples {'missing' if difference > 0 else 'too many'}")
    if wrong:
        raise typer.Exit(1)
    published = any(count.published is not None for count in found)
    say("complete: all counts are as published" if published else "read without problems; no counts are published")


@data_app.command("labels")
def write_labels_of(
    name: Name,
    root: Annotated[Path, typer.Option(help="The folder of the data.")],
    out: Annotated[Path, typer.Option(metavar="FILE.csv", help="The labels file to write.")],
    settings: Set = None,
) -> None:
    """Write the labels of a published image dataset as a CSV with one row per image. A site of a real federation joins
    with it.

    Example:  [bold]fedmll data labels voc:2007 --root DATA --out labels.csv[/], then
    [bold]fedmll join HOST:PORT --name a --csv labels.csv --images DATA --rename names.csv[/]
    """
    from fedmll.config.experiment import Experiment
    from fedmll.data.sources import write_labels

    reading = Experiment().changed(parse_settings(settings) | {"data.name": name}).data.reading
    splits = write_labels(name, root, out, reading)
    parts = {"training": splits.train, "validation": splits.validation, "test": splits.test}
    counts = ", ".join(f"{len(data):,} {part}" for part, data in parts.items() if data is not None)
    say(f"{counts} images, {len(splits.train.classes)} classes: {out}")
    if splits.group is not None:
        say(f"images of one '{splits.group}' belong together: use --group '{splits.group}'")


@data_app.command("show")
def show_data(
    name: Name,
    root: Root = None,
    out: Annotated[Path, typer.Option(help="The image file to write.")] = Path("contact-sheet.png"),
    count: Annotated[int, typer.Option(help="The number of images.", min=1, max=120)] = 24,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "train",
    seed: Annotated[int, typer.Option(help="The seed that draws the images.")] = 0,
    skip_unreadable: SkipUnreadable = False,
    settings: Set = None,
    plugins: Plugins = None,
) -> None:
    """Draw a contact sheet: images of a dataset with their labels."""
    from fedmll.reports.figures import image_sheets

    load_plugin_files(plugins)
    if split not in ("train", "validation", "test"):
        raise ConfigError(f"--split is train, validation or test; it is '{split}'.")
    data = getattr(load_splits(name, root, skip_unreadable, settings), split)
    if data is None:
        raise ConfigError(f"'{name}' has no validation data.")
    image_sheets.write_contact_sheet(out, data, image_sheets.choose_positions(data, count, seed))
    say(f"image written to {out}")


@data_app.command("fine-names")
def write_fine_names(
    root: Annotated[Path, typer.Option("--root", help="The folder (or HDF5 file) of FLAIR.")],
    out: Annotated[Path | None, typer.Option(help="The file to write. Default: fine_names.json in the folder.")] = None,
) -> None:
    """Write the fine names of FLAIR's coarse classes, most frequent first: the file for method.fine_names of FedLGT.

    Example:  [bold]fedmll data fine-names --root DATA[/]
    """
    from fedmll.core import files
    from fedmll.data.sources.flair import fine_names
    from fedmll.runs.formatting import to_json

    found = fine_names(root)
    out = out or (root if root.is_dir() else root.parent) / "fine_names.json"
    files.write_atomic(out, to_json(found, indent=1) + "\n")
    say(f"written: {out} ({sum(map(len, found.values()))} fine names of {len(found)} classes)")


# Initial weights

weights_app = typer.Typer(help="List and download published weights (model.weights).", no_args_is_help=True)


@weights_app.command("list")
def list_weights() -> None:
    """List the weights that can be downloaded, their backbone, and whether they are downloaded."""
    from fedmll.models.pretrained_weights import PUBLISHED

    rows = [
        (known.name, known.backbone, f"{known.megabytes:g} MB", "yes" if known.path.is_file() else "no", known.url)
        for known in PUBLISHED.values()
    ]
    header = ("name", "model.backbone", "size", "downloaded", "from")
    print_table("weights, trained on ImageNet", header, rows, words=True)


@weights_app.command("get")
def get_weights(name: Annotated[str, typer.Argument(help="A name of `fedmll weights list`.")]) -> None:
    """Download weights from their publisher and check their published hash. An interrupted download is continued.

    Example:  [bold]fedmll weights get resnet18-imagenet1k-v1[/]
    """
    from fedmll.core.download import download_file
    from fedmll.models.pretrained_weights import find_published

    known = find_published(name)
    with download_bars() as add_bar:
        fetched = download_file(known.url, known.path, known.sha256, add_bar(known.file))
    say(f"{known.file} {'was downloaded' if fetched else 'exists already'}, with the published hash: {known.path}")
    say(f"use it with --backbone {known.backbone} --set model.weights={name}")
