"""Official datasets in their official layouts: right labels for known images, and one report of all problems."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import official_datasets as official
import pytest
from official_datasets import Made, shade

from fedmll.config.settings import ReadingOptions
from fedmll.core.errors import ConfigError, DataError
from fedmll.data.dataset import Dataset
from fedmll.data.sources import load, padchest, write_labels

LISTED = (
    official.voc2007, official.coco2014, official.chest, official.chexpert_small, official.mimic, official.vindr
)  # fmt: skip
FILES = (*LISTED, official.ham, official.haemorrhage, official.pad)
Maker = Callable[[Path], Made]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMLL_CACHE", str(tmp_path / "cache"))


def numbers_of(data: Dataset) -> list[int]:
    """Which image it is, by its shade (JPEG may move it a little)."""
    shades = np.array([shade(number) for number in range(12)])
    return [int(np.abs(shades - np.median(image)).argmin()) for image in data.samples(slice(None))]


def told(data: Dataset) -> dict[int, dict[str, int]]:
    """The known targets of each image by class name, without absent classes."""
    rows = zip(numbers_of(data), data.labels, strict=True)
    return {
        number: {name: int(value) for name, value in zip(data.classes, row, strict=True) if value}
        for number, row in rows
    }


@pytest.mark.parametrize("make", LISTED, ids=lambda make: make.__name__)
def test_official_layout_gives_labels_and_split_of_every_image(tmp_path: Path, make: Maker) -> None:
    made = make(tmp_path)
    splits = load(made.name, tmp_path)
    assert told(splits.train) == made.expected["train"]
    assert told(splits.test) == made.expected["test"]
    assert splits.train.sample_shape == (1 if made.grey else 3, 16, 20)
    assert splits.validation is None
    assert splits.train.files is not None
    assert any(made.image.endswith(file) for file in splits.train.files)


# Each way in which a tree can be broken


def missing_folder(root: Path, made: Made) -> str:
    place = root / made.folder
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    return place.name


def truncated_image(root: Path, made: Made) -> str:
    place = root / made.image
    place.write_bytes(place.read_bytes()[:-30])
    return f"{place.name}' ("


def image_gone(root: Path, made: Made) -> str:
    (root / made.image).unlink()
    return Path(made.image).name


def wrong_header(root: Path, made: Made) -> str:
    if made.header is None:
        (root / made.labels).write_text("000005 yes\n000007 1\n")
        return "has no 1, -1 or 0 for 1 images: '000005'"
    place = root / made.labels
    text = place.read_text()
    assert made.header[0] in text
    place.write_text(text.replace(*made.header, 1))
    return "categories" if place.suffix == ".json" else made.header[0].partition(",")[0]


BREAKS = (missing_folder, truncated_image, image_gone, wrong_header)


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.__name__)
@pytest.mark.parametrize("make", FILES, ids=lambda make: make.__name__)
def test_damaged_official_data_is_explained_in_one_paragraph(
    tmp_path: Path, make: Maker, broken: Callable[[Path, Made], str]
) -> None:
    made = make(tmp_path)
    said = broken(tmp_path, made)
    if broken is image_gone and made.name == "ich":
        load(made.name, tmp_path)  # FedMLP's set is a part of the slices: those that are there are the data
        return
    with pytest.raises(DataError) as error:
        load(made.name, tmp_path)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("make", LISTED, ids=lambda make: make.__name__)
def test_all_problems_are_in_the_same_report(tmp_path: Path, make: Maker) -> None:
    made = make(tmp_path)
    words = [truncated_image(tmp_path, made), missing_folder(tmp_path, made)]
    if made.name in ("voc:2007", "mimic-cxr"):  # without its lists it names no image
        words = words[1:]
    with pytest.raises(DataError) as error:
        load(made.name, tmp_path)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("make", LISTED, ids=lambda make: make.__name__)
def test_unreadable_official_images_can_be_skipped(tmp_path: Path, make: Maker) -> None:
    made = make(tmp_path)
    truncated_image(tmp_path, made)
    reading = ReadingOptions(skip_unreadable=True)
    splits = load(made.name, tmp_path, reading=reading, require_positives=False)
    first = min(made.expected["train"])
    assert told(splits.train) == {n: labels for n, labels in made.expected["train"].items() if n != first}
    assert any("1 (1 unreadable)" in note for note in splits.notes)


@pytest.mark.parametrize(
    "name", ["voc:2007", "voc:2012", "coco:2014", "chestxray14", "ham10000", "chexpert", "ich", "medmnist:dermamnist"]
)
@pytest.mark.parametrize("root", [None, "empty"])
def test_missing_data_says_what_is_expected_and_where_to_get_it(tmp_path: Path, name: str, root: str | None) -> None:
    with pytest.raises(DataError, match=r"was not found .* Expected: .*https?://"):
        load(name, None if root is None else tmp_path)


# What is particular to each


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize(("uncertain_labels", "value"), [("unknown", -1), ("present", 1), ("absent", 0), (None, -1)])
def test_voc_difficult_objects_follow_uncertain_labels(
    tmp_path: Path, lists: bool, uncertain_labels: str | None, value: int
) -> None:
    official.voc2007(tmp_path, lists)
    splits = load("voc:2007", tmp_path / "VOCdevkit", reading=ReadingOptions(uncertain_labels=uncertain_labels))  # type: ignore[arg-type]
    cat, dog = splits.train.classes.index("cat"), splits.train.classes.index("dog")
    assert splits.train.labels[0, [cat, dog]].tolist() == [value, 1]
    assert splits.test.labels[0, dog] == value


def test_voc_needs_a_known_year(tmp_path: Path) -> None:
    for name in ("voc", "voc:2010"):
        with pytest.raises(DataError, match="write voc:2007 or voc:2012"):
            load(name, tmp_path)
    with pytest.raises(DataError, match="'ml-voc:2007': composites are made of images with one label"):
        load("ml-voc:2007", tmp_path)


def test_coco_annotations_of_unknown_images_and_other_categories_are_named(tmp_path: Path) -> None:
    made = official.coco2014(tmp_path)
    file = tmp_path / made.labels
    file.write_text(file.read_text().replace('"image_id": 25', '"image_id": 26'))
    with pytest.raises(
        DataError, match="1 annotations have an image or category that is not listed: image 26, category 90"
    ):
        load(made.name, tmp_path)


def test_chest_x_rays_of_a_view_stay_with_their_patient(tmp_path: Path) -> None:
    official.chest(tmp_path)
    with (tmp_path / "Data_Entry_2017_v2020.csv").open("a") as file:  # 20 more patients with two PA views each
        for number in range(4, 44):
            name = f"{number // 2 + 10:08}_{number % 2:03}.png"
            file.write(f"{name},Hernia,0,{number // 2 + 10},58,M,PA,2682,2749,0.143,0.143\n")
            official.picture(tmp_path / "images_002" / "images" / name, number, grey=True)
    splits = load("chestxray14:pa", tmp_path, require_positives=False)
    assert (len(splits.train), len(splits.test)) == (30, 13)  # 7:3, without the AP view and the official lists
    assert splits.train.patients is not None and splits.test.patients is not None
    assert not set(splits.train.patients) & set(splits.test.patients)
    assert splits.group == "Patient ID"
    official.chest(tmp_path)
    load("chestxray14", tmp_path, reading=ReadingOptions(group="Patient ID"))  # as a stored experiment says it
    with pytest.raises(ConfigError, match=r"data\.group is for"):
        load("chestxray14", tmp_path, reading=ReadingOptions(group="Patient Age"))


def test_patient_in_training_and_test_lists_is_rejected(tmp_path: Path) -> None:
    official.chest(tmp_path)
    (tmp_path / "train_val_list.txt").write_text("00000001_000.png\n00000002_000.png")
    (tmp_path / "test_list.txt").write_text("00000001_001.png\n00000003_000.png")
    with pytest.raises(DataError, match="1 of 'Patient ID' are in more than one part of the split: '1'"):
        load("chestxray14", tmp_path)


def test_ham10000_keeps_lesions_together_and_can_be_composed(tmp_path: Path) -> None:
    official.ham(tmp_path)
    splits = load("ham10000", tmp_path)
    for data in (splits.train, splits.test):
        assert data.labels.argmax(axis=1).tolist() == numbers_of(data)
        assert data.labels.sum() == len(data)
    assert splits.train.patients is not None and splits.test.patients is not None
    assert not set(splits.train.patients) & set(splits.test.patients)
    assert len(splits.train) + len(splits.test) == 35 and 5 <= len(splits.test) <= 9
    composed = load("ml-ham10000", tmp_path, options={"singles": "all", "pairs": 1})
    assert composed.train.labels.sum(axis=1).max() == 2


@pytest.mark.parametrize(("uncertain_labels", "value"), [("unknown", -1), ("present", 1), ("absent", 0)])
def test_chexpert_uncertain_follows_setting_and_blank_is_unknown(
    tmp_path: Path, uncertain_labels: str, value: int
) -> None:
    official.chexpert_small(tmp_path)
    splits = load("chexpert", tmp_path, reading=ReadingOptions(uncertain_labels=uncertain_labels))  # type: ignore[arg-type]
    assert splits.train.labels[0].tolist() == [1] + [-1] * 12 + [value]
    assert splits.train.patients is not None and splits.train.patients.tolist() == ["patient00001", "patient00002"]


def test_chexpert_with_test_labels_has_validation_data(tmp_path: Path) -> None:
    official.chexpert_small(tmp_path)
    folder = tmp_path / "CheXpert-v1.0-small"
    text = (folder / "valid.csv").read_text().replace("valid/patient64541", "test/patient64741")
    (folder / "test.csv").write_text(text)
    official.picture(folder / "test/patient64741/study1/view1_frontal.jpg", 5, grey=True)
    splits = load("chexpert", folder)
    assert splits.validation is not None and numbers_of(splits.validation) == [2] and numbers_of(splits.test) == [5]


def test_haemorrhage_split_is_fixed_and_every_slice_has_its_types(tmp_path: Path) -> None:
    official.haemorrhage(tmp_path)
    splits = load("ich", tmp_path)
    assert (len(splits.train), len(splits.test)) == (7, 3)
    for data in (splits.train, splits.test):
        for number, row in zip(numbers_of(data), data.labels, strict=True):
            assert row.tolist() == [int(place != number % 5) for place in range(5)]
    assert np.array_equal(load("ich", tmp_path, seed=5).test.rows, splits.test.rows)


def test_dicom_slices_are_windowed_in_hounsfield_units(tmp_path: Path) -> None:
    pytest.importorskip("pydicom", reason="pydicom is not installed (fedmll[dicom])")
    made = official.haemorrhage(tmp_path, official.dicom, "dcm")
    splits = load("ich", tmp_path)
    assert splits.window == (0.0, 80.0)
    whole = np.concatenate([splits.train.rows, splits.test.rows])
    assert sorted(whole.tolist()) == list(range(10))
    images = splits.train.store
    assert (images[:, :, :, 0] == 0).all()  # air is black
    assert images[:, 0, 0, -1].tolist() == [int(4 * number * 256 / 80) for number in range(10)]
    wide = load("ich", tmp_path, reading=ReadingOptions(window=(-1000.0, 1000.0)))
    assert wide.train.store[3, 0, 0, -1] == int((1000 + 12) * 256 / 2000)
    truncated_image(tmp_path, made)
    with pytest.raises(DataError, match=r"ID_000000003\.dcm' \(pydicom cannot read this DICOM image"):
        load("ich", tmp_path)


def test_a_slice_without_labels_is_named(tmp_path: Path) -> None:
    official.haemorrhage(tmp_path)
    official.picture(tmp_path / "slices" / "ID_abc.png", 1, grey=True)
    with pytest.raises(DataError, match=r"1 slices have no labels in stage_2_train\.csv: '.*ID_abc\.png'"):
        load("ich", tmp_path)


# MedMNIST: one npz


def write_medmnist(file: Path, colour: bool, labels: int, **changes: np.ndarray) -> None:
    arrays = {}
    for start, (part, count) in enumerate((("train", 6), ("val", 2), ("test", 2))):
        numbers = (np.arange(count) + start) % 10
        images = np.full((count, 28, 28), 0, np.uint8) + np.array([shade(n) for n in numbers], np.uint8)[:, None, None]
        arrays[f"{part}_images"] = np.repeat(images[..., None], 3, 3) if colour else images
        arrays[f"{part}_labels"] = (
            np.arange(count, dtype=np.uint8)[:, None] % 7 if labels == 1 else np.ones((count, labels), np.uint8)
        )
    np.savez(file, **arrays | changes)


def test_medmnist_with_several_labels_and_with_one(tmp_path: Path) -> None:
    write_medmnist(tmp_path / "chestmnist.npz", False, 14)
    splits = load("medmnist:chestmnist", tmp_path)
    assert splits.train.sample_shape == (1, 28, 28) and splits.train.labels.all()
    assert splits.validation is not None
    assert [numbers_of(data) for data in (splits.train, splits.validation, splits.test)] == [
        [0, 1, 2, 3, 4, 5], [1, 2], [2, 3]
    ]  # fmt: skip
    write_medmnist(tmp_path / "dermamnist_64.npz", True, 1, train_labels=np.array([[6], [1], [2], [3], [4], [5]]))
    splits = load("medmnist:dermamnist_64", tmp_path, size=14, require_positives=False)
    assert splits.train.sample_shape == (3, 14, 14)
    assert splits.train.labels.argmax(axis=1).tolist() == [6, 1, 2, 3, 4, 5]
    with pytest.raises(DataError, match="no training sample has the class 'actinic keratoses"):
        load("medmnist:dermamnist_64", tmp_path)


def test_damaged_medmnist_file_reports_all_problems(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no 2-D set 'dermanist' in MedMNIST; did you mean 'dermamnist'"):
        load("medmnist:dermanist", tmp_path)
    wrong = {"train_images": np.zeros((5, 28, 28), np.float32), "val_labels": np.zeros((2, 3), np.uint8)}
    write_medmnist(tmp_path / "dermamnist.npz", True, 1, **wrong)
    with pytest.raises(DataError, match=r"3 problems.*float32 \(5, 28, 28\).*5 train images and 6.*\(2, 3\)"):
        load("medmnist:dermamnist", tmp_path)
    np.savez(tmp_path / "dermamnist.npz", train_images=np.zeros((5, 28, 28), np.uint8))
    with pytest.raises(DataError, match="has no array 'train_labels'"):
        load("medmnist:dermamnist", tmp_path)
    write_medmnist(tmp_path / "dermamnist.npz", True, 1)
    whole = (tmp_path / "dermamnist.npz").read_bytes()
    (tmp_path / "dermamnist.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"dermamnist\.npz' is not a readable \.npz"):
        load("medmnist:dermamnist", tmp_path)


def test_padchest_follows_the_tree_of_labels_and_knows_what_is_unchanged(tmp_path: Path) -> None:
    official.pad(tmp_path)
    table = tmp_path / padchest.TABLE
    lines = table.read_text().splitlines()
    changed = {
        "0.png": "['laminar atelectasis', 'loc basal']",
        "1.png": "['unchanged', ' air bronchogram']",
        "2.png": "['normal']",
        "3.png": "['hydropneumothorax', nan]",
    }
    for number, labels in enumerate(changed.values()):
        lines[1 + number] = f'{number},{number}.png,{number % 3},patient{number},"{labels.replace(", nan", "")}"'
    table.write_text("\n".join(lines) + "\n")
    splits = load("padchest", tmp_path, require_positives=False)
    found = told(splits.train) | told(splits.test)
    assert len(found) == 12  # without the excluded image
    assert found[0] == {"atelectasis": 1}
    assert found[1] == dict.fromkeys(padchest.CLASSES, -1) | {"consolidation": 1, "infiltrates": 1}
    assert found[2] == {}
    assert found[3] == {"pleural effusion": 1, "pneumothorax": 1}
    assert found[5] == dict.fromkeys(padchest.CLASSES, 1)
    assert splits.group == "PatientID"


def test_tables_may_be_compressed_as_published(tmp_path: Path) -> None:
    made = official.mimic(tmp_path)
    for file in tmp_path.glob("*.csv"):
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    assert told(load("mimic-cxr", tmp_path).train) == made.expected["train"]
    damaged = tmp_path / "mimic-cxr-2.0.0-chexpert.csv.gz"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    with pytest.raises(DataError, match="is not a CSV file"):
        load("mimic-cxr", tmp_path)


def test_readers_of_vindr_who_disagree_are_uncertain(tmp_path: Path) -> None:
    official.vindr(tmp_path)
    for uncertain, target in (("present", 1), ("absent", 0)):
        splits = load("vindr-cxr", tmp_path, reading=ReadingOptions(uncertain_labels=uncertain))
        assert splits.train.labels[0].tolist() == [1, 1, target, 0]


@pytest.mark.parametrize("make", LISTED, ids=lambda make: make.__name__)
def test_labels_of_an_official_layout_become_a_csv_of_a_folder(tmp_path: Path, make: Maker) -> None:
    """For a site of a real federation, which joins with a CSV. No image is opened to write it."""
    made, file = make(tmp_path / "data"), tmp_path / "labels.csv"
    write_labels(made.name, tmp_path / "data", file)
    group = load(made.name, tmp_path / "data").group
    reading = ReadingOptions(ignore=() if group is None else (group,))
    read = load(f"folder:{file}", tmp_path / "data", reading=reading, require_positives=False)
    assert told(read.train) == made.expected["train"] and told(read.test) == made.expected["test"]


def test_labels_are_written_without_reading_images(tmp_path: Path) -> None:
    made = official.coco2014(tmp_path)
    (tmp_path / made.image).write_bytes(b"not an image")
    write_labels(made.name, tmp_path, tmp_path / "labels.csv")
    assert made.image in (tmp_path / "labels.csv").read_text()
    with pytest.raises(ConfigError, match="has no image files"):
        write_labels("digits", tmp_path, tmp_path / "labels.csv")
