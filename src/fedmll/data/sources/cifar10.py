"""`cifar10`: the official python batches, or an `.npz` with x_train, y_train, x_test, y_test (uint8, N×32×32×3).

The batches are pickles. They are read by an unpickler that can build numpy arrays, numbers, strings, lists and dicts
and nothing else, so a file that was tampered with cannot run anything.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import DataError
from fedmll.core.registry import register
from fedmll.data.dataset import Dataset, Splits
from fedmll.data.images.decode import resized
from fedmll.data.sources.base import DownloadableFile, Source, SourceRequest, data_missing
from fedmll.data.sources.npz import read_npz
from fedmll.data.targets import one_hot

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILES = ("test_batch",)
SIDE = 32


def load(request: SourceRequest) -> Splits:
    place = find(request.root)
    if place is None:
        raise data_missing(
            "cifar10",
            request.root,
            f"the folder {BATCHES}/ with {TRAIN_FILES[0]} … {TRAIN_FILES[-1]} and {TEST_FILES[0]}, or a file "
            "cifar10*.npz with x_train, y_train, x_test, y_test",
            "Get 'CIFAR-10 python version' from https://www.cs.toronto.edu/~kriz/cifar.html, unpack it, and give the "
            "folder that it is in with --root.",
        )
    if place.suffix == ".npz":
        arrays = read_npz(place, ("x_train", "y_train", "x_test", "y_test"))
        parts = [(arrays["x_train"], arrays["y_train"]), (arrays["x_test"], arrays["y_test"])]
    else:
        parts = [_read_batches([place / name for name in names]) for names in (TRAIN_FILES, TEST_FILES)]
    train, test = (_dataset(images, labels, place, request) for images, labels in parts)
    return Splits(train, test)


def find(root: Path | None) -> Path | None:
    """The folder of batches or the one npz that `root` is or holds."""
    if root is None or not root.exists():
        return None
    if root.is_file():
        return root if root.suffix == ".npz" else None
    for folder in (root, root / BATCHES):
        if (folder / TRAIN_FILES[0]).is_file():
            return folder
    packed = sorted(root.glob("cifar10*.npz"))
    if len(packed) > 1:
        names = ", ".join(path.name for path in packed)
        raise DataError(f"'{root}' holds several files for cifar10: {names}. Give the one that you mean as --root.")
    return packed[0] if packed else None


def _dataset(images: NDArray[Any], numbers: NDArray[Any], place: Path, request: SourceRequest) -> Dataset:
    whole = numbers.shape == (len(images),) and numbers.dtype.kind in "iu"
    if images.dtype != np.uint8 or images.shape[1:] != (SIDE, SIDE, 3) or not whole:
        raise DataError(
            f"'{place}': CIFAR-10 images are uint8 (N, {SIDE}, {SIDE}, 3) with one class number each; these are "
            f"{images.dtype} {images.shape} with labels {numbers.dtype} {numbers.shape}. Is it another dataset?"
        )
    store = resized(np.ascontiguousarray(images.transpose(0, 3, 1, 2)), request.size, request.progress)
    return Dataset(store, one_hot(numbers.astype(np.int64), len(CLASSES), f"'{place}'"), CLASSES)


def _read_batches(files: list[Path]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    batches = [_read_batch(file) for file in files]
    return np.concatenate([images for images, _ in batches]), np.concatenate([labels for _, labels in batches])


def _read_batch(file: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    try:
        with file.open("rb") as stream:
            batch = _ArraysOnly(stream, encoding="bytes").load()
        planes = np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, SIDE, SIDE)
        labels = np.asarray(batch[b"labels"], dtype=np.int64)
    except FileNotFoundError:
        raise DataError(f"'{file}' is missing: {BATCHES}/ must be complete. Unpack the archive again.") from None
    except Exception as error:  # a damaged pickle can raise almost anything, and none of it helps the reader
        raise DataError(f"'{file}' is not a CIFAR-10 batch ({error}). Get and unpack the archive again.") from None
    return planes.transpose(0, 2, 3, 1), labels


class _ArraysOnly(pickle.Unpickler):
    """Finds the three names that a pickled numpy array needs, and refuses every other."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]  # numpy's own, wherever this version keeps it
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes in the batches' old protocol
            return lambda text, encoding: text.encode("latin1")
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which has no place in a batch of images")


register("source", "cifar10")(
    Source(
        description="CIFAR-10, 32×32 colour, 60,000 images, 10 classes, one label each; --root DIR with its batches",
        load=load,
        available=lambda root: find(root) is not None,
        classes=len(CLASSES),
        licence="none published",
        published={"": {"train": 50000, "test": 10000}},
        downloads={
            "": (
                DownloadableFile(
                    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a"
                ),
            )
        },
    )
)
