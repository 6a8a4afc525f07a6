"""`vindr-cxr`: VinDr-CXR, 18,000 chest X-rays of two hospitals in Vietnam, 28 findings, labelled by radiologists.

Nguyen, Lam, Le et al., VinDr-CXR, Scientific Data 2022, arXiv:2012.15029. https://physionet.org/content/vindr-cxr/ ;
PhysioNet's credentialed data use agreement.

DIR/annotations/image_labels_train.csv     image_id, rad_id, and a column per class: three rows (readers) per image
DIR/annotations/image_labels_test.csv      image_id, and a column per class: one row per image
DIR/train/4fa96496….dicom, DIR/test/…      DICOM (extra `dicom`), or PNG or JPEG with the same names

The tables may also be in DIR. In training data a class is present if most readers of the image see it, absent if none
does, and otherwise uncertain: unknown, unless `data.uncertain_labels` says otherwise. The test labels are the consensus
of five readers. `No finding` is a class.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.config.settings import UncertainLabels
from fedmll.core.registry import register
from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN, Splits
from fedmll.data.images.labels_csv import read_rows
from fedmll.data.images.open_image import DICOM_ENDINGS
from fedmll.data.images.problems import Problems, abbreviate
from fedmll.data.sources.base import Source, SourceRequest, data_missing
from fedmll.data.sources.labelled_images import (
    UNCERTAIN_TARGETS,
    check_exist,
    find_images_by_stem,
    load_official,
    read_csv_columns,
)
from fedmll.data.targets import TEST, TRAIN

PARTS = (("train", TRAIN), ("test", TEST))
IMAGE, READER = "image_id", "rad_id"
SAME_CLASS = {"Other disease": "Other diseases"}  # the test table spells it differently
FORMATS = (".png", ".jpg", ".jpeg", *DICOM_ENDINGS)
VOTES = {"1": 1, "1.0": 1, "0": 0, "0.0": 0}
CLASSES = 28


def load(request: SourceRequest) -> Splits:
    root = request.root
    if root is None or find(root, "train") is None:
        raise data_missing(
            "vindr-cxr",
            root,
            "annotations/image_labels_train.csv, annotations/image_labels_test.csv, and the images in train/ and test/",
            "Get access at https://physionet.org/content/vindr-cxr/.",
        )
    problems = Problems(f"'{root}'")
    paths: list[Path] = []
    split: list[int] = []
    labels = []
    classes: tuple[str, ...] = ()
    for part, code in PARTS:
        file, folder = find(root, part), root / part
        if file is None or not check_exist(problems, folder):
            check_exist(problems, *([root / "annotations" / f"image_labels_{part}.csv"] if file is None else []))
            continue
        names, targets, found = _read(file, request.reading.uncertain_labels, problems)
        if classes and set(found) != set(classes):
            problems.add(f"'{file.name}' has other classes than the training data.")
            continue
        classes = classes or found
        images = find_images_by_stem([folder], FORMATS)
        ending = next(iter(images.values())).suffix if images else ".dicom"
        paths += [images.get(name, folder / f"{name}{ending}") for name in names]
        labels.append(targets[:, [found.index(name) for name in classes]])
        split += [code] * len(names)
    targets = np.concatenate(labels) if labels else np.zeros((0, len(classes)), np.int8)
    return load_official(problems, request, root, paths, targets, classes, np.array(split, np.int8))


def find(root: Path | None, part: str) -> Path | None:
    name = f"image_labels_{part}.csv"
    places = () if root is None else (root / "annotations" / name, root / name)
    return next((place for place in places if place.is_file()), None)


def _read(
    file: Path, uncertain: UncertainLabels | None, problems: Problems
) -> tuple[list[str], NDArray[np.int8], tuple[str, ...]]:
    """The images, their targets and the classes of a table."""
    header = read_rows(file, problems).header
    own = [name for name in header if name not in (IMAGE, READER, "")]
    images, *columns = read_csv_columns(file, (IMAGE, *own), problems)
    names = list(dict.fromkeys(images))
    place = {name: row for row, name in enumerate(names)}
    rows = np.array([place[name] for name in images], dtype=np.int64)
    targets = np.full((len(names), len(own)), UNKNOWN, dtype=np.int8)
    wrong: set[str] = set()
    for column, cells in enumerate(columns):
        wrong |= {f"'{cell}'" for cell in cells if cell not in VOTES and cell != ""}
        known = np.array([cell in VOTES for cell in cells], dtype=bool)
        yes = np.bincount(rows, weights=[VOTES.get(cell, 0) for cell in cells], minlength=len(names))
        votes = np.bincount(rows, weights=known, minlength=len(names))
        targets[:, column] = np.where(
            votes == 0,
            UNKNOWN,
            np.where(2 * yes > votes, PRESENT, np.where(yes == 0, ABSENT, UNCERTAIN_TARGETS[uncertain])),
        )
    if wrong:
        problems.add(f"'{file.name}' has cells other than 1, 0 and blank: {abbreviate(sorted(wrong))}.")
    return names, targets, tuple(SAME_CLASS.get(name, name) for name in own)


register("source", "vindr-cxr")(
    Source(
        description="VinDr-CXR, findings of several readers per image; --root DIR with annotations/, train/ and test/",
        load=load,
        available=lambda root: find(root, "train") is not None,
        composes=False,
        settings=("uncertain_labels", "window"),
        classes=CLASSES,
        licence="PhysioNet credentialed",
        published={"": {"train": 15000, "test": 3000}},
    )
)
