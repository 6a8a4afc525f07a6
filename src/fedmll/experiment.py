"""Experiment: everything that defines a run, validated before anything starts; TOML in, complete TOML out."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from fedmll import methods
from fedmll.data.images.reading import Reading
from fedmll.errors import ConfigError, nearest

M = TypeVar("M", bound=BaseModel)
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
AUTO = "auto"
COMPOSITE = "ml-"
DEFAULT_CLIENTS = 10
SAY_CLIENTS = ("folder", "packed")  # sources that may say which client a sample belongs to


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)


class Data(Section):
    """Which images: a source's name, where it lies and how it is read."""

    name: str = "ml-digits"
    root: Path | None = None  # the folder (or file) that holds the data; for folder: the images
    size: Count | tuple[Count, Count] | None = None  # images become squares, or [height, width]; default: from the data
    classes: Names = ()  # of a CSV: the only columns that are classes; default: all that are left
    ignore: Names = ()  # of a CSV: columns that are no classes
    group: str | None = None  # the column (packed: array) whose samples stay on one side of every split: the patient
    window: tuple[float, float] | None = (
        None  # images of more than 8 bits: what becomes 0 and 255; default: from the data
    )
    skip_unreadable: bool = False  # leave out images that are missing or cannot be decoded
    layout: Literal["quadrants", "side-by-side", "blend"] = "quadrants"  # of ml-… composites
    singles: Count | Literal["proportional", "all"] = "proportional"  # one-label composites a class
    pairs: Annotated[int, Field(ge=0)] | Literal["proportional"] = (
        "proportional"  # two-label composites a pair of classes
    )
    top_classes: Count | None = None  # keep only the most frequent classes
    limit: Count | None = None  # keep only so many training samples (drawn by the seed)

    @model_validator(mode="after")
    def _anchor(self) -> Data:
        """Paths become absolute, so that a run can go on from another folder."""
        if self.root is not None:
            self.__dict__["root"] = self.root.expanduser().absolute()
        kind, colon, file = self.name.partition(":")
        path = Path(file).expanduser()
        if colon and path.exists():  # else it may lie in the root
            self.__dict__["name"] = f"{kind}:{path.absolute()}"
        return self

    @property
    def source(self) -> str:
        """The source alone: `cifar10` of `ml-cifar10`, `packed` of `packed:FILE.npz`."""
        return self.name.removeprefix(COMPOSITE).partition(":")[0]

    @property
    def composite(self) -> bool:
        return self.name.startswith(COMPOSITE)

    @property
    def label(self) -> str:
        """The name for a person: without the folders of a file."""
        kind, colon, file = self.name.partition(":")
        return f"{kind}{colon}{Path(file).name}"

    @property
    def reading(self) -> Reading:
        return Reading(self.classes, self.ignore, self.group, self.window, self.skip_unreadable)

    @property
    def composition(self) -> dict[str, Any]:
        return self.model_dump(include={"layout", "singles", "pairs"})


class Partition(Section):
    """Which client has which samples."""

    # auto: natural where the data says its clients (a `client` column), else dirichlet; decided when it is loaded
    kind: Literal["auto", "iid", "dirichlet", "natural", "labels-per-client"] = "auto"
    clients: Count | None = None  # default 10; natural: a client a group
    beta: Annotated[float, Field(gt=0)] = 0.5
    presence: Share = 1.0  # γ: a client shows at most γC classes
    outside: Literal["drop", "withhold", "negative"] = "drop"  # a sample that fits no client
    labels_per_client: Count = 2
    minimum: Count | None = None  # smallest client; default: one batch, or less if there are too few samples
    # share of its samples that a client keeps for validation; auto: 0.1, or none where the source has validation data
    holdout: Annotated[float, Field(ge=0, lt=1)] | Literal["auto"] = "auto"
    server: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of the training samples that the server holds, unlabelled


class Annotation(Section):
    """Which client annotates which classes; the others are unknown there."""

    kind: Literal["none", "missing", "one-class"] = "none"
    missing: Annotated[int, Field(ge=0)] = 0  # classes that each client does not annotate


class Model(Section):
    backbone: Literal["auto", "convnet", "resnet18", "mlp", "vit"] = "auto"
    channels: tuple[int, ...] = (32, 64, 128, 128)  # of convnet's blocks, mlp's layers, vit's layers (the last)
    norm: Literal["batch", "group"] = "batch"
    stem: Literal["auto", "cifar", "imagenet"] = "auto"  # of resnet18
    weights: Path | None = None  # initial weights: .safetensors or .pth (resnet18), a folder or hub name (vit)

    @model_validator(mode="after")
    def _anchor(self) -> Model:
        if self.weights is not None and self.weights.expanduser().exists():
            self.__dict__["weights"] = self.weights.expanduser().absolute()
        return self


class Training(Section):
    rounds: Count = 20
    local_epochs: Count = 1
    batch_size: Count = 32
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"  # adam and sgd couple weight decay with the gradient
    lr: Annotated[float, Field(gt=0)] = 1e-3
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of sgd
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    clip: Annotated[float, Field(gt=0)] | None = None  # largest gradient norm
    loss: Literal["bce", "weighted", "asl"] = "bce"
    augment: Literal["none", "flip", "shift", "crop-flip", "weak", "jitter", "strong"] = "none"
    keep: Literal["auto", "last", "best"] = "auto"  # the model of the last round, or of the best on validation data


class Participation(Section):
    fraction: Share = 1.0
    count: Count | None = None  # clients a round; wins over fraction
    sampling: Literal["uniform", "size"] = "uniform"


class Sites(Section):
    """A real federation whose server has no data (data.name = "none"): what the clients have."""

    classes: Annotated[tuple[str, ...], Field(min_length=1)]
    channels: Literal[1, 3] = 3


class Engine(Section):
    """How it runs here. Nothing in this section changes a result."""

    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"  # 0: in the calling process
    device: Literal["auto", "cpu", "cuda"] = "auto"
    checkpoint_every: Count = 1
    evaluate_every: Count = 1


class MethodSection(BaseModel):
    """The method's name and its own options (`fedmll methods NAME` lists them)."""

    model_config = ConfigDict(extra="allow")
    name: str = "fedavg"

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Experiment(Section):
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

    _asked: dict[str, Any] = PrivateAttr(default_factory=dict)  # what was said; the rest is defaults and rules
    _notes: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="after")
    def _fill_in(self) -> Experiment:
        """Write every default out and decide every "auto" that needs no data, so that the saved file says all; refuse
        what cannot work together."""
        method = methods.find(self.method.name)
        self.__dict__["method"] = MethodSection(name=self.method.name, **method.named(self.method.options))
        self._asked = self.model_dump(exclude_unset=True)
        options = _validated(method.options_class(self.method.options), self.method.options, "method")
        found = method.resolve(options, self)
        self._notes = tuple(f"method.{name} = {value} ({why})" for name, (value, why) in found.items() if why)
        decided = merged(options.model_dump(), {name: value for name, (value, _) in found.items()})
        self.__dict__["method"] = MethodSection(name=self.method.name, **decided)
        features = self.data.source == "features"
        if self.model.backbone == AUTO:
            self.model.backbone = "mlp" if features else "convnet"
        if (self.model.backbone == "mlp") != features:
            raise ConfigError(
                f"model.backbone = '{self.model.backbone}' does not fit data.name = '{self.data.label}': mlp is for "
                "feature vectors (features:FILE.npz), the other backbones are for images."
            )
        if self.partition.clients is None and self.partition.kind not in ("natural", AUTO):
            self.partition.clients = DEFAULT_CLIENTS
        if self.training.keep == AUTO:
            self.training.keep = method.keep
        _ = self.data.reading  # refuses what is no window, and columns named twice
        clients, count = self.partition.clients, self.participation.count
        if clients is None and self.partition.kind == AUTO and self.data.source not in SAY_CLIENTS:
            clients = DEFAULT_CLIENTS
        if clients and count and count > clients:
            raise ConfigError(
                f"participation.count = {count} is more than partition.clients = {clients}; lower it, or leave it "
                "out for all clients."
            )
        method.check(self)
        return self

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
    def load(cls, path: Path, overrides: Mapping[str, Any] | None = None) -> Experiment:
        return cls.make(merged(read_toml(path), overrides or {}))

    def changed(self, overrides: Mapping[str, Any]) -> Experiment:
        """The same experiment with some `section.key` values changed: what was left open is decided anew, and another
        method starts from its own options."""
        values = dict(self._asked)
        if overrides.get("method.name", self.method.name) != self.method.name:
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
            and key != "data.root"
            and ours.get(key) not in (None, AUTO)
            and ours[key] != theirs.get(key)
        ]

    def depends_on_rounds(self, rounds: int) -> dict[str, tuple[Any, Any]]:
        """The method's options that a rule set from the number of rounds, and what it would give for another number:
        (now, then)."""
        method = methods.find(self.method.name)
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
        return tomli_w.dumps(json.loads(self.model_dump_json(exclude_none=True)))

    def fingerprint(self) -> str:
        """What the weights of a round depend on, as a hash: not the engine, not where the data lies (its contents have
        a digest of their own), not how many rounds follow."""
        values = self.model_dump(mode="json", exclude={"engine": True, "data": {"root"}, "training": {"rounds"}})
        values["data"]["name"] = self.data.label
        if values["sites"] is None:
            del values["sites"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"There is no experiment file {path}. `fedmll run` without a file uses the defaults."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}.") from None


def merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `section.key` overrides put in."""
    result: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    for path, value in overrides.items():
        *sections, key = path.split(".")
        place = result
        for name in sections:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise ConfigError(f"'{path}' cannot be set: '{name}' is a value, not a section.")
        place[key] = value
    return result


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
        return f"There is no key '{path}'{nearest(names[-1], fields.model_fields)}."
    return f"{path or 'experiment'}: {problem['msg']} (it is {problem['input']!r})."
