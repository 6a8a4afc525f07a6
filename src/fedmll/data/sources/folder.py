"""`folder:labels.csv`: image files in the folder `--root` and their labels in a CSV (its columns: see data.labels_csv).

Without `--root` the images are looked for beside the CSV. Without a `split` column a fifth is test, by the seed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmll.data.cache import Progress, content_key, silent
from fedmll.data.dataset import Dataset, Splits
from fedmll.data.decode import EncodedImages, decoded_images
from fedmll.data.labels_csv import LabelTable, read_labels
from fedmll.data.sources.base import Request, Source
from fedmll.data.targets import splits_of
from fedmll.errors import DataError


def load(request: Request) -> Splits:
    file = request.file()
    root = request.root or file.parent
    if not root.is_dir():
        raise DataError(
            f"The image folder '{root}' does not exist. Give the folder that the paths in '{file}' start from with "
            "--root."
        )
    table = read_labels(file, root)
    store = decoded(table, request.size, request.progress)
    samples = Dataset(store, table.labels, table.classes, groups=table.clients)
    return splits_of(samples, table.split, request.seed, f"'{file}'", request.require_positives)


def decoded(table: LabelTable, size: int | None, progress: Progress = silent) -> NDArray[np.uint8]:
    """The images of a labels file, from the cache if they are in it."""
    return decoded_images(_key(table), lambda: encoded(table), size, progress)


def _key(table: LabelTable) -> str:
    """Changes when an image does (by path, size in bytes and time), not when a label does."""
    files = zip(table.paths, table.sizes_and_times, strict=True)
    return content_key("folder", *(f"{path.absolute()}\x1f{size}\x1f{time}" for path, (size, time) in files))


def encoded(table: LabelTable) -> EncodedImages:
    return EncodedImages(len(table.paths), table.paths.__getitem__, lambda position: f"'{table.paths[position]}'")


SOURCE = Source(
    description="your image files in the folder --root DIR, with their labels in a CSV",
    load=load,
    available=lambda root: True,
    file="labels.csv",
)
