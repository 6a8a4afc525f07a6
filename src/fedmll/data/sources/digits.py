"""`digits`: the 1,797 handwritten digits of 8×8 pixels that come with scikit-learn. Needs no download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.core.registry import register
from fedmll.data.dataset import Dataset, Splits
from fedmll.data.images.decode import resized
from fedmll.data.sources.base import Source, SourceRequest
from fedmll.data.targets import make_splits, one_hot

CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def load(request: SourceRequest) -> Splits:
    pixels, digits = read()
    images = np.minimum(pixels * 16, 255).astype(np.uint8).reshape(-1, 1, 8, 8)  # 17 grey levels, 0 to 16
    store = resized(images, request.size, request.progress)
    return make_splits(Dataset(store, one_hot(digits, len(CLASSES), "digits"), CLASSES), None, "digits")


def read() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Pixels (N, 64) and digits, read from scikit-learn's file, because importing scikit-learn takes over a second."""
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not file.is_file():
        from sklearn.datasets import load_digits

        found = load_digits()
        return found.data, found.target
    table = np.loadtxt(file, delimiter=",")
    return table[:, :-1], table[:, -1].astype(np.int64)


register("source", "digits")(
    Source(
        description="handwritten digits, 8×8 grey, 1,797 images, 10 classes, one label each; embedded",
        load=load,
        classes=len(CLASSES),
        licence="CC BY 4.0",
        published={"": {"train and test": 1797}},
    )
)
