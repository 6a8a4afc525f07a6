"""`coco:2014`, `coco:2017`: MS-COCO, 80 classes, several labels per image.

Lin, Maire, Belongie et al., Microsoft COCO: Common Objects in Context, ECCV 2014. https://cocodataset.org ;
annotations CC BY 4.0, images under Flickr's terms of use.

DIR/annotations/instances_train2014.json, instances_val2014.json
DIR/train2014/COCO_train2014_000000000009.jpg, …     or DIR/images/train2014/…
DIR/val2014/…

The training data is train, the test data is val, whose labels are public. A class is present if an object of it is
annotated, alone or in a crowd.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core.registry import register
from fedmll.data.dataset import PRESENT, Splits
from fedmll.data.images.problems import Problems, abbreviate
from fedmll.data.sources.base import Source, SourceRequest, data_missing
from fedmll.data.sources.labelled_images import check_exist, load_official
from fedmll.data.targets import TEST, TRAIN

SETS = (("train", TRAIN), ("val", TEST))
YEARS = ("2014", "2017")
KEPT = ("id", "name", "file_name", "image_id", "category_id", "images", "annotations", "categories")


def load(request: SourceRequest) -> Splits:
    year, root = request.argument, request.root
    if root is None or not available(root, year):
        raise data_missing(
            f"coco:{year}",
            root,
            f"annotations/instances_train{year}.json, annotations/instances_val{year}.json, and the folders "
            f"train{year}/ and val{year}/ (or images/train{year}/ …)",
            "Get the images and the 'Train/Val annotations' from https://cocodataset.org/#download and unpack them.",
        )
    problems = Problems(f"'{root}'")
    paths: list[Path] = []
    labels: list[NDArray[np.int8]] = []
    split: list[int] = []
    names: tuple[str, ...] = ()
    for part, code in SETS:
        file, folder = root / "annotations" / f"instances_{part}{year}.json", root / "images" / f"{part}{year}"
        if not folder.is_dir():
            folder = root / f"{part}{year}"
        read = _read(file, problems) if check_exist(problems, file, folder) else None
        if read is None:
            continue
        files, targets, classes = read
        if names and classes != names:
            problems.add(f"'{file.name}' has other categories than the training data.")
            continue
        names = classes
        paths += [folder / name for name in files]
        labels.append(targets)
        split += [code] * len(files)
    targets = np.concatenate(labels) if labels else np.zeros((0, len(names)), np.int8)
    return load_official(problems, request, root, paths, targets, names, np.array(split, np.int8))


def available(root: Path | None, year: str) -> bool:
    return root is not None and any(
        (root / "annotations" / f"instances_{part}{year}.json").is_file() for part, _ in SETS
    )


def _read(file: Path, problems: Problems) -> tuple[list[str], NDArray[np.int8], tuple[str, ...]] | None:
    """The images, their targets, and the classes in the order of their ids."""
    try:
        with file.open(encoding="utf-8") as stream:
            # The outlines of objects are nearly all of the file: they are dropped while it is parsed.
            found = json.load(stream, object_hook=_drop_unused, parse_float=lambda text: None)
        classes = sorted(found["categories"], key=lambda category: category["id"])
        column = {category["id"]: place for place, category in enumerate(classes)}
        row = {image["id"]: place for place, image in enumerate(found["images"])}
        files = [str(image["file_name"]) for image in found["images"]]
        pairs = [(note["image_id"], note["category_id"]) for note in found["annotations"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problems.add(f"'{file.name}' is not a COCO annotation file ({type(error).__name__}: {error}). Unpack it again.")
        return None
    unknown = [f"image {image}, category {kind}" for image, kind in pairs if image not in row or kind not in column]
    if unknown:
        problems.add(
            f"'{file.name}': {len(unknown)} annotations have an image or category that is not listed: "
            f"{abbreviate(unknown)}."
        )
    known = [(row[image], column[kind]) for image, kind in pairs if image in row and kind in column]
    labels = np.zeros((len(files), len(classes)), dtype=np.int8)
    if known:
        labels[tuple(np.array(known).T)] = PRESENT
    return files, labels, tuple(str(category["name"]) for category in classes)


def _drop_unused(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in KEPT if name in values}


register("source", "coco")(
    Source(
        description="MS-COCO, several labels per image; --root DIR with annotations/ and the image folders",
        load=load,
        available=lambda root: any(available(root, year) for year in YEARS),
        variants=YEARS,
        composes=False,
        classes=80,
        licence="CC BY 4.0; images: Flickr's terms",
        published={"2014": {"train": 82783, "test": 40504}, "2017": {"train": 118287, "test": 5000}},
    )
)
