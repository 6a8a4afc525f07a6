"""Initial weights (`model.weights`): published weights, where they are on this machine, and their pixel scaling.

    FILE, FOLDER     a weight file in torchvision's format (.pth, .safetensors); for a vit a folder or a hub name
    NAME             a name of `fedmll weights list`, after `fedmll weights get NAME`
    run:FOLDER       the backbone of an earlier run
    random           no weights: a frozen backbone is meant to be untrained

This module needs no torch, so that lists appear quickly.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from fedmll.config.settings import RUN, ModelSettings
from fedmll.core.errors import ConfigError
from fedmll.core.registry import register
from fedmll.core.text import suggest
from fedmll.data.images.cache import cache_folder

PixelScaling = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std of pixels in [0, 1]

METADATA_KEY = "fedmll"  # of a run's model.safetensors: the description of the model, as JSON
TORCHVISION = "https://download.pytorch.org/models/"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class PublishedWeights:
    """Weights that torchvision publishes (its code: BSD-3), trained on ImageNet-1k (whose terms allow research)."""

    name: str
    backbone: str
    file: str  # its name ends with the first digits of its SHA-256
    megabytes: float

    @property
    def url(self) -> str:
        return TORCHVISION + self.file

    @property
    def sha256(self) -> str:
        """The first 8 digits."""
        return self.file.removesuffix(".pth").rpartition("-")[2]

    @property
    def path(self) -> Path:
        """Where the downloaded file is stored."""
        return cache_folder() / "weights" / self.file


PUBLISHED = {
    weights.name: weights
    for weights in (
        PublishedWeights("densenet121-imagenet1k-v1", "densenet121", "densenet121-a639ec97.pth", 30.8),
        PublishedWeights("mobilenet-v2-imagenet1k-v1", "mobilenet-v2", "mobilenet_v2-b0353104.pth", 13.6),
        PublishedWeights("mobilenet-v2-imagenet1k-v2", "mobilenet-v2", "mobilenet_v2-7ebf99e0.pth", 13.6),
        PublishedWeights("resnet18-imagenet1k-v1", "resnet18", "resnet18-f37072fd.pth", 44.7),
        PublishedWeights("resnet50-imagenet1k-v1", "resnet50", "resnet50-0676ba61.pth", 97.8),
        PublishedWeights("resnet50-imagenet1k-v2", "resnet50", "resnet50-11ad3fa6.pth", 97.8),
    )
}


def find_published(name: str) -> PublishedWeights:
    if name not in PUBLISHED:
        raise ConfigError(f"There are no published weights '{name}'{suggest(name, PUBLISHED)}")
    return PUBLISHED[name]


def find_weights_file(weights: str) -> Path:
    """The file or folder that `model.weights` names."""
    if is_run(weights):
        file = _run_file(weights, "model.safetensors")
        if not file.is_file():
            raise ConfigError(
                f"model.weights = '{weights}': this run is not finished; continue it with "
                f"`fedmll resume {file.parent}`."
            )
        return file
    path = Path(weights).expanduser()
    if path.exists():
        return path
    known = PUBLISHED.get(weights)
    if known is None:
        raise ConfigError(
            f"There is no weights file '{weights}' (model.weights). Give a .safetensors or .pth file, run:FOLDER of an "
            f"earlier run, or a name of `fedmll weights list`{suggest(weights, PUBLISHED)}"
        )
    if not known.path.is_file():
        raise ConfigError(
            f"model.weights = '{weights}' is not on this machine: `fedmll weights get {weights}` downloads it "
            f"({known.megabytes:g} MB); or give a file that you have: --set model.weights=FILE."
        )
    return known.path


def is_run(weights: str) -> bool:
    return weights.startswith(RUN)


def read_run_model_settings(weights: str) -> ModelSettings:
    """The [model] settings of the run that `run:FOLDER` names."""
    file = _run_file(weights, "experiment.toml")
    try:
        return ModelSettings.model_validate(tomllib.loads(file.read_text())["model"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.weights = '{weights}': {file} cannot be read ({error}).") from None


def _run_file(weights: str, name: str) -> Path:
    folder = Path(weights.removeprefix(RUN)).expanduser()
    if not (folder / "experiment.toml").is_file():
        raise ConfigError(f"model.weights = '{weights}': {folder} is not a run (it has no experiment.toml).")
    return folder / name


# Pixel scaling for the weights of a backbone; "imagenet" is the default


@register("pixels", "imagenet")
def imagenet_pixels(weights: str) -> PixelScaling:
    return IMAGENET_MEAN, IMAGENET_STD


@register("pixels", "run")
def pixels_of_run(weights: str) -> PixelScaling:
    """The scaling of the earlier run."""
    model = read_run_model_settings(weights)
    return model.pixel_mean or (0.5,), model.pixel_std or (0.5,)
