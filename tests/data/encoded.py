"""Small image files in memory."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from fedmll.data.images.decode import EncodedImages


def encode(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def encoded_files(files: list[bytes]) -> EncodedImages:
    return EncodedImages(len(files), files.__getitem__, lambda position: f"image {position}")


def random_pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
