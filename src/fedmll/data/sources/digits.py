"""`digits`: the 1,797 handwritten digits of 8×8 pixels that come with scikit-learn. Needs no download."""

from __future__ import annotations

import numpy as np

from fedmll.data.dataset import Dataset, Splits
from fedmll.data.images.decode import resized
from fedmll.data.sources.base import Request, Source
from fedmll.data.targets import one_hot, splits_of
from fedmll.registry import register

CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def load(request: Request) -> Splits:
    from sklearn.datasets import load_digits  # here: it takes a second

    digits = load_digits()
    images = np.minimum(digits.images * 16, 255).astype(np.uint8)[:, None]  # 17 grey levels, 0 to 16
    store = resized(images, request.size, request.progress)
    labels = one_hot(digits.target, len(CLASSES), "digits")
    return splits_of(Dataset(store, labels, CLASSES), None, "digits")


register("source", "digits")(
    Source(
        description="handwritten digits, 8×8 grey, 1,797 images, 10 classes, one label each; embedded",
        load=load,
        available=lambda root: True,
        classes=len(CLASSES),
        licence="CC BY 4.0",
        published={"": {"train and test": 1797}},
    )
)
