"""Images that are decoded on demand and not stored, for sets that are too large for the cache.

`store[rows]` decodes only these rows, as if the store were an array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedmll.core.errors import DataError
from fedmll.data.images.decode import decode_image


class LazyImages:
    """Behaves like a uint8 array (N, channels, height, width).

    Args:
        key: the cache key of the images; it changes when an image changes.
        shape: (N, channels, height, width).
        read: returns the image of a row as a file, as encoded bytes, or as pixels (height, width, channels). The image
            is resized if its size differs.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4
    itemsize = 1

    def __init__(self, key: str, shape: tuple[int, int, int, int], read: Callable[[int], Any]) -> None:
        self.key, self.shape, self.read = key, shape, read

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> NDArray[np.uint8]:
        wanted = np.arange(len(self))[rows]
        if wanted.ndim == 0:
            return self._image(int(wanted))
        images = np.empty((len(wanted), *self.shape[1:]), dtype=np.uint8)
        for place, row in enumerate(wanted.tolist()):
            images[place] = self._image(row)
        return images

    def _image(self, row: int) -> NDArray[np.uint8]:
        source = self.read(row)
        channels, height, width = self.shape[1:]
        if isinstance(source, np.ndarray):
            pixels = Image.fromarray(source).convert("L" if channels == 1 else "RGB")
            if pixels.size != (width, height):
                pixels = pixels.resize((width, height), Image.Resampling.BILINEAR)
            array = np.asarray(pixels)
            return array[None] if channels == 1 else array.transpose(2, 0, 1)
        try:
            return decode_image(source, self.shape[1:])
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            name = "an image inside a file" if isinstance(source, bytes) else f"'{source}'"
            raise DataError(
                f"{name} cannot be decoded ({error}). Replace it and continue with `fedmll resume`."
            ) from None
