"""`voc:2007`, `voc:2012`: PASCAL Visual Object Classes, 20 classes, several labels per image.

Everingham, Van Gool, Williams, Winn, Zisserman, The PASCAL Visual Object Classes (VOC) Challenge, IJCV 2010.
http://host.robots.ox.ac.uk/pascal/VOC/ ; images under Flickr's terms of use. `fedmll data get voc:2007` fetches it.

DIR/VOCdevkit/VOC2007/JPEGImages/000005.jpg          or DIR is VOCdevkit, or the folder of the year itself
                      ImageSets/Main/trainval.txt    names of images; also test.txt (2007), train.txt, val.txt (2012)
                      ImageSets/Main/cat_trainval.txt    one class: names of images, each with 1, -1 or 0 (difficult)
                      Annotations/000005.xml         used if the lists of classes do not exist

2007: the training data is trainval, the test data is test. 2012: its test labels are secret, so the training data is
train and the test data is val. A class whose only objects in an image are marked `difficult` is unknown, as in VOC's
own evaluation, unless `data.uncertain_labels` says otherwise.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.core.registry import register
from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN, Splits
from fedmll.data.images.problems import Problems, abbreviate
from fedmll.data.sources.base import DownloadableFile, Source, SourceRequest, data_missing
from fedmll.data.sources.labelled_images import UNCERTAIN_TARGETS, check_exist, load_official, read_lines
from fedmll.data.targets import TEST, TRAIN

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
SETS = {"2007": (("trainval", TRAIN), ("test", TEST)), "2012": (("train", TRAIN), ("val", TEST))}
HOST = "http://host.robots.ox.ac.uk/pascal/VOC"


def load(request: SourceRequest) -> Splits:
    year = request.argument
    folder = find(request.root, year)
    if folder is None:
        raise data_missing(
            f"voc:{year}",
            request.root,
            f"the folder VOCdevkit/VOC{year}/ with JPEGImages, ImageSets/Main and Annotations",
            f"Get it with `fedmll data get voc:{year} --root DIR`, or from {HOST}/.",
        )
    problems = Problems(f"'{folder}'")
    main, images = folder / "ImageSets" / "Main", folder / "JPEGImages"
    difficult = UNCERTAIN_TARGETS[request.reading.uncertain_labels]
    names: list[str] = []
    labels: list[NDArray[np.int8]] = []
    split: list[int] = []
    if check_exist(problems, images, *(main / f"{name}.txt" for name, _ in SETS[year])):
        for name, code in SETS[year]:
            found = [line.split()[0] for line in read_lines(main / f"{name}.txt")]
            names += found
            split += [code] * len(found)
            labels.append(_labels(folder, name, found, difficult, problems))
    paths = [images / f"{name}.jpg" for name in names]
    targets = np.concatenate(labels) if labels else np.zeros((0, len(CLASSES)), np.int8)
    return load_official(problems, request, folder, paths, targets, CLASSES, np.array(split, np.int8))


def find(root: Path | None, year: str) -> Path | None:
    if root is None:
        return None
    places = (root, root / f"VOC{year}", root / "VOCdevkit" / f"VOC{year}")
    return next((place for place in places if place.name == f"VOC{year}" and place.is_dir()), None)


def _labels(folder: Path, name: str, images: list[str], difficult: int, problems: Problems) -> NDArray[np.int8]:
    files = [folder / "ImageSets" / "Main" / f"{kind}_{name}.txt" for kind in CLASSES]
    if any(file.exists() for file in files):
        return _from_lists(files, images, difficult, problems)
    return _from_annotations(folder / "Annotations", images, difficult, problems)


def _from_lists(files: list[Path], images: list[str], difficult: int, problems: Problems) -> NDArray[np.int8]:
    codes = {"1": PRESENT, "-1": ABSENT, "0": difficult}
    labels = np.full((len(images), len(CLASSES)), UNKNOWN, dtype=np.int8)
    if not check_exist(problems, *files):
        return labels
    for column, file in enumerate(files):
        listed = {line.split()[0]: line.split()[-1] for line in read_lines(file)}
        wrong = [f"'{image}'" for image in images if listed.get(image) not in codes]
        if wrong:
            problems.add(f"'{file.name}' has no 1, -1 or 0 for {len(wrong)} images: {abbreviate(wrong)}.")
        labels[:, column] = [codes.get(listed.get(image, ""), UNKNOWN) for image in images]
    return labels


def _from_annotations(folder: Path, images: list[str], difficult: int, problems: Problems) -> NDArray[np.int8]:
    labels = np.full((len(images), len(CLASSES)), ABSENT, dtype=np.int8)
    if not check_exist(problems, folder):
        return labels
    wrong = []
    for row, image in enumerate(images):
        try:
            objects = ElementTree.parse(folder / f"{image}.xml").getroot().findall("object")
            shown = [(CLASSES.index(str(o.findtext("name"))), o.findtext("difficult") == "1") for o in objects]
        except (OSError, ElementTree.ParseError, ValueError) as error:
            wrong.append(f"'{image}.xml' ({error})")
            continue
        labels[row, [column for column, hard in shown if hard]] = difficult
        labels[row, [column for column, hard in shown if not hard]] = PRESENT
    if wrong:
        problems.add(f"{len(wrong)} annotations cannot be read: {abbreviate(wrong)}. Unpack the archive again.")
    return labels


register("source", "voc")(
    Source(
        description="PASCAL VOC, several labels per image; --root DIR with VOCdevkit",
        load=load,
        available=lambda root: any(find(root, year) for year in SETS),
        variants=tuple(SETS),
        composes=False,
        settings=("uncertain_labels",),
        classes=len(CLASSES),
        licence="Flickr's terms",
        published={"2007": {"train": 5011, "test": 4952}, "2012": {"train": 5717, "test": 5823}},
        downloads={
            "2007": (
                DownloadableFile(f"{HOST}/voc2007/VOCtrainval_06-Nov-2007.tar", "md5:c52e279531787c972589f7e41ab4ae64"),
                DownloadableFile(f"{HOST}/voc2007/VOCtest_06-Nov-2007.tar", "md5:b6e924de25625d8de591ea690078ad9f"),
            ),
            "2012": (
                DownloadableFile(f"{HOST}/voc2012/VOCtrainval_11-May-2012.tar", "md5:6cd6e144f989b92b3379bac3b3de84fd"),
            ),
        },
    )
)
