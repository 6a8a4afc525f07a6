"""The sections of an experiment: each setting with its type, range and description.

Names of methods, losses, partitions, … are looked up later, in `resolve`.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from fedmll.core.errors import ConfigError

SITE_NAME = re.compile(r"[\w.-]{1,40}")


def _absolute(path: Path) -> Path:
    absolute = path.expanduser().absolute()
    if str(absolute) != os.fsencode(absolute).decode("utf-8", "replace"):
        raise ValueError("the path is not UTF-8, so an experiment cannot store it; rename it, or give a link to it")
    return absolute


def _absolute_file_argument(name: str) -> str:
    """The file in `kind:FILE` as an absolute path, if it exists here; otherwise it may be relative to data.root."""
    kind, colon, file = name.partition(":")
    path = Path(file).expanduser()
    return f"{kind}:{path.absolute()}" if colon and path.exists() else name


def _without_folders(name: str) -> str:
    """`packed:FILE.npz` for `packed:/data/FILE.npz`"""
    kind, colon, file = name.partition(":")
    return f"{kind}{colon}{Path(file).name}"


def _site_name(name: str) -> str:
    if not SITE_NAME.fullmatch(name):
        raise ValueError("a site's name has 1 to 40 letters, digits, dots, hyphens and underscores")
    return name


def _absolute_weights(value: str) -> str:
    """A file or `run:FOLDER` as an absolute path, if it exists; otherwise it is a name."""
    if value == RANDOM:
        return value
    kind = RUN if value.startswith(RUN) else ""
    path = Path(value.removeprefix(kind)).expanduser()
    return f"{kind}{path.absolute()}" if path.exists() else value


def _at_most_32_bits(value: int) -> int:
    """A larger number is a typing error, and would overflow in torch or NumPy."""
    if value >= 2**31:
        raise ValueError(f"Input should be less than {2**31}")
    return value


# Paths become absolute, so that a run can be resumed from another folder.
AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1), AfterValidator(_at_most_32_bits)]
Width = Annotated[int, Field(ge=1, le=2**16)]  # of a layer
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
# of the feature columns of a table: mean and standard deviation of numbers, or the values of a column of text
TableEncoding = tuple[tuple[str, tuple[float, float] | tuple[str, ...]], ...]
UncertainLabels = Literal["unknown", "present", "absent"]
AUTO = "auto"  # decided by a rule when the experiment is resolved or its data is loaded
COMPOSITE = "ml-"  # prefix of a data source: composites of its images
RUN = "run:"  # prefix of weights: the folder of an earlier run
RANDOM = "random"  # weights of a frozen backbone that is meant to be untrained
NO_DATA = "none"  # data.name of a server without test data
SITES = "sites"  # data.name and partition.kind of an experiment with [[sites]]


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How a user's images and labels are read: the settings `data.…`, or options of `fedmll join` and `fedmll data
    pack`.

    Attributes:
        classes: the class columns of a labels file, in this order; empty: all remaining columns.
        ignore: columns to ignore.
        group: the column of the patient: all images of a patient are on one side of each split.
        window: the values that become black and white in images with more than 8 bits per pixel; None: from the data.
        skip_unreadable: skip images that are missing or cannot be decoded, instead of raising an error.
        uncertain_labels: the target for labels marked as uncertain (VOC: difficult, CheXpert: uncertain).
        encoding: how the feature columns of a table become numbers; None: from the data.
        by_options: error messages name command-line options (--ignore a,b) instead of settings (--set data.ignore=…).
    """

    classes: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    group: str | None = None
    window: tuple[float, float] | None = None
    skip_unreadable: bool = False
    uncertain_labels: UncertainLabels | None = None
    encoding: TableEncoding | None = None
    by_options: bool = False

    def __post_init__(self) -> None:
        for name in ("classes", "ignore"):
            repeated = [n for n, count in Counter(getattr(self, name)).items() if count > 1]
            if repeated:
                raise ConfigError(f"{self.setting(name)} names '{repeated[0]}' twice.")
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
        """The text for the command line that sets a value."""
        if self.by_options:
            text = value if isinstance(value, str) else ",".join(str(part) for part in value)
            return f"--{name}={shlex.quote(text)}"
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return f"--set {shlex.quote(f'data.{name}={text}')}"

    def how_to_ignore(self, names: Sequence[str]) -> str:
        """The text for the command line that also ignores these columns."""
        return self.how_to_set("ignore", [*self.ignore, *names])


class SettingsSection(BaseModel):
    """A section of an experiment: unknown keys, infinity and NaN are errors."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)


class DataSettings(SettingsSection):
    """Which data is used, where it is and how it is read."""

    name: Annotated[str, AfterValidator(_absolute_file_argument)] = Field(
        default="ml-digits",
        description="The data source (`fedmll data list`); `ml-NAME` makes composites of its images.",
    )
    root: AbsolutePath | None = Field(
        default=None, description="The folder (or file) of the data; for `folder`, the folder of the images."
    )
    size: Count | tuple[Count, Count] | None = Field(
        default=None,
        description="Images are resized to squares of this side, or to [height, width]. Default: from the data.",
    )
    classes: Names = Field(default=(), description="Class columns of a CSV. Default: all remaining columns.")
    ignore: Names = Field(default=(), description="Columns of a CSV to ignore.")
    group: str | None = Field(
        default=None,
        description="The column that names the patient (for `packed`, the array). All samples of a patient stay on "
        "one side of each split.",
    )
    window: tuple[float, float] | None = Field(
        default=None,
        description="The values that become 0 and 255 in images with more than 8 bits per pixel. Default: from the "
        "data.",
    )
    skip_unreadable: bool = Field(default=False, description="Skip images that are missing or cannot be decoded.")
    uncertain_labels: UncertainLabels | None = Field(
        default=None,
        description="The target for labels marked as uncertain, in `voc` (difficult) and `chexpert` (uncertain). "
        "Default: unknown.",
    )
    encoding: TableEncoding | None = Field(
        default=None,
        description="How the columns of a `table` become numbers: [name, [mean, std]] or [name, [values]] for each. "
        "Default: from the training rows.",
    )
    layout: Literal["quadrants", "side-by-side", "blend"] = Field(
        default="quadrants", description="How composites (ml-…) combine two images."
    )
    singles: Count | Literal["proportional", "all"] = Field(
        default="proportional", description="The number of one-label images per class in composites."
    )
    pairs: Annotated[int, Field(ge=0)] | Literal["proportional"] = Field(
        default="proportional", description="The number of two-label images per pair of classes in composites."
    )
    top_classes: Count | None = Field(default=None, description="Use only the N most frequent classes. Default: all.")
    limit: Count | None = Field(default=None, description="Use only this many training samples, drawn by the seed.")

    @property
    def source(self) -> str:
        """The name of the source: `cifar10` for `ml-cifar10`, `packed` for `packed:FILE.npz`."""
        return self.name.removeprefix(COMPOSITE).partition(":")[0]

    @property
    def unused(self) -> dict[str, set[str]]:
        """Settings without a meaning for a server without data; they are not written to its experiment file."""
        if self.name != NO_DATA:
            return {}
        composed = {"layout", "singles", "pairs", "classes", "ignore", "skip_unreadable"}
        return {"data": composed, "partition": {"beta", "presence", "unassignable", "labels_per_client"}}

    @property
    def composite(self) -> bool:
        return self.name.startswith(COMPOSITE)

    @property
    def label(self) -> str:
        """The name for people: a file without its folders."""
        return _without_folders(self.name)

    @property
    def reading(self) -> ReadingOptions:
        return ReadingOptions(
            classes=self.classes,
            ignore=self.ignore,
            group=self.group,
            window=self.window,
            skip_unreadable=self.skip_unreadable,
            uncertain_labels=self.uncertain_labels,
            encoding=self.encoding,
        )

    @property
    def composition(self) -> dict[str, Any]:
        return self.model_dump(include={"layout", "singles", "pairs"})


class ClientPartition(SettingsSection):
    """How samples are divided among clients."""

    kind: str = Field(
        default=AUTO,
        description="How samples are assigned to clients: iid, dirichlet, labels-per-client, natural, feature-skew, "
        "file or a plug-in's name. auto: natural if the data names its clients (a `client` column), otherwise "
        "dirichlet.",
    )
    clients: Count | None = Field(
        default=None, description="The number of clients. Default: 10; for `natural`, one client per group."
    )
    beta: Annotated[float, Field(gt=0)] = Field(
        default=0.5,
        description="Concentration β of the Dirichlet distribution: small values give skewed clients, "
        "large values similar ones.",
    )
    presence: Share = Field(
        default=1.0, description="Presence ratio γ: a client has positive samples of at most γC of the C classes."
    )
    unassignable: Literal["drop", "withhold", "negative"] = Field(
        default="drop",
        description="What happens to a sample whose labels fit no client: drop it, or assign it with the labels that "
        "do not fit as unknown (withhold) or absent (negative).",
    )
    labels_per_client: Count = Field(default=2, description="The number of classes per client for `labels-per-client`.")
    minimum: Count | None = Field(
        default=None,
        description="The number of samples of the smallest client. Default: one batch, or fewer if there are too few "
        "samples.",
    )


class PartitionSettings(ClientPartition):
    """Which client has which samples."""

    holdout: Annotated[float, Field(ge=0, lt=1)] | Literal["auto"] = Field(
        default="auto",
        description="The fraction of its samples that a client holds out for validation. auto: 0.1, or 0 if the "
        "source has validation data.",
    )
    server: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="The fraction of the training samples that the server holds, without labels."
    )
    file: AbsolutePath | None = Field(
        default=None, description="The partition file for `file`, written by `fedmll data freeze`."
    )


class AnnotationSettings(SettingsSection):
    """Which client annotates which classes; the targets of other classes are unknown at that client."""

    kind: str = Field(
        default="none",
        description="Which classes a client annotates. none: all; one-class: one class per client; "
        "missing: all but some classes.",
    )
    missing: Annotated[int, Field(ge=0)] = Field(
        default=0, description="The number of classes that each client does not annotate, for `missing`."
    )


class ModelSettings(SettingsSection):
    """The network."""

    backbone: str = Field(default=AUTO, description="The backbone. auto: convnet; for feature vectors, mlp.")
    channels: tuple[Width, ...] = Field(
        default=(32, 64, 128, 128),
        description="Channels of convnet's blocks, widths of mlp's layers; the last value is the width of small-vit's "
        "layers.",
    )
    norm: Literal["batch", "group"] = Field(default="batch", description="Batch or group normalisation.")
    freeze: Literal["none", "backbone"] | Count = Field(
        default="none", description="Freeze the whole backbone, or its first n stages."
    )
    views: Annotated[int, Field(ge=1, le=8)] = Field(
        default=1,
        description="The number of cached views per image with a frozen backbone; all but the first are augmented.",
    )
    stages: Literal["auto"] | tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default="auto",
        description="Stages of a frozen backbone whose mean features are added to those of the last stage; 0 is the "
        "stem. For heads that use means. auto: [17, 16, 13] for a frozen mobilenet-v2, otherwise none.",
    )
    power: Literal["auto", "none", "sqrt"] = Field(
        default="auto",
        description="sqrt: the signed square root of the mean features of the last stage, like stages. auto: sqrt for "
        "a frozen mobilenet-v2, otherwise none.",
    )
    flip_average: bool | Literal["auto"] = Field(
        default="auto",
        description="Average the features of an image and of its mirror image, like stages. auto: true for a frozen "
        "mobilenet-v2, otherwise false.",
    )
    standardise: bool | Literal["auto"] = Field(
        default="auto",
        description="Standardise the features of a frozen backbone with the mean and variance over all clients. auto: "
        "if model.freeze = 'backbone'.",
    )
    bias: Literal["auto", "prior", "zero"] = Field(
        default="auto",
        description="Initial bias of each class. prior: log-odds of the share of positives among the known labels of "
        "all clients; zero: about 0. auto: prior if model.freeze = 'backbone', otherwise zero.",
    )
    class_token: bool = Field(
        default=False,
        description="vit, small-vit: heads that use means get the class token instead of the mean of the patch tokens, "
        "as ViT's own classifier does.",
    )
    width: Width | None = Field(
        default=None, description="The width of a trained layer between backbone and head. Default: no such layer."
    )
    stem: Literal["auto", "cifar", "imagenet"] = Field(
        default="auto", description="The stem of resnet18 and resnet50. auto: by the size of the images."
    )
    weights: (
        Annotated[
            str,
            BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value),
            AfterValidator(_absolute_weights),
        ]
        | None
    ) = Field(
        default=None,
        description="Initial weights: a file (for vit, a folder or hub name), a name of `fedmll weights list`, or "
        "run:FOLDER. random: a frozen backbone stays untrained, which gives random features.",
    )
    pixel_mean: Annotated[tuple[float, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="Mean of pixels in [0, 1], one value per channel or one for all. Default: from the weights, else "
        "0.5.",
    )
    pixel_std: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)] | None = Field(
        default=None, description="Standard deviation of pixels, like pixel_mean. Default: from the weights, else 0.5."
    )

    @property
    def pools_stages(self) -> bool:
        """Whether the settings ask for more than the mean of the last stage. "auto" does not ask for it."""
        return self.stages not in (AUTO, ()) or self.power == "sqrt" or self.flip_average is True

    @property
    def pretrained(self) -> str | None:
        """`weights` that exist somewhere; None: the backbone starts with random weights."""
        return None if self.weights == RANDOM else self.weights


class TrainingSettings(SettingsSection):
    """Rounds and local training."""

    rounds: Annotated[int, Field(ge=0), AfterValidator(_at_most_32_bits)] = Field(
        default=20, description="The number of rounds."
    )
    local_epochs: Count = Field(default=1, description="Epochs per client and round.")
    batch_size: Count = Field(default=32, description="Samples per batch.")
    optimizer: Literal["adamw", "adam", "sgd"] = Field(
        default="adamw", description="The clients' optimizer. adam and sgd add weight decay to the gradient."
    )
    optimizer_state: Literal["fresh", "kept"] = Field(
        default="fresh", description="Whether a client starts each round with a fresh optimizer state or keeps it."
    )
    lr: Annotated[float, Field(gt=0)] = Field(default=1e-3, description="The learning rate.")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.0, description="The momentum of sgd.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.01, description="The weight decay.")
    clip: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="The largest gradient norm; larger gradients are scaled. Default: no limit."
    )
    loss: str = Field(
        default="bce",
        description="The loss function: bce, weighted (positives by N/n⁺), asl, hill, splc, em or a plug-in's. Its "
        "options follow after colons: asl:gamma_negative=2:clip=0.",
    )
    augment: str = Field(
        default="none",
        description="The augmentation of training images: none, flip, shift, crop-flip, weak, jitter, strong or "
        "the name of a plug-in.",
    )
    keep: Literal["auto", "last", "best"] = Field(
        default="auto",
        description="Which model is kept: that of the last round, or that of the best round on the validation data. "
        "auto: the method's choice.",
    )
    clients_per_batch: Annotated[int, Field(ge=2)] | None = Field(
        default=None,
        description="Train this many clients at once, in simulations with networks of linear layers. Faster; the last "
        "bits of the results differ.",
    )

    def batches(self, samples: float) -> int:
        """The number of batches per epoch.

        A last batch of one sample joins the batch before it, because batch normalisation cannot train on one sample.
        """
        count = max(1, math.ceil(samples / self.batch_size))
        return count - 1 if count > 1 and samples - (count - 1) * self.batch_size == 1 else count


class ParticipationSettings(SettingsSection):
    """Which clients take part in a round."""

    fraction: Share = Field(default=1.0, description="The fraction of the clients that take part in a round.")
    count: Count | None = Field(
        default=None, description="The number of clients per round; takes precedence over `fraction`."
    )
    sampling: Literal["uniform", "size"] = Field(
        default="uniform",
        description="Each client has the same chance, or a chance proportional to its number of samples.",
    )


class StudySettings(SettingsSection):
    """What the data of all sites has in common: for [[sites]], and for the server of a real federation that has no data
    (data.name = "none")."""

    classes: Names = Field(
        default=(), description="The names of the classes. Default with [[sites]]: all classes of all sites."
    )
    channels: Literal[1, 3] | None = Field(
        default=None,
        description="Channels of the images: 1 (grey) or 3 (colour). Default: 3; with [[sites]], 1 if the images of "
        "all sites are grey.",
    )


class SiteSettings(SettingsSection):
    """One site of a simulated federation whose sites have different data sources. `[[sites]]` begins each."""

    name: Annotated[str, AfterValidator(_site_name)] = Field(description="The name of the site, and of its client.")
    data: Annotated[str, AfterValidator(_absolute_file_argument)] = Field(
        description="The site's data source (`fedmll data list`)."
    )
    root: Path | None = Field(
        default=None, description="The folder (or file) of the site's data; relative to data.root, if that is set."
    )
    rename: dict[str, Annotated[str, Field(min_length=1)]] = Field(
        default={},
        description="The site's class names and the study's: { sofa = \"couch\" }. Names that are not listed stay. "
        "Several names can become one class, which is then present if one of them is.",
    )
    excludes: dict[str, Literal["all"] | Annotated[tuple[str, ...], Field(min_length=1)]] = Field(
        default={},
        description="What a label of the site says about others by definition: where it is present, these classes of "
        'the study are absent unless they are known: { "No Finding" = "all" }.',
    )
    classes: Names = Field(default=(), description="As data.classes.")
    ignore: Names = Field(default=(), description="As data.ignore.")
    group: str | None = Field(default=None, description="As data.group.")
    window: tuple[float, float] | None = Field(default=None, description="As data.window.")
    skip_unreadable: bool = Field(default=False, description="As data.skip_unreadable.")
    uncertain_labels: UncertainLabels | None = Field(default=None, description="As data.uncertain_labels.")
    limit: Count | None = Field(
        default=None, description="Use only this many training samples of the site, drawn by the seed."
    )
    partition: ClientPartition | None = Field(
        default=None,
        description="How the site's samples are divided among its clients. Default: the site is one client.",
    )

    @property
    def reading(self) -> ReadingOptions:
        return ReadingOptions(
            classes=self.classes,
            ignore=self.ignore,
            group=self.group,
            window=self.window,
            skip_unreadable=self.skip_unreadable,
            uncertain_labels=self.uncertain_labels,
        )

    @property
    def source(self) -> str:
        """The name of the source: `voc` for `voc:2007`."""
        return self.data.removeprefix(COMPOSITE).partition(":")[0]

    @property
    def label(self) -> str:
        """The name of its data for people: a file without its folders."""
        return _without_folders(self.data)


class EngineSettings(SettingsSection):
    """Where the experiment runs. These settings do not change a result."""

    kind: Literal["local", "ray"] = Field(
        default="local", description="local: worker processes on this machine; ray: actors of Ray (extra `ray`)."
    )
    address: str | None = Field(
        default=None,
        description="The Ray cluster: HOST:PORT of its head node, or auto for the one of this machine. Default: Ray "
        "starts on this machine.",
    )
    workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = Field(
        default="auto",
        description="Worker processes, or actors of Ray; 0: train in the calling process. auto: one per core; on Ray "
        "with GPUs `per_device` per GPU.",
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = Field(
        default="auto", description="The device for training: cpu, cuda, cuda:1, mps. auto: cuda if there is one."
    )
    per_device: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="How many actors of Ray share one GPU."
    )
    checkpoint_every: Count = Field(default=1, description="Write a checkpoint after this many rounds.")
    evaluate_every: Count = Field(default=1, description="Evaluate after this many rounds.")


class MethodSettings(BaseModel):
    """The method's name and its options (`fedmll methods NAME` lists them)."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(default="fedavg", description="The method (`fedmll methods`).")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})
