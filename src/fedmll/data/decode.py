"""JPEG and PNG files into one uint8 array (N, channels, height, width): decoded and resized once, then cached."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedmll.data.cache import Fill, Progress, Shape, cached, content_key, in_ram_or_cached, silent
from fedmll.errors import DataError

LARGEST_NATIVE_SIDE = 128  # images of one size up to this keep it
DEFAULT_SIDE = 112  # all others become squares of this side, unless a size is given
CHUNK = 256  # images a thread takes at a time
NAMED_FAILURES = 5

GREY_MODES = ("1", "L", "LA", "I;16", "I;16L", "I;16B", "I;16N")
UNSCALED_MODES = ("I", "F")  # 32-bit samples: nothing in the file says which value is white

Result = TypeVar("Result")


@dataclass(frozen=True)
class EncodedImages:
    """Image files that are not decoded yet: on disk, or inside a packed file."""

    count: int
    read: Callable[[int], Path | bytes]
    name: Callable[[int], str]


def decoded_images(
    key: str, encoded: Callable[[], EncodedImages], size: int | None, progress: Progress = silent
) -> NDArray[np.uint8]:
    """All images as one mapped array; `encoded` is called only when they are not in the cache under `key`.

    size   the side of the square they are resized to. None: their own size if all have the same, of at most 128
           pixels a side; otherwise 112. There is one channel if every file is grey, else three.
    """

    def prepare() -> tuple[Shape, Fill]:
        images = encoded()

        def fill(array: NDArray[np.uint8]) -> None:
            def decode(position: int) -> None:
                array[position] = decode_image(images.read(position), *array.shape[1:])

            _finish(work_through(images, decode, progress, "decoding images"))

        return _common_shape(images, size, progress), fill

    return cached(content_key(key, size), prepare, progress, "decoding images")


def decode_image(source: Path | bytes, channels: int, height: int, width: int) -> NDArray[np.uint8]:
    """One image as (channels, height, width), resized with Pillow's bilinear filter if it has another size."""
    with open_image(source) as image:
        pixels = as_8_bit(image, "L" if channels == 1 else "RGB")
    if pixels.size != (width, height):
        pixels = pixels.resize((width, height), Image.Resampling.BILINEAR)
    array = np.asarray(pixels)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def as_8_bit(image: Image.Image, mode: str) -> Image.Image:
    """The image as `L` or `RGB`. Pillow clips 16-bit samples to 255 where they must be scaled."""
    if image.mode in UNSCALED_MODES:
        raise ValueError(f"its pixels are 32-bit ('{image.mode}'); save it with 8 or 16 bits a channel")
    image.load()  # now: Pillow reads late, and the file may be closed by then
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image if image.mode == mode else image.convert(mode)


def resized(images: NDArray[np.uint8], size: int | None, progress: Progress = silent) -> NDArray[np.uint8]:
    """An array (N, channels, height, width) resized as files would be; the array itself if nothing changes."""
    count, channels, height, width = images.shape
    if size is None or (height, width) == (size, size):
        return images

    def fill(array: NDArray[np.uint8]) -> None:
        def resize(position: int) -> None:
            for channel in range(channels):
                plane = Image.fromarray(np.ascontiguousarray(images[position, channel]))
                array[position, channel] = np.asarray(plane.resize((size, size), Image.Resampling.BILINEAR))

        in_memory = EncodedImages(count, lambda position: b"", lambda position: f"image {position}")
        _finish(work_through(in_memory, resize, progress, "resizing images"))

    shape = (count, channels, size, size)
    return in_ram_or_cached(lambda: content_key(images, "resized", size), shape, fill, progress, "resizing images")


def open_image(source: Path | bytes) -> Image.Image:
    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)


def _common_shape(images: EncodedImages, size: int | None, progress: Progress) -> Shape:
    """Channels and sides from the headers of all files, which costs little beside decoding them."""
    grey = np.zeros(images.count, dtype=bool)
    sides = np.zeros((images.count, 2), dtype=np.int64)

    def look(position: int) -> None:
        with open_image(images.read(position)) as image:
            grey[position] = image.mode in GREY_MODES
            sides[position] = image.height, image.width

    _finish(work_through(images, look, progress, "looking at images"))
    height, width = int(sides[0, 0]), int(sides[0, 1])
    if size is not None:
        height = width = size
    elif (sides != sides[0]).any() or max(height, width) > LARGEST_NATIVE_SIDE:
        height = width = DEFAULT_SIDE
    return images.count, 1 if grey.all() else 3, height, width


def work_through(
    images: EncodedImages, work: Callable[[int], Result], progress: Progress, what: str
) -> Iterator[Result]:
    """work(i) of every image, in order, by a few threads (Pillow lets them run side by side).

    A file that cannot be read does not stop the others: all that failed are reported together at the end.
    """
    failures: list[tuple[int, Exception]] = []

    def work_on(chunk: range) -> list[Result]:
        results = []
        for position in chunk:
            try:
                results.append(work(position))
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # what Pillow raises
                failures.append((position, error))
        return results

    chunks = [range(start, min(start + CHUNK, images.count)) for start in range(0, images.count, CHUNK)]
    pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
    try:
        for chunk, results in zip(chunks, pool.map(work_on, chunks), strict=True):
            yield from results
            progress(chunk.stop, images.count, what)
    finally:  # after Ctrl-C the chunks that have not begun are dropped
        pool.shutdown(cancel_futures=True)
    if failures:
        raise _unreadable(images, sorted(failures, key=lambda failure: failure[0]))


def _finish(work: Iterator[None]) -> None:
    """Run work whose results are where they belong already."""
    for _ in work:
        pass


def _unreadable(images: EncodedImages, failures: list[tuple[int, Exception]]) -> DataError:
    named = [f"{images.name(position)} ({_reason(error)})" for position, error in failures[:NAMED_FAILURES]]
    more = len(failures) - len(named)
    return DataError(
        f"{len(failures)} of {images.count} images cannot be read: {'; '.join(named)}"
        f"{f'; and {more} more' if more else ''}. Replace them with files that open in an image viewer, or remove "
        "their rows from the labels."
    )


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):  # its own text repeats the path
        return "not an image that Pillow knows"
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
