"""Image files for a model, as a stream: decoded as in training, by threads, a few images ahead of the network."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedmll.core.errors import DataError
from fedmll.data.images.decode import WIDE_MODES, Window, decode_image, open_image

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class ImagePrediction:
    path: Path
    probabilities: NDArray[np.float32] | None  # (C,); None if the file cannot be read
    reason: str = ""  # why it cannot be read


def decode_batches(
    paths: Sequence[Path], shape: tuple[int, int, int], window: Window | None, size: int
) -> Iterator[list[tuple[Path, Pixels | str]]]:
    """Decode image files in order.

    Args:
        paths: the files.
        shape: channels, height and width of the model's input.
        window: the range of values of images with more than 8 bits per pixel.
        size: how many images a batch has at most.

    Yields:
        Batches: each path with its pixels, or with the reason why there are none.
    """
    workers = min(8, os.cpu_count() or 1)
    waiting: deque[tuple[Path, Future[Pixels | str]]] = deque()
    remaining, pool = iter(paths), ThreadPoolExecutor(workers)

    def submit_more() -> None:
        for path in islice(remaining, size + workers - len(waiting)):
            waiting.append((path, pool.submit(read_pixels, path, shape, window)))

    try:
        submit_more()
        while waiting:
            batch = []
            for _ in range(min(size, len(waiting))):
                path, future = waiting.popleft()
                batch.append((path, future.result()))
                submit_more()
            yield batch
    finally:  # a consumer that stops early does not wait for files that nobody has started to read
        pool.shutdown(cancel_futures=True)


def read_pixels(path: Path, shape: tuple[int, int, int], window: Window | None) -> Pixels | str:
    """The same pixels as in training, or the reason why there are none."""
    try:
        if window is None:
            with open_image(path) as image:
                if image.mode.startswith("I;16") or image.mode in WIDE_MODES:
                    return "it has more than 8 bits per pixel, and the model was trained on 8-bit images"
        return decode_image(path, shape, window)
    except Image.UnidentifiedImageError:
        return "not an image format that Pillow reads"
    except OSError as error:
        return error.strerror or str(error)
    except (ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return str(error) or type(error).__name__


def find_images(paths: Iterable[Path]) -> list[Path]:
    """Files as they are; for each folder all images in it and below it, sorted."""
    suffixes = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    images: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in suffixes and file.is_file())
            if not inside:
                raise DataError(f"The folder {path} holds no images.")
            images += inside
        else:
            images.append(path)
    return images
