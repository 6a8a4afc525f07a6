"""What every backbone is, how one is built from an experiment, and how weights come into it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedmll import registry
from fedmll.errors import ConfigError
from fedmll.models.weights import PUBLISHED, is_run, locate, model_of_run
from fedmll.seeding import derive
from fedmll.settings import Model

B = TypeVar("B", bound="Backbone")
CLASSIFIERS = ("fc.", "classifier.")  # torchvision's names


class Backbone(nn.Module):
    """`width` is the number of channels of the token map that `forward` gives; one token may be a vector."""

    width: int

    def __init__(self) -> None:
        super().__init__()
        self.neck: nn.Module | None = None  # between tokens and head (models/frozen.py)
        self.frozen: tuple[nn.Module, ...] = ()  # of its stages
        self.means_kept = False  # what comes in as vectors are means of its own tokens (models/frozen.py)

    @property
    def layout(self) -> dict[str, Any] | None:
        """What it is built from where the experiment alone does not say it (JSON); None: the experiment does."""
        return None

    @property
    def whole_is_frozen(self) -> bool:
        return bool(self.frozen) and len(self.frozen) == len(self.stages())

    def train(self, mode: bool = True) -> Self:
        """What is frozen stays in evaluation mode: its batch statistics are not those of a batch."""
        super().train(mode)
        for stage in self.frozen:
            stage.eval()
        return self

    def stages(self) -> list[nn.Module]:
        """The modules in order from the image; every parameter is in one of them."""
        return [child for child in self.children() if child is not self.neck]

    def load(self, weights: dict[str, Tensor], origin: str) -> None:
        """All of them, under their names; a grey image gets the sum of the colour filters."""
        first = next((f"{name}.weight" for name, m in self.named_modules() if isinstance(m, nn.Conv2d)), "")
        if first in weights and self.get_parameter(first).shape[1] == 1 and weights[first].shape[1:2] == (3,):
            weights = weights | {first: weights[first].sum(1, keepdim=True)}
        try:
            self.load_state_dict(weights)
        except RuntimeError as error:
            raise ConfigError(
                f"model.weights = {origin} does not fit this {type(self).__name__} "
                f"({' '.join(str(error).split())[:300]}). It must have the same layout: ImageNet weights in "
                "torchvision's format need model.norm = 'batch' (and of a resnet model.stem = 'imagenet'), an earlier "
                "run's need its [model] settings and its size of images."
            ) from None


def normalisation(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(min(8, channels), channels)


def he_initialised(backbone: nn.Module) -> None:
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def build_backbone(
    model: Model, sample_shape: tuple[int, ...], seed: int, layout: Mapping[str, Any] | None = None
) -> Backbone:
    """The same initial weights for every method: they depend on the seed and on nothing else. `layout`: as a finished
    model's file has it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "backbone"))
        if layout is not None:
            backbone: Backbone = registry.find("layout", model.backbone)(layout)
            return backbone
        return _built(model, sample_shape)


def _built(model: Model, sample_shape: tuple[int, ...]) -> Backbone:
    if model.weights is None or not is_run(model.weights):
        backbone: Backbone = registry.find("backbone", model.backbone)(model, sample_shape)
        return backbone
    before = model_of_run(model.weights)
    if before.backbone != model.backbone:
        raise ConfigError(
            f"model.weights = '{model.weights}' is a run with model.backbone = '{before.backbone}', and this one has "
            f"'{model.backbone}'; they must be the same."
        )
    # what a pretrained transformer looks like, only its own folder says
    origin = before.weights if model.backbone == "vit" else None
    backbone = _built(model.model_copy(update={"weights": origin}), sample_shape)
    weights = read_weights(locate(model.weights))
    start = "backbone."
    own = {name.removeprefix(start): weight for name, weight in weights.items() if name.startswith(start)}
    backbone.load(own, model.weights)
    return backbone


def pretrained(backbone: B, model: Model) -> B:
    """With the weights of torchvision's file, if there is one; the classifier is left out."""
    if model.weights is None:
        return backbone
    published = PUBLISHED.get(model.weights)
    if published is not None and published.backbone != model.backbone:
        raise ConfigError(
            f"model.weights = '{model.weights}' is for model.backbone = '{published.backbone}', and this is "
            f"'{model.backbone}'; `fedmll weights list` shows which is for which."
        )
    weights = read_weights(locate(model.weights))
    backbone.load({name: w for name, w in weights.items() if not name.startswith(CLASSIFIERS)}, model.weights)
    return backbone


def refuse_files(model: Model) -> None:
    if model.weights is not None:
        raise ConfigError(
            f"model.weights = '{model.weights}', but there are no published weights of model.backbone = "
            f"'{model.backbone}'. It can start from an earlier run (model.weights = 'run:FOLDER')."
        )


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a .safetensors or a .pth file; of the latter nothing but tensors is read."""
    if not path.is_file():
        raise ConfigError(f"model.weights = {path} is a folder; give the path of a .safetensors or .pth file.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise ConfigError(
            f"model.weights = {path} is no file of weights ({' '.join(str(error).split())[:200]}). Give a .safetensors "
            "or .pth file, whole and with nothing but tensors by name."
        ) from None
    if not isinstance(weights, dict) or not all(isinstance(weight, Tensor) for weight in weights.values()):
        raise ConfigError(f"model.weights = {path} must hold nothing but tensors by name (a module's state_dict).")
    return dict(weights)


def pixel_scale(model: Model, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of pixels in [0, 1], one a channel or one for all. A grey image has the colours' average."""
    if model.pixel_mean is None or model.pixel_std is None:
        return (0.5,), (0.5,)
    mean, std = model.pixel_mean, model.pixel_std
    if channels == 1:
        return (sum(mean) / len(mean),), (sum(std) / len(std),)
    if len(mean) not in (1, channels):
        raise ConfigError(
            f"model.pixel_mean and model.pixel_std have {len(mean)} numbers, and the images {channels} channels; give "
            "one number for all, or one a channel."
        )
    return mean, std
