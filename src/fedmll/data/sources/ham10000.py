"""`ham10000`: 10,015 dermatoscopic images of 7 kinds of skin lesions, one label each.

Tschandl, Rosendahl, Kittler, The HAM10000 dataset, Scientific Data 2018. https://doi.org/10.7910/DVN/DBW86T ;
CC BY-NC 4.0.

DIR/HAM10000_metadata.csv                              lesion_id,image_id,dx,… (also without .csv, as Dataverse has it)
DIR/HAM10000_images_part_1/ISIC_0027419.jpg            and HAM10000_images_part_2/, or all in HAM10000_images/

There is no official split: a fifth of the lesions is test, and a lesion (`lesion_id`) stays on one side of each split.
DermaMNIST's composites are made of it: `ml-ham10000` with `data.singles = "all"` and `data.pairs = 50`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedmll.core.registry import register
from fedmll.data.dataset import Splits
from fedmll.data.images.problems import Problems, abbreviate
from fedmll.data.sources.base import Source, SourceRequest, data_missing
from fedmll.data.sources.labelled_images import check_exist, find_images_by_stem, load_official, read_csv_columns

CLASSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
METADATA = ("HAM10000_metadata.csv", "HAM10000_metadata")
LESION = "lesion_id"


def load(request: SourceRequest) -> Splits:
    root, metadata = request.root, find(request.root)
    if root is None or metadata is None:
        raise data_missing(
            "ham10000",
            root,
            "HAM10000_metadata.csv, and the images in HAM10000_images_part_1/ and HAM10000_images_part_2/",
            "Get both from https://doi.org/10.7910/DVN/DBW86T and unpack the images next to the CSV.",
        )
    problems = Problems(f"'{root}'")
    folders = sorted(path for path in root.glob("HAM10000_images*") if path.is_dir())
    if not (root / "HAM10000_images").is_dir():
        check_exist(problems, root / "HAM10000_images_part_1", root / "HAM10000_images_part_2")
    lesions, names, kinds = read_csv_columns(metadata, (LESION, "image_id", "dx"), problems)
    wrong = sorted({f"'{kind}'" for kind in kinds if kind not in CLASSES})
    if wrong:
        problems.add(f"the column 'dx' has values other than {', '.join(CLASSES)}: {abbreviate(wrong)}.")
    labels = np.array([[kind == name for name in CLASSES] for kind in kinds], dtype=np.int8)  # one class is present
    images = find_images_by_stem(folders, (".jpg",))
    first = folders[0] if folders else root
    paths = [images.get(name, first / f"{name}.jpg") for name in names]
    labels = labels.reshape(len(names), len(CLASSES))
    return load_official(problems, request, root, paths, labels, CLASSES, None, lesions, LESION)


def find(root: Path | None) -> Path | None:
    return None if root is None else next((root / name for name in METADATA if (root / name).is_file()), None)


register("source", "ham10000")(
    Source(
        description="HAM10000, skin lesions, one label each; --root DIR with its CSV and image folders",
        load=load,
        available=lambda root: find(root) is not None,
        group=LESION,
        classes=len(CLASSES),
        licence="CC BY-NC 4.0",
        published={"": {"train and test": 10015}},
    )
)
