"""FLAIR in one HDF5 file, as two projects write it. Only the labels are read at once; images one at a time.

ml-flair, by user    /train/USER/images (n, 256, 256, 3), image_ids, labels and fine_grained_labels ("a|b" an image)
ml-flair, by image   /train/IMAGE/image, labels, fine_grained_labels, user_id
pfl-research         as by user, but labels_row and labels_col, fine_grained_labels_row and …_col: the places of the
                     positives; the names are in /metadata/label_mapping and fine_grained_label_mapping, as JSON
"""

from __future__ import annotations

import json
import os
from array import array
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import DataError
from fedmll.data.images.problems import Problems, abbreviate
from fedmll.data.targets import TEST, TRAIN, VALIDATION

PARTITIONS = {"train": TRAIN, "val": VALIDATION, "test": TEST}
KINDS = {"coarse": "labels", "fine": "fine_grained_labels"}
MAPPING = {"coarse": "label_mapping", "fine": "fine_grained_label_mapping"}
ENDINGS = (".hdf5", ".h5")
SEPARATOR = "/"  # of an image's id and its place at its user


def numbered() -> dict[str, int]:
    """A mapping that numbers names 0, 1, 2, … in the order of their first use."""
    return defaultdict(count().__next__)


class FlairListing:
    """Collects the 429,078 images and labels one after the other, with little memory."""

    def __init__(self) -> None:
        self.images: list[bytes] = []
        self.user, self.split = array("i"), array("b")
        self.users = numbered()
        self.names = {kind: numbered() for kind in KINDS}
        self.columns = {kind: array("i") for kind in KINDS}  # of all labels, image after image
        self.counts = {kind: array("i") for kind in KINDS}  # labels of each image

    def add(self, image: str, user: str, split: int, coarse: list[str], fine: list[str]) -> None:
        self.images.append(image.encode())
        self.user.append(self.users[user])
        self.split.append(split)
        for kind, names in (("coarse", coarse), ("fine", fine)):
            self.columns[kind].extend(map(self.names[kind].__getitem__, names))
            self.counts[kind].append(len(names))


def hdf5_file(root: Path) -> Path | None:
    """The HDF5 file: `root` itself, or the only one in it."""
    if root.is_file():
        return root if root.suffix in ENDINGS else None
    found = sorted(path for ending in ENDINGS for path in root.glob(f"*{ending}"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise DataError(f"'{root}' holds several HDF5 files: {names}. Give one of them as --root.")
    return found[0] if found else None


def hdf5_index(file: Path, problems: Problems) -> FlairListing:
    listing = FlairListing()
    wrong: list[str] = []
    with _opened(file) as archive:
        missing = [part for part in PARTITIONS if part not in archive]
        if missing:
            problems.add(f"it has no group {' and no group '.join(repr(part) for part in missing)}.")
        names = _mapped_names(archive)
        for part, split in PARTITIONS.items():
            for name, group in archive[part].items() if part in archive else ():
                try:
                    (_add_image if "image" in group else _add_user)(listing, name, group, split, names)
                except (KeyError, ValueError, IndexError, AttributeError, TypeError) as error:
                    wrong.append(f"/{part}/{name} ({error})")
    if wrong:
        problems.add(f"{len(wrong)} groups are neither a user nor an image of FLAIR: {abbreviate(wrong)}.")
    return listing


def pixels_reader(
    file: Path, images: NDArray[np.bytes_], users: NDArray[np.bytes_], split: NDArray[np.int8]
) -> Callable[[int], NDArray[np.uint8]]:
    """A function that returns the pixels of a row.

    Each process opens the file itself: HDF5 files do not survive a fork.
    """
    parts = {code: part for part, code in PARTITIONS.items()}
    opened: dict[int, Any] = {}

    def read(row: int) -> NDArray[np.uint8]:
        archive = opened.setdefault(os.getpid(), None) or _opened(file)
        opened[os.getpid()] = archive
        image, _, place = images[row].decode().rpartition(SEPARATOR)
        part = archive[parts[int(split[row])]]
        if place:
            return np.asarray(part[users[row].decode()]["images"][int(place)])
        return np.asarray(part[image]["image"])

    return read


def _opened(file: Path) -> Any:
    try:
        import h5py
    except ImportError:
        raise DataError(f"'{file}' is an HDF5 file; to read it: pip install 'fedmll[hdf5]'.") from None
    try:
        return h5py.File(file, "r")
    except OSError as error:
        raise DataError(f"'{file}' is not a readable HDF5 file ({error}). Copy it again.") from None


def _mapped_names(archive: Any) -> dict[str, dict[int, str]]:
    """pfl-research's names of the columns."""
    found = {}
    for kind, name in MAPPING.items():
        if f"metadata/{name}" in archive:
            text = archive[f"metadata/{name}"][()]
            found[kind] = {int(column): str(label) for label, column in json.loads(text).items()}
    return found


def _add_user(listing: FlairListing, user: str, group: Any, split: int, names: dict[str, dict[int, str]]) -> None:
    count = len(group["images"])
    ids = [_text(value) for value in group["image_ids"][()]] if "image_ids" in group else [user] * count
    labels: dict[str, list[list[str]]] = {}
    for kind, column in KINDS.items():
        if f"{column}_row" in group:
            labels[kind] = [[] for _ in range(count)]
            for row, place in zip(group[f"{column}_row"][()], group[f"{column}_col"][()], strict=True):
                labels[kind][int(row)].append(names[kind][int(place)])
        else:
            labels[kind] = [_split(value) for value in group[column][()]]
        if len(labels[kind]) != count or len(ids) != count:
            raise ValueError(f"{count} images, {len(ids)} ids and {len(labels[kind])} {column}")
    for place, image in enumerate(ids):
        listing.add(f"{image}{SEPARATOR}{place}", user, split, labels["coarse"][place], labels["fine"][place])


def _add_image(listing: FlairListing, image: str, group: Any, split: int, names: dict[str, dict[int, str]]) -> None:
    coarse, fine = (_split(group[column][()]) for column in KINDS.values())
    listing.add(f"{image}{SEPARATOR}", _text(group["user_id"][()]), split, coarse, fine)


def _split(value: Any) -> list[str]:
    return [name for name in _text(value).split("|") if name]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
