"""Pack an image folder and its labels file into one `.npz` file, which the source `packed` reads (`fedmll data pack`).

jpeg     uint8, the bytes of all images              offset  int64 (N + 1,), image i is jpeg[offset[i]:offset[i + 1]]
labels   int8 (N, C): 1, 0, or -1 unknown          classes (C,) strings           name  (N,) strings
split    (N,) 0 train, 1 validation, 2 test, and client (N,) strings, if the labels file has these columns; also the
         column of --group
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedmll.config.settings import ReadingOptions
from fedmll.core.errors import DataError
from fedmll.core.files import atomic_replace
from fedmll.data.images.cache import Progress, no_progress
from fedmll.data.images.decode import (
    GREY_MODES,
    EncodedImages,
    Window,
    as_8_bit,
    map_images,
    open_image,
    scan_images,
    window_note,
)
from fedmll.data.images.labels_csv import read_labels
from fedmll.data.images.problems import check_readable, describe_skipped
from fedmll.data.sources.labelled_images import encoded_images


def pack(
    csv: Path,
    images_root: Path,
    out: Path,
    size: int | None = None,
    quality: int = 95,
    progress: Progress = no_progress,
    reading: ReadingOptions | None = None,
) -> tuple[str, ...]:
    """Write the packed file `out`.

    Args:
        csv: the labels file.
        images_root: the folder of the images.
        out: the file to write.
        size: resize images to squares of this side; None keeps the size of each image.
        quality: JPEG quality.
        progress: called with the number of images.
        reading: how the labels file is read.

    Returns:
        Notes for the user.
    """
    reading = reading or ReadingOptions()
    if out.suffix != ".npz":
        raise DataError(f"The packed file must end in .npz; '{out}' does not.")
    table = read_labels(csv, images_root, reading)
    if not table.paths:
        table.problems.report()
    scan = scan_images(encoded_images(table), progress)
    window = scan.window(reading)
    failures = scan.rejected(reading)
    out.parent.mkdir(parents=True, exist_ok=True)
    # The unnamed file disappears with the process; the images never have to fit into memory.
    with tempfile.TemporaryFile(dir=out.parent) as jpegs, atomic_replace(out) as temporary:
        offset = _write_jpegs(encoded_images(table), jpegs, size, quality, window, failures, progress)
        unreadable = dict(sorted(failures.items()))
        kept, skipped = check_readable(
            len(table.paths), encoded_images(table).name, unreadable, reading, table.problems
        )
        table = table.select_rows(kept)
        arrays: dict[str, NDArray[np.generic]] = {
            "jpeg": np.memmap(jpegs, dtype=np.uint8, mode="r"),
            "offset": offset,
            "labels": table.labels,
            "classes": np.array(table.classes),
            "name": np.array(table.names),
        }
        if table.split is not None:
            arrays["split"] = table.split
        if table.clients is not None:
            arrays["client"] = table.clients
        if table.patients is not None:
            arrays[str(reading.group)] = table.patients
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
    return (*window_note(window), *describe_skipped(table.missing, skipped))


def _write_jpegs(
    images: EncodedImages,
    file: IO[bytes],
    size: int | None,
    quality: int,
    window: Window | None,
    failures: dict[int, str],
    progress: Progress,
) -> NDArray[np.int64]:
    rejected = set(failures)

    def encode(position: int) -> bytes:
        if position in rejected:
            return b""
        with open_image(images.read(position)) as image:
            pixels = as_8_bit(image, "L" if image.mode in GREY_MODES else "RGB", window)
        if size is not None and pixels.size != (size, size):
            pixels = pixels.resize((size, size), Image.Resampling.BILINEAR)
        jpeg = io.BytesIO()
        # Full colour resolution: the usual chroma subsampling is visible in small images.
        pixels.save(jpeg, "JPEG", quality=quality, subsampling=0)
        return jpeg.getvalue()

    written = [file.write(jpeg) for jpeg in map_images(images, encode, progress, "packing images", failures)]
    lengths = [length for length in written if length]
    file.flush()
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
