"""Small copies of official datasets, in their real formats, with images that can be told apart: each is of one shade.

Every maker writes a tree below a folder and says what must be read back: the files of each split and their labels."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from fedmll.data.sources import chestxray14, chexpert, ham10000, ich, padchest, voc


@dataclass
class Made:
    """What a tree says: by split, number of the image → present (1) and unknown (-1) classes."""

    name: str  # after --data
    expected: dict[str, dict[int, dict[str, int]]]
    image: str  # one of its images, to be damaged
    labels: str  # its file of labels, to be damaged
    folder: str  # a folder (or file) that it cannot be without
    header: tuple[str, str] | None = None  # what to replace in `labels`, by what, for a wrong header
    grey: bool = False


def shade(number: int) -> int:
    return 12 + 20 * number


def picture(path: Path, number: int, grey: bool = False, size: tuple[int, int] = (20, 16)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = shade(number)
    Image.new("L" if grey else "RGB", size, colour if grey else (colour, colour, colour)).save(path, quality=95)


def table(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])


def voc2007(root: Path, lists: bool = True) -> Made:
    """Two images of training and two of test; in each set the last shows every class, so that none is never seen."""
    folder = root / "VOCdevkit" / "VOC2007"
    sets = {"trainval": ["000005", "000007"], "test": ["000001", "000002"]}
    shown = {  # class → difficult
        "000005": {"dog": False, "cat": True},
        "000007": dict.fromkeys(voc.CLASSES, False),
        "000001": {"dog": True, "person": False},
        "000002": {},
    }
    for place, (image, objects) in enumerate(shown.items()):
        picture(folder / "JPEGImages" / f"{image}.jpg", place)
        tree = ElementTree.Element("annotation")
        for name, hard in objects.items():
            thing = ElementTree.SubElement(tree, "object")
            ElementTree.SubElement(thing, "name").text = name
            ElementTree.SubElement(thing, "difficult").text = str(int(hard))
        (folder / "Annotations").mkdir(exist_ok=True)
        ElementTree.ElementTree(tree).write(folder / "Annotations" / f"{image}.xml")
    main = folder / "ImageSets" / "Main"
    main.mkdir(parents=True)
    for part, images in sets.items():
        (main / f"{part}.txt").write_text("".join(f"{image}\n" for image in images))
        for name in voc.CLASSES if lists else ():
            codes = [{None: -1, True: 0, False: 1}[shown[image].get(name)] for image in images]
            lines = zip(images, codes, strict=True)
            (main / f"{name}_{part}.txt").write_text("".join(f"{image} {code:2d}\n" for image, code in lines))
    expected = {
        "train": {0: {"dog": 1, "cat": -1}, 1: dict.fromkeys(voc.CLASSES, 1)},
        "test": {2: {"dog": -1, "person": 1}, 3: {}},
    }
    base = "VOCdevkit/VOC2007"
    labels = f"{base}/ImageSets/Main/cat_trainval.txt"
    return Made("voc:2007", expected, f"{base}/JPEGImages/000005.jpg", labels, f"{base}/ImageSets/Main/test.txt")


def coco2014(root: Path) -> Made:
    categories = [{"id": 18, "name": "dog"}, {"id": 1, "name": "person"}, {"id": 90, "name": "toothbrush"}]
    parts = {"train": {9: [1, 18, 18], 25: [90], 30: []}, "val": {42: [18]}}
    number = 0
    for part, images in parts.items():
        notes, entries = [], []
        for image, kinds in images.items():
            file = f"COCO_{part}2014_{image:012d}.jpg"
            picture(root / f"{part}2014" / file, number)
            number += 1
            entries.append({"id": image, "file_name": file, "height": 16, "width": 20, "license": 1})
            notes += [
                {"image_id": image, "category_id": kind, "segmentation": [[1.5, 2.5]], "iscrowd": 0, "area": 1.25}
                for kind in kinds
            ]
        annotations = root / "annotations" / f"instances_{part}2014.json"
        annotations.parent.mkdir(exist_ok=True)
        annotations.write_text(
            json.dumps({"info": {}, "images": entries, "annotations": notes, "categories": categories})
        )
    expected = {"train": {0: {"person": 1, "dog": 1}, 1: {"toothbrush": 1}, 2: {}}, "test": {3: {"dog": 1}}}
    damaged = "train2014/COCO_train2014_000000000009.jpg"
    labels = "annotations/instances_train2014.json"
    return Made("coco:2014", expected, damaged, labels, "val2014", ('"categories"', '"kinds"'))


def chest(root: Path) -> Made:
    """A patient has two images; PA and AP; in two of the folders of the archives."""
    header = ["Image Index", "Finding Labels", "Follow-up #", "Patient ID", "Patient Age", "Patient Gender",
              "View Position", "OriginalImage[Width", "Height]", "OriginalImagePixelSpacing[x", "y]"]  # fmt: skip
    every = "|".join(chestxray14.CLASSES)
    rows = [
        ("00000001_000.png", "Cardiomegaly|Effusion", 1, "PA"),
        ("00000001_001.png", "No Finding", 1, "AP"),
        ("00000002_000.png", every, 2, "PA"),
        ("00000003_000.png", "Hernia", 3, "PA"),
    ]
    cells = [[name, found, 0, patient, 58, "M", view, 2682, 2749, 0.143, 0.143] for name, found, patient, view in rows]
    table(root / "Data_Entry_2017_v2020.csv", header, cells)
    for place, (name, *_) in enumerate(rows):
        picture(root / ("images_001" if place < 2 else "images_002") / "images" / name, place, grey=True)
    (root / "train_val_list.txt").write_text("\n".join(name for name, *_ in rows[:3]))
    (root / "test_list.txt").write_text(rows[3][0])
    expected = {
        "train": {0: {"Cardiomegaly": 1, "Effusion": 1}, 1: {}, 2: dict.fromkeys(chestxray14.CLASSES, 1)},
        "test": {3: {"Hernia": 1}},
    }
    header_change = ("Finding Labels", "Findings")
    image, labels = "images_001/images/00000001_000.png", "Data_Entry_2017_v2020.csv"
    return Made("chestxray14", expected, image, labels, "test_list.txt", header_change, grey=True)


def ham(root: Path) -> Made:
    """Seven kinds, four lesions of each, the first lesion of each kind with two images: 35 images, a colour a kind."""
    rows, number = [], 0
    for kind, name in enumerate(ham10000.CLASSES):
        for lesion in (0, 0, 1, 2, 3):
            image = f"ISIC_{24306 + number:07d}"
            rows.append([f"HAM_{kind}{lesion}", image, name, "histo", 60.0, "male", "scalp"])
            picture(root / f"HAM10000_images_part_{1 + number % 2}" / f"{image}.jpg", kind)
            number += 1
    header = ["lesion_id", "image_id", "dx", "dx_type", "age", "sex", "localization"]
    table(root / "HAM10000_metadata.csv", header, rows)
    image, labels = "HAM10000_images_part_1/ISIC_0024306.jpg", "HAM10000_metadata.csv"
    return Made("ham10000", {}, image, labels, "HAM10000_images_part_1", ("image_id", "image"))


def chexpert_small(root: Path) -> Made:
    header = ["Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", *chexpert.CLASSES]
    blank = dict.fromkeys(chexpert.CLASSES, "")
    rows = {
        "train/patient00001/study1/view1_frontal.jpg": blank | {"No Finding": "1.0", "Support Devices": "-1.0"},
        "train/patient00002/study2/view2_lateral.jpg": dict.fromkeys(chexpert.CLASSES, "1.0"),
        "valid/patient64541/study1/view1_frontal.jpg": dict.fromkeys(chexpert.CLASSES, "0.0") | {"Edema": "1.0"},
    }
    folder = root / "CheXpert-v1.0-small"
    for place, name in enumerate(rows):
        picture(folder / name, place, grey=True)
    for part in ("train", "valid"):
        cells = [
            [f"CheXpert-v1.0-small/{name}", "Female", 68, "Frontal", "AP", *values.values()]
            for name, values in rows.items()
            if name.startswith(part)
        ]
        table(folder / f"{part}.csv", header, cells)
    expected = {
        "train": {
            0: dict.fromkeys(chexpert.CLASSES, -1) | {"No Finding": 1},
            1: dict.fromkeys(chexpert.CLASSES, 1),
        },
        "test": {2: {"Edema": 1}},
    }
    image = "CheXpert-v1.0-small/train/patient00001/study1/view1_frontal.jpg"
    labels = "CheXpert-v1.0-small/train.csv"
    change = ("Pleural Other", "Pleura")
    return Made("chexpert", expected, image, labels, "CheXpert-v1.0-small/valid.csv", change, grey=True)


def haemorrhage(root: Path, write: Callable[[Path, int], None] | None = None, ending: str = "png") -> Made:
    """Ten slices, of which 7 are for training: every slice shows all types but one."""
    rows = []
    for number in range(10):
        name = f"ID_{number:09x}"
        file = root / "slices" / f"{name}.{ending}"
        picture(file, number, grey=True) if write is None else write(file, number)
        rows += [[f"{name}_{kind}", int(place != number % 5)] for place, kind in enumerate(ich.CLASSES)]
        rows.append([f"{name}_any", 1])
    table(root / "stage_2_train.csv", ["ID", "Label"], rows)
    change = ("ID,Label", "ID,Labels")
    image = f"slices/ID_000000003.{ending}"
    return Made("ich", {}, image, "stage_2_train.csv", "slices", change, grey=True)


def dicom(path: Path, number: int) -> None:
    """A CT slice of 12 bits: Hounsfield units from −1000; the right half lies at 4·number, the left is air."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    found = Dataset()
    found.file_meta = FileMetaDataset()
    found.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    found.file_meta.MediaStorageSOPClassUID = CTImageStorage
    found.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    values = np.zeros((16, 20), dtype=np.uint16)
    values[:, 10:] = 1000 + 4 * number
    found.Rows, found.Columns = values.shape
    found.SamplesPerPixel, found.PhotometricInterpretation = 1, "MONOCHROME2"
    found.BitsAllocated, found.BitsStored, found.HighBit, found.PixelRepresentation = 16, 12, 11, 0
    found.RescaleSlope, found.RescaleIntercept = 1, -1000
    found.PixelData = values.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    found.save_as(path, enforce_file_format=True)


def mimic(root: Path) -> Made:
    """Two studies of one patient, one of them with two views; a study without labels is left out."""
    labels = [
        ["10000032", "50414267", *["1.0" if name == "No Finding" else "" for name in chexpert.CLASSES]],
        ["10000032", "53189527", *["1.0"] * len(chexpert.CLASSES)],
        ["11000764", "54901301", *["-1.0" if name == "Edema" else "0.0" for name in chexpert.CLASSES]],
    ]
    images = [
        ("02aa804e", "50414267", "10000032", "train"),
        ("174413ec", "50414267", "10000032", "train"),
        ("2a2277a9", "53189527", "10000032", "train"),
        ("6f9ac2e4", "54901301", "11000764", "test"),
        ("ffffffff", "59999999", "11000764", "test"),
    ]
    table(root / "mimic-cxr-2.0.0-chexpert.csv", ["subject_id", "study_id", *chexpert.CLASSES], labels)
    table(root / "mimic-cxr-2.0.0-split.csv", ["dicom_id", "study_id", "subject_id", "split"], images)
    for place, (name, study, subject, _) in enumerate(images[:4]):
        picture(root / "files" / f"p{subject[:2]}" / f"p{subject}" / f"s{study}" / f"{name}.jpg", place, grey=True)
    nothing = dict.fromkeys(chexpert.CLASSES, -1) | {"No Finding": 1}
    expected = {
        "train": {0: nothing, 1: nothing, 2: dict.fromkeys(chexpert.CLASSES, 1)},
        "test": {3: {"Edema": -1}},
    }
    image, file = "files/p10/p10000032/s50414267/02aa804e.jpg", "mimic-cxr-2.0.0-chexpert.csv"
    change = ("Pleural Other", "Pleura")
    return Made("mimic-cxr", expected, image, file, "mimic-cxr-2.0.0-split.csv", change, grey=True)


def vindr(root: Path) -> Made:
    """Three readers per training image; the tables spell one class differently, as the published ones do."""
    train = ["Aortic enlargement", "Cardiomegaly", "Other diseases", "No finding"]
    votes = {"aa": ([1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]), "bb": ([0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1])}
    rows = [[name, f"R{n}", *row] for name, of_image in votes.items() for n, row in enumerate(of_image)]
    table(root / "annotations" / "image_labels_train.csv", ["image_id", "rad_id", *train], rows)
    test = [*train[:2], "Other disease", "No finding"]
    table(root / "annotations" / "image_labels_test.csv", ["image_id", *test], [["cc", 0, 1, 1, 0]])
    for place, file in enumerate(("train/aa.png", "train/bb.png", "test/cc.png")):
        picture(root / file, place, grey=True)
    expected = {
        "train": {
            0: {"Aortic enlargement": 1, "Cardiomegaly": 1, "Other diseases": -1},
            1: {"Other diseases": 1, "No finding": 1},
        },
        "test": {2: {"Cardiomegaly": 1, "Other diseases": 1}},
    }
    change = ("image_id", "image")
    return Made("vindr-cxr", expected, "train/aa.png", "annotations/image_labels_train.csv", "test", change, grey=True)


def pad(root: Path) -> Made:
    """Twelve patients with an image each, all classes in every second; one image is excluded and not there."""
    every = sorted({label for labels in padchest.FINDINGS.values() for label in labels})
    rows: list[list[object]] = []
    for number in range(12):
        labels = str([" ".join(["", name]) for name in every]) if number % 2 else "['normal']"
        rows.append([number, f"{number}.png", number % 3, f"patient{number}", labels])
        picture(root / str(number % 3) / f"{number}.png", number, grey=True)
    rows.append([12, "12.png", 0, "patient12", "['exclude']"])
    table(root / padchest.TABLE, ["", "ImageID", "ImageDir", "PatientID", "Labels"], rows)
    return Made("padchest", {}, "0/3.png", padchest.TABLE, padchest.TABLE, ("Labels", "Label"), grey=True)
