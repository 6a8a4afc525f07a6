"""Image files for a model, as a stream: decoded as training decodes them, by threads, a little ahead of the network."""

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

from fedmll.data.images.decode import WIDE_MODES, Window, decode_image, open_image
from fedmll.errors import DataError

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Prediction:
    path: Path
    probabilities: NDArray[np.float32] | None  # (C,)
    reason: str = ""  # why there are none


def decoded(
    paths: Sequence[Path], shape: tuple[int, int, int], window: Window | None, size: int
) -> Iterator[list[tuple[Path, Pixels | str]]]:
    """Batches of up to `size`, in order: each path with its pixels, or with the reason why there are none."""
    workers = min(8, os.cpu_count() or 1)
    waiting: deque[tuple[Path, Future[Pixels | str]]] = deque()
    left, pool = iter(paths), ThreadPoolExecutor(workers)

    def fill() -> None:
        for path in islice(left, size + workers - len(waiting)):
            waiting.append((path, pool.submit(pixels_of, path, shape, window)))

    try:
        fill()
        while waiting:
            batch = []
            for _ in range(min(size, len(waiting))):
                path, found = waiting.popleft()
                batch.append((path, found.result()))
                fill()
            yield batch
    finally:  # who stops early does not wait for what has not begun
        pool.shutdown(cancel_futures=True)


def pixels_of(path: Path, shape: tuple[int, int, int], window: Window | None) -> Pixels | str:
    """The very pixels that training would have seen, or why there are none."""
    try:
        if window is None:
            with open_image(path) as image:
                if image.mode.startswith("I;16") or image.mode in WIDE_MODES:
                    return "it has more than 8 bits a pixel, and the model was trained on images of 8"
        return decode_image(path, shape, window)
    except Image.UnidentifiedImageError:
        return "not an image that Pillow knows"
    except OSError as error:
        return error.strerror or str(error)
    except (ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return str(error) or type(error).__name__


def image_files(given: Iterable[Path]) -> list[Path]:
    """Files as they are given; of folders all images in them and below, sorted."""
    known = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    found: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in known and file.is_file())
            if not inside:
                raise DataError(f"The folder {path} holds no images.")
            found += inside
        else:
            found.append(path)
    return found
