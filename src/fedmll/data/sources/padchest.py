"""`padchest`: 160,868 chest X-rays of 67,000 patients of one Spanish hospital, with the labels of their reports.

Bustos, Pertusa, Salinas, de la Iglesia-Vayá, PadChest, Medical Image Analysis 2020, arXiv:1901.07441.
https://bimcv.cipf.es/bimcv-projects/padchest/ ; for research, after registration.

DIR/PADCHEST_chest_x_ray_images_labels_160K_01.02.19.csv     ImageID, ImageDir, PatientID, Labels, … (or .csv.gz)
DIR/0/216840111366964….png … DIR/54/…                        by ImageDir, or all in DIR or in DIR/images/

`Labels` is a list such as ['cardiomegaly', 'laminar atelectasis']. The labels form a tree: the classes here are the
findings in FINDINGS, each with the labels below it. A class is absent in an image whose report has other labels or is
`normal`. If the report says `unchanged`, findings that it does not list are unknown. Images without labels, and those
marked `exclude`, are left out. There is no official split: a fifth of the patients (`PatientID`) is test data. The PNG
files have 16 bits; `data.window` sets black and white.
"""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.core.registry import register
from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN, Splits
from fedmll.data.images.problems import Problems, abbreviate
from fedmll.data.sources.base import Source, SourceRequest, data_missing
from fedmll.data.sources.labelled_images import load_official, read_csv_columns

TABLE = "PADCHEST_chest_x_ray_images_labels_160K_01.02.19.csv"
PATIENT = "PatientID"
COLUMNS = ("ImageID", "ImageDir", PATIENT, "Labels")
NORMAL, EXCLUDE, UNCHANGED = "normal", "exclude", "unchanged"
MOST_CHARACTERS = 10_000  # of a list of labels

_CONSOLIDATION = ("consolidation", "air bronchogram")
_INFILTRATES = ("infiltrates", "interstitial pattern", "ground glass pattern", "reticular interstitial pattern",
                "reticulonodular interstitial pattern", "miliary opacities", "alveolar pattern")  # fmt: skip
_CATHETERS = ("central venous catheter", "central venous catheter via subclavian vein",
              "central venous catheter via jugular vein", "central venous catheter via umbilical vein",
              "reservoir central venous catheter")  # fmt: skip
_DEVICES = ("electrical device", "dual chamber device", "single chamber device", "pacemaker", "dai",
            "artificial heart valve", "artificial mitral heart valve", "artificial aortic heart valve", "nsg tube",
            "chest drain tube", "endotracheal tube", "tracheostomy tube", "gastrostomy tube", "nephrostomy tube",
            "ventriculoperitoneal drain tube", *_CATHETERS)  # fmt: skip
FINDINGS: dict[str, tuple[str, ...]] = {  # class → the labels that say that it is present
    "air trapping": ("air trapping",),
    "aortic atheromatosis": ("aortic atheromatosis",),
    "aortic elongation": ("aortic elongation", "descendent aortic elongation", "ascendent aortic elongation",
                          "aortic button enlargement", "supra aortic elongation"),
    "atelectasis": ("atelectasis", "total atelectasis", "lobar atelectasis", "segmental atelectasis",
                    "laminar atelectasis", "round atelectasis", "atelectasis basal"),
    "bronchiectasis": ("bronchiectasis",),
    "cardiomegaly": ("cardiomegaly",),
    "consolidation": _CONSOLIDATION,
    "costophrenic angle blunting": ("costophrenic angle blunting",),
    "device": _DEVICES,
    "emphysema": ("emphysema",),
    "fracture": ("fracture", "rib fracture", "vertebral fracture", "clavicle fracture", "humeral fracture",
                 "callus rib fracture"),
    "granuloma": ("granuloma", "calcified granuloma"),
    "hemidiaphragm elevation": ("hemidiaphragm elevation",),
    "hiatal hernia": ("hiatal hernia",),
    "hilar enlargement": ("hilar enlargement", "adenopathy", "vascular hilar enlargement",
                          "pulmonary artery enlargement"),
    "infiltrates": (*_INFILTRATES, *_CONSOLIDATION),
    "mass": ("mass", "mediastinal mass", "breast mass", "pleural mass", "pulmonary mass", "soft tissue mass"),
    "nodule": ("nodule", "multiple nodules"),
    "pleural effusion": ("pleural effusion", "loculated pleural effusion", "loculated fissural effusion",
                         "hydropneumothorax", "empyema", "hemothorax"),
    "pleural thickening": ("pleural thickening", "apical pleural thickening", "calcified pleural thickening"),
    "pneumonia": ("pneumonia", "atypical pneumonia"),
    "pneumothorax": ("pneumothorax", "hydropneumothorax"),
    "pulmonary edema": ("pulmonary edema",),
    "pulmonary fibrosis": ("pulmonary fibrosis",),
    "scoliosis": ("scoliosis",),
    "tuberculosis": ("tuberculosis", "tuberculosis sequelae"),
}  # fmt: skip
CLASSES = tuple(FINDINGS)


def load(request: SourceRequest) -> Splits:
    root, file = request.root, find(request.root)
    if root is None or file is None:
        raise data_missing(
            "padchest",
            root,
            f"{TABLE} (or .csv.gz), and the images in 0/ … 54/, in images/ or next to it",
            "Register at https://bimcv.cipf.es/bimcv-projects/padchest/ and unpack what you get.",
        )
    problems = Problems(f"'{root}'")
    names, folders, patients, cells = read_csv_columns(file, COLUMNS, problems)
    lists = _parse_lists(cells, file.name, problems)
    kept = [row for row, labels in enumerate(lists) if labels and EXCLUDE not in labels]
    paths = [_find_image(root, folders[row], names[row]) for row in kept]
    targets = _targets([lists[row] for row in kept])
    return load_official(
        problems, request, root, paths, targets, CLASSES, None, [patients[row] for row in kept], PATIENT
    )


def find(root: Path | None) -> Path | None:
    places = () if root is None else (root / TABLE, root / f"{TABLE}.gz")
    return next((place for place in places if place.is_file()), None)


def _find_image(root: Path, folder: str, name: str) -> Path:
    places = (root / folder / name, root / "images" / name, root / name)
    return next((place for place in places if place.is_file()), places[0])


def _parse_lists(cells: list[str], file: str, problems: Problems) -> list[frozenset[str]]:
    """The labels of each image; blanks around a label are left out."""
    found, wrong = [], []
    for cell in cells:
        try:
            values = ast.literal_eval(cell) if cell.strip() and len(cell) < MOST_CHARACTERS else []
            if not isinstance(values, list):
                raise ValueError(cell)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            wrong.append(f"'{cell[:60]}'")
            values = []
        found.append(frozenset(str(value).strip().lower() for value in values) - {"", "nan"})
    if wrong:
        problems.add(f"'{file}': {len(wrong)} cells of Labels are not lists of labels: {abbreviate(wrong)}.")
    return found


def _targets(lists: list[frozenset[str]]) -> NDArray[np.int8]:
    targets = np.full((len(lists), len(CLASSES)), ABSENT, dtype=np.int8)
    for row, labels in enumerate(lists):
        if UNCHANGED in labels:
            targets[row] = UNKNOWN
        for column, signs in enumerate(FINDINGS.values()):
            if not labels.isdisjoint(signs):
                targets[row, column] = PRESENT
    return targets


register("source", "padchest")(
    Source(
        description="PadChest, several findings per image; --root DIR with its CSV and image folders",
        load=load,
        available=lambda root: find(root) is not None,
        composes=False,
        group=PATIENT,
        nothing=NORMAL,
        settings=("window",),
        classes=len(CLASSES),
        licence="for research, after registration",
    )
)
