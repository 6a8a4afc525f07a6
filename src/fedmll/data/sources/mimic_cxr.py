"""`mimic-cxr`: MIMIC-CXR-JPG, 377,110 chest X-rays, 14 observations as in CheXpert.

Johnson, Pollard, Berkowitz et al., MIMIC-CXR-JPG, arXiv:1901.07042, 2019.
https://physionet.org/content/mimic-cxr-jpg/ ; PhysioNet's credentialed data use agreement.

DIR/mimic-cxr-2.0.0-chexpert.csv       subject_id, study_id, and the observations: 1.0, 0.0, -1.0 or blank
DIR/mimic-cxr-2.0.0-split.csv          dicom_id, study_id, subject_id, split: train, validate or test
DIR/files/p10/p10000032/s50414267/02aa804e-….jpg

Both tables may be compressed, as published (.csv.gz). A blank cell is unknown: the report does not mention the finding.
An uncertain label (-1) is unknown, unless `data.uncertain_labels` says otherwise. An image of a study without labels is
left out. A patient (`subject_id`) is in one part of the split, and clients hold out whole patients.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.core.registry import register
from fedmll.data.dataset import Splits
from fedmll.data.images.problems import Problems, abbreviate
from fedmll.data.sources.base import Source, SourceRequest, data_missing
from fedmll.data.sources.chexpert import CLASSES, label_codes, parse_labels
from fedmll.data.sources.labelled_images import check_exist, load_official, read_csv_columns
from fedmll.data.targets import TEST, TRAIN, VALIDATION

LABELS, SPLIT = "mimic-cxr-2.0.0-chexpert.csv", "mimic-cxr-2.0.0-split.csv"
PARTS = {"train": TRAIN, "validate": VALIDATION, "test": TEST}
PATIENT = "subject_id"


def load(request: SourceRequest) -> Splits:
    root = request.root
    labels_file, split_file = find(root, LABELS), find(root, SPLIT)
    if root is None or labels_file is None:
        raise data_missing(
            "mimic-cxr",
            root,
            f"{LABELS} and {SPLIT} (or .csv.gz), and the images in files/p10/ … files/p19/",
            "Get access at https://physionet.org/content/mimic-cxr-jpg/.",
        )
    problems = Problems(f"'{root}'")
    check_exist(problems, root / "files", *([] if split_file is not None else [root / SPLIT]))
    subjects, studies, *columns = read_csv_columns(labels_file, (PATIENT, "study_id", *CLASSES), problems)
    codes = label_codes(request.reading.uncertain_labels)
    targets = parse_labels(columns, codes, labels_file.name, problems)
    row_of = {study: row for row, study in enumerate(zip(subjects, studies, strict=True))}
    images: list[list[str]] = [[], [], [], []]
    if split_file is not None:
        images = read_csv_columns(split_file, ("dicom_id", PATIENT, "study_id", "split"), problems)
    wrong = sorted({f"'{part}'" for part in images[3] if part not in PARTS})
    if wrong:
        problems.add(f"'{split_file.name if split_file else SPLIT}' has a split other than "
                     f"{', '.join(PARTS)}: {abbreviate(wrong)}.")  # fmt: skip
    kept = [image for image in zip(*images, strict=True) if image[1:3] in row_of and image[3] in PARTS]
    paths = [
        root / "files" / f"p{subject[:2]}" / f"p{subject}" / f"s{study}" / f"{image}.jpg"
        for image, subject, study, _ in kept
    ]
    rows = np.array([row_of[subject, study] for _, subject, study, _ in kept], dtype=np.int64)
    labels: NDArray[np.int8] = targets[rows] if len(rows) else np.zeros((0, len(CLASSES)), np.int8)
    split = np.array([PARTS[part] for *_, part in kept], dtype=np.int8)
    patients = [subject for _, subject, _, _ in kept]
    return load_official(problems, request, root, paths, labels, CLASSES, split, patients, PATIENT)


def find(root: Path | None, name: str) -> Path | None:
    places = () if root is None else (root / name, root / f"{name}.gz")
    return next((place for place in places if place.is_file()), None)


register("source", "mimic-cxr")(
    Source(
        description="MIMIC-CXR-JPG, several observations per image, some unknown; --root DIR with its CSVs and files/",
        load=load,
        available=lambda root: find(root, LABELS) is not None,
        composes=False,
        group=PATIENT,
        settings=("uncertain_labels",),
        classes=len(CLASSES),
        licence="PhysioNet credentialed",
    )
)
