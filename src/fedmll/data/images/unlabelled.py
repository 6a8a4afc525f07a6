"""A folder of images without labels, as a model takes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.data.images.cache import Progress, silent
from fedmll.data.images.decode import EncodedImages, decode_image, finish, look_at, work_through
from fedmll.data.images.reading import Problems
from fedmll.settings import Reading

IMAGE_FILES = {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".gif", ".webp"}


def image_files(folder: Path) -> Iterator[Path]:
    """The image files in the folder and the folders inside it; none if there is no such folder."""
    return (path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_FILES and path.is_file())


def read_images(folder: Path, sample_shape: tuple[int, ...], progress: Progress = silent) -> NDArray[np.uint8]:
    """uint8 (N, channels, height, width) with the sample shape of a task; files that cannot be read are named."""
    files = sorted(image_files(folder))
    images = np.empty((len(files), *sample_shape), dtype=np.uint8)
    encoded = EncodedImages(len(files), files.__getitem__, lambda position: f"'{files[position]}'")
    look = look_at(encoded, progress)
    window = look.window(Reading())
    failures = look.unreadable | dict.fromkeys(look.wide, "32-bit pixels; save it with 8 or 16 bits a channel")

    def decode(position: int) -> None:
        if position not in failures:
            images[position] = decode_image(files[position], sample_shape, window)

    finish(work_through(encoded, decode, progress, "decoding unlabelled images", failures))
    problems = Problems(f"'{folder}'")
    named = [f"{encoded.name(place)} ({failures[place]})" for place in sorted(failures)]
    problems.add_unreadable(named, len(files), "Replace or remove them.")
    problems.report()
    return images
