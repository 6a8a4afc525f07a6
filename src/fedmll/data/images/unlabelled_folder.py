"""Read a folder of images without labels, in the shape that a model expects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.config.settings import ReadingOptions
from fedmll.data.images.cache import Progress, no_progress
from fedmll.data.images.decode import EncodedImages, decode_image, map_images, run_all, scan_images
from fedmll.data.images.problems import Problems

IMAGE_FILES = {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".gif", ".webp"}


def find_images(folder: Path) -> Iterator[Path]:
    """The image files in a folder and its subfolders; none if the folder does not exist."""
    return (path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_FILES and path.is_file())


def read_images(folder: Path, sample_shape: tuple[int, ...], progress: Progress = no_progress) -> NDArray[np.uint8]:
    """Read all images of a folder as uint8 (N, channels, height, width); an error names the unreadable files."""
    files = sorted(find_images(folder))
    images = np.empty((len(files), *sample_shape), dtype=np.uint8)
    encoded = EncodedImages(len(files), files.__getitem__, lambda position: f"'{files[position]}'")
    scan = scan_images(encoded, progress)
    window = scan.window(ReadingOptions())
    failures = scan.unreadable | dict.fromkeys(scan.wide, "32-bit pixels; save it with 8 or 16 bits per channel")

    def decode(position: int) -> None:
        if position not in failures:
            images[position] = decode_image(files[position], sample_shape, window)

    run_all(map_images(encoded, decode, progress, "decoding unlabelled images", failures))
    problems = Problems(f"'{folder}'")
    named = [f"{encoded.name(place)} ({failures[place]})" for place in sorted(failures)]
    problems.add_unreadable(named, len(files), "Replace or remove them.")
    problems.report()
    return images
