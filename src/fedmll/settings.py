"""The sections of an experiment: every setting, its meaning and its range. Names are looked up in the registry."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fedmll.errors import ConfigError

Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
AUTO = "auto"  # decided by a rule, when the experiment is made or when its data is known
COMPOSITE = "ml-"  # of a source's name: composites of its images
RUN = "run:"  # of weights: the folder of an earlier run
# settings that came later: where they are not set a run's fingerprint is what it was without them
LATER = (("model", "pixel_mean"), ("model", "pixel_std"), ("data", "doubtful"), ("partition", "file"),
         ("training", "together"))  # fmt: skip
Doubtful = Literal["unknown", "present", "absent"]


@dataclass(frozen=True)
class Reading:
    """The settings `data.…` (of `fedmll join` and `fedmll data pack`: the options --…) of these names.

    classes           the only columns of a labels file that are classes, in this order; empty: all that are left
    ignore            columns that are read as if they were not there
    group             the column that says whose image it is: a patient's images are on one side of every split
    window            which values become black and white in images with more than 8 bits a pixel; None: from the data
    skip_unreadable   leave out images that are missing or cannot be decoded, instead of an error
    doubtful          what a label is that its publisher marks as doubtful (VOC: difficult, CheXpert: uncertain)
    """

    classes: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    group: str | None = None
    window: tuple[float, float] | None = None
    skip_unreadable: bool = False
    doubtful: Doubtful | None = None
    by_options: bool = False  # for errors: the user writes --ignore a,b and not --set data.ignore=["a","b"]

    def __post_init__(self) -> None:
        for name in ("classes", "ignore"):
            repeated = next((n for n in getattr(self, name) if getattr(self, name).count(n) > 1), None)
            if repeated is not None:
                raise ConfigError(f"{self.setting(name)} names '{repeated}' twice.")
        if self.window is not None:
            low, high = float(self.window[0]), float(self.window[1])
            if not low < high:
                raise ConfigError(
                    f"{self.setting('window')} is the value that becomes black and the value that becomes white, the "
                    f"smaller first; it is {low:g}, {high:g}."
                )
            object.__setattr__(self, "window", (low, high))

    def setting(self, name: str) -> str:
        return f"--{name}" if self.by_options else f"data.{name}"

    def how_to_set(self, name: str, value: str | Sequence[Any]) -> str:
        """What to write on the command line, ready to be copied."""
        if self.by_options:
            text = value if isinstance(value, str) else ",".join(str(part) for part in value)
            return f"--{name}={shlex.quote(text)}"
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return f"--set {shlex.quote(f'data.{name}={text}')}"

    def how_to_ignore(self, names: Sequence[str]) -> str:
        """These columns too, beside those that are ignored already."""
        return self.how_to_set("ignore", [*self.ignore, *names])


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)


NO_DATA = "none"  # data.name of a federation's server without test data


class Data(Section):
    """Which images: a source's name, where it lies and how it is read."""

    name: str = "ml-digits"
    root: Path | None = None  # the folder (or file) that holds the data; for folder: the images
    size: Count | tuple[Count, Count] | None = None  # images become squares, or [height, width]; default: from the data
    classes: Names = ()  # of a CSV: the only columns that are classes; default: all that are left
    ignore: Names = ()  # of a CSV: columns that are no classes
    group: str | None = None  # the column (packed: array) whose samples stay on one side of every split: the patient
    # images of more than 8 bits: what becomes 0 and 255; default: from the data
    window: tuple[float, float] | None = None
    skip_unreadable: bool = False  # leave out images that are missing or cannot be decoded
    doubtful: Doubtful | None = None  # of voc (difficult) and chexpert (uncertain): such labels; default: unknown
    layout: Literal["quadrants", "side-by-side", "blend"] = "quadrants"  # of ml-… composites
    singles: Count | Literal["proportional", "all"] = "proportional"  # one-label composites a class
    # two-label composites a pair of classes
    pairs: Annotated[int, Field(ge=0)] | Literal["proportional"] = "proportional"
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
    def unused(self) -> dict[str, set[str]]:
        """Settings that mean nothing with this data: a server without any composes and divides nothing."""
        if self.name != NO_DATA:
            return {}
        composed = {"layout", "singles", "pairs", "classes", "ignore", "skip_unreadable"}
        return {"data": composed, "partition": {"beta", "presence", "outside", "labels_per_client"}}

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
        return Reading(self.classes, self.ignore, self.group, self.window, self.skip_unreadable, self.doubtful)

    @property
    def composition(self) -> dict[str, Any]:
        return self.model_dump(include={"layout", "singles", "pairs"})


class Partition(Section):
    """Which client has which samples."""

    # auto: natural where the data says its clients (a `client` column), else dirichlet; decided when it is loaded
    kind: str = AUTO
    clients: Count | None = None  # default 10; natural: a client a group
    beta: Annotated[float, Field(gt=0)] = 0.5
    presence: Share = 1.0  # γ: a client shows at most γC classes
    outside: Literal["drop", "withhold", "negative"] = "drop"  # a sample that fits no client
    labels_per_client: Count = 2
    minimum: Count | None = None  # smallest client; default: one batch, or less if there are too few samples
    # share of its samples that a client keeps for validation; auto: 0.1, or none where the source has validation data
    holdout: Annotated[float, Field(ge=0, lt=1)] | Literal["auto"] = "auto"
    server: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of the training samples that the server holds, unlabelled
    file: Path | None = None  # of kind "file": what `fedmll data freeze` wrote

    @model_validator(mode="after")
    def _anchor(self) -> Partition:
        """Paths become absolute, so that a run can go on from another folder."""
        if self.file is not None:
            self.__dict__["file"] = self.file.expanduser().absolute()
        return self


class Annotation(Section):
    """Which client annotates which classes; the others are unknown there."""

    kind: str = "none"
    missing: Annotated[int, Field(ge=0)] = 0  # classes that each client does not annotate


class Model(Section):
    backbone: str = AUTO  # convnet; of feature vectors: mlp
    channels: tuple[int, ...] = (32, 64, 128, 128)  # of convnet's blocks, mlp's layers, vit's layers (the last)
    norm: Literal["batch", "group"] = "batch"
    freeze: Literal["none", "backbone"] | Count = "none"  # all of the backbone, or its first n stages
    views: Annotated[int, Field(ge=1, le=8)] = 1  # of a frozen backbone: kept views of an image, all but one augmented
    width: Count | None = None  # of a trained neck between the backbone and the head; default: no neck
    stem: Literal["auto", "cifar", "imagenet"] = "auto"  # of resnet18 and resnet50
    # initial weights: a file (of a vit: a folder or hub name), a name of `fedmll weights list`, or run:FOLDER
    weights: Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)] | None = (
        None
    )
    # of pixels in [0, 1], one number a channel or one for all; default: what the weights were trained with, else 0.5
    pixel_mean: Annotated[tuple[float, ...], Field(min_length=1)] | None = None
    pixel_std: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _anchor(self) -> Model:
        """Paths become absolute, so that a run can go on from another folder."""
        if self.weights is not None:
            kind = RUN if self.weights.startswith(RUN) else ""
            path = Path(self.weights.removeprefix(kind)).expanduser()
            if path.exists():  # else it is a name
                self.__dict__["weights"] = f"{kind}{path.absolute()}"
        return self


class Training(Section):
    rounds: Annotated[int, Field(ge=0)] = 20
    local_epochs: Count = 1
    batch_size: Count = 32
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"  # adam and sgd couple weight decay with the gradient
    optimizer_state: Literal["fresh", "kept"] = "fresh"  # every round anew, or kept at the client
    lr: Annotated[float, Field(gt=0)] = 1e-3
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of sgd
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    clip: Annotated[float, Field(gt=0)] | None = None  # largest gradient norm
    loss: str = "bce"
    augment: str = "none"
    keep: Literal["auto", "last", "best"] = "auto"  # the model of the last round, or of the best on validation data
    # so many clients are trained at once (networks of linear layers, simulations): faster, with other last bits
    together: Annotated[int, Field(ge=2)] | None = None

    def batches(self, samples: float) -> int:
        """How many an epoch has. A last batch of one sample joins the one before it (batch normalisation cannot train
        on one)."""
        count = max(1, math.ceil(samples / self.batch_size))
        return count - 1 if count > 1 and samples - (count - 1) * self.batch_size == 1 else count


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
