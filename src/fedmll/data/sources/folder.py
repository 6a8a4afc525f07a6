"""`folder:labels.csv`: image files in the folder `--root`, and their labels in a CSV (see `data.images.labels_csv`).

Without `--root` the images are next to the CSV. Without a `split` column a fifth is test, the same for every seed.
"""

from __future__ import annotations

from fedmll.core.errors import DataError
from fedmll.core.registry import register
from fedmll.data.dataset import Splits
from fedmll.data.images.labels_csv import read_labels
from fedmll.data.sources.base import Source, SourceRequest
from fedmll.data.sources.labelled_images import decode_table


def load(request: SourceRequest) -> Splits:
    file, reading = request.file(), request.reading
    root = request.root or file.parent
    if not root.is_dir():
        raise DataError(
            f"The image folder '{root}' does not exist. Give the folder that the paths in '{file}' start from with "
            "--root."
        )
    found = decode_table(read_labels(file, root, reading), request.size, reading, request.progress)
    return found.splits(f"'{file}'", request, reading.group)


register("source", "folder")(
    Source(
        description="your image files in the folder --root DIR, with their labels in a CSV",
        load=load,
        file="labels.csv",
        has_clients=True,
        settings=("classes", "ignore", "group", "window"),
    )
)
