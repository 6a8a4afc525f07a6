"""Vision transformers by `transformers` (pip install 'fedmll[hf]'), as backbones that give a map of tokens.

`vit`        `model.weights` is a folder as `save_pretrained` writes it, or a name on the hub. Without weights: an
             untrained ViT-B/16 (12 layers of width 768, 12 heads, patches of 16 × 16). Its trained weights are
             google/vit-base-patch16-224-in21k on the hub.
`small-vit`  untrained, of `model.channels`: as many layers as numbers, the last one its width.

A head that uses the mean of the tokens can have the class token instead: `model.class_token`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmll.config.settings import ModelSettings
from fedmll.core.errors import ConfigError, FedmllError
from fedmll.core.registry import register
from fedmll.models.backbones.base import Backbone
from fedmll.models.pretrained_weights import PixelScaling

HEAD_WIDTH = 32  # of a small transformer's attention heads
LAYOUT = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("image_size", "patch_size", "num_channels", "qkv_bias", "layer_norm_eps"),
)  # what a transformer's shape depends on
VIT_B16 = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "patch_size": 16
}  # Dosovitskiy et al., 2021, Table 1  # fmt: skip
TOKENS = 8  # a small transformer's map has about 8 × 8


class VisionTransformer(Backbone):
    """The output is the map of the patch tokens, without the class token; or the class token alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        config: Any = network.config
        self.width = config.hidden_size
        self.patch = config.patch_size
        self.gives_class_token = False

    @property
    def layout(self) -> dict[str, Any]:
        config: Any = self.network.config
        return {key: value for key, value in json.loads(config.to_json_string()).items() if key in LAYOUT}

    def stages(self) -> list[nn.Module]:
        """The embeddings; then every layer, the last one with the norm after it."""
        network: Any = self.network
        *layers, last = network.layers if hasattr(network, "layers") else network.encoder.layer
        return [network.embeddings, *layers, nn.ModuleList([last, network.layernorm])]

    def forward(self, images: Tensor) -> Tensor:
        return self._output(self.network(pixel_values=images).last_hidden_state, images)

    def stage_outputs(self, images: Tensor, wanted: frozenset[int]) -> dict[int, Tensor]:
        outputs = self.network(pixel_values=images, output_hidden_states=True)
        found = {number: self._output(outputs.hidden_states[number], images) for number in wanted}
        return found | {-1: self._output(outputs.last_hidden_state, images)}

    def use_class_token(self) -> None:
        self.gives_class_token = True

    def _output(self, tokens: Tensor, images: Tensor) -> Tensor:
        """The class token is the first one."""
        if self.gives_class_token:
            return tokens[:, 0]
        rows, columns = images.shape[2] // self.patch, images.shape[3] // self.patch
        return tokens[:, 1:].transpose(1, 2).unflatten(-1, (int(rows), int(columns)))


@register("backbone", "vit")
def vit(model: ModelSettings, sample_shape: tuple[int, ...]) -> VisionTransformer:
    if model.pretrained is None:
        return untrained_vit_b16(sample_shape)
    return pretrained_vit(model.pretrained, sample_shape)


@register("backbone", "small-vit")
def small_vit_of_channels(model: ModelSettings, sample_shape: tuple[int, ...]) -> VisionTransformer:
    if model.pretrained is not None:
        raise ConfigError(
            f"model.weights = '{model.weights}': a small-vit has no published weights. Leave it out, or use "
            "model.backbone = 'vit'."
        )
    return small_vit(sample_shape, model.channels)


@register("layout", "small-vit")
@register("layout", "vit")
def vit_of_layout(layout: Mapping[str, Any]) -> VisionTransformer:
    """As a finished model's file describes it; untrained."""
    library = _library()
    try:
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size", "num_channels"):
            if not isinstance(layout.get(key), int) or layout[key] < 1:
                raise ValueError(f"{key} is not a positive integer")
        config = library.ViTConfig(**{key: value for key, value in layout.items() if key in LAYOUT})
        return VisionTransformer(library.ViTModel(config, add_pooling_layer=False))
    except FedmllError:
        raise
    except Exception as error:  # transformers raises many kinds of errors
        raise ConfigError(
            f"The vision transformer of the model file cannot be built from its layout "
            f"({' '.join(str(error).split())[:200]}); get the file again from whoever trained the model."
        ) from None


def untrained_vit_b16(sample_shape: tuple[int, ...]) -> VisionTransformer:
    channels, height, breadth = sample_shape
    library = _library()
    config = library.ViTConfig(image_size=[height, breadth], num_channels=channels, **VIT_B16)
    _check_patches(height, breadth, config.patch_size)
    return VisionTransformer(library.ViTModel(config, add_pooling_layer=False))


def small_vit(sample_shape: tuple[int, ...], channels: tuple[int, ...]) -> VisionTransformer:
    """Untrained, for small images: its patches divide the image into about 8 × 8 tokens."""
    library = _library()
    width, (depth, height, breadth) = channels[-1], sample_shape
    if width % HEAD_WIDTH:
        raise ConfigError(
            f"model.channels ends in {width}; for a small-vit this is its width and must be a multiple of "
            f"{HEAD_WIDTH}, e.g. [128, 128, 128, 128] (four layers of width 128)."
        )
    divisors = [p for p in range(1, min(height, breadth) + 1) if height % p == 0 and breadth % p == 0]
    config = library.ViTConfig(
        hidden_size=width,
        num_hidden_layers=len(channels),
        num_attention_heads=width // HEAD_WIDTH,
        intermediate_size=4 * width,
        image_size=[height, breadth],
        patch_size=min(divisors, key=lambda p: abs(max(height, breadth) / p - TOKENS)),
        num_channels=depth,
    )
    return VisionTransformer(library.ViTModel(config, add_pooling_layer=False))


def pretrained_vit(weights: str, sample_shape: tuple[int, ...]) -> VisionTransformer:
    """From a folder or the hub, fitted once to the images' size (positions interpolated) and channels (a grey image
    gets the sum of the colour filters)."""
    library, local = _library(), Path(weights).exists()
    try:
        config = library.ViTConfig.from_pretrained(weights, local_files_only=local)
        if config.model_type != "vit":
            raise ValueError(f"it is a '{config.model_type}', not a 'vit'")
        network, report = library.ViTModel.from_pretrained(
            weights,
            config=config,
            add_pooling_layer=False,
            local_files_only=local,
            dtype=torch.float32,
            output_loading_info=True,
        )
        if report["missing_keys"]:
            raise ValueError(f"it lacks {', '.join(sorted(report['missing_keys'])[:3])}")
    except (OSError, ValueError, RuntimeError) as error:
        raise _refusal(weights, error) from None
    _fit(network, sample_shape)
    return VisionTransformer(network)


@register("pixels", "vit")
def vit_pixels(weights: str) -> PixelScaling:
    """Mean and std that a pretrained transformer's pixels were normalised with: its preprocessor_config.json says so;
    without one 0.5 and 0.5, as ViT-B/16's."""
    name = "preprocessor_config.json"
    folder = Path(weights)
    try:
        if folder.exists():
            file = folder / name
        else:
            from transformers.utils import cached_file

            file = Path(cached_file(weights, name, _raise_exceptions_for_missing_entries=False) or name)
        found = json.loads(file.read_text()) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise _refusal(weights, error) from None
    return tuple(found.get("image_mean", (0.5,))), tuple(found.get("image_std", (0.5,)))


def _refusal(weights: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"model.weights = {weights} is no vision transformer that can be loaded "
        f"({' '.join(str(error).split())[:300]}). Give a folder with config.json and model.safetensors, or a name on "
        "the hub if this machine can reach it."
    )


def _library() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError("The backbones vit and small-vit need transformers: pip install 'fedmll[hf]'.") from None
    transformers.logging.set_verbosity_error()  # it reports a checkpoint's classifier, which is not wanted here
    transformers.logging.disable_progress_bar()
    return transformers


def _check_patches(height: int, breadth: int, patch: int) -> None:
    if height % patch or breadth % patch:
        raise ConfigError(
            f"The images are {height} × {breadth} and the transformer's patches {patch} × {patch}: set data.size to a "
            f"multiple of {patch}, for example {max(patch, round(height / patch) * patch)}."
        )


def _fit(network: Any, sample_shape: tuple[int, ...]) -> None:
    """Make a network that was trained on other images take these."""
    channels, height, breadth = sample_shape
    patch, old = network.config.patch_size, network.embeddings.patch_embeddings.image_size
    _check_patches(height, breadth, patch)
    embeddings = network.embeddings
    positions = embeddings.position_embeddings.data
    grid = positions[:, 1:].mT.reshape(1, -1, old[0] // patch, old[1] // patch)
    if (height, breadth) != tuple(old):
        grid = F.interpolate(grid, (height // patch, breadth // patch), mode="bicubic", align_corners=False)
    embeddings.position_embeddings = nn.Parameter(torch.cat([positions[:, :1], grid.flatten(2).mT], dim=1))
    projection = embeddings.patch_embeddings.projection
    if channels != projection.in_channels:
        if channels != 1:
            raise ConfigError(
                f"The images have {channels} channels and the transformer takes {projection.in_channels}."
            )
        projection.weight = nn.Parameter(projection.weight.data.sum(1, keepdim=True))
        projection.in_channels = 1
    embeddings.patch_embeddings.num_channels = network.config.num_channels = channels
    embeddings.image_size = embeddings.patch_embeddings.image_size = (height, breadth)
    network.config.image_size = [height, breadth]
