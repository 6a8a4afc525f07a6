"""The commands at a site: check, join, validate."""

from __future__ import annotations

import csv as csv_format
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from fedmll.cli.options import (
    Classes,
    Group,
    Ignore,
    Plugins,
    Settings,
    SkipUnreadable,
    Window,
    interruptible,
    load_plugin_files,
    parse_window,
    split_names,
    with_parameters,
)
from fedmll.cli.output import console, errors, print_table, say
from fedmll.cli.predict import load_model_of
from fedmll.cli.server import INSECURE, Insecure, PassphraseFile
from fedmll.core.addresses import is_address
from fedmll.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fedmll.deploy.site.server_access import ServerAccess
    from fedmll.deploy.site.site_config import Site
    from fedmll.deploy.site.validate import ModelValidation

FOLDER = "folder"  # the only kind of data at a site


@dataclass(frozen=True, kw_only=True)
class SiteOptions:
    """The options that check, join and validate share: the site's data and keys."""

    csv: Annotated[
        Path, typer.Option(help="The labels: one row per image, one column per class; 1, 0 or blank (unknown).")
    ]
    images: Annotated[Path, typer.Option(help="The folder that the paths in the CSV start from.")]
    settings: Settings = None
    classes: Classes = None
    ignore: Ignore = None
    group: Group = None
    window: Window = None
    skip_unreadable: SkipUnreadable = False
    rename: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Your class names and the study's: a CSV with the columns own,study."),
    ] = None
    ca: Annotated[Path, typer.Option(help="The CA's certificate, from the server's operator.")] = Path("keys/ca.crt")
    key: Annotated[Path | None, typer.Option(help="Your private key. Default: keys/NAME.key.")] = None
    passphrase_file: PassphraseFile = None
    insecure: Insecure = False
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Your client's own folder. Default: fedmll-NAME.")
    ] = None

    def site(self, name: str, **more: Any) -> Site:
        """The site that these options describe; `more` are further fields of `Site`."""
        from fedmll.config.settings import ReadingOptions
        from fedmll.deploy.security.client_keys import check_client_name
        from fedmll.deploy.site.site_config import Site

        folder = self.state_dir or Path(f"fedmll-{check_client_name(name)}")
        return Site(
            name=name,
            csv=self.csv.resolve(),
            images=self.images.resolve(),
            state_dir=folder.resolve(),
            reading=ReadingOptions(
                classes=split_names(self.classes),
                ignore=split_names(self.ignore),
                group=self.group,
                window=parse_window(self.window),
                skip_unreadable=self.skip_unreadable,
                by_options=True,
            ),
            class_renames=read_class_renames(self.rename),
            **more,
        )

    def access(self, name: str, server: str, patience: float = 0) -> ServerAccess:
        """How the server is reached."""
        from fedmll.deploy.security.private_keys import read_passphrase
        from fedmll.deploy.site.server_access import ServerAccess

        if self.insecure:
            return ServerAccess(server=server, ca=None, key=None, patience=patience)
        key = self.key or Path(f"keys/{name}.key")
        passphrase = read_passphrase(key, self.passphrase_file) if key.is_file() else None
        return ServerAccess(server=server, ca=self.ca, key=key, patience=patience, passphrase=passphrase)


@dataclass(frozen=True, kw_only=True)
class JoinOptions(SiteOptions):
    """The options that join and validate share."""

    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto"
    patience: Annotated[float, typer.Option(help="Seconds to wait for a server that is not reachable.")] = 12 * 3600
    approve: Annotated[
        str | None, typer.Option(metavar="DIGEST", help="Take part only in the study with this digest, and do not ask.")
    ] = None
    weights: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Your copy of a file that the experiment needs; repeatable."),
    ] = None
    min_count: Annotated[
        int, typer.Option(help="Send no count or metric of a class with fewer positive or negative images.")
    ] = 10
    plugins: Plugins = None

    def site(self, name: str, **more: Any) -> Site:
        from fedmll.deploy.experiment_for_sites import parse_digest

        return super().site(
            name,
            device=self.device,
            local_files=tuple(file.resolve() for file in self.weights or ()),
            needs_approval=True,
            approved_digest=parse_digest(self.approve),
            **more,
        )


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `options`, a dataclass, by one command-line option per field of the dataclass."""
    own = {name: (p.annotation, p.default) for name, p in inspect.signature(command, eval_str=True).parameters.items()}
    record, _ = own.pop("options")
    hints, empty = get_type_hints(record, include_extras=True), inspect.Parameter.empty
    shared = {f.name: (hints[f.name], empty if f.default is MISSING else f.default) for f in fields(record)}
    required = {name: parameter for name, parameter in own.items() if parameter[1] is empty}

    def call(**values: Any) -> None:
        command(options=record(**{name: values.pop(name) for name in shared}), **values)

    return with_parameters(call, command, required | shared | own)


def register(app: typer.Typer) -> None:
    for command in (check, join, validate):
        app.command()(command)


@expand_options
def check(
    options: SiteOptions,
    study: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="The study, from the server's operator.")
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The number of clients in the study, which is needed for its digest."),
    ] = None,
    server: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Also connect to the server.")] = None,
    name: Annotated[str, typer.Option(help="Your name in the federation.")] = "site",
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Also write the results to a file.")] = None,
) -> None:
    """Check whether you can join a federation: labels, class names, images, patients, disk, keys, server and clock.

    All problems are reported at once. Exit code 0: you can join, perhaps with warnings; 1: you cannot.

    Example:
    [bold]fedmll check --csv labels.csv --images scans --study study.toml --server fed.example.org:8000 --name a[/]
    """
    from fedmll.cli import display
    from fedmll.config.experiment import Experiment
    from fedmll.deploy.site.check import check_site

    site = options.site(name)
    experiment = None if study is None else Experiment.load(study)
    access = None if server is None else options.access(name, server)
    with display.RunProgress(0) as progress:
        result = check_site(site, experiment, access, progress.on_setup_progress, clients=clients)
    if result.summary is not None:
        console.print(display.site_table(name, result.summary))
    console.print(display.check_table(result.results))
    if out is not None:
        result.write(out)
        say(f"written: {out}")
    if result.errors:
        raise typer.Exit(1)


@expand_options
def join(
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The federation's server.")],
    name: Annotated[str, typer.Option(help="Your name in the federation.")],
    options: JoinOptions,
    data: Annotated[str, typer.Option(help="The kind of data; 'folder' is the only one.")] = FOLDER,
    keep_cache: Annotated[
        bool, typer.Option("--keep-cache", help="Keep the prepared images in --state-dir when the run is over.")
    ] = False,
    max_rounds: Annotated[int, typer.Option(help="Do not take part in a run with more rounds.")] = 1000,
    max_epochs: Annotated[int, typer.Option(help="Do not take part in a run with more epochs per round.")] = 100,
    max_hours: Annotated[
        float, typer.Option(help="The longest time of training and testing in this join, in hours.")
    ] = 720.0,
    min_images: Annotated[int, typer.Option(help="Do not take part with fewer training images.")] = 10,
    max_memory: Annotated[float, typer.Option(help="The largest memory for the model and one batch, in GB.")] = 4.0,
    methods: Annotated[str | None, typer.Option(help="The only methods that you allow, comma-separated.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder for the model and the report. Default: --state-dir.")
    ] = None,
    report: Annotated[
        bool,
        typer.Option(
            "--report/--no-report",
            help="At the end, train a local model and compare the federated model with it on your own test data.",
        ),
    ] = True,
) -> None:
    """Take part in a federation with your own images.

    Your data is checked first.
    You approve the study at the terminal, or in advance with --approve DIGEST.
    Then your site trains until the run is over.
    In the end you have the model and a report on how good it is on your own test data.

    Example:  [bold]fedmll join federation.example.org:8000 --name hospital-a --csv labels.csv --images scans[/]
    """
    from fedmll.deploy.site.site_config import SiteLimits
    from fedmll.methods import find

    load_plugin_files(options.plugins)
    if data != FOLDER:
        raise ConfigError(f"--data takes '{FOLDER}' (a CSV and a folder of images); it got '{data}'.")
    for method in split_names(methods):
        find(method)  # a misspelt name is an error here, not a rejection later
    limits = SiteLimits(
        max_rounds=max_rounds,
        max_epochs=max_epochs,
        max_hours=max_hours,
        min_images=min_images,
        max_memory=max_memory,
        methods=split_names(methods),
        min_count=options.min_count,
    )
    site = options.site(name, limits=limits, keep_cache=keep_cache, out=None if out is None else out.resolve())
    take_part(site, options.access(name, server, options.patience), report)


@expand_options
def validate(
    target: Annotated[
        str, typer.Argument(metavar="SERVER_OR_MODEL", help="HOST:PORT, the folder of a run or a model.safetensors.")
    ],
    options: JoinOptions,
    name: Annotated[str | None, typer.Option(help="With a server: your name there.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="With a model: the JSON file for the counts. With a server: the folder for the model and the report."
        ),
    ] = None,
) -> None:
    """Test a model on your own images without training: the model of a running federation, or a model file.

    Examples:  [bold]fedmll validate fed.example.org:8000 --name lab --csv labels.csv --images scans[/]  ·
    [bold]fedmll validate model.safetensors --csv labels.csv --images scans --out counts.json[/]
    """
    from fedmll.deploy.site.site_config import SiteLimits

    load_plugin_files(options.plugins)
    at_server = is_server(target)
    if at_server and name is None:
        raise ConfigError("A server identifies you by your name: give it with --name.")
    name = name or "site"
    output_dir = out.resolve() if out is not None and at_server else None
    limits = SiteLimits(min_count=options.min_count)
    site = options.site(name, limits=limits, validation_only=True, out=output_dir)
    if at_server:
        take_part(site, options.access(name, target, options.patience))
    else:
        validate_file(Path(target), site, out, options.plugins)


def is_server(target: str) -> bool:
    """Whether the argument is HOST:PORT and not the name of an existing file."""
    return is_address(target) and not Path(target).exists()


def take_part(site: Site, access: ServerAccess, report: bool = True) -> None:
    """Check the data, report all problems at once, then serve."""
    from fedmll.cli import display
    from fedmll.deploy.site.check import check_site
    from fedmll.deploy.site.join import join as join_federation

    with display.RunProgress(0) as progress:
        result = check_site(site, None, access, progress.on_setup_progress, connect=False)
    if result.summary is not None:
        console.print(display.site_table(site.name, result.summary))
    for text in result.texts("warning"):
        say(f"warning: {text}")
    if result.errors:
        raise DataError("\n".join(result.texts("error")))
    if access.ca is None:
        errors.print(INSECURE)
    with interruptible("the same command: nothing is lost"):
        join_federation(site, access, display.say, report, display.RunProgress(0).on_setup_progress)


def validate_file(target: Path, site: Site, out: Path | None, plugins: list[Path] | None) -> None:
    from fedmll.cli import display
    from fedmll.deploy.site.validate import validate_model

    _, model = load_model_of(target, plugins)
    with display.RunProgress(0) as progress:
        validation = validate_model(model, site, progress.on_setup_progress)
    show_validation(validation)
    if out is not None:
        validation.write(out)
        say(f"counts and metrics that may be sent: {out}")


def show_validation(validation: ModelValidation) -> None:
    from fedmll.evaluation.metric_definitions import CLASS_COLUMNS, EXTERNAL, label_of, metrics_in

    report = validation.report
    values = [(label_of(name), f"{report.values[name]:.2f}") for name in metrics_in(EXTERNAL) if name in report.values]
    title = f"{validation.model.name} on {validation.images} images"
    print_table(title, ("metric", "%"), values)
    digits = {key: 0 if key in CLASS_COLUMNS[-2:] else 2 for key in CLASS_COLUMNS}
    rows = [
        (name, *(f"{report.per_class[key][column]:.{digits[key]}f}" for key in CLASS_COLUMNS))
        for column, name in enumerate(validation.classes)
    ]
    print_table("by class", ("class", *CLASS_COLUMNS), rows)
    if validation.withheld_classes:
        names = ", ".join(validation.withheld_classes)
        say(f"too few images for reliable metrics, and not in the file: {names}")


def read_class_renames(file: Path | None) -> tuple[tuple[str, str], ...]:
    """The pairs (own, study) of a CSV with these two columns."""
    if file is None:
        return ()
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened_file:
            rows = csv_format.DictReader(opened_file)
            if not {"own", "study"} <= set(rows.fieldnames or ()):
                raise KeyError
            return tuple((row["own"].strip(), row["study"].strip()) for row in rows)
    except (OSError, UnicodeDecodeError, KeyError, AttributeError, csv_format.Error):
        raise ConfigError(
            f"{file} is not a CSV with the columns own and study, one row per class (--rename)."
        ) from None
