"""`ich`: intracranial haemorrhage on CT slices, 5 types, several an image (RSNA 2019).

Flanders, Prevedello, Shih et al., Construction of a Machine Learning Dataset through Collaboration: The RSNA 2019 Brain
CT Hemorrhage Challenge, Radiology: AI 2020. https://www.kaggle.com/c/rsna-intracranial-hemorrhage-detection ; for
non-commercial research, after the rules are accepted.

DIR/stage_2_train.csv                  ID,Label: ID_0000aee4b_epidural,0 … six rows an image, the sixth is `any`
DIR/stage_2_train/ID_0000aee4b.dcm     DICOM (extra `dicom`), or
DIR/png/ID_0000aee4b.png               the slices as PNG or JPEG, in any folder of DIR

The slices that are used are those that are there: FedMLP has 185,051 of the 752,803. There is no official test data:
25,000 slices (or 70 % of fewer) are for training and the rest is test, drawn once, the same for every seed, as FedMLP.
In DICOM slices `data.window` are Hounsfield units; without it the brain's, 0 … 80.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.core.registry import register
from fedmll.core.seeding import numpy_generator
from fedmll.data.dataset import Splits
from fedmll.data.images.dicom import ENDINGS
from fedmll.data.images.problems import Problems, abbreviate
from fedmll.data.sources.base import Source, SourceRequest, data_missing
from fedmll.data.sources.labelled_images import build_label_table, find_images_by_stem, load_label_table
from fedmll.data.targets import SPLIT_SEED, TEST, TRAIN

CLASSES = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")
ANY = "any"
LABELS = "stage_2_train.csv"
FORMATS = (".png", ".jpg", ".jpeg", *ENDINGS)
TRAINING, SHARE = 25_000, 0.7
BRAIN = (0.0, 80.0)  # Hounsfield units: centre 40, width 80


def load(request: SourceRequest) -> Splits:
    root = request.root
    if root is None or not (root / LABELS).is_file():
        raise data_missing(
            "ich",
            root,
            f"{LABELS}, and the slices in a folder next to it (stage_2_train/*.dcm, or *.png)",
            "Get it from https://www.kaggle.com/c/rsna-intracranial-hemorrhage-detection.",
        )
    problems = Problems(f"'{root}'")
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    there = find_images_by_stem(folders, FORMATS)
    if not there:
        problems.add("there is no folder with slices (.dcm, .png or .jpg) in it.")
    names, labels = _read(root / LABELS, set(there), problems)
    unlabelled = [f"'{there[name]}'" for name in sorted(there.keys() - set(names))]
    if unlabelled and names:
        problems.add(f"{len(unlabelled)} slices have no labels in {LABELS}: {abbreviate(unlabelled)}.")
    paths = [there[name] for name in names]
    if any(path.suffix.lower() in ENDINGS for path in paths) and request.reading.window is None:
        request = replace(request, reading=replace(request.reading, window=BRAIN))
    table = build_label_table(problems, request.reading, paths, labels, CLASSES, _split(len(names)), root)
    return load_label_table(table, f"'{root}'", request)


def _split(samples: int) -> NDArray[np.int8]:
    chosen = numpy_generator(SPLIT_SEED, "split").permutation(samples)[: min(TRAINING, round(SHARE * samples))]
    split = np.full(samples, TEST, dtype=np.int8)
    split[chosen] = TRAIN
    return split


def _read(file: Path, wanted: set[str], problems: Problems) -> tuple[list[str], NDArray[np.int8]]:
    """The labels of the wanted slices, in the order of their names; 4.5 million rows, read as a stream."""
    column = {name: place for place, name in enumerate(CLASSES)}
    found: dict[str, NDArray[np.int8]] = {}
    strange: list[str] = []
    with file.open(encoding="utf-8-sig") as lines:
        header = next(lines, "").strip()
        if header != "ID,Label":
            problems.add(f"'{file.name}': the header is '{header[:60]}' and not 'ID,Label'.")
            return [], np.zeros((0, len(CLASSES)), np.int8)
        for number, line in enumerate(lines, 2):
            key, _, value = line.strip().rpartition(",")
            name, _, kind = key.rpartition("_")
            if name not in wanted and value in ("0", "1"):
                continue
            if value not in ("0", "1") or (kind not in column and kind != ANY):
                strange.append(f"row {number}: '{line.strip()[:60]}'")
            elif kind != ANY:
                found.setdefault(name, np.full(len(CLASSES), -1, dtype=np.int8))[column[kind]] = value == "1"
    if strange:
        problems.add(f"'{file.name}' has {len(strange)} rows that are no ID_…_type,0 or 1: {abbreviate(strange)}.")
    partly = [f"'{name}'" for name, targets in found.items() if (targets < 0).any()]
    if partly:
        problems.add(f"'{file.name}' has not all {len(CLASSES)} types of {len(partly)} slices: {abbreviate(partly)}.")
    names = sorted(found)
    labels = np.array([found[name] for name in names], dtype=np.int8).reshape(len(names), len(CLASSES))
    return names, labels


register("source", "ich")(
    Source(
        description="RSNA intracranial haemorrhage, several types a CT slice; --root DIR with stage_2_train.csv",
        load=load,
        available=lambda root: root is not None and (root / LABELS).is_file(),
        composes=False,
        settings=("window",),
        classes=len(CLASSES),
        licence="RSNA, non-commercial",
    )
)
