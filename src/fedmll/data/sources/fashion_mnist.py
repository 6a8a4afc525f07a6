"""`fashion-mnist`: the four idx files, gzipped or not. Debian's package `dataset-fashion-mnist` is found by itself."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import DataError
from fedmll.core.registry import register
from fedmll.data.dataset import Dataset, Splits
from fedmll.data.images.decode import resized
from fedmll.data.sources.base import DownloadableFile, Source, SourceRequest, data_missing
from fedmll.data.targets import one_hot

CLASSES = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
TRAIN, TEST = "train", "t10k"
LARGEST = 2**30  # bytes; Fashion-MNIST has 47 million
IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
HOST = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FILES = {
    f"{TRAIN}-{IMAGES}.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    f"{TRAIN}-{LABELS}.gz": "25c81989df183df01b3e8a0aad5dffbe",
    f"{TEST}-{IMAGES}.gz": "bef4ecab320f06d8554ea6380940ec79",
    f"{TEST}-{LABELS}.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


def load(request: SourceRequest) -> Splits:
    folder = request.root or DEBIAN
    if not available(request.root):
        raise data_missing(
            "fashion-mnist",
            folder,
            f"{', '.join(f'{part}-{kind}.gz' for part in (TRAIN, TEST) for kind in (IMAGES, LABELS))}",
            "Debian and Ubuntu: apt install dataset-fashion-mnist. Elsewhere: the four files of "
            "https://github.com/zalandoresearch/fashion-mnist in one folder, given with --root.",
        )
    return Splits(_dataset(folder, TRAIN, request), _dataset(folder, TEST, request))


def available(root: Path | None) -> bool:
    folder = root or DEBIAN
    return all(_file(folder, part, kind).is_file() for part in (TRAIN, TEST) for kind in (IMAGES, LABELS))


def _file(folder: Path, part: str, kind: str) -> Path:
    zipped = folder / f"{part}-{kind}.gz"
    return zipped if zipped.is_file() else folder / f"{part}-{kind}"


def _dataset(folder: Path, part: str, request: SourceRequest) -> Dataset:
    images, labels = (_read_idx(_file(folder, part, kind)) for kind in (IMAGES, LABELS))
    if images.ndim != 3 or labels.shape != (len(images),):
        raise DataError(
            f"'{folder}': the {part} images have the shape {images.shape} and the labels {labels.shape}; N images and "
            "N labels are needed. Are the files from two datasets?"
        )
    store = resized(images[:, None], request.size, request.progress)
    return Dataset(store, one_hot(labels.astype(np.int64), len(CLASSES), f"'{folder}'"), CLASSES)


def _read_idx(file: Path) -> NDArray[np.uint8]:
    """An idx file: two zero bytes, 8 for uint8, the number of dimensions, their sizes (big-endian), then the values."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            start = stream.read(4)
            if start[:3] != b"\0\0\x08":
                raise ValueError("it does not begin like one")
            shape = np.frombuffer(stream.read(4 * start[3]), dtype=">u4", count=start[3]).tolist()
            if math.prod(shape) > LARGEST:
                raise ValueError(f"it declares the shape {tuple(shape)}")
            return np.frombuffer(stream.read(math.prod(shape) + 1), dtype=np.uint8).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise DataError(f"'{file}' is not a complete idx file of bytes ({error}). Get it again.") from None


register("source", "fashion-mnist")(
    Source(
        description="Fashion-MNIST, 28×28 grey, 70,000 images, 10 classes, one label each; --root or Debian's package",
        load=load,
        available=available,
        classes=len(CLASSES),
        licence="MIT",
        published={"": {"train": 60000, "test": 10000}},
        downloads={"": tuple(DownloadableFile(f"{HOST}/{file}", f"md5:{md5}") for file, md5 in FILES.items())},
    )
)
