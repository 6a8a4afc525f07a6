"""The commands at a site: check, join."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmll.cli.federation import INSECURE, Insecure, PassphraseFile
from fedmll.cli.options import (
    Classes,
    Group,
    Ignore,
    Plugins,
    Settings,
    SkipUnreadable,
    Window,
    load_files,
    names_in,
    stoppable,
    window_in,
)
from fedmll.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fedmll.deploy.joining import Access
    from fedmll.deploy.site import Site

Csv = Annotated[Path, typer.Option("--csv", help="An image a row, a column a class: 1, 0 or blank (unknown).")]
Images = Annotated[Path, typer.Option("--images", help="The folder that the CSV's paths start from.")]
Rename = Annotated[
    Path | None,
    typer.Option("--rename", metavar="FILE.csv", help="Your names of classes and the study's: columns own,study."),
]
Ca = Annotated[Path, typer.Option("--ca", help="The CA's certificate, from the server's operator.")]
Key = Annotated[Path | None, typer.Option("--key", help="Your private key. Default: keys/NAME.key.")]
Memory = Annotated[Path | None, typer.Option("--memory", help="Where your client remembers. Default: fedmll-NAME.")]
MinCount = Annotated[
    int, typer.Option("--min-count", help="Counts of fewer images with, or without, a class do not leave.")
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda or auto.")]
Patience = Annotated[float, typer.Option("--patience", help="Seconds to wait for a server that is away.")]
Yes = Annotated[bool, typer.Option("--yes", help="Approve the experiment without being asked.")]
Weights = Annotated[
    list[Path] | None,
    typer.Option("--weights", metavar="FILE", help="Your copy of a file the experiment starts from; repeatable."),
]
CA = Path("keys/ca.crt")
PATIENCE = 12 * 3600


def register(app: typer.Typer) -> None:
    app.command()(check)
    app.command()(join)


def join(
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The federation's server.")],
    name: Annotated[str, typer.Option("--name", help="Your name in the federation.")],
    csv: Csv,
    images: Images,
    settings: Settings = None,
    data: Annotated[str, typer.Option("--data", help="The kind of data; 'folder' is the only one.")] = "folder",
    classes: Classes = None,
    ignore: Ignore = None,
    group: Group = None,
    window: Window = None,
    skip_unreadable: SkipUnreadable = False,
    rename: Rename = None,
    ca: Ca = CA,
    key: Key = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    memory: Memory = None,
    device: Device = "auto",
    patience: Patience = PATIENCE,
    yes: Yes = False,
    weights: Weights = None,
    keep_cache: Annotated[
        bool, typer.Option("--keep-cache", help="Keep the prepared images in the memory folder.")
    ] = False,
    max_rounds: Annotated[int, typer.Option("--max-rounds", help="Take part in no run with more rounds.")] = 1000,
    min_images: Annotated[int, typer.Option("--min-images", help="Train on so many images or not at all.")] = 10,
    min_count: MinCount = 10,
    max_memory: Annotated[float, typer.Option("--max-memory", help="Most GB for the model and a batch.")] = 4.0,
    methods: Annotated[str | None, typer.Option("--methods", help="The only methods you allow, comma-separated.")] = (
        None
    ),
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where the model and the report go. Default: --memory.")
    ] = None,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="At the end: was it worth joining? Trains a model of your own.")
    ] = True,
    plugins: Plugins = None,
) -> None:
    """Take part in a federation with your own images: check them, then serve until the run is over; then you have the
    model, and a report of what it is worth on your own test data.

    Example:  [bold]fedmll join federation.example.org:8000 --name hospital-a --csv labels.csv --images scans[/]
    """
    from fedmll.deploy import joining, keys
    from fedmll.deploy.approval import Limits
    from fedmll.deploy.site import Site
    from fedmll.methods import find

    load_files(plugins)
    if data != "folder":
        raise ConfigError(f"--data takes 'folder' (a CSV and a folder of images); it got '{data}'.")
    folder = memory or Path(f"fedmll-{keys.check_name(name)}")
    for method in names_in(methods):
        find(method)  # a slip of the pen is an error here, not a refusal later
    private, passphrase = (None, None) if insecure else key_of(name, key, passphrase_file)
    site = Site(
        name,
        csv.resolve(),
        images.resolve(),
        folder.resolve(),
        names_in(classes),
        device,
        names_in(ignore),
        group,
        window_in(window),
        skip_unreadable,
        tuple(file.resolve() for file in weights or ()),
        Limits(max_rounds, min_images, max_memory, names_in(methods), min_count),
        not yes,
        keep_cache,
        renamed_in(rename),
        None if out is None else out.resolve(),
    )
    take_part(site, joining.Access(server, None if insecure else ca, private, patience, passphrase), insecure, report)


def take_part(site: Site, access: Access, insecure: bool, report: bool = True) -> None:
    """What `check` finds stops it, all of it at once; then serve."""
    from fedmll.cli import display
    from fedmll.deploy import checking, joining

    with display.RunProgress(0) as progress:
        found = checking.check_site(site, None, access, progress.preparing, reach=False)
    if found.summary is not None:
        display.console.print(display.site_table(site.name, found.summary))
    for text in found.of("warning"):
        display.say(f"warning: {text}")
    if found.errors:
        raise DataError("\n".join(found.of("error")))
    if insecure:
        display.errors.print(INSECURE)
    with stoppable("the same command: nothing is lost"):
        joining.join(site, access, display.say, report, display.RunProgress(0).preparing)


def check(
    csv: Csv,
    images: Images,
    settings: Settings = None,
    study: Annotated[
        Path | None, typer.Option("--study", metavar="FILE.toml", help="The study, from the server's operator.")
    ] = None,
    server: Annotated[str | None, typer.Option("--server", metavar="HOST:PORT", help="Also try to reach it.")] = None,
    name: Annotated[str, typer.Option("--name", help="Your name in the federation.")] = "site",
    classes: Classes = None,
    ignore: Ignore = None,
    group: Group = None,
    window: Window = None,
    skip_unreadable: SkipUnreadable = False,
    rename: Rename = None,
    ca: Ca = CA,
    key: Key = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    memory: Memory = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.json", help="The findings as a file.")] = None,
) -> None:
    """Whether you can join: labels, class names, images, patients, disk, keys, server and clock, all at once.

    Exit code 0: yes, perhaps with warnings; 1: no. Example:
    [bold]fedmll check --csv labels.csv --images scans --study study.toml --server fed.example.org:8000 --name a[/]
    """
    from fedmll.cli import display
    from fedmll.deploy import checking, joining, keys
    from fedmll.deploy.site import Site
    from fedmll.experiment import Experiment

    folder = memory or Path(f"fedmll-{keys.check_name(name)}")
    private, passphrase = (None, None) if insecure else key_of(name, key, passphrase_file)
    site = Site(
        name, csv.resolve(), images.resolve(), folder.resolve(),
        names_in(classes), ignore=names_in(ignore), group=group, window=window_in(window),
        skip_unreadable=skip_unreadable, rename=renamed_in(rename),
    )  # fmt: skip
    wanted = None if study is None else Experiment.load(study)
    access = None if server is None else joining.Access(server, None if insecure else ca, private, 0, passphrase)
    with display.RunProgress(0) as progress:
        found = checking.check_site(site, wanted, access, progress.preparing)
    if found.summary is not None:
        display.console.print(display.site_table(name, found.summary))
    display.console.print(display.findings_table(found.findings))
    if out is not None:
        found.write(out)
        display.say(f"written: {out}")
    if found.errors:
        raise typer.Exit(1)


def key_of(name: str, key: Path | None, passphrase_file: Path | None) -> tuple[Path, str | None]:
    """A client's private key and, if it has one, its passphrase."""
    from fedmll.deploy.private import passphrase_of

    private = key or Path(f"keys/{name}.key")
    return private, passphrase_of(private, passphrase_file) if private.is_file() else None


def renamed_in(file: Path | None) -> tuple[tuple[str, str], ...]:
    """The columns own and study of a CSV."""
    import csv

    if file is None:
        return ()
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            found = csv.DictReader(opened)
            if not {"own", "study"} <= set(found.fieldnames or ()):
                raise KeyError
            return tuple((row["own"].strip(), row["study"].strip()) for row in found)
    except (OSError, UnicodeDecodeError, KeyError, AttributeError, csv.Error):
        raise ConfigError(f"{file} is no CSV with the columns own and study, a class a row (--rename).") from None
