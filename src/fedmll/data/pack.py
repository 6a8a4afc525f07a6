"""`fedmll data pack`: an image folder and its labels file into one `.npz` that the `packed` source reads.

jpeg     uint8, all images one after another       offset  int64 (N + 1,), image i is jpeg[offset[i]:offset[i + 1]]
labels   int8 (N, C): 1, 0, or -1 unknown          classes (C,) strings           name  (N,) strings
split    (N,) 0 train, 1 validation, 2 test, and client (N,) strings, if the labels file has these columns
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedmll.data.cache import Progress, silent
from fedmll.data.decode import GREY_MODES, EncodedImages, as_8_bit, open_image, work_through
from fedmll.data.labels_csv import LabelTable, read_labels
from fedmll.errors import DataError
from fedmll.files import replacing


def pack(
    csv: Path,
    images_root: Path,
    out: Path,
    size: int | None = None,
    quality: int = 95,
    progress: Progress = silent,
) -> None:
    """Write `out`, whole or not at all. `size` resizes to squares of this side; None keeps each image's own size."""
    if out.suffix != ".npz":
        raise DataError(f"The packed file must end in .npz; '{out}' does not.")
    table = read_labels(csv, images_root)
    out.parent.mkdir(parents=True, exist_ok=True)
    # The unnamed file disappears with the process, however it ends; the images never have to fit into memory.
    with tempfile.TemporaryFile(dir=out.parent) as jpegs, replacing(out) as temporary:
        offset = _write_jpegs(table, jpegs, size, quality, progress)
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
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)


def _write_jpegs(
    table: LabelTable, file: IO[bytes], size: int | None, quality: int, progress: Progress
) -> NDArray[np.int64]:
    images = EncodedImages(len(table.paths), table.paths.__getitem__, lambda position: f"'{table.paths[position]}'")

    def encode(position: int) -> bytes:
        with open_image(images.read(position)) as image:
            pixels = as_8_bit(image, "L" if image.mode in GREY_MODES else "RGB")
        if size is not None and pixels.size != (size, size):
            pixels = pixels.resize((size, size), Image.Resampling.BILINEAR)
        jpeg = io.BytesIO()
        # Colour at full resolution: on images this small, JPEG's usual halving of it shows.
        pixels.save(jpeg, "JPEG", quality=quality, subsampling=0)
        return jpeg.getvalue()

    lengths = [file.write(jpeg) for jpeg in work_through(images, encode, progress, "packing images")]
    file.flush()
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
