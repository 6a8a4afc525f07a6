"""Options that several commands share, and how they become an experiment."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedmll.config.presets import PREFIX, load_preset
from fedmll.core import registry
from fedmll.core.errors import ConfigError

if TYPE_CHECKING:
    from fedmll.config.experiment import Experiment

File = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE.toml",
        help="An experiment file, or preset:PAPER/TABLE. Default: an experiment with default settings.",
    ),
]
Root = Annotated[Path | None, typer.Option("--root", help="The folder (or file) of the data.", show_default=False)]
Workers = Annotated[
    int | None, typer.Option("--workers", help="Worker processes; 0: train in this process. Default: one per core.")
]
EngineKind = Annotated[
    str | None, typer.Option("--engine", help="local (default), or ray: train on a Ray cluster (extra `ray`).")
]
Address = Annotated[
    str | None,
    typer.Option("--address", help="The Ray cluster, HOST:PORT or auto. Default: Ray starts on this machine."),
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, mps or auto.")]
SkipUnreadable = Annotated[
    bool, typer.Option("--skip-unreadable", help="Skip images that are missing or cannot be decoded.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="section.key=value", help="Any setting, for example training.lr=3e-4; repeatable."),
]


def read_options_file(context: typer.Context, file: Path | None) -> Path | None:
    """Read a command's options from a TOML file. Options on the command line take precedence."""
    if file is None:
        return None
    from fedmll.config.toml_values import read_toml
    from fedmll.core.text import suggest

    known = {parameter.name or "" for parameter in context.command.params} - {"settings", "help"}
    values = {name.replace("-", "_"): value for name, value in read_toml(file).items()}
    unknown = next((name for name in values if name not in known), None)
    if unknown is not None:
        shown = [name.replace("_", "-") for name in known]
        raise ConfigError(f"{file}: '{unknown}' is not an option of `{context.info_name}`{suggest(unknown, shown)}")
    repeatable = {parameter.name for parameter in context.command.params if getattr(parameter, "multiple", False)}
    context.default_map = {
        name: ",".join(map(str, value)) if isinstance(value, list) and name not in repeatable else value
        for name, value in values.items()
    }
    return file


Settings = Annotated[
    Path | None,
    typer.Option("--settings", metavar="FILE.toml", help="Read these options from a file: name = \"hospital-a\", …",
                 is_eager=True, callback=read_options_file),
]  # fmt: skip
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin", metavar="FILE.py", help="A Python file with your own methods, data sources, …; repeatable."
    ),
]
Classes = Annotated[str | None, typer.Option("--classes", help="Use only these columns, comma-separated.")]
Ignore = Annotated[str | None, typer.Option("--ignore", help="Columns to ignore, comma-separated.")]
Group = Annotated[
    str | None,
    typer.Option("--group", help="The patient column: all rows of a patient stay on one side of each split."),
]
Window = Annotated[
    str | None,
    typer.Option("--window", help="LOW,HIGH: the values that become black and white in images with more than 8 bits."),
]
Track = Annotated[
    str | None,
    typer.Option(
        "--track",
        metavar="[NAMES]",
        help="Also log each round to tensorboard (default) or mlflow, comma-separated (extra `track`).",
    ),
]
Published = Annotated[
    str | None,
    typer.Option(
        "--as-published",
        metavar="[METHOD]",
        help="Use the training settings of a method's paper (rounds, lr, …). Default: the chosen method.",
    ),
]
OWN = "own"  # --as-published without a name: the paper of the chosen method
NOT_PUBLISHED = {  # what no paper does
    "model.standardise": False,
    "model.bias": "zero",
    "model.stages": (),
    "model.power": "none",
    "model.flip_average": False,
}

# option → its setting and its help
SETTINGS: dict[str, tuple[str, Any]] = {
    "method": ("method.name", Annotated[str | None, typer.Option(help="A method (see `fedmll methods`).")]),
    "data": ("data.name", Annotated[str | None, typer.Option(help="A data source (see `fedmll data list`).")]),
    "root": ("data.root", Root),
    "backbone": (
        "model.backbone",
        Annotated[str | None, typer.Option(help="convnet, resnet18, vit, …; mlp for feature vectors.")],
    ),
    "clients": ("partition.clients", Annotated[int | None, typer.Option(help="The number of clients.")]),
    "rounds": ("training.rounds", Annotated[int | None, typer.Option(help="The number of rounds.")]),
    "seed": ("seed", Annotated[int | None, typer.Option(help="The seed of all random draws.")]),
    "engine": ("engine.kind", EngineKind),
    "address": ("engine.address", Address),
    "workers": ("engine.workers", Workers),
    "device": ("engine.device", Device),
    "skip_unreadable": ("data.skip_unreadable", SkipUnreadable),
}


@dataclass(frozen=True, kw_only=True)
class ExperimentArguments:
    """The parts of a command line that define an experiment."""

    file: Path | None
    options: dict[str, Any]  # section.key → value
    settings: list[str] | None = None  # --set
    plugins: list[Path] | None = None
    published: str | None = None

    def experiment(self) -> Experiment:
        """The experiment: values of the file, then options, then --set. Published settings fill in the others."""
        from fedmll.config.experiment import Experiment
        from fedmll.config.toml_values import merge_overrides, read_toml

        if self.file is not None and str(self.file).startswith(PREFIX):
            values = self._without_other_options(load_preset(str(self.file)))
        else:
            values = {} if self.file is None else self._without_other_options(read_toml(self.file))
        values = merge_overrides(values, drop_none(**self.options) | parse_settings(self.settings))
        if self.plugins:
            values["plugins"] = [*values.get("plugins", []), *map(str, self.plugins)]
        if self.published is not None:
            load_plugin_files([Path(file) for file in values.get("plugins", [])])  # the method may be in a plug-in
            values = as_published(self.published, values)
        return Experiment.make(values)

    def _without_other_options(self, values: dict[str, Any]) -> dict[str, Any]:
        """With --method, drop the file's options of another method, and print a message."""
        name, section = self.options.get("method.name"), values.get("method")
        if name is None or not isinstance(section, dict) or section.get("name", name) == name:
            return values
        is_bound = parse_settings(self.settings).get("method.of", section.get("of")) == section["name"]
        others = sorted(section.keys() - {"name"})
        if not others or is_bound:  # an upper bound takes the options of its method
            return values
        from fedmll.cli.output import say

        say(f"--method {name}: the options of {section['name']} in {self.file} are not used ({', '.join(others)})")
        return {**values, "method": {}}


def experiment_options(*names: str, published: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command FILE.toml, these options of SETTINGS, --set and --plugin.

    The command gets them as its parameter `arguments`.
    """

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        shared: dict[str, tuple[Any, Any]] = {"file": (File, None)}
        shared |= {name: (SETTINGS[name][1], False if name == "skip_unreadable" else None) for name in names}
        shared |= {p.name: (p.annotation, p.default) for p in own if p.name != "arguments"}
        shared |= {"set": (Set, None), "plugins": (Plugins, None)}
        shared |= {"as_published": (Published, None)} if published else {}

        def call(**values: Any) -> None:
            options = {SETTINGS[name][0]: values.pop(name) for name in names}
            if not options.get("data.skip_unreadable"):  # not given
                options.pop("data.skip_unreadable", None)
            arguments = ExperimentArguments(
                file=values.pop("file"),
                options=options,
                settings=values.pop("set"),
                plugins=values.pop("plugins"),
                published=values.pop("as_published", None),
            )
            command(arguments=arguments, **values)

        return with_parameters(call, command, shared)

    return wrap


def with_parameters(
    call: Callable[..., None], command: Callable[..., None], parameters: dict[str, tuple[Any, Any]]
) -> Callable[..., None]:
    """`call` with the name and the help of `command`, and with these parameters (name → annotation and default), from
    which Typer makes the options."""
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {name: annotation for name, (annotation, _) in parameters.items()}
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in parameters.items()
        ]
    )
    return call


def drop_none(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def load_plugin_files(plugins: list[Path] | None) -> None:
    for file in plugins or []:
        registry.load_plugin_file(file.expanduser().absolute())


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    from fedmll.config.toml_values import parse_value

    values = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set takes section.key=value, for example training.lr=3e-4; it got '{setting}'.")
        values[key.strip()] = parse_value(value.strip())
    return values


def fill_optional_values(words: list[str]) -> list[str]:
    """Insert default values of options whose value may be left out, which Typer does not support."""
    filled: list[str] = []
    for place, word in enumerate(words):
        filled.append(word)
        following = words[place + 1] if place + 1 < len(words) else "-"
        no_value = following.startswith("-") or following.endswith(".toml")
        if word == "--as-published" and no_value:
            filled.append(OWN)
        if word == "--track" and (
            no_value or Path(following).exists()
        ):  # a folder or a file is not the name of a tracker
            filled.append("tensorboard")
    return filled


def as_published(whose: str, values: dict[str, Any]) -> dict[str, Any]:
    """Fill in a paper's settings where `values` has none; print those that cannot be used here."""
    from fedmll.cli.output import errors
    from fedmll.config.toml_values import merge_overrides

    name = str(values.get("method", {}).get("name", "fedavg")) if whose == OWN else whose
    method = registry.find("method", name)
    if not method.published:
        known = ", ".join(known for known, cls in registry.all_of("method").items() if cls.published)
        raise ConfigError(f"'{name}' has no published settings; name a method: --as-published {known}.")

    def is_set(key: str) -> bool:
        section, _, option = key.partition(".")
        return option in values.get(section, {})

    added = {key: value for key, value in (NOT_PUBLISHED | method.published).items() if not is_set(key)}
    partition, data = values.get("partition", {}), str(values.get("data", {}).get("name", ""))
    if partition.get("kind", "natural" if data.startswith("flair:") else "") == "natural":
        added.pop("partition.clients", None)  # each group of the data is a client; a number would merge them
    clients = values.get("partition", {}).get("clients", added.get("partition.clients"))
    other_method = whose not in (OWN, values.get("method", {}).get("name"))  # its method options do not apply
    missing = {
        key: what
        for key, what in method.unpublished.items()
        if not is_set(key) and not (other_method and "method." in key)
    }
    if clients is not None and added.get("participation.count", 0) > clients:
        missing["participation.count"] = f"{added.pop('participation.count')} clients per round; there are {clients}"
    for key, what in missing.items():
        errors.print(f"[yellow]not as published:[/] {key}; the paper: {what}", highlight=False, soft_wrap=True)
    return merge_overrides(values, added)


def split_names(text: str | None) -> tuple[str, ...]:
    """Split comma-separated names."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def parse_window(text: str | None) -> tuple[float, float] | None:
    """Parse LOW,HIGH."""
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--window takes LOW,HIGH, for example 0,4095; it got '{text}'.") from None
    return low, high


@contextmanager
def interruptible(hint: str) -> Iterator[None]:
    """On Ctrl-C and SIGTERM, stop cleanly and print how to continue."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        from fedmll.cli.output import errors

        errors.print(f"\nStopped. Continue with: [bold]{escape(hint)}[/]", soft_wrap=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def new_run_folder(name: str) -> Path:
    """The first of runs/NAME, runs/NAME-2, … that does not exist."""
    base = Path("runs") / name.replace(":", "-").replace("/", "-")
    folder, number = base, 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder
