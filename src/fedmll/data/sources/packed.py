"""`packed:FILE.npz`: images and labels in one file; `fedmll data pack` writes it (its arrays: data.images.pack).

Also read: `is_test` (booleans) instead of `split`, and `labels` of one class number per sample. Without either a fifth
is test. The samples' clients are the array `client`; their patients are the array that `data.group`
names, otherwise `patient` or `patient_id`.
"""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import DataError
from fedmll.core.registry import register
from fedmll.data.dataset import Dataset, Splits
from fedmll.data.images.decode import EncodedImages, decoded_images
from fedmll.data.images.problems import Problems, check_readable, describe_skipped
from fedmll.data.sources.base import Source, SourceRequest
from fedmll.data.sources.npz import class_names, read_npz
from fedmll.data.targets import TEST, check_classes, make_splits, parse_targets

PATIENTS = ("patient", "patient_id")


def load(request: SourceRequest) -> Splits:
    file = request.file()
    where = f"'{file}'"
    group = request.reading.group
    patients = PATIENTS if group is None else (group,)
    needed = ("offset", "labels", "classes", *(() if group is None else (group,)))
    arrays = read_npz(file, needed, ("split", "is_test", "name", "client", *PATIENTS))
    classes = class_names(arrays, 0)
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
    kept, skipped = check_readable(
        len(samples), lambda i: _name(file, arrays, i), images.unreadable, request.reading, Problems(where)
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
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"The images of '{file}' cannot be read ({error}). Copy the file again.") from None
    digest.update(offset.astype(np.int64).tobytes())
    return digest.hexdigest()


def _encoded(file: Path, arrays: dict[str, NDArray[Any]]) -> EncodedImages:
    jpeg, offset = read_npz(file, ("jpeg",))["jpeg"], arrays["offset"]
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
        available=lambda root: True,
        file="FILE.npz",
        has_clients=True,
        settings=("group", "window"),
    )
)
