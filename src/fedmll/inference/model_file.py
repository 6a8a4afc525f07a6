"""A trained model as one file.

`model.safetensors` holds every tensor that prediction needs, also the frozen ones, and in its metadata (`fedmll`, as
JSON) a description of the model with a checksum of everything. Neither the data nor the initial weights are needed. A
file never makes this program run code, open another file, or allocate much more memory than its own size: plug-ins are
named in it, and passed by the user who loads it.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

from fedmll.config.experiment import Experiment
from fedmll.core import files, registry
from fedmll.core.errors import ConfigError, DataError
from fedmll.core.message import Tensors
from fedmll.core.tensor_files import checksum_with_description
from fedmll.core.text import suggest
from fedmll.core.versions import fedmll_version
from fedmll.data.dataset import Dataset
from fedmll.data.sources.table import encode, read_table
from fedmll.engines.client_trainer import Trainer
from fedmll.evaluation.calibration import apply_calibration
from fedmll.inference.image_predictions import ImagePrediction, decode_batches, display_path
from fedmll.inference.model_metadata import (
    FORMAT_VERSION,
    PluginWarning,
    build_experiment,
    check_complete,
    check_format,
    compare_plugins,
    parse_metadata,
    writer_version,
)
from fedmll.methods.framework.client_round import EVALUATION_BATCH
from fedmll.methods.framework.task import Task
from fedmll.models.backbones import pixel_scale
from fedmll.models.flat_weights import FrozenState
from fedmll.models.objects import register_model
from fedmll.models.pretrained_weights import METADATA_KEY

MIN_ALLOCATION = 2**24  # values; see AllocationLimit
MIN_TENSOR = 2**10  # values that the smallest tensor counts as: millions of tiny layers need memory too
HOW_TO_REPAIR = "Copy it again; if the run's checkpoints are there, `fedmll resume FOLDER` writes it again."

KnownLabels = Mapping[str, int] | NDArray[np.integer]
"""Known labels: {class: 1 or 0} for all samples, or an array (N, C) with 1, 0 and -1 for unknown."""

Samples = NDArray[Any] | Dataset | Path | str | Sequence[Path | str]


def describe_model(
    experiment: Experiment, trainer: Trainer, thresholds: NDArray[np.floating] | None, round: int
) -> dict[str, Any]:
    """The description of a model for its file (see `ModelDescription`). Paths are stored without their folders."""
    values = experiment.model_dump(mode="json", exclude_none=True, exclude={"engine", "plugins"})
    values["data"].pop("root", None)
    values["data"]["name"] = _without_folders(values["data"]["name"])
    for site in values.get("sites", ()):
        site.pop("root", None)
        site["data"] = _without_folders(site["data"])
    if "file" in values["partition"]:
        values["partition"]["file"] = _without_folders(values["partition"]["file"])
    values["method"] = {name: _without_folders(value) for name, value in values["method"].items()}  # text encoders
    weights = values["model"].pop("weights", None)
    task, head = trainer.task, trainer.method.network_head
    scale = pixel_scale(experiment.model, task.sample_shape[0]) if len(task.sample_shape) == 3 else None
    return {
        "format": FORMAT_VERSION,
        "versions": {"fedmll": fedmll_version(), "torch": str(torch.__version__)},
        "method": experiment.method.name,
        "head": head.name,
        "takes_known_labels": "label-states" in head.provides,
        "classes": list(task.classes),
        "sample_shape": list(task.sample_shape),
        "pixels": None if scale is None else {"mean": list(scale[0]), "std": list(scale[1])},
        "window": experiment.data.window,
        "thresholds": None if thresholds is None else [float(value) for value in thresholds],
        "thresholds_for": None if thresholds is None else "f1",
        "calibration": None,  # or a and b of σ(a z + b) for each class: see evaluation/thresholds.py
        "clients": task.clients,
        "round": round,
        "initial_weights": _without_folders(weights),
        "layout": trainer.model.backbone.layout,
        "frozen": sorted(trainer.frozen()),
        "plugins": [Path(file).name for file in experiment.plugins],
        "plugin_checksums": [registry.checksum_of(Path(file)) for file in experiment.plugins],
        "experiment": values,
    }


def write_model(file: Path, weights: Tensors, description: Mapping[str, Any]) -> None:
    with files.atomic_replace(file) as temporary:
        contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(contiguous, temporary, build_metadata(weights, description))


def build_metadata(weights: Tensors, description: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a model file: its description with the checksum. One key, as the order of several is random."""
    return {METADATA_KEY: json.dumps({**description, "checksum": checksum_with_description(weights, description)})}


class AllocationLimit(TorchFunctionMode):
    """While it is active, torch functions that create tensors raise ConfigError beyond a total number of values.

    The network that a model file describes has no more values than the file. A description of a much larger one is
    rejected before memory is allocated.
    """

    CREATE = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full, torch.eye, torch.arange)

    def __init__(self, file: Path, stored: int) -> None:
        super().__init__()
        self.file, self.stored, self.created = file, stored, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.CREATE:
            size = (kwargs or {}).get("size", args[0] if func is torch.full or len(args) == 1 else args)
            count = math.prod(size) if isinstance(size, Sequence) else int(size)
            self.created += max(count, MIN_TENSOR)
            if self.created > 8 * self.stored + MIN_ALLOCATION:
                raise ConfigError(
                    f"{self.file} is refused because it describes a network that is far larger than the "
                    f"{self.stored:,} values in it; get the file again from whoever trained the model."
                )
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class SavedModel:
    """A model that predicts; `load_model` returns one.

    Attributes:
        file: the model file.
        description: what the file says about the model.
        weights: all tensors of the model by name.
    """

    file: Path
    description: dict[str, Any] = field(repr=False)
    weights: Tensors = field(repr=False)

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.description["classes"])

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Channels, height and width of images; the width of feature vectors."""
        return tuple(self.description["sample_shape"])

    @property
    def takes_known_labels(self) -> bool:
        return bool(self.description["takes_known_labels"])

    @property
    def tuned_thresholds(self) -> NDArray[np.float64] | None:
        """(C,), chosen on the run's validation data: for the best F1, or for another goal of `fedmll tune`. None if
        there was no validation data."""
        values = self.description["thresholds"]
        return None if values is None else np.array(values, dtype=np.float64)

    @property
    def calibration(self) -> NDArray[np.float64] | None:
        """(C, 2): a and b of σ(a z + b), from `fedmll tune --calibrate`."""
        values = self.description.get("calibration")
        return None if values is None else np.array(values, dtype=np.float64)

    @property
    def experiment(self) -> Experiment:
        return self.trainer.task.experiment

    @cached_property
    def trainer(self) -> Trainer:
        description = self.description
        experiment = build_experiment(self.file, description)
        frozen = {name: self.weights[name] for name in description["frozen"] if name in self.weights}
        finished = FrozenState(frozen, description["layout"])
        task = Task(
            experiment, self.classes, self.sample_shape, description["clients"], torch.device("cpu"), finished=finished
        )
        with AllocationLimit(self.file, sum(tensor.numel() for tensor in self.weights.values())):
            trainer = Trainer(task)
        places = trainer.weights.layout | trainer.weights.counter_layout
        expected = {name: place.shape for name, place in places.items()}
        expected |= {name: tensor.shape for name, tensor in trainer.frozen().items()}
        shapes = {name: tensor.shape for name, tensor in self.weights.items()}
        wrong = [name for name, shape in expected.items() if shapes.get(name) != shape]
        if wrong:
            raise ConfigError(
                f"{self.file} does not hold the model that it describes: {len(wrong)} of {len(expected)} tensors are "
                f"missing or have another shape, '{wrong[0]}' is the first. It was written by fedmll "
                f"{writer_version(description)}: use that version."
            )
        trainer.load(self.weights)
        trainer.model.eval()
        return trainer

    def predict(self, samples: Samples, known: KnownLabels | None = None) -> NDArray[np.float32]:
        """Probabilities (N, C).

        Args:
            samples: images (N, channels, height, width) with uint8 pixels, feature vectors (N, width), a dataset, image
                files, or tables.
            known: known labels, for methods that can use them (C-Tran's); other methods reject them.
        """
        if isinstance(samples, Path | str):
            samples = [samples]
        if not isinstance(samples, np.ndarray | Dataset):
            return self._predict_files([Path(path) for path in samples], known)
        if not isinstance(samples, Dataset):
            samples = Dataset(samples, np.zeros((len(samples), len(self.classes)), np.int8), self.classes)
        if samples.sample_shape != self.sample_shape:
            raise ConfigError(
                f"The model {self.file} takes samples of shape {self.sample_shape}, and these are "
                f"{samples.sample_shape}."
            )
        targets = None if known is None else torch.from_numpy(self._known_targets(known, len(samples)))
        scores: NDArray[np.float32] = self.trainer.predict(samples, 0, len(samples), targets).numpy()
        return scores if self.calibration is None else apply_calibration(scores, self.calibration).astype(np.float32)

    def _predict_files(self, paths: list[Path], known: KnownLabels | None) -> NDArray[np.float32]:
        scores = []
        for prediction in self.stream(paths, known):
            if prediction.probabilities is None:
                raise DataError(f"The image {display_path(prediction.path)} cannot be used: {prediction.reason}.")
            scores.append(prediction.probabilities)
        return np.stack(scores) if scores else np.zeros((0, len(self.classes)), np.float32)

    def stream(self, paths: Sequence[Path], known: KnownLabels | None = None) -> Iterator[ImagePrediction]:
        """Predict image files one after the other, in order; or the rows of tables, if the model was trained on one.

        An unreadable file gives a reason and does not stop the others. Memory does not grow with the number of files:
        threads decode a few images ahead of the network.
        """
        if self.description["experiment"]["data"].get("encoding") is not None:
            yield from self._stream_tables(paths, known)
            return
        if len(self.sample_shape) != 3:
            raise ConfigError(
                f"The model {self.file} takes feature vectors of width {self.sample_shape[0]}, not images: "
                "load_model(FILE).predict(ARRAY) uses it."
            )
        targets = None if known is None else self._known_targets(known, len(paths))
        _ = self.trainer  # a wrong model is rejected before images are read
        window, start = self.description["window"], 0
        shape = (self.sample_shape[0], self.sample_shape[1], self.sample_shape[2])
        for batch in decode_batches(paths, shape, None if window is None else tuple(window), EVALUATION_BATCH):
            readable = [place for place, (_, pixels) in enumerate(batch) if not isinstance(pixels, str)]
            rows = None if targets is None or not readable else targets[start + np.array(readable)]
            pixels = np.array([batch[place][1] for place in readable], dtype=np.uint8).reshape(-1, *shape)
            scores = iter(self.predict(pixels, rows))
            for path, decoded in batch:
                if isinstance(decoded, str):
                    yield ImagePrediction(path, None, decoded)
                else:
                    yield ImagePrediction(path, next(scores))
            start += len(batch)

    def _stream_tables(self, tables: Sequence[Path], known: KnownLabels | None) -> Iterator[ImagePrediction]:
        """Predict the rows of tables: each is named after its file and number."""
        encoding = self.experiment.data.encoding
        assert encoding is not None
        for table in tables:
            scores = self.predict(encode(read_table(table), encoding, f"'{table}'"), known)
            for number, row in enumerate(scores, 1):
                yield ImagePrediction(Path(f"{table}:{number}"), row)

    def _known_targets(self, known: KnownLabels, samples: int) -> NDArray[np.int8]:
        """(samples, C)."""
        if not self.takes_known_labels:
            raise ConfigError(
                f"The model {self.file} ('{self.description['method']}', head '{self.description['head']}') cannot use "
                "known labels; models of fedctran and fedlgt can. Leave them out."
            )
        if isinstance(known, Mapping):
            row = np.full(len(self.classes), -1, np.int8)
            for name, value in known.items():
                if name not in self.classes:
                    raise ConfigError(f"The model has no class '{name}'{suggest(name, self.classes)}")
                row[self.classes.index(name)] = value
            known = np.tile(row, (samples, 1))
        known = np.asarray(known)
        if known.shape != (samples, len(self.classes)) or not np.isin(known, (-1, 0, 1)).all():
            raise ConfigError(
                f"known labels must be 1, 0 or -1 (unknown), with one row per sample and one column per class: "
                f"({samples}, {len(self.classes)}); they are {known.shape}."
            )
        return known.astype(np.int8)


def load_model(file: Path | str, *, plugins: Sequence[Path | str] = (), model: Any = None) -> SavedModel:
    """Load a `model.safetensors`.

    No code is run and no file is opened because a model file names it. A `PluginWarning` says that a plug-in file is
    not the one that the model was trained with.

    Args:
        file: the model file.
        plugins: the plug-in files that the model's method needs.
        model: the torch module that the model was trained with, if it was a Python object.
    """
    saved, paths = read_model(file), [Path(plugin).expanduser().absolute() for plugin in plugins]
    check_complete(saved.file, saved.description)
    if model is not None:
        for classes in (None, len(saved.classes)):  # with and without its last layer: the file names one of them
            register_model(model, classes)
    not_finite = [name for name, tensor in saved.weights.items() if not torch.isfinite(tensor).all()]
    if not_finite:
        raise DataError(
            f"{file} cannot be used because {len(not_finite)} of its {len(saved.weights)} tensors have values that are "
            f"NaN or infinite, '{not_finite[0]}' is the first: its training diverged, so train again with a lower "
            "training.lr."
        )
    for path in paths:
        registry.load_plugin_file(path)
    for text in compare_plugins(saved.file, saved.description, paths):
        warnings.warn(text, PluginWarning, stacklevel=2)
    return saved


def read_model(file: Path | str) -> SavedModel:
    """Read a model file whose description has only known keys, but may lack some that prediction needs."""
    file = Path(file)
    if not file.is_file():
        raise ConfigError(f"There is no model file {file}. A finished run has one, model.safetensors, in its folder.")
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            description = parse_metadata(file, metadata.get(METADATA_KEY, "null"))
            check_format(file, description)
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        raise DataError(f"{file} is not a complete model file ({_one_line(error)}). {HOW_TO_REPAIR}") from None
    if description.get("checksum") != checksum_with_description(weights, description):
        raise DataError(f"{file} is damaged: its content does not match its checksum. {HOW_TO_REPAIR}")
    return SavedModel(file, description, weights)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _without_folders(value: Any) -> Any:
    """Reduce an absolute path, also behind a word and a colon, to its last name: the folders mean nothing elsewhere."""
    kind, colon, rest = str(value).rpartition(":")
    return f"{kind}{colon}{Path(rest).name}" if isinstance(value, str) and Path(rest).is_absolute() else value
