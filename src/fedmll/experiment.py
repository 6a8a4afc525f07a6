"""Experiment: everything that defines a run, validated before anything starts; TOML in, complete TOML out."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tomli_w
from pydantic import BaseModel, Field, PrivateAttr, ValidationError, field_validator, model_validator

from fedmll import registry
from fedmll.errors import ConfigError, nearest
from fedmll.settings import (
    AUTO,
    LATER,
    RUN,
    Annotation,
    Data,
    Engine,
    MethodSection,
    Model,
    Participation,
    Partition,
    Section,
    Sites,
    Training,
)

M = TypeVar("M", bound=BaseModel)
DEFAULT_CLIENTS = 10


class Experiment(Section):
    """Everything that a result depends on, checked when it is made. `Experiment()` has the defaults."""

    seed: Annotated[int, Field(ge=0)] = 0
    data: Data = Data()
    partition: Partition = Partition()
    annotation: Annotation = Annotation()
    model: Model = Model()
    method: MethodSection = MethodSection()
    training: Training = Training()
    participation: Participation = Participation()
    engine: Engine = Engine()
    sites: Sites | None = None
    plugins: tuple[str, ...] = ()  # files (--plugin); installed packages need not be named

    _asked: dict[str, Any] = PrivateAttr(default_factory=dict)  # what was said; the rest is defaults and rules
    _notes: tuple[str, ...] = PrivateAttr(default=())

    @field_validator("plugins")
    @classmethod
    def _anchor(cls, files: tuple[str, ...]) -> tuple[str, ...]:
        """Paths become absolute, so that a run can go on from another folder."""
        return tuple(dict.fromkeys(str(Path(file).expanduser().absolute()) for file in files))

    @model_validator(mode="after")
    def _fill_in(self) -> Experiment:
        """Write every default out and decide every "auto" that needs no data, so that the saved file says all; refuse
        what cannot work together."""
        for file in self.plugins:
            registry.load_file(Path(file))
        method = registry.find("method", self.method.name)
        self.__dict__["method"] = MethodSection(name=self.method.name, **method.named(self.method.options))
        self._asked = self.model_dump(exclude_unset=True)
        options = _validated(method.options_class(self.method.options), self.method.options, "method")
        found = method.resolve(options, self)
        self._notes = tuple(f"method.{name} = {value} ({why})" for name, (value, why) in found.items() if why)
        decided = merged(options.model_dump(), {name: value for name, (value, _) in found.items()})
        self.__dict__["method"] = MethodSection(name=self.method.name, **_said(decided))
        if self.training.keep == AUTO:
            self.training.keep = method.keep
        if (rounds := method.rounds(options)) is not None:
            self.training.rounds = rounds
        elif not self.training.rounds:
            raise ConfigError(f"training.rounds = 0: '{method.name}' would learn nothing. Set 1 or more.")
        source = registry.all_of("source").get(self.data.source)  # None: the server of a federation may have no data
        self._check_names(features=source is not None and not source.images)
        self._check_clients(may_be_natural=source is not None and source.says_clients)
        self._check_views(images=source is None or source.images)
        self._scale_pixels()
        if self.model.weights is not None and not self.model.weights.startswith("run:") and self.model.stem == AUTO:
            self.model.stem = "imagenet"  # what published weights were trained with, however small the images are
        _ = self.data.reading  # refuses what is no window, and columns named twice
        method.check(self)
        return self

    def _check_views(self, images: bool) -> None:
        """What is augmented is an image; of a frozen backbone only the kept views are."""
        views, augmented = self.model.views, self.training.augment != "none"
        if self.model.freeze != "backbone" or not images:
            if views > 1:
                raise ConfigError(f"model.views = {views} is for images and model.freeze = 'backbone'; leave it out.")
        elif augmented != (views > 1):
            raise ConfigError(
                f"With model.freeze = 'backbone' images are augmented before they are kept: training.augment = "
                f"'{self.training.augment}' and model.views = {views} do not go together. Set both (model.views = 4, "
                "training.augment = 'crop-flip'), or none."
            )

    def _check_names(self, features: bool) -> None:
        if self.model.backbone == AUTO:
            self.model.backbone = "mlp" if features else "convnet"
        for kind, key, name in (
            ("backbone", "model.backbone", self.model.backbone),
            ("partition", "partition.kind", self.partition.kind),
            ("annotation", "annotation.kind", self.annotation.kind),
            ("loss", "training.loss", self.training.loss),
            ("augmentation", "training.augment", self.training.augment),
        ):
            try:
                if (key, name) != ("partition.kind", AUTO):  # the data decides
                    registry.find(kind, name)
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}") from None
        if (self.model.backbone == "mlp") != features and self.model.backbone not in registry.added("backbone"):
            raise ConfigError(
                f"model.backbone = '{self.model.backbone}' does not fit data.name = '{self.data.label}': mlp is for "
                "feature vectors (features:FILE.npz), the other backbones are for images."
            )

    def _check_clients(self, may_be_natural: bool) -> None:
        if self.partition.clients is None and self.partition.kind not in ("natural", "file", AUTO):
            self.partition.clients = DEFAULT_CLIENTS
        clients, count = self.partition.clients, self.participation.count
        if clients is None and self.partition.kind == AUTO and not may_be_natural:
            clients = DEFAULT_CLIENTS
        if clients and count and count > clients:
            raise ConfigError(
                f"participation.count = {count} is more than partition.clients = {clients}; lower it, or leave it "
                "out for all clients."
            )

    def _scale_pixels(self) -> None:
        """As the weights want it, unless the experiment says it."""
        model = self.model
        if model.weights is not None and model.pixel_mean is None and model.pixel_std is None:
            kind = "run" if model.weights.startswith(RUN) else model.backbone
            rules = registry.all_of("pixels")
            mean, std = rules.get(kind, rules["imagenet"])(model.weights)
            self.__dict__["model"] = model.model_copy(update={"pixel_mean": mean, "pixel_std": std})
        elif len(model.pixel_mean or ()) != len(model.pixel_std or ()):
            raise ConfigError(
                "model.pixel_mean and model.pixel_std go together: as many numbers in one as in the other."
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Experiment) and self.model_dump() == other.model_dump()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a rule decided, for the person who left it open."""
        return self._notes

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> Experiment:
        """From nested mappings, with errors that name the key and the nearest right one."""
        return _validated(cls, values)

    @classmethod
    def load(cls, path: Path | str, overrides: Mapping[str, Any] | None = None) -> Experiment:
        return cls.make(merged(read_toml(Path(path)), overrides or {}))

    def changed(self, overrides: Mapping[str, Any]) -> Experiment:
        """The same experiment with some `section.key` values changed: what was left open is decided anew, and another
        method starts from its own options."""
        values = dict(self._asked)
        bounded = overrides.get("method.of") == self.method.name  # an upper bound has the options of what it bounds
        if overrides.get("method.name", self.method.name) != self.method.name and not bounded:
            values["method"] = {}
        return self.make(merged(values, overrides))

    def settled(self, found: Mapping[str, Any], notes: Iterable[str] = ()) -> Experiment:
        """This experiment with what its data decides (`section.key`), where it is still open."""
        values = self.model_dump(exclude_none=True)
        known = _flat(values)
        settled = self.make(merged(values, {key: v for key, v in found.items() if known.get(key, AUTO) == AUTO}))
        settled._asked, settled._notes = self._asked, (*self._notes, *notes)
        return settled

    def differs(self, saved: Experiment) -> list[str]:
        """The keys in which a saved experiment is not this one. What is still open here may be anything there."""
        ours, theirs = _flat(self.model_dump(mode="json")), _flat(saved.model_dump(mode="json"))
        return [
            key
            for key in sorted(ours.keys() | theirs.keys())
            if not key.startswith("engine.")
            and key not in ("data.root", "plugins")
            and ours.get(key) not in (None, AUTO)
            and ours[key] != theirs.get(key)
        ]

    def depends_on_rounds(self, rounds: int) -> dict[str, tuple[Any, Any]]:
        """The method's options that a rule set from the number of rounds, and what it would give for another number:
        (now, then)."""
        method = registry.find("method", self.method.name)
        left = method.opened(self.method.options)
        open_options = method.options_class(left)(**left)
        now = method.resolve(open_options, self)
        other = self.model_copy(update={"training": self.training.model_copy(update={"rounds": rounds})})
        then = method.resolve(open_options, other)
        return {
            f"method.{name}": (value, then[name][0])
            for name, (value, _) in now.items()
            if _flat(self.method.options).get(name) == value != then[name][0]
        }

    def to_toml(self) -> str:
        return tomli_w.dumps(json.loads(self.model_dump_json(exclude_none=True, exclude=self.data.unused)))

    def fingerprint(self) -> str:
        """What the weights of a round depend on, as a hash: not the engine, not where the data and the plug-ins lie
        (their contents have digests of their own), not how many rounds follow."""
        without: Any = {"engine": True, "plugins": True, "data": {"root"}, "training": {"rounds"}}
        values = self.model_dump(mode="json", exclude=without | ({"sites": True} if self.sites is None else {}))
        values["data"]["name"] = self.data.label
        for section, key in LATER:
            if values[section][key] is None:
                del values[section][key]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text())
        if isinstance(values.get("plugins"), list):  # they lie beside the file that names them
            values["plugins"] = [str(path.parent / file) for file in values["plugins"]]
        return values
    except FileNotFoundError:
        raise ConfigError(
            f"There is no experiment file {path}. `fedmll run` without a file uses the defaults."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}.") from None


def parse_value(text: str) -> Any:
    """As in a TOML file; what is not TOML is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `section.key` overrides put in."""
    result = _copied(values)
    for path, value in overrides.items():
        *sections, key = path.split(".")
        place = result
        for name in sections:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise ConfigError(f"'{path}' cannot be set: '{name}' is a value, not a section.")
        place[key] = value
    return result


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tables without what is None: TOML has no word for it, and pydantic looks for it in its own fields only."""

    def said(value: Any) -> Any:
        return {k: said(v) for k, v in value.items() if v is not None} if isinstance(value, Mapping) else value

    return {name: said(value) for name, value in values.items()}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as `section.key`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _validated(model: type[M], values: Mapping[str, Any], prefix: str = "") -> M:
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        problems = [_explain(model, problem, prefix) for problem in error.errors()]
        raise ConfigError("The experiment is not valid: " + " ".join(problems)) from None


def _explain(model: type[BaseModel], problem: Any, prefix: str) -> str:
    names = [part for part in problem["loc"] if isinstance(part, str)]
    path = ".".join(filter(None, [prefix, *names]))
    if problem["type"] == "extra_forbidden":
        fields: Any = model
        for name in names[:-1]:
            fields = fields.model_fields[name].annotation
        return f"There is no key '{path}'{nearest(names[-1], fields.model_fields)}"
    return f"{path or 'experiment'}: {problem['msg']} (it is {problem['input']!r})."
