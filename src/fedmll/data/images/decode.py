"""Image files into one uint8 array (N, channels, height, width): decoded, scaled and resized once, then cached.

Samples of more than 8 bits (16-bit PNG and TIFF) are scaled by one window for the whole set, so that images stay
comparable: the values from low to high become 0 to 255, those outside are clipped. Unless a window is given it is
0 … 2^b − 1 with the smallest number b of bits, 8 to 16, that holds the largest value of the set: scanners write 12 bits
into 16. Nothing says what is white in 32-bit samples: they need a window.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedmll.data.images import dicom
from fedmll.data.images.cache import (
    Progress,
    Shape,
    cached,
    content_key,
    in_ram_or_cached,
    remember,
    remembered,
    silent,
)
from fedmll.errors import ConfigError, DataError
from fedmll.settings import Reading

LARGEST_NATIVE_SIDE = 128  # images of one size up to this keep it
DEFAULT_SIDE = 112  # all others become squares of this side, unless a size is given
CHUNK = 256  # images a thread takes at a time

GREY_MODES = ("1", "L", "LA", "I;16", "I;16L", "I;16B", "I;16N", "I", "F")
WIDE_MODES = ("I", "F")  # 32-bit samples
WHITE_16_BIT = 65535.0

Result = TypeVar("Result")
Size: TypeAlias = int | tuple[int, int] | None
"""What images are resized to: the side of a square, or height and width; None keeps or chooses it."""
Window: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class EncodedImages:
    """Image files that are not decoded yet: on disk, or inside a packed file."""

    count: int
    read: Callable[[int], Path | bytes]
    name: Callable[[int], str]


@dataclass(frozen=True)
class Look:
    """What a first look at all files finds: their headers, and the range of those with more than 8 bits a sample."""

    grey: bool  # every one that can be opened
    smallest: tuple[int, int]  # height and width, by area
    largest: tuple[int, int]
    same_size: bool
    deep: int = 0  # images of 16 bits
    brightest: int = 0  # the largest value in them
    wide: list[int] = field(default_factory=list)  # images of 32 bits
    wide_range: tuple[float, float] = (0.0, 0.0)
    unreadable: dict[int, str] = field(default_factory=dict)  # position → reason

    def sides(self, size: Size) -> tuple[int, int]:
        """Height and width that the images are to have."""
        chosen = height_and_width(size)
        if chosen is not None:
            return chosen
        native = self.same_size and max(self.largest) <= LARGEST_NATIVE_SIDE
        return self.largest if native else (DEFAULT_SIDE, DEFAULT_SIDE)

    def window(self, reading: Reading) -> Window | None:
        """The window for images with more than 8 bits; None if there are none (or only such that need one given)."""
        if reading.window is not None:
            if not self.deep and not self.wide:
                raise ConfigError(
                    f"{reading.setting('window')} is for images with more than 8 bits a pixel, and these have 8. Leave "
                    "it out."
                )
            return reading.window
        return (0.0, float(2 ** max(8, self.brightest.bit_length()) - 1)) if self.deep else None

    def refused(self, reading: Reading) -> dict[int, str]:
        """The images that cannot be used, and why."""
        if reading.window is not None or not self.wide:
            return dict(self.unreadable)
        proposed = reading.how_to_set("window", [float(f"{value:g}") for value in self.wide_range])
        first, *others = self.wide
        reasons = {first: f"32-bit pixels: say what is black and white, all values are in {proposed}"}
        return self.unreadable | reasons | dict.fromkeys(others, "32-bit pixels too")

    def notes(self, sides: tuple[int, int], window: Window | None) -> tuple[str, ...]:
        """What the user should know."""
        notes = []
        if not self.same_size or self.largest != sides:
            had = _shown(self.largest)
            if not self.same_size:
                had = f"from {_shown(self.smallest)} to {had}"
            setting = sides[0] if sides[0] == sides[1] else list(sides)
            notes.append(f"images: {had} resized to {_shown(sides)} (data.size = {setting})")
        return (*notes, *window_note(window))


@dataclass(frozen=True)
class Decoded:
    store: NDArray[np.uint8]  # what could not be decoded is black
    unreadable: dict[int, str]  # position → reason
    window: Window | None  # that was used for samples of more than 8 bits
    notes: tuple[str, ...]


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
    reading: Reading | None = None,
    progress: Progress = silent,
) -> Decoded:
    """All images as one mapped array; `encoded` is called only when they are not in the cache under `key`.

    size   what they are resized to. None: their own size if all have the same, of at most 128 pixels a side; otherwise
           112 × 112. There is one channel if every file is grey, else three.
    A file that cannot be decoded does not stop the others; who calls says whether it is an error.
    """
    reading = reading or Reading()

    def look() -> dict[str, object]:
        return asdict(look_at(encoded(), progress))

    found = _look_from(remembered(content_key(key, "look"), look))
    window, sides = found.window(reading), found.sides(size)
    refused = found.refused(reading)
    pixels = content_key(key, "pixels", sides, window)

    def prepare() -> tuple[Shape, Callable[[NDArray[np.uint8]], None]]:
        images = encoded()
        failures: dict[int, str] = {}

        def fill(array: NDArray[np.uint8]) -> None:
            def decode(position: int) -> None:
                if position not in refused:
                    array[position] = decode_image(images.read(position), array.shape[1:], window)

            finish(work_through(images, decode, progress, "decoding images", failures))
            remember(f"{pixels}-failures", failures)  # before the images are: who finds these finds it

        return (images.count, 1 if found.grey else 3, *sides), fill

    store = cached(pixels, prepare, progress, "decoding images")
    late = {int(place): reason for place, reason in remembered(f"{pixels}-failures", dict).items()}
    unreadable = dict(sorted((refused | late).items()))
    # A window of 16-bit images must not become, by being stored, the window of 32-bit ones that were left out.
    known = None if found.wide and reading.window is None else window
    return Decoded(store, unreadable, known, found.notes(sides, window))


def decode_image(source: Path | bytes, shape: tuple[int, ...], window: Window | None = None) -> NDArray[np.uint8]:
    """One image as `shape` (channels, height, width), resized with Pillow's bilinear filter if it has another size."""
    channels, height, width = shape
    with open_image(source) as image:
        pixels = as_8_bit(image, "L" if channels == 1 else "RGB", window)
    if pixels.size != (width, height):
        pixels = pixels.resize((width, height), Image.Resampling.BILINEAR)
    array = np.asarray(pixels)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def as_8_bit(image: Image.Image, mode: str, window: Window | None = None) -> Image.Image:
    """The image as `L` or `RGB`. Pillow clips samples of more than 8 bits to 255 where they must be scaled."""
    image.load()  # now: Pillow reads late, and the file may be closed by then
    if image.mode.startswith("I;16") or image.mode in WIDE_MODES:
        if window is None and image.mode in WIDE_MODES:
            raise ValueError("32-bit pixels need a window")
        image = Image.fromarray(scaled(np.asarray(image), window or (0.0, WHITE_16_BIT)))
    return image if image.mode == mode else image.convert(mode)


def scaled(values: NDArray[np.generic], window: Window) -> NDArray[np.uint8]:
    """The window in 256 equal steps. With 0 … 2^b − 1 these are the upper 8 of b bits, exactly."""
    low, high = window
    inside = np.clip(np.nan_to_num(values.astype(np.float64), nan=low), low, high)
    return np.minimum((inside - low) * (256 / (high - low)), 255).astype(np.uint8)


def resized(images: NDArray[np.uint8], size: Size, progress: Progress = silent) -> NDArray[np.uint8]:
    """An array (N, channels, height, width) resized as files would be; the array itself if nothing changes."""
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
        finish(work_through(in_memory, resize, progress, "resizing images", {}))

    shape = (count, channels, height, width)
    return in_ram_or_cached(lambda: content_key(images, "resized", sides), shape, fill, progress, "resizing images")


def open_image(source: Path | bytes) -> Image.Image:
    if isinstance(source, Path) and source.suffix.lower() in dicom.ENDINGS:
        return dicom.open_dicom(source)
    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)


def look_at(images: EncodedImages, progress: Progress = silent) -> Look:
    """The headers of all files, which cost little beside decoding them; of deep ones also their values."""
    grey = np.ones(images.count, dtype=bool)
    sides = np.zeros((images.count, 2), dtype=np.int64)
    deep: dict[int, int] = {}
    wide: dict[int, tuple[float, float]] = {}
    unreadable: dict[int, str] = {}

    def look(position: int) -> None:
        with open_image(images.read(position)) as image:
            if image.mode.startswith("I;16"):
                deep[position] = int(np.asarray(image).max())
            elif image.mode in WIDE_MODES:
                values = np.asarray(image)
                finite = values[np.isfinite(values)]
                wide[position] = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
            grey[position] = image.mode in GREY_MODES
            sides[position] = image.height, image.width

    finish(work_through(images, look, progress, "looking at images", unreadable))
    opened = sides[sides.all(axis=1)]
    if not len(opened):
        return Look(True, (0, 0), (0, 0), True, unreadable=unreadable)
    areas = opened.prod(axis=1)
    return Look(
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


def work_through(
    images: EncodedImages, work: Callable[[int], Result], progress: Progress, what: str, failures: dict[int, str]
) -> Iterator[Result]:
    """work(i) of every image, in order, by a few threads (Pillow lets them run side by side).

    An image that cannot be decoded does not stop the others: it gives no result, and `failures` says why.
    """

    def work_on(chunk: range) -> list[Result]:
        results = []
        for position in chunk:
            try:
                results.append(work(position))
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # what Pillow raises
                if isinstance(error, OSError) and error.errno is not None:  # the disk's fault, not the image's
                    raise DataError(f"{images.name(position)} cannot be read now: {error.strerror}.") from None
                failures[position] = _reason(error)
        return results

    chunks = [range(start, min(start + CHUNK, images.count)) for start in range(0, images.count, CHUNK)]
    pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
    try:
        for chunk, results in zip(chunks, pool.map(work_on, chunks), strict=True):
            yield from results
            progress(chunk.stop, images.count, what)
    finally:  # after Ctrl-C the chunks that have not begun are dropped
        pool.shutdown(cancel_futures=True)


def finish(work: Iterator[object]) -> None:
    """Run work whose results are where they belong already."""
    for _ in work:
        pass


def _look_from(values: dict[str, Any]) -> Look:
    """Back from JSON, which knows neither tuples nor numbers as keys."""
    pairs = {name: tuple(values[name]) for name in ("smallest", "largest", "wide_range")}
    reasons = {int(place): reason for place, reason in values["unreadable"].items()}
    return Look(**values | pairs | {"unreadable": reasons})


def _shown(sides: tuple[int, int]) -> str:
    return f"{sides[1]} × {sides[0]}"


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):  # its own text repeats the path
        return "not an image that Pillow knows"
    return str(error) or type(error).__name__
