"""`chexpert`: 224,316 chest X-rays of 65,240 patients, 14 observations: present, absent, uncertain or not mentioned.

Irvin, Rajpurkar, Ko et al., CheXpert, AAAI 2019. https://stanfordmlgroup.github.io/competitions/chexpert/ ; Stanford's
research agreement; it is available after registration.

DIR/CheXpert-v1.0-small/train.csv, valid.csv      or CheXpert-v1.0/, or DIR is that folder
                        train/patient00001/study1/view1_frontal.jpg
                        test.csv, test/…          if you have the test labels; then `valid` is validation data

A blank cell is unknown: the report does not mention the finding. An uncertain label (-1) is unknown, unless
`data.uncertain_labels` says otherwise. No patient is in two official parts, and clients hold out whole patients too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.config.settings import UncertainLabels
from fedmll.core.registry import register
from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN, Splits
from fedmll.data.images.problems import Problems, abbreviate
from fedmll.data.sources.base import Source, SourceRequest, data_missing
from fedmll.data.sources.labelled_images import UNCERTAIN_TARGETS, load_official, read_csv_columns
from fedmll.data.targets import TEST, TRAIN, VALIDATION

CLASSES = (
    *("No Finding", "Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Lung Lesion", "Edema"),
    *("Consolidation", "Pneumonia", "Atelectasis", "Pneumothorax", "Pleural Effusion", "Pleural Other", "Fracture"),
    "Support Devices",
)
CELLS = {"": UNKNOWN, "1.0": PRESENT, "1": PRESENT, "0.0": ABSENT, "0": ABSENT}
UNCERTAIN = ("-1.0", "-1")
FOLDERS = ("", "CheXpert-v1.0-small", "CheXpert-v1.0")


def load(request: SourceRequest) -> Splits:
    folder = find(request.root)
    if folder is None:
        raise data_missing(
            "chexpert",
            request.root,
            "the folder CheXpert-v1.0-small/ (or CheXpert-v1.0/) with train.csv, valid.csv, train/ and valid/",
            "Register at https://stanfordmlgroup.github.io/competitions/chexpert/ and unpack what you get.",
        )
    problems = Problems(f"'{folder}'")
    tested = (folder / "test.csv").is_file()
    parts = [("train", TRAIN), ("valid", VALIDATION if tested else TEST), *([("test", TEST)] if tested else [])]
    codes = label_codes(request.reading.uncertain_labels)
    paths: list[Path] = []
    patients: list[str] = []
    split: list[int] = []
    labels = []
    for part, code in parts:
        names, *columns = read_csv_columns(folder / f"{part}.csv", ("Path", *CLASSES), problems)
        inside = [name.partition(f"{part}/")[2] for name in names]  # after "CheXpert-v1.0-small/train/"
        paths += [folder / part / name for name in inside]
        patients += [name.partition("/")[0] for name in inside]
        split += [code] * len(names)
        labels.append(parse_labels(columns, codes, f"{part}.csv", problems))
    targets, codes_of_split = np.concatenate(labels), np.array(split, np.int8)
    return load_official(problems, request, folder, paths, targets, CLASSES, codes_of_split, patients, "patient")


def find(root: Path | None) -> Path | None:
    places = () if root is None else tuple(root / name for name in FOLDERS)
    return next((place for place in places if (place / "train.csv").is_file() and (place / "train").is_dir()), None)


def label_codes(uncertain: UncertainLabels | None) -> dict[str, int]:
    """Cell → target."""
    return CELLS | dict.fromkeys(UNCERTAIN, UNCERTAIN_TARGETS[uncertain])


def parse_labels(columns: list[list[str]], codes: dict[str, int], file: str, problems: Problems) -> NDArray[np.int8]:
    wrong = sorted({f"'{cell}'" for column in columns for cell in column if cell not in codes})
    if wrong:
        problems.add(f"'{file}' has cells other than 1, 0, -1 and blank: {abbreviate(wrong)}.")
    return np.array([[codes.get(cell, UNKNOWN) for cell in column] for column in columns], dtype=np.int8).T


register("source", "chexpert")(
    Source(
        description="CheXpert, several observations per image, some unknown; --root DIR with CheXpert-v1.0-small",
        load=load,
        available=lambda root: find(root) is not None,
        composes=False,
        group="patient",
        settings=("uncertain_labels",),
        classes=len(CLASSES),
        licence="Stanford's research agreement",
        published={"": {"train": 223414, "test": 234}},
    )
)
