"""A trained model as one file: `model.safetensors` holds every tensor that predicts, also the frozen ones, and in its
metadata (`fedmll`, as JSON) what is needed to use it. Neither the data nor the weights it started from are needed.

Nothing that a file says is executed or looked for on the disk: plug-ins are named in it, and given by who loads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedmll import files, registry
from fedmll.client import EVALUATION_BATCH
from fedmll.data.dataset import Dataset
from fedmll.engines.learner import Learner
from fedmll.errors import ConfigError, DataError, nearest
from fedmll.experiment import Experiment
from fedmll.message import Tensors
from fedmll.models.backbones import pixel_scale
from fedmll.models.flat import Finished
from fedmll.running.images import Prediction, decoded
from fedmll.task import Task

FORMAT = 1
KEY = "fedmll"  # of the metadata
LEAST_PROBABILITY = 1e-7  # its logit is finite, also in float32 near 1

Known = Mapping[str, int] | NDArray[np.integer]
"""What is known of labels: {class: 1 or 0} of every sample, or (N, C) with -1 for unknown."""


def describe(
    experiment: Experiment, learner: Learner, thresholds: NDArray[np.floating] | None, round: int
) -> dict[str, Any]:
    """All that a file says about its model, as JSON has it. Paths are without their folders."""
    values = experiment.model_dump(mode="json", exclude_none=True, exclude={"engine", "plugins"})
    values["data"].pop("root", None)
    weights = values["model"].pop("weights", None)
    task, head = learner.task, learner.method.network_head
    scale = pixel_scale(experiment.model, task.sample_shape[0]) if len(task.sample_shape) == 3 else None
    described = {
        "format": FORMAT,
        "versions": {"fedmll": _version(), "torch": str(torch.__version__)},
        "method": experiment.method.name,
        "head": head.name,
        "takes_known_labels": "states" in head.gives,
        "classes": list(task.classes),
        "sample_shape": list(task.sample_shape),
        "pixels": None if scale is None else {"mean": list(scale[0]), "std": list(scale[1])},
        "window": experiment.data.window,
        "thresholds": None if thresholds is None else [float(value) for value in thresholds],
        "thresholds_for": None if thresholds is None else "f1",
        "calibration": None,  # or a and b of σ(a z + b), class by class: see running/thresholds.py
        "clients": task.clients,
        "round": round,
        "began_from": weights,
        "layout": learner.model.backbone.layout,
        "frozen": sorted(learner.frozen()),
        "plugins": list(experiment.plugins),
        "experiment": values,
    }
    return {name: _without_folders(value) for name, value in described.items()}


def write_model(file: Path, weights: Tensors, description: Mapping[str, Any]) -> None:
    """Whole, or not at all."""
    with files.replacing(file) as temporary:
        metadata = {KEY: json.dumps(description)}  # one key: of several the file's order would be any
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary, metadata)


@dataclass(frozen=True)
class SavedModel:
    """A model that predicts. `load_model` gives one."""

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
        """(C,), chosen on the run's validation data (with the best F1, or as `fedmll tune` was told); None if it had
        none."""
        found = self.description["thresholds"]
        return None if found is None else np.array(found, dtype=np.float64)

    @property
    def calibration(self) -> NDArray[np.float64] | None:
        """(C, 2): a and b of σ(a z + b), by `fedmll tune --calibrate`."""
        found = self.description.get("calibration")
        return None if found is None else np.array(found, dtype=np.float64)

    @property
    def experiment(self) -> Experiment:
        return self.learner.task.experiment

    @cached_property
    def learner(self) -> Learner:
        described = self.description
        try:
            experiment = Experiment.make(described["experiment"])
        except ConfigError as error:
            raise ConfigError(f"{self.file} cannot be used: {error}{_needed(described['plugins'])}") from None
        finished = Finished({name: self.weights[name] for name in described["frozen"]}, described["layout"])
        learner = Learner(
            Task(
                experiment, self.classes, self.sample_shape, described["clients"], torch.device("cpu"),
                finished=finished,
            )
        )  # fmt: skip
        places = learner.weights.layout | learner.weights.counter_layout
        wanted = {name: place.shape for name, place in places.items()}
        wanted |= {name: tensor.shape for name, tensor in learner.frozen().items()}
        held = {name: tensor.shape for name, tensor in self.weights.items()}
        wrong = [name for name, shape in wanted.items() if held.get(name) != shape]
        if wrong:
            raise ConfigError(
                f"{self.file} does not hold the model that it describes: {len(wrong)} of {len(wanted)} tensors are "
                f"missing or have another shape, '{wrong[0]}' is the first. {_other_version(described)}"
            )
        learner.load(self.weights)
        learner.model.eval()
        return learner

    def predict(
        self, samples: NDArray[Any] | Dataset | Path | str | Sequence[Path | str], known: Known | None = None
    ) -> NDArray[np.float32]:
        """Probabilities (N, C) of images (N, channels, height, width) with bytes for pixels, of feature vectors, or of
        image files. `known` labels help the methods that can use them (C-Tran's); others refuse them."""
        if isinstance(samples, Path | str):
            samples = [samples]
        if not isinstance(samples, np.ndarray | Dataset):
            return self._of_files([Path(path) for path in samples], known)
        if not isinstance(samples, Dataset):
            samples = Dataset(samples, np.zeros((len(samples), len(self.classes)), np.int8), self.classes)
        if samples.sample_shape != self.sample_shape:
            raise ConfigError(
                f"The model {self.file} takes samples of shape {self.sample_shape}, and these are "
                f"{samples.sample_shape}."
            )
        told = None if known is None else torch.from_numpy(self._known(known, len(samples)))
        found: NDArray[np.float32] = self.learner.predict(samples, 0, len(samples), told).numpy()
        return found if self.calibration is None else recalibrated(found, self.calibration).astype(np.float32)

    def _of_files(self, paths: list[Path], known: Known | None) -> NDArray[np.float32]:
        found = np.zeros((len(paths), len(self.classes)), np.float32)
        for place, prediction in enumerate(self.stream(paths, known)):
            if prediction.probabilities is None:
                raise DataError(f"The image {prediction.path} cannot be used: {prediction.reason}.")
            found[place] = prediction.probabilities
        return found

    def stream(self, paths: Sequence[Path], known: Known | None = None) -> Iterator[Prediction]:
        """One after the other, in order; a file that cannot be read says why and does not stop the others. Memory does
        not grow with the number of files: threads decode a little ahead of the network."""
        if len(self.sample_shape) != 3:
            raise ConfigError(
                f"The model {self.file} takes feature vectors of width {self.sample_shape[0]}, not images: "
                "load_model(FILE).predict(ARRAY) uses it."
            )
        told = None if known is None else self._known(known, len(paths))
        _ = self.learner  # a wrong model is refused before images are read
        window, start = self.description["window"], 0
        shape = (self.sample_shape[0], self.sample_shape[1], self.sample_shape[2])
        for batch in decoded(paths, shape, None if window is None else tuple(window), EVALUATION_BATCH):
            good = [place for place, (_, pixels) in enumerate(batch) if not isinstance(pixels, str)]
            rows = None if told is None or not good else told[start + np.array(good)]
            pixels = np.array([batch[place][1] for place in good], dtype=np.uint8).reshape(-1, *shape)
            scores = iter(self.predict(pixels, rows))
            for path, found in batch:
                yield Prediction(path, None, found) if isinstance(found, str) else Prediction(path, next(scores))
            start += len(batch)

    def _known(self, known: Known, samples: int) -> NDArray[np.int8]:
        """(samples, C)."""
        if not self.takes_known_labels:
            raise ConfigError(
                f"The model {self.file} ('{self.description['method']}', head '{self.description['head']}') cannot use "
                "known labels; those of fedctran and fedlgt can. Leave them out."
            )
        if isinstance(known, Mapping):
            row = np.full(len(self.classes), -1, np.int8)
            for name, value in known.items():
                if name not in self.classes:
                    raise ConfigError(f"The model knows no class '{name}'{nearest(name, self.classes)}")
                row[self.classes.index(name)] = value
            known = np.tile(row, (samples, 1))
        known = np.asarray(known)
        if known.shape != (samples, len(self.classes)) or not np.isin(known, (-1, 0, 1)).all():
            raise ConfigError(
                f"known labels must be 1, 0 or -1 (unknown), one row a sample and one column a class: "
                f"({samples}, {len(self.classes)}); they are {known.shape}."
            )
        return known.astype(np.int8)


def recalibrated(p: NDArray[np.floating], by: NDArray[np.float64]) -> NDArray[np.float64]:
    """σ(a z + b) of probabilities (N, C), z their logits."""
    return recalibrated_tensor(torch.as_tensor(p, dtype=torch.float64), torch.from_numpy(by)).numpy()


def recalibrated_tensor(p: Tensor, by: Tensor) -> Tensor:
    """The same as a network has it."""
    return torch.sigmoid(torch.logit(p, eps=LEAST_PROBABILITY) * by[:, 0] + by[:, 1])


def load_model(file: Path | str, *, plugins: Sequence[Path | str] = ()) -> SavedModel:
    """The model in a `model.safetensors`. `plugins`: the files of a method of your own, as for a run."""
    file = Path(file)
    if not file.is_file():
        raise ConfigError(f"There is no model file {file}. A finished run has one, model.safetensors, in its folder.")
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            described = json.loads(metadata.get(KEY, "null"))
            _refuse_stranger(file, described)
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        raise DataError(
            f"{file} is not a whole model file ({' '.join(str(error).split())[:200]}). Copy it again; if the run's "
            "checkpoints are there, `fedmll resume FOLDER` writes it anew."
        ) from None
    for plugin in plugins:
        registry.load_file(Path(plugin).expanduser().absolute())
    return SavedModel(file, described, weights)


def _refuse_stranger(file: Path, described: Any) -> None:
    if not isinstance(described, dict) or "format" not in described:
        raise ConfigError(
            f"{file} does not say what model it is: it was not written by fedmll, or by one before 0.2. Of a run's "
            "folder `fedmll resume FOLDER` writes it anew, without training again."
        )
    if described["format"] != FORMAT:
        raise ConfigError(
            f"{file} has the format version {described['format']}, and this fedmll reads version {FORMAT}. "
            f"{_other_version(described)}"
        )


def _other_version(described: Mapping[str, Any]) -> str:
    versions = described.get("versions")
    wrote = versions.get("fedmll", "unknown") if isinstance(versions, dict) else "unknown"
    return f"It was written by fedmll {wrote}: use that version."


def _version() -> str:
    try:
        return version("fedmll")
    except PackageNotFoundError:  # a source tree that is not installed
        return "0+source"


def _needed(plugins: Sequence[str]) -> str:
    return f" It was made with the plug-in {', '.join(plugins)}: give it with --plugin." if plugins else ""


def _without_folders(value: Any) -> Any:
    """Absolute paths, also those behind a word and a colon, become names: they say nothing elsewhere."""
    if isinstance(value, dict):
        return {key: _without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(inner) for inner in value]
    if isinstance(value, str):
        kind, colon, rest = value.rpartition(":")
        return f"{kind}{colon}{Path(rest).name}" if Path(rest).is_absolute() else value
    return value
