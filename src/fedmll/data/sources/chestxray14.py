"""`chestxray14`: NIH ChestX-ray14, 112,120 chest X-rays of 30,805 patients, 14 findings. `chestxray14:pa`: PA views.

Wang, Peng, Lu, Lu, Bagheri, Summers, ChestX-ray8, CVPR 2017. https://nihcc.app.box.com/v/ChestXray-NIHCC ; free to use
with attribution to the NIH Clinical Center.

DIR/Data_Entry_2017_v2020.csv           or Data_Entry_2017.csv
DIR/images_001/images/00000001_000.png  … images_012; or all in DIR/images/
DIR/train_val_list.txt, test_list.txt   the official split; without both a fifth of the patients is test

`No Finding` is an image with none of the 14. A patient (`Patient ID`) stays on one side of each split.

`chestxray14:pa` is the data of FedMLP, without the official lists: the PA views, 30 % of them test data, drawn once by
patient. The paper uses the eight most frequent findings: `--data chestxray14:pa --set data.top_classes=8`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.core.registry import register
from fedmll.data.dataset import PRESENT, Splits
from fedmll.data.images.problems import Problems, abbreviate
from fedmll.data.sources.base import Source, SourceRequest, data_missing
from fedmll.data.sources.labelled_images import (
    check_exist,
    find_images_by_stem,
    load_official,
    read_csv_columns,
    read_lines,
)
from fedmll.data.targets import TEST, TRAIN, draw_split

CLASSES = (
    *("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Effusion", "Emphysema", "Fibrosis", "Hernia"),
    *("Infiltration", "Mass", "Nodule", "Pleural_Thickening", "Pneumonia", "Pneumothorax"),
)
NOTHING = "No Finding"
PATIENT = "Patient ID"
PA, PA_TEST_SHARE = "pa", 0.3  # FedMLP: PA views, training and test data 7:3
COLUMNS = ("Image Index", "Finding Labels", PATIENT, "View Position")
LISTS = (("train_val_list.txt", TRAIN), ("test_list.txt", TEST))


def load(request: SourceRequest) -> Splits:
    root = request.root
    entries = find(root)
    if root is None or entries is None:
        raise data_missing(
            "chestxray14",
            root,
            "Data_Entry_2017_v2020.csv (or Data_Entry_2017.csv), train_val_list.txt, test_list.txt, and the images in "
            "images_001/images/ … images_012/images/ or in images/",
            "Get all of it from https://nihcc.app.box.com/v/ChestXray-NIHCC and unpack it into one folder.",
        )
    problems = Problems(f"'{root}'")
    folders = sorted(path for path in (*root.glob("images*"), *root.glob("images_*/images")) if path.is_dir())
    if not folders:
        check_exist(problems, root / "images")
    rows = zip(*read_csv_columns(entries, COLUMNS, problems), strict=True)
    kept = [row for row in rows if row[3] == "PA" or request.argument != PA]
    names, findings, patients = ([row[column] for row in kept] for column in range(3))
    images = find_images_by_stem(folders, (".png",))
    first = folders[0] if folders else root
    paths = [images.get(Path(name).stem, first / name) for name in names]
    labels = _labels(findings, problems)
    split = _split(root, names, problems) if request.argument != PA else None
    if request.argument == PA and names:
        split = draw_split(labels, np.array(patients, dtype=np.str_), PA_TEST_SHARE)
    return load_official(problems, request, root, paths, labels, CLASSES, split, patients, PATIENT)


def find(root: Path | None) -> Path | None:
    return None if root is None else next(iter(sorted(root.glob("Data_Entry_2017*.csv"), reverse=True)), None)


def _labels(findings: list[str], problems: Problems) -> NDArray[np.int8]:
    column = {name: place for place, name in enumerate(CLASSES)}
    labels = np.zeros((len(findings), len(CLASSES)), dtype=np.int8)
    unknown = set()
    for row, cell in enumerate(findings):
        for name in cell.split("|"):
            if name in column:
                labels[row, column[name]] = PRESENT
            elif name != NOTHING:
                unknown.add(f"'{name}'")
    if unknown:
        problems.add(f"'Finding Labels' has names that are not among the 14: {abbreviate(sorted(unknown))}.")
    return labels


def _split(root: Path, names: list[str], problems: Problems) -> NDArray[np.int8] | None:
    files = [root / file for file, _ in LISTS]
    if not any(file.exists() for file in files) or not check_exist(problems, *files):
        return None
    side = {name: code for file, code in LISTS for name in read_lines(root / file)}
    lost = [f"'{name}'" for name in names if name not in side]
    if lost:
        problems.add(f"{len(lost)} images of the CSV are in neither list of the split: {abbreviate(lost)}.")
    return np.array([side.get(name, TRAIN) for name in names], dtype=np.int8)


register("source", "chestxray14")(
    Source(
        description="NIH ChestX-ray14, several findings per image; --root DIR with its CSV and image folders",
        load=load,
        available=lambda root: find(root) is not None,
        variants=("", PA),
        composes=False,
        group=PATIENT,
        nothing=NOTHING,
        classes=len(CLASSES),
        licence="NIH, with attribution",
        published={"": {"train": 86524, "test": 25596}},
    )
)
