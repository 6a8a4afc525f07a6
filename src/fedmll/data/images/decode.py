"""Decode image files into one uint8 array (N, channels, height, width): decoded, scaled and resized once, then cached.

Pixels of more than 8 bits (16-bit PNG and TIFF) are scaled by one window for the whole set, so that images stay
comparable: the values from low to high become 0 to 255, values outside are clipped. The default window is 0 … 2^b − 1,
where b is the smallest number of bits (8 to 16) that holds the largest value of the set, because scanners write 12 bits
into 16. For 32-bit pixels the white value is unknown, so they need a window.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedmll.config.settings import ReadingOptions
from fedmll.core.errors import ConfigError, DataError
from fedmll.data.images.cache import (
    Progress,
    Shape,
    cached_array,
    cached_json,
    content_key,
    in_memory_or_cached,
    no_progress,
    store_json,
)
from fedmll.data.images.open_image import (
    GREY_MODES,
    IMAGE_ERRORS,
    WIDE_MODES,
    describe_image_error,
    find_images,
    open_image,
)
from fedmll.data.images.problems import Problems, abbreviate

LARGEST_NATIVE_SIDE = 128  # images that all have one size up to this keep it
DEFAULT_SIDE = 112  # other images become squares of this side by default
CHUNK = 256  # images per thread and task
WHITE_16_BIT = 65535.0

Result = TypeVar("Result")
Size: TypeAlias = int | tuple[int, int] | None
"""The size to resize images to: the side of a square, or (height, width); None: from the data."""
Window: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class EncodedImages:
    """Image files that are not decoded yet, on disk or inside a packed file."""

    count: int
    read: Callable[[int], Path | bytes]
    name: Callable[[int], str]


@dataclass(frozen=True)
class ImageScan:
    """The result of reading all headers, and the value range of images with more than 8 bits per pixel."""

    grey: bool  # all readable images are grey
    smallest: tuple[int, int]  # height and width, by area
    largest: tuple[int, int]
    same_size: bool
    deep: int = 0  # number of 16-bit images
    brightest: int = 0  # their largest value
    wide: list[int] = field(default_factory=list)  # positions of 32-bit images
    wide_range: tuple[float, float] = (0.0, 0.0)
    unreadable: dict[int, str] = field(default_factory=dict)  # position → reason

    def sides(self, size: Size) -> tuple[int, int]:
        """Height and width after resizing."""
        chosen = height_and_width(size)
        if chosen is not None:
            return chosen
        native = self.same_size and max(self.largest) <= LARGEST_NATIVE_SIDE
        return self.largest if native else (DEFAULT_SIDE, DEFAULT_SIDE)

    def window(self, reading: ReadingOptions) -> Window | None:
        """The window for images with more than 8 bits; None if there are no such images, or only 32-bit ones without
        a window."""
        if reading.window is not None:
            if not self.deep and not self.wide:
                raise ConfigError(
                    f"{reading.setting('window')} is for images with more than 8 bits per pixel, and these have 8. "
                    "Leave it out."
                )
            return reading.window
        return (0.0, float(2 ** max(8, self.brightest.bit_length()) - 1)) if self.deep else None

    def rejected(self, reading: ReadingOptions) -> set[int]:
        """The positions of images that cannot be decoded: unreadable, or in need of a window that is not given."""
        return {*self.unreadable, *(self.wide if reading.window is None else ())}

    def window_problem(self, reading: ReadingOptions, images: EncodedImages) -> str | None:
        """What to do about images that are readable, but need a window."""
        if reading.window is not None or not self.wide:
            return None
        low, high = (float(f"{value:g}") for value in self.wide_range)
        names = abbreviate([images.name(position) for position in self.wide], 1)
        return (
            f"{len(self.wide)} of {images.count} images need a window: {names}. Their values are rescaled (DICOM) or "
            f"32-bit numbers, from {low:g} to {high:g}, and nothing says which of them are black and white. Give both "
            f"values, for example {reading.how_to_set('window', [low, high])}."
        )

    def notes(self, sides: tuple[int, int], window: Window | None) -> tuple[str, ...]:
        """Notes for the user."""
        notes = []
        if not self.same_size or self.largest != sides:
            had = _format_sides(self.largest)
            if not self.same_size:
                had = f"from {_format_sides(self.smallest)} to {had}"
            setting = sides[0] if sides[0] == sides[1] else list(sides)
            notes.append(f"images: {had} resized to {_format_sides(sides)} (data.size = {setting})")
        return (*notes, *window_note(window))


@dataclass(frozen=True)
class DecodedImages:
    store: NDArray[np.uint8]  # images that could not be decoded are black
    unreadable: dict[int, str]  # position → reason
    window: Window | None  # used for pixels of more than 8 bits
    notes: tuple[str, ...]
    window_problem: str | None  # if images need a window that was not given; they are black


def window_note(window: Window | None) -> tuple[str, ...]:
    if window is None:
        return ()
    return (f"pixels of more than 8 bits: {window[0]:g} … {window[1]:g} became 0 … 255 (data.window)",)


def height_and_width(size: Size) -> tuple[int, int] | None:
    return (size, size) if isinstance(size, int) else size


def decoded_images(
    key: str,
    encoded: Callable[[], EncodedImages],
    size: Size,
    reading: ReadingOptions | None = None,
    progress: Progress = no_progress,
) -> DecodedImages:
    """All images as one memory-mapped array with one channel if all files are grey, otherwise three.

    A file that cannot be decoded does not stop the others; the caller decides whether it is an error.

    Args:
        key: the cache key of the images.
        encoded: returns the encoded images; called only if they are not in the cache.
        size: the size to resize to. None: the images' own size if all have the same size of at most 128 pixels per
            side, otherwise 112 × 112.
        reading: how the user's images are read.
        progress: called with the number of images.
    """
    reading = reading or ReadingOptions()

    def scan_as_json() -> dict[str, object]:
        return asdict(scan_images(encoded(), progress))

    scan = _scan_from_json(cached_json(content_key(key, "look"), scan_as_json))
    window, sides = scan.window(reading), scan.sides(size)
    rejected = scan.rejected(reading)
    pixels = content_key(key, "pixels", sides, window, sorted(rejected))

    def prepare() -> tuple[Shape, Callable[[NDArray[np.uint8]], None]]:
        images = encoded()

        def fill(array: NDArray[np.uint8]) -> None:
            failures = decode_into(array, images, window, rejected, progress, "decoding images")
            store_json(f"{pixels}-failures", failures)  # first, so that it exists whenever the images exist

        return (images.count, 1 if scan.grey else 3, *sides), fill

    store = cached_array(pixels, prepare, progress, "decoding images")
    late = {int(place): reason for place, reason in cached_json(f"{pixels}-failures", dict).items()}
    unreadable = dict(sorted((scan.unreadable | late).items()))
    problem = scan.window_problem(reading, encoded()) if scan.wide and reading.window is None else None
    return DecodedImages(store, unreadable, window, scan.notes(sides, window), problem)


def decode_into(
    array: NDArray[np.uint8],
    images: EncodedImages,
    window: Window | None,
    rejected: Collection[int],
    progress: Progress,
    what: str,
) -> dict[int, str]:
    """Decode all images, except the rejected ones, into an array. Returns why others could not be decoded."""
    failures: dict[int, str] = {}

    def decode(position: int) -> None:
        if position not in rejected:
            array[position] = decode_image(images.read(position), array.shape[1:], window)

    run_all(map_images(images, decode, progress, what, failures))
    return failures


def decode_image(
    source: Path | bytes | NDArray[np.uint8], shape: tuple[int, ...], window: Window | None = None
) -> NDArray[np.uint8]:
    """Decode one image to `shape` (channels, height, width); resized with Pillow's bilinear filter if the size
    differs."""
    channels, height, width = shape
    with open_image(source) as image:
        pixels = as_8_bit(image, "L" if channels == 1 else "RGB", window)
    if pixels.size != (width, height):
        pixels = pixels.resize((width, height), Image.Resampling.BILINEAR)
    array = np.asarray(pixels)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


class LazyImages:
    """Behaves like a uint8 array (N, channels, height, width), but decodes the rows of `images[rows]` on demand.

    For sets that are too large for the cache.

    Args:
        key: the cache key of the images; it changes when an image changes.
        shape: (N, channels, height, width).
        read: returns the image of a row as a file, as encoded bytes, or as pixels (height, width, channels). The image
            is resized if its size differs.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4
    itemsize = 1

    def __init__(self, key: str, shape: Shape, read: Callable[[int], Any]) -> None:
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
        source = None
        try:
            source = self.read(row)
            return decode_image(source, self.shape[1:])
        except IMAGE_ERRORS as error:
            name = f"'{source}'" if isinstance(source, Path) else "an image inside a file"
            reason = describe_image_error(error)
            raise DataError(
                f"{name} cannot be decoded ({reason}). Replace it and continue with `fedmll resume`."
            ) from None


def as_8_bit(image: Image.Image, mode: str, window: Window | None = None) -> Image.Image:
    """Convert an image to `L` or `RGB`. Pixels of more than 8 bits are scaled; Pillow would clip them to 255."""
    image.load()  # now: Pillow reads lazily, and the file may be closed later
    if image.mode.startswith("I;16") or image.mode in WIDE_MODES:
        if window is None and image.mode in WIDE_MODES:
            raise ValueError("32-bit pixels need a window")
        image = Image.fromarray(scale_to_8_bit(np.asarray(image), window or (0.0, WHITE_16_BIT)))
    return image if image.mode == mode else image.convert(mode)


def scale_to_8_bit(values: NDArray[np.generic], window: Window) -> NDArray[np.uint8]:
    """Scale the window to 256 equal steps. The window 0 … 2^b − 1 gives exactly the upper 8 of b bits."""
    low, high = window
    inside = np.clip(np.nan_to_num(values.astype(np.float64), nan=low), low, high)
    return np.minimum((inside - low) * (256 / (high - low)), 255).astype(np.uint8)


def resized(images: NDArray[np.uint8], size: Size, progress: Progress = no_progress) -> NDArray[np.uint8]:
    """Resize an array (N, channels, height, width) as files are resized; returns the array itself if nothing
    changes."""
    count, channels, *native = images.shape
    sides = height_and_width(size)
    if sides is None or tuple(native) == sides:
        return images
    height, width = sides

    def fill(array: NDArray[np.uint8]) -> None:
        def resize(position: int) -> None:
            for channel in range(channels):
                plane = Image.fromarray(np.ascontiguousarray(images[position, channel]))
                array[position, channel] = np.asarray(plane.resize((width, height), Image.Resampling.BILINEAR))

        in_memory = EncodedImages(count, lambda position: b"", lambda position: f"image {position}")
        run_all(map_images(in_memory, resize, progress, "resizing images", {}))

    shape = (count, channels, height, width)
    return in_memory_or_cached(lambda: content_key(images, "resized", sides), shape, fill, progress, "resizing images")


def read_images(folder: Path, shape: tuple[int, ...], progress: Progress = no_progress) -> NDArray[np.uint8]:
    """All images of a folder without labels, as uint8 (N, *shape); an error names the unreadable files."""
    files = sorted(find_images(folder))
    array = np.empty((len(files), *shape), dtype=np.uint8)
    images = EncodedImages(len(files), files.__getitem__, lambda position: f"'{files[position]}'")
    scan = scan_images(images, progress)
    window = scan.window(ReadingOptions())
    failures = scan.unreadable | dict.fromkeys(scan.wide, "32-bit pixels; save it with 8 or 16 bits per channel")
    failures |= decode_into(array, images, window, failures, progress, "decoding unlabelled images")
    problems = Problems(f"'{folder}'")
    named = [f"{images.name(place)} ({failures[place]})" for place in sorted(failures)]
    problems.add_unreadable(named, len(files), "Replace or remove them.")
    problems.report()
    return array


def scan_images(images: EncodedImages, progress: Progress = no_progress) -> ImageScan:
    """Read the headers of all files, and the value ranges of images with more than 8 bits per pixel."""
    grey = np.ones(images.count, dtype=bool)
    sides = np.zeros((images.count, 2), dtype=np.int64)
    deep: dict[int, int] = {}
    wide: dict[int, tuple[float, float]] = {}
    unreadable: dict[int, str] = {}

    def scan_one(position: int) -> None:
        with open_image(images.read(position)) as image:
            if image.mode.startswith("I;16"):
                deep[position] = int(np.asarray(image).max())
            elif image.mode in WIDE_MODES:
                values = np.asarray(image)
                finite = values[np.isfinite(values)]
                wide[position] = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
            grey[position] = image.mode in GREY_MODES
            sides[position] = image.height, image.width

    run_all(map_images(images, scan_one, progress, "scanning images", unreadable))
    opened = sides[sides.all(axis=1)]
    if not len(opened):
        return ImageScan(True, (0, 0), (0, 0), True, unreadable=unreadable)
    areas = opened.prod(axis=1)
    return ImageScan(
        grey=bool(grey.all()),
        smallest=(int(opened[areas.argmin(), 0]), int(opened[areas.argmin(), 1])),
        largest=(int(opened[areas.argmax(), 0]), int(opened[areas.argmax(), 1])),
        same_size=bool((opened == opened[0]).all()),
        deep=len(deep),
        brightest=max(deep.values(), default=0),
        wide=sorted(wide),
        wide_range=(
            min((low for low, _ in wide.values()), default=0.0),
            max((h for _, h in wide.values()), default=0.0),
        ),
        unreadable=dict(sorted(unreadable.items())),
    )


def map_images(
    images: EncodedImages, work: Callable[[int], Result], progress: Progress, what: str, failures: dict[int, str]
) -> Iterator[Result]:
    """Yield `work(i)` for each image in order, computed by several threads (Pillow releases the GIL).

    An image that cannot be decoded yields no result; the reason is put into `failures`.
    """

    def work_on(chunk: range) -> list[Result]:
        results = []
        for position in chunk:
            try:
                results.append(work(position))
            except IMAGE_ERRORS as error:
                if isinstance(error, OSError) and error.errno is not None:  # an error of the disk, not of the image
                    raise DataError(f"{images.name(position)} cannot be read: {error.strerror}.") from None
                failures[position] = describe_image_error(error)
        return results

    chunks = [range(start, min(start + CHUNK, images.count)) for start in range(0, images.count, CHUNK)]
    pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
    try:
        for chunk, results in zip(chunks, pool.map(work_on, chunks), strict=True):
            yield from results
            progress(chunk.stop, images.count, what)
    finally:  # after Ctrl-C, chunks that have not started are dropped
        pool.shutdown(cancel_futures=True)


def run_all(work: Iterator[object]) -> None:
    """Consume an iterator whose results are not needed."""
    for _ in work:
        pass


def _scan_from_json(values: dict[str, Any]) -> ImageScan:
    """Restore tuples and integer keys, which JSON does not have."""
    pairs = {name: tuple(values[name]) for name in ("smallest", "largest", "wide_range")}
    reasons = {int(place): reason for place, reason in values["unreadable"].items()}
    return ImageScan(**values | pairs | {"unreadable": reasons})


def _format_sides(sides: tuple[int, int]) -> str:
    return f"{sides[1]} × {sides[0]}"
