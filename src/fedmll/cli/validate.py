"""The command of who tests and never trains: validate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedmll.cli.federation import Insecure, PassphraseFile
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
    window_in,
)
from fedmll.cli.site import (
    CA,
    PATIENCE,
    Ca,
    Csv,
    Device,
    Images,
    Key,
    Memory,
    MinCount,
    Patience,
    Rename,
    Weights,
    Yes,
    key_of,
    renamed_in,
    take_part,
)
from fedmll.errors import ConfigError

if TYPE_CHECKING:
    from fedmll.deploy.site import Site
    from fedmll.deploy.validating import Validated

PRINTED = ("map", "macro_auc", "macro_f1", "macro_f1_tuned", "bacc", "micro_auc", "micro_f1")
BY_CLASS = ("ap", "auc", "f1", "precision", "recall", "positives", "known")


def register(app: typer.Typer) -> None:
    app.command()(validate)


def validate(
    target: Annotated[
        str, typer.Argument(metavar="SERVER_OR_MODEL", help="HOST:PORT, a run's folder or a model.safetensors.")
    ],
    csv: Csv,
    images: Images,
    settings: Settings = None,
    name: Annotated[str | None, typer.Option("--name", help="With a server: your name there.")] = None,
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
    out: Annotated[
        Path | None,
        typer.Option("--out", help="With a model: the JSON file of counts. With a server: the folder of what you get."),
    ] = None,
    min_count: MinCount = 10,
    plugins: Plugins = None,
) -> None:
    """Test a model on your own images, and never train: of a running federation, or a file's.

    Examples:  [bold]fedmll validate fed.example.org:8000 --name lab --csv labels.csv --images scans[/]  ·
    [bold]fedmll validate model.safetensors --csv labels.csv --images scans --out counts.json[/]
    """
    from fedmll.deploy.approval import Limits
    from fedmll.deploy.joining import Access
    from fedmll.deploy.keys import check_name
    from fedmll.deploy.site import Site

    load_files(plugins)
    at_server = is_server(target)
    if at_server and name is None:
        raise ConfigError("A server knows you by your name: give it with --name.")
    called = check_name(name or "site")
    site = Site(
        called, csv.resolve(), images.resolve(), (memory or Path(f"fedmll-{called}")).resolve(),
        names_in(classes), device, names_in(ignore), group, window_in(window), skip_unreadable,
        tuple(file.resolve() for file in weights or ()), limits=Limits(min_count=min_count),
        asks=not yes, rename=renamed_in(rename), validates=True,
        out=out.resolve() if out is not None and at_server else None,
    )  # fmt: skip
    if not at_server:
        on_a_file(Path(target), site, out, plugins)
        return
    private, passphrase = (None, None) if insecure else key_of(called, key, passphrase_file)
    take_part(site, Access(target, None if insecure else ca, private, patience, passphrase), insecure)


def is_server(target: str) -> bool:
    """HOST:PORT, unless there is such a file."""
    host, _, port = target.rpartition(":")
    return bool(host) and port.isdigit() and not Path(target).exists()


def on_a_file(target: Path, site: Site, out: Path | None, plugins: list[Path] | None) -> None:
    from fedmll.cli import display
    from fedmll.deploy.validating import validate_model
    from fedmll.running.saved import SavedRun, run_or_model

    found = run_or_model(target, plugins=plugins)
    model = found.model if isinstance(found, SavedRun) else found
    with display.RunProgress(0) as progress:
        validated = validate_model(model, site, progress.preparing)
    show(validated)
    if out is not None:
        validated.write(out)
        display.say(f"counts and metrics that may be sent: {out}")


def show(validated: Validated) -> None:
    from fedmll.cli import display
    from fedmll.report.metric_names import called

    report = validated.report
    values = [(called(name), f"{report.values[name]:.2f}") for name in PRINTED if name in report.values]
    title = f"{validated.model.name} on {validated.images} images"
    display.console.print(display.plain_table(title, ("metric", "%"), values))
    lines = [
        (escape(name), *(f"{report.per_class[key][column]:.{0 if key in BY_CLASS[-2:] else 2}f}" for key in BY_CLASS))
        for column, name in enumerate(validated.classes)
    ]
    display.console.print(display.plain_table("by class", ("class", *BY_CLASS), lines))
    if validated.few:
        display.say(f"too few images to say much, and not in the file: {', '.join(validated.few)}")
