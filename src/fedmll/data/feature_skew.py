"""`feature-skew`: all clients have the same label distribution, but their images look different, as from other
scanners.

Samples are assigned as in `iid`. Each client gets one appearance, each appearance is used equally often, and the
client's training images are changed accordingly: FedHarmony's third axis of heterogeneity. Test data is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from fedmll.core.errors import ConfigError
from fedmll.core.registry import register
from fedmll.data.dataset import Dataset
from fedmll.data.images.cache import Progress, content_key, in_memory_or_cached, no_progress, store_key
from fedmll.data.partition import Partition, PartitionRequest, iid

APPEARANCES = ("plain", "dark", "bright", "flat", "blurred", "coarse")
VALUES = np.arange(256)
CURVES = {  # pixel value → new pixel value
    "dark": np.rint(255 * (VALUES / 255) ** 2).astype(np.uint8),
    "bright": np.rint(255 * (VALUES / 255) ** 0.5).astype(np.uint8),
    "flat": np.rint(64 + VALUES / 2).astype(np.uint8),
}
COARSE = 4  # side of the square of pixels that become one


@register("partition", "feature-skew")
def feature_skew(request: PartitionRequest) -> Partition:
    """Clients of equal size; the images of each client look different (dark, bright, flat, blurred, coarse)."""
    assigned = iid(request)
    appearances = np.resize(np.arange(len(APPEARANCES)), len(assigned.clients))
    return replace(assigned, appearances=request.generator("look").permutation(appearances))


def change_appearance(images: NDArray[np.uint8], appearance: str) -> NDArray[np.uint8]:
    """Images (N, channels, height, width) with this appearance."""
    if appearance == "plain":
        return images
    if appearance in CURVES:
        return CURVES[appearance][images]
    changed = np.empty_like(images)
    for place in np.ndindex(images.shape[:2]):
        plane = Image.fromarray(np.ascontiguousarray(images[place]))
        if appearance == "blurred":
            changed_plane = plane.filter(ImageFilter.BoxBlur(1))
        else:
            small = (max(1, plane.width // COARSE), max(1, plane.height // COARSE))
            changed_plane = plane.resize(small, Image.Resampling.BOX).resize(plane.size, Image.Resampling.NEAREST)
        changed[place] = np.asarray(changed_plane)
    return changed


def apply_feature_skew(
    train: Dataset,
    clients: Sequence[NDArray[np.int64]],
    appearances: NDArray[np.int64],
    progress: Progress = no_progress,
) -> Dataset:
    """The training data with each client's images changed; they are prepared once and cached."""
    if not train.is_images:
        raise ConfigError("partition.kind = 'feature-skew' changes images, and this data has feature vectors.")
    appearance_of = np.zeros(len(train), dtype=np.int64)
    for rows, appearance in zip(clients, appearances.tolist(), strict=True):
        appearance_of[rows] = appearance

    def fill(images: NDArray[np.uint8]) -> None:
        for start in range(0, len(train), 256):
            part = np.arange(start, min(start + 256, len(train)))
            found = np.array(train.samples(part))
            for appearance in np.unique(appearance_of[part]):
                selected = appearance_of[part] == appearance
                found[selected] = change_appearance(found[selected], APPEARANCES[appearance])
            images[part] = found
            progress(int(part[-1]) + 1, len(train), "changing the appearance of images")

    def key() -> str:
        return content_key("looks", store_key(train.store), train.rows, appearance_of)  # type: ignore[arg-type]

    _, channels, height, width = train.store.shape
    store = in_memory_or_cached(
        key, (len(train), channels, height, width), fill, progress, "changing the appearance of images"
    )
    files = None if train.files is None else train.files[train.rows]
    return replace(train, store=store, rows=np.arange(len(train), dtype=np.int64), files=files)
