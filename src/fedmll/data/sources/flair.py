"""`flair:coarse` (17 labels), `flair:fine` (1,628): 429,078 photographs of 51,414 Flickr users, who are the clients.

Song, Granqvist, Talwar, FLAIR: Federated Learning Annotated Image Repository, NeurIPS 2022.
https://github.com/apple/ml-flair ; annotations CC BY-NC 4.0, images under Flickr's terms of use.

DIR/label_relationship.txt         optional, lines `fine -> coarse`: for `fedmll data fine-names`
DIR/labels_and_metadata.json       a list of {user_id, image_id, labels, fine_grained_labels, partition}
DIR/small_images/IMAGE_ID.jpg      256 × 256
or DIR/*.hdf5 (or DIR is the file; extra `hdf5`), in one of three layouts:
  ml-flair, by user    /train/USER/images (n, 256, 256, 3), image_ids, labels and fine_grained_labels ("a|b" per image)
  ml-flair, by image   /train/IMAGE/image, labels, fine_grained_labels, user_id
  pfl-research         as by user, but labels_row and labels_col, fine_grained_labels_row and …_col: the positions
                       of the positives; /metadata/label_mapping and fine_grained_label_mapping have the names, as JSON

The official split (train, val, test) divides the users. Images are decoded when a client is trained, and only its own
images; the cache has only an index of users, images and labels, so that 51,414 users need little memory. Classes are in
alphabetical order. A note names labels without a training image: they are part of the published task.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import DataError
from fedmll.core.files import atomic_replace
from fedmll.core.registry import register
from fedmll.data.dataset import PRESENT, Dataset, Splits
from fedmll.data.images.cache import content_key, image_folder
from fedmll.data.images.decode import DEFAULT_SIDE, LARGEST_NATIVE_SIDE, LazyImages
from fedmll.data.images.open_image import IMAGE_ERRORS, check_pixels, describe_image_error, open_image
from fedmll.data.images.problems import Problems, abbreviate
from fedmll.data.sources.base import Source, SourceRequest, data_missing
from fedmll.data.sources.labelled_images import check_exist, read_lines
from fedmll.data.targets import TEST, TRAIN, VALIDATION

PARTITIONS = {"train": TRAIN, "val": VALIDATION, "test": TEST}
RELATIONSHIP = "label_relationship.txt"
KINDS = {"coarse": "labels", "fine": "fine_grained_labels"}
MAPPING = {"coarse": "label_mapping", "fine": "fine_grained_label_mapping"}
ENDINGS = (".hdf5", ".h5")
SEPARATOR = "/"  # of an image's id and its place at its user
METADATA, IMAGES = "labels_and_metadata.json", "small_images"
CHUNK = 1 << 22
GAP = re.compile(r"[\s,]*")
ROWS_AT_ONCE = 16_384


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


@dataclass(frozen=True)
class FlairIndex:
    """One row per image: training, validation, then test images; the images of a user are consecutive."""

    images: NDArray[np.bytes_]  # (N,) ids
    users: NDArray[np.bytes_]  # (U,)
    user: NDArray[np.int32]  # (N,) place in users
    split: NDArray[np.int8]
    coarse: NDArray[np.bytes_]  # names
    fine: NDArray[np.bytes_]
    coarse_pairs: NDArray[np.int32]  # (2, M): row, class
    fine_pairs: NDArray[np.int32]


def load(request: SourceRequest) -> Splits:
    kind, root = request.argument, request.root
    file = None if root is None else hdf5_file(root)
    if root is None or (file is None and not (root / METADATA).is_file()):
        raise data_missing(
            f"flair:{kind}",
            root,
            f"{METADATA} and the folder {IMAGES}/, or an HDF5 file of ml-flair or pfl-research",
            "Get it with the download script of https://github.com/apple/ml-flair.",
        )
    key, found = _indexed(root, file)
    names = tuple(name.decode() for name in getattr(found, kind).tolist())
    pairs = getattr(found, f"{kind}_pairs")
    labels = _dense(content_key(key, kind), pairs, len(found.images), len(names))
    read: Callable[[int], Any]
    if file is None:
        folder, ids = root / IMAGES, found.images
        read = lambda row: folder / f"{ids[row].decode()}.jpg"  # noqa: E731
    else:
        read = pixels_reader(file, found.images, found.users[found.user], found.split)
    sides, notes = _sides(read, request.size, f"'{file or root}'")
    store = cast("NDArray[np.uint8]", LazyImages(content_key(key, sides), (len(found.images), 3, *sides), read))
    users = found.users.astype(np.str_)
    parts = []
    for code in (TRAIN, VALIDATION, TEST):
        begin, end = np.searchsorted(found.split, [code, code + 1])
        rows = np.arange(begin, end, dtype=np.int64)
        parts.append(Dataset(store, labels[begin:end], names, rows, users[found.user[begin:end]]))
    train, validation, test = parts
    never = np.flatnonzero(np.bincount(pairs[1, pairs[0] < len(train)], minlength=len(names)) == 0)
    if len(never):
        notes += (f"{len(never)} labels are on no training image: {abbreviate([names[place] for place in never])}",)
    return Splits(train, test, validation if len(validation) else None, notes=notes)


def _sides(
    read: Callable[[int], Any], size: tuple[int, int] | None, where: str
) -> tuple[tuple[int, int], tuple[str, ...]]:
    """The size after resizing, by the same rule as everywhere; all images of FLAIR have the size of the first."""
    first = None
    try:
        first = read(0)
        with open_image(first) as image:
            width, height = image.size
    except IMAGE_ERRORS as error:
        name = f"'{first}'" if isinstance(first, Path) else f"The first image of {where}"
        raise DataError(f"{name} cannot be decoded ({describe_image_error(error)}). Replace it.") from None
    native = max(height, width) <= LARGEST_NATIVE_SIDE
    sides = size or ((height, width) if native else (DEFAULT_SIDE, DEFAULT_SIDE))
    if sides == (height, width):
        return sides, ()
    return sides, (f"images: {width} × {height} resized to {sides[1]} × {sides[0]}, when they are read",)


# The index


def fine_names(root: Path) -> dict[str, list[str]]:
    """Coarse class → its fine names, the most frequent first (over all images), for `method.fine_names` of FedLGT.

    DIR/label_relationship.txt, which is part of FLAIR, has the lines `fine -> coarse`.
    """
    file = hdf5_file(root)
    folder = root if root.is_dir() else root.parent
    relations = folder / RELATIONSHIP
    if not relations.is_file() or (file is None and not (root / METADATA).is_file()):
        raise data_missing(
            "flair",
            root,
            f"{RELATIONSHIP} (lines `fine -> coarse`) beside {METADATA} or an HDF5 file",
            "Get it with the download script of https://github.com/apple/ml-flair.",
        )
    lines = [line.partition("->") for line in read_lines(relations)]
    coarse_of = {fine.strip(): coarse.strip() for fine, arrow, coarse in lines if arrow}
    _, found = _indexed(root, file)
    counts = np.bincount(found.fine_pairs[1], minlength=len(found.fine))
    by_count = sorted(zip(counts.tolist(), [name.decode() for name in found.fine.tolist()], strict=True), reverse=True)
    names: dict[str, list[str]] = {name.decode(): [] for name in found.coarse.tolist()}
    for images, name in by_count:
        if images and coarse_of.get(name) in names:
            names[coarse_of[name]].append(name)
    empty = [name for name, of_class in names.items() if not of_class]
    if empty:
        raise DataError(f"'{relations}' names no fine label of {abbreviate(empty)}. Copy it again.")
    return names


def _indexed(root: Path, file: Path | None) -> tuple[str, FlairIndex]:
    """The index, from the cache or built. It is built again if the metadata or the image folder changed."""
    watched = [file] if file is not None else [root / METADATA, root / IMAGES]
    times = [(path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else None for path in watched]
    key = content_key("flair", *(path.absolute() for path in watched), *times)
    kept = image_folder() / f"{key}.npz"
    try:
        with np.load(kept, allow_pickle=False) as arrays:
            return key, FlairIndex(**{one.name: arrays[one.name] for one in fields(FlairIndex)})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        pass
    problems = Problems(f"'{file or root}'")
    listing = _from_json(root, problems) if file is None else hdf5_index(file, problems)
    problems.report()
    found = _sorted(listing)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace(kept) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **{one.name: getattr(found, one.name) for one in fields(FlairIndex)})
    return key, found


def _sorted(listing: FlairListing) -> FlairIndex:
    users, by_name = _alphabetical(listing.users)
    user = by_name[np.array(listing.user, dtype=np.int32)]
    images, split = np.array(listing.images), np.array(listing.split, dtype=np.int8)
    order = np.lexsort((images, user, split))
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    names, pairs = {}, {}
    for kind in KINDS:
        names[kind], column = _alphabetical(listing.names[kind])
        rows = np.repeat(place, np.array(listing.counts[kind], dtype=np.int32))
        found = np.stack([rows, column[np.array(listing.columns[kind], dtype=np.int32)]])
        pairs[kind] = found[:, np.argsort(found[0], kind="stable")]
    return FlairIndex(
        images[order], users, user[order], split[order], names["coarse"], names["fine"], pairs["coarse"], pairs["fine"]
    )


def _alphabetical(numbers: dict[str, int]) -> tuple[NDArray[np.bytes_], NDArray[np.int32]]:
    """The names in alphabetical order, and the new number for each old number."""
    names = sorted(numbers)
    new = np.empty(len(names), dtype=np.int32)
    new[[numbers[name] for name in names]] = np.arange(len(names), dtype=np.int32)
    return np.array([name.encode() for name in names], dtype=np.bytes_), new


def _from_json(root: Path, problems: Problems) -> FlairListing:
    listing = FlairListing()
    folder = root / IMAGES
    is_there = check_exist(problems, folder)
    there = {entry.name for entry in os.scandir(folder)} if is_there else set()
    missing, wrong = [], []
    try:
        for number, entry in enumerate(_entries(root / METADATA), 1):
            try:
                image, split = entry["image_id"], PARTITIONS[entry["partition"]]
                listing.add(image, entry["user_id"], split, entry["labels"], entry["fine_grained_labels"])
            except (KeyError, TypeError, AttributeError) as error:
                wrong.append(f"entry {number} ({type(error).__name__}: {error})")
                continue
            if f"{image}.jpg" not in there:
                missing.append(f"'{image}.jpg'")
    except (ValueError, RecursionError) as error:
        problems.add(f"'{METADATA}' cannot be read as JSON ({error}). Copy it again.")
    if wrong:
        problems.add(
            f"{len(wrong)} entries of '{METADATA}' are not {{user_id, image_id, labels, fine_grained_labels, "
            f"partition}}: {abbreviate(wrong)}."
        )
    if missing and is_there:
        problems.add(f"{len(missing)} of {len(listing.images)} images are not in {IMAGES}/: {abbreviate(missing)}.")
    elif not listing.images and not problems.found:
        problems.add(f"'{METADATA}' lists no images.")
    return listing


def _entries(file: Path) -> Iterator[Any]:
    """The entries of a JSON list, one at a time: the whole list would need a gigabyte of memory."""
    decoder = json.JSONDecoder()
    with file.open(encoding="utf-8") as stream:
        text = stream.read(CHUNK).lstrip()
        if not text.startswith("["):
            raise ValueError("it is not a list")
        place = 1
        while True:
            place = GAP.match(text, place).end()  # type: ignore[union-attr]
            if text[place : place + 1] == "]":
                return
            try:
                entry, place = decoder.raw_decode(text, place)
            except ValueError:
                more = stream.read(CHUNK)
                if not more:
                    raise
                text, place = text[place:] + more, 0
                continue
            yield entry


def _dense(key: str, pairs: NDArray[np.int32], samples: int, classes: int) -> NDArray[np.int8]:
    """Targets with one column per class, memory-mapped from the cache: 1,628 labels would need 700 MB of memory."""
    path = image_folder() / f"{key}-labels.npy"
    if not path.is_file():
        with atomic_replace(path) as temporary, temporary.open("wb") as stream:
            shape = {"descr": "|i1", "fortran_order": False, "shape": (samples, classes)}
            np.lib.format.write_array_header_1_0(stream, shape)
            for begin in range(0, samples, ROWS_AT_ONCE):
                size = min(ROWS_AT_ONCE, samples - begin)
                block = np.zeros((size, classes), dtype=np.int8)
                first, last = np.searchsorted(pairs[0], [begin, begin + size])
                block[pairs[0, first:last] - begin, pairs[1, first:last]] = PRESENT
                stream.write(block.data)
    return cast("NDArray[np.int8]", np.load(path, mmap_mode="r", allow_pickle=False))


# HDF5


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
        found = part[users[row].decode()]["images"] if place else part[image]["image"]
        if found.ndim != (4 if place else 3) or found.shape[-1] != 3 or found.dtype != np.uint8:
            raise ValueError(f"an image must be uint8 (height, width, 3); it is {found.dtype} {found.shape}")
        check_pixels(*found.shape[-3:-1])  # before it is inflated
        return np.asarray(found[int(place)] if place else found)

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


register("source", "flair")(
    Source(
        description="FLAIR, several labels per image, its users are the clients; --root DIR or an HDF5 file",
        load=load,
        available=lambda root: root is not None and ((root / METADATA).is_file() or hdf5_file(root) is not None),
        variants=tuple(KINDS),
        composes=False,
        has_clients=True,
        classes={"coarse": 17, "fine": 1628},
        licence="CC BY-NC 4.0; images: Flickr's terms",
        published={kind: {"train": 345879, "validation": 39239, "test": 43960} for kind in KINDS},
    )
)
