"""`packed:FILE.npz`: images and labels in one file, which `fedmll data pack` writes.

jpeg     uint8, the bytes of all images            offset  int64 (N + 1,), image i is jpeg[offset[i]:offset[i + 1]]
labels   int8 (N, C): 1, 0, or -1 unknown          classes (C,) strings           name  (N,) strings
split    (N,) 0 train, 1 validation, 2 test, and client (N,) strings, if the labels file has these columns; also the
         column of --group

Also read: `is_test` (booleans) instead of `split`, and `labels` with one class number per sample. Without a split a
fifth is test. The patients are in the array that `data.group` names, otherwise in `patient` or `patient_id`.
"""

from __future__ import annotations

import hashlib
import io
import tempfile
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedmll.config.settings import ReadingOptions
from fedmll.core.errors import DataError
from fedmll.core.files import atomic_replace
from fedmll.core.registry import register
from fedmll.data.dataset import Dataset, Splits
from fedmll.data.images.cache import Progress, no_progress
from fedmll.data.images.decode import (
    EncodedImages,
    Window,
    as_8_bit,
    decoded_images,
    map_images,
    scan_images,
    window_note,
)
from fedmll.data.images.labels_csv import read_labels
from fedmll.data.images.open_image import GREY_MODES, open_image
from fedmll.data.images.problems import Problems, check_readable, describe_skipped
from fedmll.data.sources.base import Source, SourceRequest
from fedmll.data.sources.labelled_images import encoded_images
from fedmll.data.sources.npz import class_names, read_npz
from fedmll.data.targets import TEST, check_classes, make_splits, parse_targets

PATIENTS = ("patient", "patient_id")
JPEG_QUALITY = 95


def load(request: SourceRequest) -> Splits:
    file = request.file()
    where = f"'{file}'"
    group = request.reading.group
    patients = PATIENTS if group is None else (group,)
    needed = ("offset", "labels", "classes", *(() if group is None else (group,)))
    arrays = read_npz(file, needed, ("split", "is_test", "name", "client", *PATIENTS))
    classes = class_names(arrays, 0, where)
    check_classes(classes, where)
    labels = parse_targets(arrays["labels"], classes, where)
    _check_lengths(arrays, len(labels), where)
    key = _key(file, arrays["offset"])
    images = decoded_images(key, lambda: _encoded(file, arrays), request.size, request.reading, request.progress)
    samples = Dataset(
        images.store,
        labels,
        classes,
        groups=arrays["client"].astype(str) if "client" in arrays else None,
        patients=next((arrays[name].astype(str) for name in patients if name in arrays), None),
        files=arrays["name"].astype(str) if "name" in arrays else None,
    )
    split = _split(arrays)
    problems, unreadable = Problems(where), images.unreadable
    kept, skipped = check_readable(
        len(samples), partial(_name, file, arrays), unreadable, request.reading, problems, images.window_problem
    )
    splits = make_splits(
        samples.subset(kept), None if split is None else split[kept], where, request.require_positives, group
    )
    return replace(splits, window=images.window, notes=(*images.notes, *describe_skipped((), skipped)))


def _split(arrays: dict[str, NDArray[Any]]) -> NDArray[np.integer] | None:
    if "split" in arrays:
        return arrays["split"].astype(np.int64)
    return arrays["is_test"].astype(bool) * TEST if "is_test" in arrays else None


def _check_lengths(arrays: dict[str, NDArray[Any]], samples: int, where: str) -> None:
    for name, values in arrays.items():
        numbers = name in ("offset", "split", "is_test")
        if name != "labels" and (values.ndim != 1 or (numbers and values.dtype.kind not in "iub")):
            raise DataError(
                f"{where}: '{name}' must be one {'whole number' if numbers else 'text'} per entry; it is "
                f"{values.dtype} {values.shape}."
            )
    expected = dict.fromkeys(arrays, samples) | {"offset": samples + 1, "classes": len(arrays["classes"])}
    for name, length in expected.items():
        if len(arrays[name]) != length:
            raise DataError(f"{where}: '{name}' has {len(arrays[name])} entries where {samples} samples need {length}.")
    if samples == 0:
        raise DataError(f"{where} holds no images.")


def _key(file: Path, offset: NDArray[np.integer]) -> str:
    """A hash of all images, read as a stream: cached images need not fit into memory."""
    try:
        with zipfile.ZipFile(file) as archive, archive.open("jpeg.npy") as jpegs:
            digest = hashlib.file_digest(jpegs, "sha256")  # type: ignore[arg-type]
    except KeyError:
        raise DataError(f"'{file}' has no array 'jpeg': it holds labels without images.") from None
    except Exception as error:  # a damaged archive can raise almost anything
        raise DataError(f"The images of '{file}' cannot be read ({error}). Copy the file again.") from None
    digest.update(offset.astype(np.int64).tobytes())
    return digest.hexdigest()


def _encoded(file: Path, arrays: dict[str, NDArray[Any]]) -> EncodedImages:
    jpeg, offset = read_npz(file, ("jpeg",))["jpeg"], arrays["offset"]
    if jpeg.ndim != 1 or jpeg.dtype != np.uint8:
        raise DataError(
            f"'{file}': 'jpeg' must be the bytes of all images, uint8 (N,); it is {jpeg.dtype} {jpeg.shape}."
        )
    if offset[0] != 0 or offset[-1] != len(jpeg) or (np.diff(offset) <= 0).any():
        raise DataError(
            f"'{file}': 'offset' must rise from 0 to {len(jpeg)}, the length of 'jpeg'. Pack the images again."
        )

    def read(position: int) -> bytes:
        return jpeg[offset[position] : offset[position + 1]].tobytes()

    return EncodedImages(len(offset) - 1, read, lambda position: _name(file, arrays, position))


def _name(file: Path, arrays: dict[str, NDArray[Any]], position: int) -> str:
    names = arrays.get("name")
    return f"image {position} of '{file}'" + (f", '{names[position]}'" if names is not None else "")


register("source", "packed")(
    Source(
        description="your images and labels packed into one file by `fedmll data pack`",
        load=load,
        file="FILE.npz",
        has_clients=True,
        settings=("group", "window"),
    )
)


# Writing


def pack(
    csv: Path,
    images_root: Path,
    out: Path,
    size: int | None = None,
    progress: Progress = no_progress,
    reading: ReadingOptions | None = None,
) -> tuple[str, ...]:
    """Write the packed file `out` of a labels file and the images in a folder; returns notes for the user.

    Args:
        csv: the labels file.
        images_root: the folder of the images.
        out: the file to write.
        size: resize images to squares of this side; None keeps the size of each image.
        progress: called with the number of images.
        reading: how the labels file is read.
    """
    reading = reading or ReadingOptions()
    if out.suffix != ".npz":
        raise DataError(f"The packed file must end in .npz; '{out}' does not.")
    table = read_labels(csv, images_root, reading)
    if not table.paths:
        table.problems.report()
    images = encoded_images(table)
    scan = scan_images(images, progress)
    window, problem = scan.window(reading), scan.window_problem(reading, images)
    failures, rejected = dict(scan.unreadable), scan.rejected(reading)
    out.parent.mkdir(parents=True, exist_ok=True)
    # The unnamed file disappears with the process; the images never have to fit into memory.
    with tempfile.TemporaryFile(dir=out.parent) as jpegs, atomic_replace(out) as temporary:
        offset = _write_jpegs(images, jpegs, size, window, rejected, failures, progress)
        unreadable = dict(sorted(failures.items()))
        kept, skipped = check_readable(images.count, images.name, unreadable, reading, table.problems, problem)
        table = table.select_rows(kept)
        arrays: dict[str, NDArray[np.generic]] = {
            "jpeg": np.memmap(jpegs, dtype=np.uint8, mode="r"),
            "offset": offset,
            "labels": table.labels,
            "classes": np.array(table.classes),
            "name": np.array(table.names),
        }
        optional = {"split": table.split, "client": table.clients, str(reading.group): table.patients}
        arrays |= {name: values for name, values in optional.items() if values is not None}
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
    return (*window_note(window), *describe_skipped(table.missing, skipped))


def _write_jpegs(
    images: EncodedImages,
    file: IO[bytes],
    size: int | None,
    window: Window | None,
    rejected: set[int],
    failures: dict[int, str],
    progress: Progress,
) -> NDArray[np.int64]:
    def encode(position: int) -> bytes:
        if position in rejected:
            return b""
        with open_image(images.read(position)) as image:
            pixels = as_8_bit(image, "L" if image.mode in GREY_MODES else "RGB", window)
        if size is not None and pixels.size != (size, size):
            pixels = pixels.resize((size, size), Image.Resampling.BILINEAR)
        jpeg = io.BytesIO()
        # Full colour resolution: the usual chroma subsampling is visible in small images.
        pixels.save(jpeg, "JPEG", quality=JPEG_QUALITY, subsampling=0)
        return jpeg.getvalue()

    written = [file.write(jpeg) for jpeg in map_images(images, encode, progress, "packing images", failures)]
    lengths = [length for length in written if length]
    file.flush()
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
