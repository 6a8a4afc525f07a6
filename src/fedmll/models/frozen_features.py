"""Frozen features: the outputs of a frozen backbone are computed once, by all cores, and cached as float16.

A backbone maps an image to a map of *tokens* (batch, width, rows, columns). With a frozen backbone only a neck (a 1×1
projection and a norm, `model.width`) and a head are trained, on the stored tokens. If the same network gets an image
instead, its tokens are rounded in the same way. A head that needs one vector per image can have more than the mean of
the tokens (models/pooled_stages.py). With `model.standardise` the tokens are standardised before the neck
(models/standardise.py).
"""

from __future__ import annotations

import hashlib
import inspect
import multiprocessing
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedmll.config.settings import ModelSettings
from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.core.files import checksum
from fedmll.core.processes import fork_process
from fedmll.core.seeding import derive, torch_generator
from fedmll.data.images.augmentation import augment
from fedmll.data.images.cache import Progress, cached_array, content_key, no_progress, store_key
from fedmll.models.backbones.base import Backbone, build_norm
from fedmll.models.pooled_stages import PooledStages
from fedmll.models.standardise import StandardiseFeatures, pool_tokens

BATCH = 16  # images; with larger batches the C library allocates and clears the memory of each layer again (32 MB)
WHOLE = "backbone"

MEAN_BATCH = 256  # images
Tokens = NDArray[np.float16]  # (views, images, width, rows, columns); view 0 is without augmentation
Means = NDArray[np.float32]  # (views, images, width)


def freeze_and_add_neck(
    backbone: Backbone, model: ModelSettings, seed: int, pooled_shape: tuple[int, ...] | None = None
) -> Backbone:
    """Apply `model.class_token`, `model.freeze`, `model.standardise` and `model.width`: choose the output of a
    transformer, freeze stages of the backbone, standardise its features and add a trained neck.

    Args:
        backbone: a backbone as it was built.
        model: the section [model] of the experiment.
        seed: the experiment's seed.
        pooled_shape: the shape of a sample, if the head needs one vector per image; None: it needs the tokens.
    """
    if model.freeze != "none":
        stages = backbone.stages()
        if model.freeze != WHOLE and len(stages) < int(model.freeze):
            raise ConfigError(
                f"model.freeze = {model.freeze}, but {model.backbone} has {len(stages)} stages; use fewer, or "
                "model.freeze = 'backbone' for all."
            )
        backbone.frozen = tuple(stages if model.freeze == WHOLE else stages[: int(model.freeze)])
        for stage in backbone.frozen:
            stage.requires_grad_(False)
    if pooled_shape is not None and model.class_token:
        backbone.use_class_token()
    if pooled_shape is not None and model.freeze == WHOLE:
        backbone.pooling = PooledStages.of(model, backbone)
        if backbone.pooling is not None:
            backbone.width = backbone.pooling.width(backbone, pooled_shape)
    if model.standardise is True:
        backbone.standardise = StandardiseFeatures(backbone.width)
    if model.width is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "neck"))
            projection = nn.Conv2d(backbone.width, model.width, 1, bias=False)
            backbone.neck = nn.Sequential(projection, build_norm(model.norm, model.width))
        backbone.width = model.width
    return backbone


def compute_tokens(backbone: Backbone, images: Tensor) -> Tensor:
    """The input of a head, from images or from stored tokens (float16): a map of tokens.

    For feature vectors, stored means, and standardised means: (batch, width).
    """
    tokens = backbone_outputs(backbone, images)
    if backbone.standardise is not None:
        tokens = backbone.standardise(tokens)
    if backbone.neck is None:
        return tokens
    return backbone.neck(tokens if tokens.dim() == 4 else as_map(tokens))


def backbone_outputs(backbone: Backbone, images: Tensor) -> Tensor:
    """What the backbone itself gives, before standardisation and neck."""
    if images.dtype == torch.float16:
        return images.float()
    if backbone.stores_means and images.dim() == 2:
        return images
    tokens = features_of(backbone, images)
    return tokens.half().float() if backbone.is_frozen else tokens


def features_of(backbone: Backbone, images: Tensor) -> Tensor:
    """The tokens of images, or the vectors that `model.stages` and the like ask for."""
    found: Tensor = backbone(images) if backbone.pooling is None else backbone.pooling.features(backbone, images)
    return found


def as_map(vectors: Tensor) -> Tensor:
    """Feature vectors as maps of one token."""
    return vectors[:, :, None, None]


@dataclass(frozen=True, kw_only=True)
class FrozenFeatures:
    """The tokens that a frozen backbone computes of all images of a store, or their means; kept in the cache.

    Attributes:
        backbone: the frozen backbone.
        store: the images.
        augmentation: the augmentation of all views but the first; it depends on the seed, the view and the image.
        views: the number of views per image.
        seed: the seed of the augmentation.
        normalise: scales pixels in [0, 1] for the backbone.
        scale: the parameters of `normalise`, for the cache key.
        means: the means of the tokens are wanted, bit for bit as a head would compute them in each step.
    """

    backbone: Backbone
    store: NDArray[Any]
    augmentation: str
    views: int
    seed: int
    normalise: Callable[[Tensor], Tensor]
    scale: object
    means: bool = False

    @property
    def device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tokens."""
        with torch.no_grad():
            blank = self.normalise(torch.zeros(1, *self.store.shape[1:], device=self.device))
            found = features_of(self.backbone.eval(), blank).shape[1:]
        return (self.views, len(self.store), *found)

    @cached_property
    def tokens_key(self) -> str:
        """The cache key of the tokens."""
        backbone, drawn = self.backbone, tuple[object, ...]()
        if self.views > 1:
            code = _code_hash(registry.find("augmentation", self.augmentation))
            drawn = (self.augmentation, self.seed, BATCH, code)
        if backbone.pooling is not None:
            drawn += (backbone.pooling, _code_hash(PooledStages))
        network = (_digest(backbone), _code_hash(type(backbone)), self.shape[2:])
        return content_key("tokens", store_key(self.store), *network, self.scale, self.views, *drawn)

    @property
    def key(self) -> str:
        """The cache key of what `load` returns."""
        return content_key("means", self.tokens_key) if self.means else self.tokens_key

    def load(self, progress: Progress = no_progress, *, processes: int | None = None) -> Tokens | Means:
        """Read the tokens or their means from the cache. What is not there is computed.

        Args:
            progress: called with the number of images.
            processes: how many processes compute; by default one per core. 0: this process. A backbone on a GPU is
                always used in this process.
        """
        self.backbone.eval()
        if not self.means:
            return self._tokens(progress, processes)
        self.backbone.stores_means = True

        def prepare() -> tuple[tuple[int, ...], Callable[[Means], None]]:
            return _mean_filler(self._tokens(progress, processes))

        return cached_array(self.key, prepare, progress, "features", np.float32)

    def _tokens(self, progress: Progress, processes: int | None) -> Tokens:
        if processes is None:
            processes = len(os.sched_getaffinity(0))
        fill = _FeatureWriter(self, progress, processes if self.device.type == "cpu" else 0)
        return cached_array(self.tokens_key, lambda: (self.shape, fill), progress, "features", np.float16)

    def batches(self) -> list[tuple[int, int]]:
        """The view and the first image of each batch. What a batch contains does not depend on who computes it."""
        return [(view, start) for view in range(self.views) for start in range(0, len(self.store), BATCH)]

    def compute(self, view: int, start: int) -> Tokens:
        """The tokens of one batch."""
        self.backbone.eval()
        with torch.inference_mode():
            rows = np.array(self.store[start : start + BATCH])
            images = torch.from_numpy(rows).to(self.device).float().mul_(1 / 255)
            if view:
                images = augment(images, self.augmentation, torch_generator(self.seed, "view", view, start))
            found: Tokens = features_of(self.backbone, self.normalise(images)).half().cpu().numpy()
        return found


def _mean_filler(tokens: Tokens) -> tuple[tuple[int, ...], Callable[[Means], None]]:
    """The shape of the means, and a function that computes them."""

    def fill(found: Means) -> None:
        for view, start in product(range(len(tokens)), range(0, tokens.shape[1], MEAN_BATCH)):
            rows = slice(start, start + MEAN_BATCH)
            found[view, rows] = pool_tokens(torch.from_numpy(np.array(tokens[view, rows])).float()).numpy()

    return tokens.shape[:3], fill


@dataclass(frozen=True)
class _FeatureWriter:
    """Computes all tokens, with some processes; 0: in this process."""

    features: FrozenFeatures
    progress: Progress
    processes: int

    def __call__(self, tokens: Tokens) -> None:
        done, total = multiprocessing.Value("q", 0), self.features.views * len(self.features.store)
        if not self.processes:
            self._compute_share(tokens, 0, 1, done)
            return
        cores = self.processes
        workers = [fork_process(self._compute_in_worker, tokens, k, cores, done) for k in range(cores)]
        try:
            for worker in workers:
                while worker.is_alive():
                    worker.join(0.2)
                    self.progress(done.value, total, "computing features")
        finally:
            for worker in workers:
                worker.terminate()
        if done.value != total:
            raise ConfigError(
                "A process that computed features died, perhaps because of too little memory. Start the command again."
            )

    def _compute_in_worker(self, tokens: Tokens, first: int, cores: int, done: Any) -> None:
        torch.set_num_threads(1)
        self._compute_share(tokens, first, cores, done)

    def _compute_share(self, tokens: Tokens, first: int, cores: int, done: Any) -> None:
        for view, start in self.features.batches()[first::cores]:
            found = self.features.compute(view, start)
            tokens[view, start : start + BATCH] = found
            with done.get_lock():
                done.value += len(found)


def _code_hash(thing: Any) -> str:
    """The hash of the source file: changed code may compute other tokens. Code without a file is never cached."""
    try:
        return checksum(Path(inspect.getfile(thing)))
    except (TypeError, OSError):
        return secrets.token_hex(8)


def _digest(backbone: Backbone) -> str:
    """The hash of all weights of the backbone itself."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in backbone.state_dict().items():
        if not name.startswith(("standardise.", "neck.")):
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
