"""`ich`: intracranial haemorrhage on CT slices, 5 types, several per image (RSNA 2019).

Flanders, Prevedello, Shih et al., Construction of a Machine Learning Dataset through Collaboration: The RSNA 2019 Brain
CT Hemorrhage Challenge, Radiology: AI 2020. https://www.kaggle.com/c/rsna-intracranial-hemorrhage-detection ; for
non-commercial research, after the rules are accepted.

DIR/stage_2_train.csv                  ID,Label: ID_0000aee4b_epidural,0 … six rows per image, one of them `any`
DIR/stage_2_train/ID_0000aee4b.dcm     DICOM (extra `dicom`), or
DIR/png/ID_0000aee4b.png               the slices as PNG or JPEG, in any folder of DIR

All slices in the folders are used (FedMLP has 185,051 of the 752,803). There is no official test data: as in FedMLP,
25,000 slices (or 70 % of fewer) are training data and the others test data, drawn once, the same for every seed. For
DICOM slices `data.window` is in Hounsfield units; the default is the brain window, 0 … 80.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.core.registry import register
from fedmll.core.seeding import numpy_generator
from fedmll.data.dataset import Splits
from fedmll.data.images.open_image import DICOM_ENDINGS
from fedmll.data.images.problems import Problems, abbreviate
from fedmll.data.sources.base import Source, SourceRequest, data_missing
from fedmll.data.sources.labelled_images import find_images_by_stem, load_official
from fedmll.data.targets import SPLIT_SEED, TEST, TRAIN

CLASSES = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")
ANY = "any"
LABELS = "stage_2_train.csv"
FORMATS = (".png", ".jpg", ".jpeg", *DICOM_ENDINGS)
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
    slices = find_images_by_stem(folders, FORMATS)
    if not slices:
        problems.add("it has no folder with slices (.dcm, .png or .jpg).")
    names, labels = _read(root / LABELS, set(slices), problems)
    unlabelled = [f"'{slices[name]}'" for name in sorted(slices.keys() - set(names))]
    if unlabelled and names:
        problems.add(f"{len(unlabelled)} slices have no labels in {LABELS}: {abbreviate(unlabelled)}.")
    paths = [slices[name] for name in names]
    if any(path.suffix.lower() in DICOM_ENDINGS for path in paths) and request.reading.window is None:
        request = replace(request, reading=replace(request.reading, window=BRAIN))
    split = np.full(len(names), TEST, dtype=np.int8)
    training = min(TRAINING, round(SHARE * len(names)))
    split[numpy_generator(SPLIT_SEED, "split").permutation(len(names))[:training]] = TRAIN
    return load_official(problems, request, root, paths, labels, CLASSES, split)


def _read(file: Path, wanted: set[str], problems: Problems) -> tuple[list[str], NDArray[np.int8]]:
    """The labels of the wanted slices, in the order of their names; 4.5 million rows, read as a stream."""
    column = {name: place for place, name in enumerate(CLASSES)}
    found: dict[str, NDArray[np.int8]] = {}
    wrong: list[str] = []
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
                wrong.append(f"row {number}: '{line.strip()[:60]}'")
            elif kind != ANY:
                found.setdefault(name, np.full(len(CLASSES), -1, dtype=np.int8))[column[kind]] = value == "1"
    if wrong:
        problems.add(
            f"'{file.name}' has {len(wrong)} rows other than ID_…_type,0 and ID_…_type,1: {abbreviate(wrong)}."
        )
    partly = [f"'{name}'" for name, targets in found.items() if (targets < 0).any()]
    if partly:
        problems.add(f"'{file.name}': {len(partly)} slices do not have all {len(CLASSES)} types: {abbreviate(partly)}.")
    names = sorted(found)
    labels = np.array([found[name] for name in names], dtype=np.int8).reshape(len(names), len(CLASSES))
    return names, labels


register("source", "ich")(
    Source(
        description="RSNA intracranial haemorrhage, several types per CT slice; --root DIR with stage_2_train.csv",
        load=load,
        available=lambda root: root is not None and (root / LABELS).is_file(),
        composes=False,
        settings=("window",),
        classes=len(CLASSES),
        licence="RSNA, non-commercial",
    )
)
