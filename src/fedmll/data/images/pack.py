"""`fedmll data pack`: an image folder and its labels file into one `.npz` that the `packed` source reads.

jpeg     uint8, all images one after another       offset  int64 (N + 1,), image i is jpeg[offset[i]:offset[i + 1]]
labels   int8 (N, C): 1, 0, or -1 unknown          classes (C,) strings           name  (N,) strings
split    (N,) 0 train, 1 validation, 2 test, and client (N,) strings, if the labels file has these columns; so has the
         column that --group names
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedmll.data.images.cache import Progress, silent
from fedmll.data.images.decode import (
    GREY_MODES,
    EncodedImages,
    Window,
    as_8_bit,
    look_at,
    open_image,
    window_note,
    work_through,
)
from fedmll.data.images.labels_csv import read_labels
from fedmll.data.images.reading import left_out, readable
from fedmll.data.sources.folder import encoded
from fedmll.errors import DataError
from fedmll.files import replacing
from fedmll.settings import Reading


def pack(
    csv: Path,
    images_root: Path,
    out: Path,
    size: int | None = None,
    quality: int = 95,
    progress: Progress = silent,
    reading: Reading | None = None,
) -> tuple[str, ...]:
    """Write `out`, whole or not at all; what the user should know of it.

    `size` resizes to squares of this side; None keeps each image's own size.
    """
    reading = reading or Reading()
    if out.suffix != ".npz":
        raise DataError(f"The packed file must end in .npz; '{out}' does not.")
    table = read_labels(csv, images_root, reading)
    if not table.paths:
        table.problems.report()
    look = look_at(encoded(table), progress)
    window = look.window(reading)
    failures = look.refused(reading)
    out.parent.mkdir(parents=True, exist_ok=True)
    # The unnamed file disappears with the process, however it ends; the images never have to fit into memory.
    with tempfile.TemporaryFile(dir=out.parent) as jpegs, replacing(out) as temporary:
        offset = _write_jpegs(encoded(table), jpegs, size, quality, window, failures, progress)
        unreadable = dict(sorted(failures.items()))
        kept, skipped = readable(len(table.paths), encoded(table).name, unreadable, reading, table.problems)
        table = table.rows(kept)
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
    return (*window_note(window), *left_out(table.missing, skipped))


def _write_jpegs(
    images: EncodedImages,
    file: IO[bytes],
    size: int | None,
    quality: int,
    window: Window | None,
    failures: dict[int, str],
    progress: Progress,
) -> NDArray[np.int64]:
    refused = set(failures)

    def encode(position: int) -> bytes:
        if position in refused:
            return b""
        with open_image(images.read(position)) as image:
            pixels = as_8_bit(image, "L" if image.mode in GREY_MODES else "RGB", window)
        if size is not None and pixels.size != (size, size):
            pixels = pixels.resize((size, size), Image.Resampling.BILINEAR)
        jpeg = io.BytesIO()
        # Colour at full resolution: on images this small, JPEG's usual halving of it shows.
        pixels.save(jpeg, "JPEG", quality=quality, subsampling=0)
        return jpeg.getvalue()

    written = [file.write(jpeg) for jpeg in work_through(images, encode, progress, "packing images", failures)]
    lengths = [length for length in written if length]
    file.flush()
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
