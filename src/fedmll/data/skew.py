"""`feature-skew`: the same labels everywhere, but images that look different: each client has a scanner of its own.

Samples are dealt as `iid` does. A look is drawn for each client, every one as often as the others, and put on its
training images: what FedHarmony calls the third axis of heterogeneity. Test data stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from fedmll.data.dataset import Dataset
from fedmll.data.images.cache import Progress, content_key, in_ram_or_cached, silent, store_key
from fedmll.data.partition import Partition, Request, iid
from fedmll.errors import ConfigError
from fedmll.registry import register

LOOKS = ("plain", "dark", "bright", "flat", "blurred", "coarse")
VALUES = np.arange(256)
CURVES = {  # what a pixel of each value becomes
    "dark": np.rint(255 * (VALUES / 255) ** 2).astype(np.uint8),
    "bright": np.rint(255 * (VALUES / 255) ** 0.5).astype(np.uint8),
    "flat": np.rint(64 + VALUES / 2).astype(np.uint8),
}
COARSE = 4  # pixels that become one


@register("partition", "feature-skew")
def feature_skew(asked: Request) -> Partition:
    """Equal shares at random; the images of each client look different (dark, bright, flat, blurred, coarse)."""
    dealt = iid(asked)
    looks = np.resize(np.arange(len(LOOKS)), len(dealt.clients))
    return replace(dealt, looks=asked.generator("look").permutation(looks))


def look_like(images: NDArray[np.uint8], look: str) -> NDArray[np.uint8]:
    """Images (N, channels, height, width) with a look."""
    if look == "plain":
        return images
    if look in CURVES:
        return CURVES[look][images]
    changed = np.empty_like(images)
    for place in np.ndindex(images.shape[:2]):
        plane = Image.fromarray(np.ascontiguousarray(images[place]))
        if look == "blurred":
            seen = plane.filter(ImageFilter.BoxBlur(1))
        else:
            small = (max(1, plane.width // COARSE), max(1, plane.height // COARSE))
            seen = plane.resize(small, Image.Resampling.BOX).resize(plane.size, Image.Resampling.NEAREST)
        changed[place] = np.asarray(seen)
    return changed


def skewed(
    train: Dataset, clients: Sequence[NDArray[np.int64]], looks: NDArray[np.int64], progress: Progress = silent
) -> Dataset:
    """The training data with every client's look on its images; they are prepared once and cached."""
    if not train.is_images:
        raise ConfigError("partition.kind = 'feature-skew' changes images, and this data has feature vectors.")
    look_of = np.zeros(len(train), dtype=np.int64)
    for rows, look in zip(clients, looks.tolist(), strict=True):
        look_of[rows] = look

    def fill(images: NDArray[np.uint8]) -> None:
        for start in range(0, len(train), 256):
            part = np.arange(start, min(start + 256, len(train)))
            found = np.array(train.samples(part))
            for look in np.unique(look_of[part]):
                mine = look_of[part] == look
                found[mine] = look_like(found[mine], LOOKS[look])
            images[part] = found
            progress(int(part[-1]) + 1, len(train), "changing how images look")

    def key() -> str:
        return content_key("looks", store_key(train.store), train.rows, look_of)  # type: ignore[arg-type]

    _, channels, height, width = train.store.shape
    store = in_ram_or_cached(key, (len(train), channels, height, width), fill, progress, "changing how images look")
    files = None if train.files is None else train.files[train.rows]
    return replace(train, store=store, rows=np.arange(len(train), dtype=np.int64), files=files)
