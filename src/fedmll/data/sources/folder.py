"""`folder:labels.csv`: image files in the folder `--root` and their labels in a CSV (its columns: see data.labels_csv).

Without `--root` the images are next to the CSV. Without a `split` column a fifth is test, the same fifth for
every seed.
"""

from __future__ import annotations

from pathlib import Path

from fedmll.config.settings import ReadingOptions
from fedmll.core.errors import DataError
from fedmll.core.registry import register
from fedmll.data.dataset import Splits
from fedmll.data.images.cache import Progress, no_progress
from fedmll.data.images.decode import Size
from fedmll.data.images.labels_csv import read_labels
from fedmll.data.sources.base import Source, SourceRequest
from fedmll.data.sources.labelled_images import LabelledImages, decode_table, splits_from


def load(request: SourceRequest) -> Splits:
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
    file: Path, root: Path, size: Size = None, reading: ReadingOptions | None = None, progress: Progress = no_progress
) -> LabelledImages:
    """Read the labels and the images. One DataError contains all problems of both."""
    reading = reading or ReadingOptions()
    return decode_table(read_labels(file, root, reading), size, reading, progress)


register("source", "folder")(
    Source(
        description="your image files in the folder --root DIR, with their labels in a CSV",
        load=load,
        available=lambda root: True,
        file="labels.csv",
        has_clients=True,
        settings=("classes", "ignore", "group", "window"),
    )
)
