"""A backbone given as a Python object: any `nn.Module`, or a function without parameters that returns one.

The module maps a batch to vectors (batch, width), to a map (batch, width, rows, columns), or to a sequence of tokens
(batch, tokens, width). Outputs of Hugging Face models are understood too. Its width is found out with two samples.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedmll.config.settings import ModelSettings
from fedmll.core.errors import ConfigError
from fedmll.core.registry import OBJECT_PREFIX, register
from fedmll.models.backbones.base import Backbone, describe_exception


class ObjectBackbone(Backbone):
    """Wraps a user's module."""

    def __init__(self, module: nn.Module, sample_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.module = module
        name, batch = type(module).__name__, torch.zeros(2, *sample_shape)
        training = module.training
        try:
            with torch.no_grad():
                output = module.eval()(batch)
            module.train(training)
        except Exception as error:
            raise ConfigError(
                f"model: {name} fails on a batch of shape {tuple(batch.shape)} ({describe_exception(error)}); it must "
                "take a batch of samples of this data."
            ) from error
        found = _tokens(output)
        if found is None or len(found) != 2:
            shape = tuple(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
            raise ConfigError(
                f"model: {name} turns a batch of shape {tuple(batch.shape)} into {shape}; it must return (batch, "
                "width), (batch, width, rows, columns) or (batch, tokens, width)."
            )
        self.width = found.shape[1]

    def stages(self) -> list[nn.Module]:
        return list(self.module.children()) or [self.module]

    def forward(self, images: Tensor) -> Tensor:
        tokens = _tokens(self.module(images))
        assert tokens is not None
        return tokens


def register_model(model: Any, classes: int | None = None) -> str:
    """Register a module as a backbone; returns its name for `model.backbone`.

    A module starts with its own weights. A function is called with torch seeded, so that its initial weights follow
    from the experiment's seed.

    Args:
        model: the module, or a function that builds it.
        classes: the number of classes. If the last layer of the module is linear with so many outputs, it is left out:
            the head of the method takes its place, and starts with new weights.
    """
    template = _build(model)
    last = next((name for name, layer in reversed(list(template.named_modules())) if not list(layer.children())), "")
    layer = template.get_submodule(last)
    is_classifier = bool(last) and isinstance(layer, nn.Linear) and layer.out_features == classes

    def build(settings: ModelSettings, sample_shape: tuple[int, ...]) -> Backbone:
        if settings.pretrained is not None:
            raise ConfigError("model.weights does not go with a model that is a Python object: load them before.")
        module = copy.deepcopy(model) if isinstance(model, nn.Module) else _build(model)
        if is_classifier:
            parent, _, leaf = last.rpartition(".")
            setattr(module.get_submodule(parent), leaf, nn.Identity())
        return ObjectBackbone(module, sample_shape)

    build.__module__ = "the user"  # not built in, so what it returns is checked
    shapes = [(name, tuple(tensor.shape)) for name, tensor in template.state_dict().items()]
    digest = hashlib.blake2b(repr((shapes, is_classifier)).encode(), digest_size=4).hexdigest()
    name = f"{OBJECT_PREFIX}{type(template).__name__}-{digest}"
    register("backbone", name)(build)
    return name


def _build(model: nn.Module | Callable[[], Any]) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise ConfigError(
            f"model is a {type(model).__name__}; it must be a torch module, a function that returns one, or the name "
            "of a backbone."
        )
    try:
        built = model()
    except Exception as error:
        raise ConfigError(
            f"model: {getattr(model, '__name__', model)} cannot be called without arguments "
            f"({describe_exception(error)}); give a module, or a function without parameters that returns one."
        ) from error
    if not isinstance(built, nn.Module):
        raise ConfigError(f"model: the function returned a {type(built).__name__}; it must return a torch module.")
    return built


def _tokens(output: Any) -> Tensor | None:
    """The output as (batch, width) or (batch, width, rows, columns); None if it is neither."""
    output = getattr(output, "last_hidden_state", output)
    if not isinstance(output, Tensor) or output.dim() not in (2, 3, 4):
        return None
    return output.transpose(1, 2)[..., None] if output.dim() == 3 else output
