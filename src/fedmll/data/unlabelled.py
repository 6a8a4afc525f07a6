"""A folder of images without labels, as a model takes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.data.cache import Progress, silent
from fedmll.data.decode import EncodedImages, decode_image, work_through

IMAGE_FILES = {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".gif", ".webp"}


def image_files(folder: Path) -> Iterator[Path]:
    """The image files in the folder and the folders inside it; none if there is no such folder."""
    return (path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_FILES and path.is_file())


def read_images(folder: Path, sample_shape: tuple[int, ...], progress: Progress = silent) -> NDArray[np.uint8]:
    """uint8 (N, channels, height, width) with the sample shape of a task; a file that cannot be read is named."""
    files = sorted(image_files(folder))
    images = np.empty((len(files), *sample_shape), dtype=np.uint8)

    def decode(position: int) -> None:
        images[position] = decode_image(files[position], *sample_shape)

    encoded = EncodedImages(len(files), files.__getitem__, lambda position: f"'{files[position]}'")
    for _ in work_through(encoded, decode, progress, "decoding unlabelled images"):
        pass
    return images
