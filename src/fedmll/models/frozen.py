"""A frozen backbone is a function: its maps of tokens are computed once, by all cores, and kept in the cache as fp16.

What is trained then is a neck (a 1×1 projection and a norm, `model.width`) and a head on top of the kept tokens. Where
the same network sees an image itself, its tokens are rounded in the same way.
"""

from __future__ import annotations

import hashlib
import inspect
import multiprocessing
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedmll import registry
from fedmll.data.images.augment import augment
from fedmll.data.images.cache import Progress, cached, content_key, silent, store_key
from fedmll.errors import ConfigError
from fedmll.files import checksum
from fedmll.models.backbones.base import Backbone, normalisation
from fedmll.processes import forked
from fedmll.seeding import derive, torch_generator
from fedmll.settings import Model

AT_ONCE = 16  # images a pass: beyond it the C library maps and clears the memory of every layer anew (from 32 MB on)
WHOLE = "backbone"

AVERAGED = 256  # images
Tokens = NDArray[np.float16]  # (views, images, width, rows, columns); view 0 is without augmentation
Means = NDArray[np.float32]  # (views, images, width)


def fit_out(backbone: Backbone, model: Model, seed: int) -> Backbone:
    """`model.freeze` and `model.width`: what is frozen stays as it is and in evaluation mode; the neck is trained."""
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
    if model.width is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "neck"))
            projection = nn.Conv2d(backbone.width, model.width, 1, bias=False)
            backbone.neck = nn.Sequential(projection, normalisation(model.norm, model.width))
        backbone.width = model.width
    return backbone


def tokens_of(backbone: Backbone, images: Tensor) -> Tensor:
    """What heads see of images, or of tokens that were kept (fp16): a map; of vectors, and of means that were kept,
    (batch, width)."""
    if images.dtype == torch.float16:
        tokens = images.float()
    elif backbone.means_kept and images.dim() == 2:
        return images
    else:
        tokens = backbone(images)
        if backbone.whole_is_frozen:
            tokens = tokens.half().float()
    if backbone.neck is None:
        return tokens
    return backbone.neck(tokens if tokens.dim() == 4 else as_map(tokens))


def as_map(vectors: Tensor) -> Tensor:
    """A map of one token."""
    return vectors[:, :, None, None]


def pooled(tokens: Tensor) -> Tensor:
    """The mean over a map (batch, width, rows, columns); a map of one token is that token, and so is a vector."""
    if tokens.dim() == 2:
        return tokens
    return tokens.flatten(1) if tokens.shape[2:] == (1, 1) else tokens.mean((2, 3))


def kept_tokens(
    backbone: Backbone, store: NDArray[Any], recipe: str, views: int, seed: int,
    normalise: Callable[[Tensor], Tensor], scale: object, progress: Progress = silent, *, means: bool = False,
) -> Tokens | Means:  # fmt: skip
    """Of every image of a store. View v > 0 of image i is augmented by `recipe`; it depends on the seed, v and i.

    normalise   pixels in [0, 1] → what the backbone takes, as `scale` says
    means       not the tokens but their means, with the bits that a head would make of the tokens in every step
    """
    backbone.eval()
    device = next(backbone.parameters()).device
    with torch.no_grad():
        shape = backbone(normalise(torch.zeros(1, *store.shape[1:], device=device))).shape[1:]
    drawn = (recipe, seed, AT_ONCE, _code(registry.find("augmentation", recipe))) if views > 1 else ()
    key = content_key("tokens", store_key(store), _digest(backbone), _code(type(backbone)), scale, views, *drawn)
    fill = _Filling(backbone, store, recipe, views, seed, normalise, progress)

    def tokens() -> Tokens:
        return cached(key, lambda: ((views, len(store), *shape), fill), progress, "features", np.float16)

    if not means:
        return tokens()
    backbone.means_kept = True
    return cached(content_key("means", key), lambda: _averaged(tokens()), progress, "features", np.float32)


def _averaged(tokens: Tokens) -> tuple[tuple[int, ...], Callable[[Means], None]]:
    """The shape of their means, and what fills them in."""

    def fill(found: Means) -> None:
        for view, start in product(range(len(tokens)), range(0, tokens.shape[1], AVERAGED)):
            rows = slice(start, start + AVERAGED)
            found[view, rows] = pooled(torch.from_numpy(np.array(tokens[view, rows])).float()).numpy()

    return tokens.shape[:3], fill


@dataclass(frozen=True)
class _Filling:
    backbone: Backbone
    store: NDArray[Any]
    recipe: str
    views: int
    seed: int
    normalise: Callable[[Tensor], Tensor]
    progress: Progress

    def __call__(self, tokens: Tokens) -> None:
        """By all cores; a device has cores of its own."""
        done, total = multiprocessing.Value("q", 0), self.views * len(self.store)
        if next(self.backbone.parameters()).device.type != "cpu":
            self._some(tokens, 0, 1, done)
            return
        cores = len(os.sched_getaffinity(0))
        workers = [forked(self._alone, tokens, k, cores, done) for k in range(cores)]
        try:
            for worker in workers:
                while worker.is_alive():
                    worker.join(0.2)
                    self.progress(done.value, total, "computing features")
        finally:
            for worker in workers:
                worker.terminate()
        if done.value != total:
            raise ConfigError("A process that computed features died; there may be too little memory. Start it again.")

    def _alone(self, tokens: Tokens, mine: int, cores: int, done: Any) -> None:
        torch.set_num_threads(1)
        self._some(tokens, mine, cores, done)

    def _some(self, tokens: Tokens, mine: int, cores: int, done: Any) -> None:
        device = next(self.backbone.parameters()).device
        work = [(view, start) for view in range(self.views) for start in range(0, len(self.store), AT_ONCE)]
        with torch.inference_mode():
            for view, start in work[mine::cores]:
                rows = slice(start, start + AT_ONCE)
                images = torch.from_numpy(np.array(self.store[rows])).to(device).float().mul_(1 / 255)
                if view:
                    images = augment(images, self.recipe, torch_generator(self.seed, "view", view, start))
                tokens[view, rows] = self.backbone(self.normalise(images)).half().cpu().numpy()
                with done.get_lock():
                    done.value += len(images)


def _code(thing: Any) -> str:
    """The file that it is written in, as it is now: what changed in it may give other tokens. Without one (a notebook's
    cell) nothing is found again."""
    try:
        return checksum(Path(inspect.getfile(thing)))
    except (TypeError, OSError):
        return secrets.token_hex(8)


def _digest(backbone: Backbone) -> str:
    """Of all its weights, without the neck."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in backbone.state_dict().items():
        if not name.startswith("neck."):
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
