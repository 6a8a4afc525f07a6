"""The options that commands share, and what they mean."""

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

from fedmll import registry
from fedmll.cli.presets import PRESET, preset
from fedmll.errors import ConfigError

if TYPE_CHECKING:
    from fedmll.experiment import Experiment

File = Annotated[
    Path | None,
    typer.Argument(metavar="FILE.toml", help="The experiment, or preset:PAPER/TABLE; without it, the defaults."),
]
Root = Annotated[Path | None, typer.Option("--root", help="Where the data lies.", show_default=False)]
Workers = Annotated[int | None, typer.Option("--workers", help="Worker processes; 0: in this process. Default: cores.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or auto.")]
SkipUnreadable = Annotated[
    bool, typer.Option("--skip-unreadable", help="Leave out images that are missing or cannot be decoded.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="section.key=value", help="Any setting, e.g. training.lr=3e-4.")
]


def take_settings(context: typer.Context, file: Path | None) -> Path | None:
    """A command's own options from a TOML; what is said on the command line counts more."""
    if file is None:
        return None
    from fedmll.errors import nearest
    from fedmll.experiment import read_toml

    known = {parameter.name or "" for parameter in context.command.params} - {"settings", "help"}
    values = {name.replace("-", "_"): value for name, value in read_toml(file).items()}
    strange = next((name for name in values if name not in known), None)
    if strange is not None:
        shown = [name.replace("_", "-") for name in known]
        raise ConfigError(f"{file}: '{strange}' is no option of `{context.info_name}`{nearest(strange, shown)}")
    repeatable = {parameter.name for parameter in context.command.params if getattr(parameter, "multiple", False)}
    context.default_map = {
        name: ",".join(map(str, value)) if isinstance(value, list) and name not in repeatable else value
        for name, value in values.items()
    }
    return file


Settings = Annotated[
    Path | None,
    typer.Option("--settings", metavar="FILE.toml", help="These options from a file: name = \"hospital-a\", …",
                 is_eager=True, callback=take_settings),
]  # fmt: skip
Plugins = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE.py", help="Python code with methods, data, … of your own; repeatable."),
]
Classes = Annotated[str | None, typer.Option("--classes", help="Use only these columns, comma-separated.")]
Ignore = Annotated[str | None, typer.Option("--ignore", help="Columns that are no classes, comma-separated.")]
Group = Annotated[
    str | None, typer.Option("--group", help="The column whose rows stay on one side of a split: patient.")
]
Window = Annotated[
    str | None, typer.Option("--window", help="LOW,HIGH: what becomes black and white in images of more than 8 bits.")
]
Track = Annotated[
    str | None,
    typer.Option(
        "--track",
        metavar="[NAMES]",
        help="Also send every round to tensorboard (default) or mlflow, comma-separated (extra `track`).",
    ),
]
Published = Annotated[
    str | None,
    typer.Option(
        "--as-published",
        metavar="[METHOD]",
        help="Train as a method's paper does (rounds, lr, …): the chosen method's own, or another's.",
    ),
]
OWN = "own"  # --as-published without a name: the paper of the method that is run

# An option that is a setting: which, and how it is shown
SETTINGS: dict[str, tuple[str, Any]] = {
    "method": ("method.name", Annotated[str | None, typer.Option(help="A method (see `fedmll methods`).")]),
    "data": ("data.name", Annotated[str | None, typer.Option(help="A data source (see `fedmll data list`).")]),
    "root": ("data.root", Root),
    "backbone": (
        "model.backbone",
        Annotated[str | None, typer.Option(help="convnet, resnet18, vit; mlp for feature vectors.")],
    ),
    "clients": ("partition.clients", Annotated[int | None, typer.Option(help="How many clients.")]),
    "rounds": ("training.rounds", Annotated[int | None, typer.Option(help="How many rounds.")]),
    "seed": ("seed", Annotated[int | None, typer.Option(help="The seed of everything random.")]),
    "workers": ("engine.workers", Workers),
    "device": ("engine.device", Device),
    "skip_unreadable": ("data.skip_unreadable", SkipUnreadable),
}


@dataclass(frozen=True)
class Asked:
    """What a command line says of an experiment."""

    file: Path | None
    options: dict[str, Any]  # section.key → value
    settings: list[str] | None  # --set
    plugins: list[Path] | None
    published: str | None = None

    def experiment(self) -> Experiment:
        """The file's values, then the options, then --set; published settings only where none of them speaks."""
        from fedmll.experiment import Experiment, merged, read_toml

        if self.file is not None and str(self.file).startswith(PRESET):
            values = self._of_method(preset(str(self.file)))
        else:
            values = {} if self.file is None else self._of_method(read_toml(self.file))
        values = merged(values, given(**self.options) | parse_settings(self.settings))
        if self.plugins:
            values["plugins"] = [*values.get("plugins", []), *map(str, self.plugins)]
        if self.published is not None:
            load_files([Path(file) for file in values.get("plugins", [])])  # the paper may be a plug-in's
            values = as_published(self.published, values)
        return Experiment.make(values)

    def _of_method(self, values: dict[str, Any]) -> dict[str, Any]:
        """With --method, the options of another method that the file has are left out, and it is said."""
        name, section = self.options.get("method.name"), values.get("method")
        if name is None or not isinstance(section, dict) or section.get("name", name) == name:
            return values
        bounded = parse_settings(self.settings).get("method.of", section.get("of")) == section["name"]
        others = sorted(section.keys() - {"name"})
        if not others or bounded:  # an upper bound has the options of what it bounds
            return values
        from fedmll.cli.tables import say

        say(f"--method {name}: the options of {section['name']} in {self.file} are not used ({', '.join(others)})")
        return {**values, "method": {}}


def asks(*names: str, published: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command FILE.toml, these options of SETTINGS, --set and --plugin; they arrive as its `asked`."""

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        shared: dict[str, tuple[Any, Any]] = {"file": (File, None)}
        shared |= {name: (SETTINGS[name][1], False if name == "skip_unreadable" else None) for name in names}
        shared |= {p.name: (p.annotation, p.default) for p in own if p.name != "asked"}
        shared |= {"settings": (Set, None), "plugins": (Plugins, None)}
        shared |= {"as_published": (Published, None)} if published else {}

        def called(**said: Any) -> None:
            options = {SETTINGS[name][0]: said.pop(name) for name in names}
            if not options.get("data.skip_unreadable"):  # not said
                options.pop("data.skip_unreadable", None)
            rest = (said.pop("settings"), said.pop("plugins"), said.pop("as_published", None))
            command(asked=Asked(said.pop("file"), options, *rest), **said)

        # what Typer reads a command's options from
        called.__annotations__ = {name: annotation for name, (annotation, _) in shared.items()}
        called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
                for name, (annotation, default) in shared.items()
            ]
        )
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        return called

    return wrap


def given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def load_files(plugins: list[Path] | None) -> None:
    for file in plugins or []:
        registry.load_file(file.expanduser().absolute())


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    from fedmll.experiment import parse_value

    values = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set takes section.key=value, for example training.lr=3e-4; it got '{setting}'.")
        values[key.strip()] = parse_value(value.strip())
    return values


def with_optional_value(words: list[str]) -> list[str]:
    """Options whose value may be left out, which Typer does not have: what is meant then is put in."""
    filled: list[str] = []
    for place, word in enumerate(words):
        filled.append(word)
        following = words[place + 1] if place + 1 < len(words) else "-"
        no_value = following.startswith("-") or following.endswith(".toml")
        if word == "--as-published" and no_value:
            filled.append(OWN)
        if word == "--track" and (no_value or Path(following).exists()):  # a folder or a file is not a tracker's name
            filled.append("tensorboard")
    return filled


def as_published(whose: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values with what a paper says where they say nothing; what it says and cannot be set here is named."""
    from fedmll.cli.tables import errors
    from fedmll.experiment import merged

    name = str(values.get("method", {}).get("name", "fedavg")) if whose == OWN else whose
    method = registry.find("method", name)
    if not method.published:
        known = ", ".join(known for known, cls in registry.all_of("method").items() if cls.published)
        raise ConfigError(f"'{name}' has no published settings of its own; say whose: --as-published {known}.")

    def said(key: str) -> bool:
        section, _, option = key.partition(".")
        return option in values.get(section, {})

    added = {key: value for key, value in method.published.items() if not said(key)}
    clients = values.get("partition", {}).get("clients", added.get("partition.clients"))
    theirs = whose not in (OWN, values.get("method", {}).get("name"))  # another method has not its options
    missing = {
        key: what for key, what in method.unpublished.items() if not said(key) and not (theirs and "method." in key)
    }
    if clients is not None and added.get("participation.count", 0) > clients:
        missing["participation.count"] = f"{added.pop('participation.count')} clients a round; there are {clients}"
    for key, what in missing.items():
        errors.print(f"[yellow]not as published:[/] {key}; the paper: {what}", highlight=False, soft_wrap=True)
    return merged(values, added)


def names_in(text: str | None) -> tuple[str, ...]:
    """Names, comma-separated."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def window_in(text: str | None) -> tuple[float, float] | None:
    """LOW,HIGH"""
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--window takes LOW,HIGH, for example 0,4095; it got '{text}'.") from None
    return low, high


@contextmanager
def stoppable(hint: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM stop cleanly and say how to go on."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        from fedmll.cli.tables import errors

        errors.print(f"\nStopped. Go on with: [bold]{escape(hint)}[/]", soft_wrap=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def fresh_folder(name: str) -> Path:
    """runs/NAME, or runs/NAME-2, … : the first that does not exist."""
    base = Path("runs") / name.replace(":", "-").replace("/", "-")
    folder, number = base, 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder
