"""`Backbone`: the base class, how a backbone is built from an experiment, and how weights are loaded."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fedmll.config.settings import ModelSettings
from fedmll.core import registry
from fedmll.core.errors import ConfigError, FedmllError
from fedmll.core.seeding import derive
from fedmll.core.tensor_files import checksum_with_description
from fedmll.models.pretrained_weights import (
    METADATA_KEY,
    PUBLISHED,
    find_weights_file,
    is_run,
    read_run_model_settings,
)
from fedmll.models.standardise import StandardiseFeatures

B = TypeVar("B", bound="Backbone")
CLASSIFIERS = ("fc.", "classifier.")  # torchvision's names


class Backbone(nn.Module):
    """Maps images to tokens (batch, width, rows, columns), or to vectors (batch, width)."""

    width: int

    def __init__(self) -> None:
        super().__init__()
        self.pooling: Any = None  # PooledStages: one vector per image instead of a map (models/pooled_stages.py)
        self.standardise: StandardiseFeatures | None = None  # after the tokens of a frozen backbone
        self.neck: nn.Module | None = None  # between tokens and head (models/frozen_features.py)
        self.frozen: tuple[nn.Module, ...] = ()  # frozen stages
        self.stores_means = False  # vectors as input are means of its own tokens (models/frozen_features.py)

    @property
    def layout(self) -> dict[str, Any] | None:
        """JSON values that are needed to build it in addition to the experiment; None: nothing else is needed."""
        return None

    @property
    def is_frozen(self) -> bool:
        return bool(self.frozen) and len(self.frozen) == len(self.stages())

    def train(self, mode: bool = True) -> Self:
        """Frozen stages stay in evaluation mode, so that their batch statistics do not change."""
        super().train(mode)
        for stage in self.frozen:
            stage.eval()
        return self

    def stages(self) -> list[nn.Module]:
        """The modules in order, starting at the image; each parameter is in one of them."""
        return [child for child in self.children() if child not in (self.standardise, self.neck)]

    def stage_outputs(self, images: Tensor, wanted: frozenset[int]) -> dict[int, Tensor]:
        """The maps of some stages by number (0: the first of `stages`), and that of the last one as number -1."""
        raise ConfigError(
            f"model.stages: the backbone {type(self).__name__} does not give the outputs of its stages. Leave "
            "model.stages out, or give the class a method stage_outputs."
        )

    def use_class_token(self) -> None:
        """Give the class token as one vector per image instead of the map (`model.class_token`)."""
        raise ConfigError(f"model.class_token = true, but the backbone {type(self).__name__} has no class token.")

    def load(self, weights: dict[str, Tensor], origin: str) -> None:
        """Load all weights by name; for grey images the colour filters of the first layer are summed."""
        first = next((f"{name}.weight" for name, m in self.named_modules() if isinstance(m, nn.Conv2d)), "")
        if first in weights and self.get_parameter(first).shape[1] == 1 and weights[first].shape[1:2] == (3,):
            weights = weights | {first: weights[first].sum(1, keepdim=True)}
        try:
            self.load_state_dict(weights)
        except RuntimeError as error:
            raise ConfigError(
                f"model.weights = {origin} does not fit this {type(self).__name__} "
                f"({' '.join(str(error).split())[:300]}). It must have the same layout: ImageNet weights in "
                "torchvision's format need model.norm = 'batch' (and for a resnet model.stem = 'imagenet'), weights of "
                "an earlier run need the same [model] settings and image size."
            ) from None


def build_norm(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(min(8, channels), channels)


def initialise_he(backbone: nn.Module) -> None:
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def build_backbone(
    model: ModelSettings, sample_shape: tuple[int, ...], seed: int, layout: Mapping[str, Any] | None = None
) -> Backbone:
    """Build a backbone. Its initial weights depend only on the seed, so they are the same for all methods.

    Args:
        model: the section [model] of the experiment.
        sample_shape: the shape of a sample.
        seed: the experiment's seed.
        layout: the layout from a model file; None: build from `model`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "backbone"))
        if layout is not None:
            backbone: Backbone = registry.find("layout", model.backbone)(layout)
            return backbone
        return _build(model, sample_shape)


def _build(model: ModelSettings, sample_shape: tuple[int, ...]) -> Backbone:
    if model.pretrained is None or not is_run(model.pretrained):
        return _call_builder(model, sample_shape)
    before = read_run_model_settings(model.pretrained)
    if before.backbone != model.backbone:
        raise ConfigError(
            f"model.weights = '{model.weights}' is a run with model.backbone = '{before.backbone}', and this one has "
            f"'{model.backbone}'; they must be the same."
        )
    # only the folder of a pretrained transformer describes its architecture
    origin = before.weights if model.backbone == "vit" else None
    backbone = _build(model.model_copy(update={"weights": origin}), sample_shape)
    weights = _read_run_weights(find_weights_file(model.pretrained))
    start, statistics = "backbone.", "backbone.standardise."  # statistics are those of the other run's data
    own = {name: w for name, w in weights.items() if name.startswith(start) and not name.startswith(statistics)}
    backbone.load({name.removeprefix(start): w for name, w in own.items()}, model.pretrained)
    return backbone


def _read_run_weights(file: Path) -> dict[str, Tensor]:
    weights = read_weights(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata() or {}
    try:
        description = json.loads(metadata.get(METADATA_KEY, ""))
        is_whole = description["checksum"] == checksum_with_description(weights, description)
    except (ValueError, KeyError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise ConfigError(
            f"model.weights = {file} is damaged: its content does not match its checksum. Copy the run again, or "
            f"delete the file and run `fedmll resume {file.parent}`, which writes it again."
        )
    return weights


def _call_builder(model: ModelSettings, sample_shape: tuple[int, ...]) -> Backbone:
    """Build the backbone that is registered under its name. Backbones of plug-ins are checked for mistakes."""
    name, build = model.backbone, registry.find("backbone", model.backbone)
    if name not in registry.find_added("backbone"):
        built_in: Backbone = build(model, sample_shape)
        return built_in
    try:
        backbone = build(model, sample_shape)
    except FedmllError:
        raise
    except Exception as error:  # the plug-in's code
        raise ConfigError(
            f"The backbone '{name}' cannot be built ({describe_exception(error)}): it must be a function of the "
            "settings of the section [model] and the shape of a sample, and return a fedmll Backbone."
        ) from error
    if not isinstance(backbone, Backbone):
        raise ConfigError(
            f"The backbone '{name}' is a {type(backbone).__name__}: it must be an instance of "
            "fedmll.models.backbones.Backbone, a torch module with a `width`."
        )
    width = getattr(backbone, "width", None)
    if not isinstance(width, int) or width < 1:
        raise ConfigError(
            f"The backbone '{name}' ({type(backbone).__name__}) has the width {width!r}: its `width` must be the "
            "number of channels of its output, a positive integer."
        )
    batch = torch.from_numpy(np.zeros((2, *sample_shape), np.float32))
    try:
        with torch.no_grad():
            output = backbone.eval()(batch)
        backbone.train()
    except FedmllError:
        raise
    except Exception as error:
        raise ConfigError(
            f"The backbone '{name}' ({type(backbone).__name__}) fails on a batch of shape {tuple(batch.shape)} "
            f"({describe_exception(error)}): it must take samples of this data."
        ) from error
    shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if not isinstance(output, Tensor) or output.dim() not in (2, 4) or output.shape[:2] != (2, width):
        raise ConfigError(
            f"The backbone '{name}' ({type(backbone).__name__}) turns a batch of shape {tuple(batch.shape)} into "
            f"{shape}: its output must be (batch, width, rows, columns) or (batch, width), here with batch = 2 and "
            f"width = {width}."
        )
    return backbone


def describe_exception(error: Exception) -> str:
    """The type and the text of an exception of somebody else's code, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def load_pretrained(backbone: B, model: ModelSettings) -> B:
    """Load torchvision weights, if `model.weights` is set; the classifier's weights are ignored."""
    if model.pretrained is None:
        return backbone
    published = PUBLISHED.get(model.pretrained)
    if published is not None and published.backbone != model.backbone:
        raise ConfigError(
            f"model.weights = '{model.weights}' is for model.backbone = '{published.backbone}', and this is "
            f"'{model.backbone}'; `fedmll weights list` shows the backbone of each."
        )
    weights = read_weights(find_weights_file(model.pretrained))
    backbone.load({name: w for name, w in weights.items() if not name.startswith(CLASSIFIERS)}, model.pretrained)
    return backbone


def check_no_weights(model: ModelSettings) -> None:
    if model.pretrained is not None:
        raise ConfigError(
            f"model.weights = '{model.weights}', but there are no published weights of model.backbone = "
            f"'{model.backbone}'. It can start from an earlier run (model.weights = 'run:FOLDER')."
        )


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a .safetensors or .pth file; a .pth file may contain only tensors."""
    if not path.is_file():
        raise ConfigError(f"model.weights = {path} is a folder; give the path of a .safetensors or .pth file.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise ConfigError(
            f"model.weights = {path} is not a file of weights ({' '.join(str(error).split())[:200]}). Give a "
            ".safetensors or .pth file that is complete and contains only named tensors."
        ) from None
    if not isinstance(weights, dict) or not all(isinstance(weight, Tensor) for weight in weights.values()):
        raise ConfigError(f"model.weights = {path} must contain only named tensors (a module's state_dict).")
    return dict(weights)


def pixel_scale(model: ModelSettings, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of pixels in [0, 1], per channel or for all channels. Grey images use the average over colours."""
    if model.pixel_mean is None or model.pixel_std is None:
        return (0.5,), (0.5,)
    mean, std = model.pixel_mean, model.pixel_std
    if channels == 1:
        return (sum(mean) / len(mean),), (sum(std) / len(std),)
    if len(mean) not in (1, channels):
        raise ConfigError(
            f"model.pixel_mean and model.pixel_std have {len(mean)} numbers, and the images {channels} channels; give "
            "one number for all, or one per channel."
        )
    return mean, std
