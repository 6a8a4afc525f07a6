"""`JoinedStore`: the samples of several stores one after the other, without copying them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.data.dataset import mapped_file
from fedmll.data.images.cache import content_key, store_key

RED, GREEN, BLUE, HALF = 19595, 38470, 7471, 0x8000  # of 65,536: Pillow's conversion from RGB to L


class JoinedStore:
    """Behaves like one array (N, …) made of several, which stay where they are, for example memory-mapped.

    Grey images become colour images, or the reverse, when they are read.

    Args:
        parts: stores of the same kind; the images of all parts have the same height and width.
        channels: the channels of the images; None for feature vectors.
    """

    def __init__(self, parts: Sequence[NDArray[Any]], channels: int | None) -> None:
        first = parts[0]
        self.parts, self.channels = tuple(parts), channels
        self.starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
        self.dtype, self.ndim, self.itemsize = first.dtype, first.ndim, first.dtype.itemsize
        sides = first.shape[1:] if channels is None else (channels, *first.shape[2:])
        self.shape: tuple[int, ...] = (int(self.starts[-1]), *sides)

    @property
    def cache_key(self) -> str:
        """The key under which something that is prepared from these samples is cached."""
        return content_key("joined", self.channels, *(store_key(part) for part in self.parts))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        wanted = np.arange(len(self))[rows]
        if wanted.ndim == 0:
            return self[wanted[None]][0]
        found = np.empty((len(wanted), *self.shape[1:]), dtype=self.dtype)
        part_of = np.searchsorted(self.starts, wanted, side="right") - 1
        for number in np.unique(part_of):
            places = np.flatnonzero(part_of == number)
            samples = self.parts[number][wanted[places] - self.starts[number]]
            found[places] = samples if self.channels is None else convert_channels(samples, self.channels)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the names of memory-mapped files, not their contents: the other process maps the same files."""
        return {"parts": [mapped_file(part) or part for part in self.parts], "channels": self.channels}

    def __setstate__(self, state: dict[str, Any]) -> None:
        parts = [
            part if hasattr(part, "shape") else np.load(part, mmap_mode="r", allow_pickle=False)
            for part in state["parts"]
        ]
        self.__init__(parts, state["channels"])  # type: ignore[misc]


def convert_channels(images: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """Images (N, channels, height, width) in grey (1) or colour (3), as Pillow converts them."""
    if images.shape[1] == channels:
        return images
    if channels == 3:
        return np.broadcast_to(images, (len(images), 3, *images.shape[2:]))
    red, green, blue = (images[:, channel].astype(np.uint32) for channel in range(3))
    return ((red * RED + green * GREEN + blue * BLUE + HALF) >> 16).astype(np.uint8)[:, None]
