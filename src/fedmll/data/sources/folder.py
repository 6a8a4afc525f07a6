"""`folder:labels.csv`: image files in the folder `--root` and their labels in a CSV (its columns: see data.labels_csv).

Without `--root` the images are looked for beside the CSV. Without a `split` column a fifth is test, the same fifth for
every seed.
"""

from __future__ import annotations

from pathlib import Path

from fedmll.data.dataset import Splits
from fedmll.data.images.cache import Progress, silent
from fedmll.data.images.decode import Size
from fedmll.data.images.labels_csv import read_labels
from fedmll.data.sources.base import Request, Source
from fedmll.data.sources.listed import LabelledImages, encoded, images_of, splits_from
from fedmll.errors import DataError
from fedmll.registry import register
from fedmll.settings import Reading

__all__ = ["LabelledImages", "encoded", "load", "read"]


def load(request: Request) -> Splits:
    file = request.file()
    root = request.root or file.parent
    if not root.is_dir():
        raise DataError(
            f"The image folder '{root}' does not exist. Give the folder that the paths in '{file}' start from with "
            "--root."
        )
    found = read(file, root, request.size, request.reading, request.progress)
    return splits_from(found, f"'{file}'", request, request.reading.group)


def read(
    file: Path, root: Path, size: Size = None, reading: Reading | None = None, progress: Progress = silent
) -> LabelledImages:
    """The labels, and the images from the cache if they are in it. Every problem of both is in one DataError."""
    reading = reading or Reading()
    return images_of(read_labels(file, root, reading), size, reading, progress)


register("source", "folder")(
    Source(
        description="your image files in the folder --root DIR, with their labels in a CSV",
        load=load,
        available=lambda root: True,
        file="labels.csv",
        says_clients=True,
        settings=("classes", "ignore", "group", "window"),
    )
)
