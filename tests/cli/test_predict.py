"""predict, export and errors, as a user types them: tables, files, and one paragraph with exit code 2 for bad input."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import small
from numpy.typing import NDArray
from PIL import Image

from fedmll import load_run, run
from fedmll.data import federation
from fedmll.inference.image_predictions import open_prediction_writer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(small(method__name="fedctran", method__layers=1, training__rounds=1), folder)
    return folder


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Three of the run's own test images as files, one more that is none."""
    folder = tmp_path / "images"
    (folder / "below").mkdir(parents=True)
    test = federation.build(small()).test
    for place, name in enumerate(("a.png", "b.png", "below/c.png")):
        Image.fromarray(test.samples(slice(place, place + 1))[0, 0]).save(folder / name)
    (folder / "broken.jpg").write_text("this is text")
    (folder / "notes.txt").write_text("not asked for")
    return folder


def refused(said: tuple[int, str, str], *words: str) -> None:
    code, out, error = said
    assert code == 2, out + error
    assert error.startswith("error: ") and len(error.strip().splitlines()) == 1 and "Traceback" not in error
    for word in words:
        assert word in error, error


def test_predict_a_folder_of_images(fedmll, trained: Path, images: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The files are the first test images: their probabilities are the kept ones."""
    code, out, error = fedmll("predict", trained, "images", "--threshold", "tuned", "--out", "p.csv")
    assert code == 0, error
    assert "images/below/c.png" in out and "all probabilities written to p.csv" in out
    assert "warning: 1 of 4 images cannot be read: images/broken.jpg (not an image in a supported format)." in error
    assert "warning: 1 other files of the folders were left out (.txt)." in error
    saved = load_run(trained)
    kept, tuned = saved.predictions().probabilities[:3], saved.model.tuned_thresholds
    with (tmp_path / "p.csv").open(newline="") as file:
        rows = {row["image"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["images/a.png", "images/b.png", "images/below/c.png", "images/broken.jpg"]
    for name, wanted in zip(("a.png", "b.png", "below/c.png"), kept, strict=True):
        row = rows[f"images/{name}"]
        np.testing.assert_allclose([float(row[label]) for label in saved.classes], wanted, atol=2e-6)
        above = [saved.classes[label] for label in np.argsort(-wanted, kind="stable") if wanted[label] > tuned[label]]
        assert row["predicted"] == "|".join(above) and row["unreadable"] == ""
    assert rows["images/broken.jpg"]["zero"] == "" and rows["images/broken.jpg"]["unreadable"]


def write_dicom(file: Path, values: NDArray[np.uint16]) -> None:
    pydicom = pytest.importorskip("pydicom", reason="pydicom is not installed (fedmll[dicom])")
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = pydicom.uid.CTImageStorage, "1.2.3"
    scan = pydicom.dataset.Dataset()
    scan.file_meta, scan.SOPClassUID, scan.SOPInstanceUID = meta, meta.MediaStorageSOPClassUID, "1.2.3"
    scan.Rows, scan.Columns = values.shape
    scan.BitsAllocated, scan.BitsStored, scan.HighBit, scan.SamplesPerPixel, scan.PixelRepresentation = 16, 12, 11, 1, 0
    scan.PhotometricInterpretation, scan.PixelData = "MONOCHROME2", values.tobytes()
    scan.save_as(file, enforce_file_format=True)


def test_dicom_files_of_a_folder_are_predicted(fedmll, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    generator = np.random.default_rng(0)
    lines = ["image,red,blue"]
    (tmp_path / "scans").mkdir()
    for place in range(24):
        write_dicom(tmp_path / "scans" / f"{place:02}.dcm", generator.integers(0, 4096, (8, 8), dtype=np.uint16))
        lines.append(f"scans/{place:02}.dcm,{place % 2},{place // 2 % 2}")
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
    settings = {"data__limit": None, "data__window": (0, 4095), "partition__clients": 2, "training__rounds": 1}
    run(small(data__name=f"folder:{tmp_path / 'labels.csv'}", training__batch_size=4, **settings), tmp_path / "run")
    (tmp_path / "scans" / "README").write_text("no image")
    code, out, error = fedmll("predict", "run", "scans", "--out", "p.csv")
    assert code == 0, error
    assert "scans/00.dcm" in out and "and 4 more" in out
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 25
    assert "warning: 1 other files of the folders were left out (no ending)." in error


def test_named_pipe_does_not_stop_predict(trained: Path, images: Path) -> None:
    """In a process of its own: before, it waited for ever."""
    os.mkfifo(images / "pipe.png")
    command = [sys.executable, "-m", "fedmll", "predict", str(trained), str(images / "pipe.png"), str(images / "a.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 images cannot be read" in done.stderr and "(it is not a regular file" in done.stderr


@pytest.mark.parametrize("ending", ["csv", "json", "parquet"])
def test_file_name_that_is_not_utf_8_is_predicted(trained: Path, images: Path, tmp_path: Path, ending: str) -> None:
    """In a process of its own, whose output is strict UTF-8, as a terminal's."""
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    shutil.copy(images / "a.png", os.fsencode(images) + b"/caf\xe9.png")
    command = [sys.executable, "-m", "fedmll", "predict", str(trained), str(images), "--out", f"p.{ending}"]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, env=os.environ | {"PYTHONUTF8": "1"})
    assert done.returncode == 0, done.stderr
    assert rb"caf\xe9.png" in done.stdout
    assert rb"caf\xe9.png" in (tmp_path / f"p.{ending}").read_bytes().replace(b"\\\\", b"\\")


def test_predict_other_output_files_and_known_labels(fedmll, trained: Path, images: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = trained / "model.safetensors"
    words = (
        "predict",
        model,
        "images/a.png",
        "images/broken.jpg",
        "--known",
        "two=1",
        "--known",
        "five=0",
        "--top",
        "2",
    )
    assert fedmll(*words, "--out", "p.json")[0] == 0
    first, second = json.loads((tmp_path / "p.json").read_text())
    assert first["predicted"][0] == "two" and len(first["predicted"]) == 2
    assert first["probabilities"]["two"] == 1 and first["probabilities"]["five"] == 0
    assert second == {"image": "images/broken.jpg", "unreadable": "not an image in a supported format"}
    parquet = pytest.importorskip("pyarrow.parquet")
    assert fedmll(*words, "--out", "p.parquet")[0] == 0
    table = parquet.read_table(tmp_path / "p.parquet").to_pylist()
    assert table[0]["predicted"] == "|".join(first["predicted"]) and table[0]["two"] == 1
    assert table[1]["unreadable"] and table[1]["two"] is None
    code, out, _ = fedmll("predict", model, *["images/a.png"] * 22, "--threshold", "1")
    assert code == 0 and out.count("none") == 20 and "and 2 more; --out FILE.csv writes all" in out


def test_impossible_predictions_are_errors(fedmll, trained: Path, images: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    refused(fedmll("predict", trained, "images/broken.jpg", "--out", "p.csv"), "1 of 1 images cannot be read", "format")
    refused(fedmll("predict", trained, "nowhere.png"), "nowhere.png (No such file or directory)")
    assert not (tmp_path / "p.csv").exists()
    good = ("predict", trained, "images/a.png")
    refused(fedmll(*good, "--known", "two"), "class=1 or class=0", "'two'")
    refused(fedmll(*good, "--known", "two=2"), "'two=2'")
    refused(fedmll(*good, "--known", "tow=1"), "did you mean 'two'")
    for wrong in ("much", "1.5", "nan"):
        refused(fedmll(*good, "--threshold", wrong), "from 0 to 1, or 'tuned'")
    refused(fedmll(*good, "--out", "p.xlsx"), "FILE.csv, FILE.json or FILE.parquet")
    refused(fedmll("predict", "nothing", "images/a.png"), "no model file nothing")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((trained / "model.safetensors").read_bytes()[:-7])
    refused(fedmll("predict", cut, "images/a.png"), "not a complete model file", "Copy it again")
    refused(fedmll("export", cut), "not a complete model file")
    run(small(training__rounds=1, partition__holdout=0.0), tmp_path / "plain")
    refused(fedmll("predict", "plain", "images/a.png", "--known", "two=1"), "cannot use known labels")
    refused(fedmll("predict", "plain", "images/a.png", "--threshold", "tuned"), "no validation data")


def test_a_class_may_be_called_image(tmp_path: Path) -> None:
    with open_prediction_writer(tmp_path / "p.csv", ["image", "b"]):
        pass
    assert (tmp_path / "p.csv").read_text() == "_image,_predicted,_unreadable,image,b\n"
    with open_prediction_writer(tmp_path / "p.json", ["a"]):
        pass
    assert json.loads((tmp_path / "p.json").read_text()) == []


def test_export_and_errors_of_a_run_whose_data_is_gone(fedmll, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("onnxruntime")
    (tmp_path / "data").mkdir()
    generator = np.random.default_rng(0)
    lines = ["image,red,blue,split"]
    for place in range(30):
        Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(tmp_path / "data" / f"{place}.png")
        red, blue = place % 2, place // 2 % 2
        lines.append(f"{place}.png,{red},{blue},{'test' if place < 8 else 'validation' if place < 12 else 'train'}")
    (tmp_path / "data" / "labels.csv").write_text("\n".join(lines) + "\n")
    settings = {"partition__clients": 2, "training__batch_size": 4, "data__limit": None, "training__rounds": 1}
    run(small(data__name=f"folder:{tmp_path / 'data' / 'labels.csv'}", **settings), tmp_path / "run")
    code, out, _ = fedmll("errors", "run", "--top", "2", "--out", "sheet.png")
    assert code == 0 and "images in sheet.png" in out
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.format == "PNG" and min(sheet.size) > 100
    shutil.copy(tmp_path / "data" / "3.png", tmp_path / "3.png")
    shutil.rmtree(tmp_path / "data")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    code, again, _ = fedmll("errors", "moved", "--top", "2", "--out", "other.png")
    assert code == 0 and again.split("images in")[0].splitlines()[:6] == out.splitlines()[:6]
    assert "No sheet of images: " in again and not (tmp_path / "other.png").exists()
    assert fedmll("predict", "moved", "3.png")[0] == 0
    code, out, error = fedmll("export", "moved")
    assert code == 0, error
    assert "moved/export/model.onnx" in out and (tmp_path / "moved" / "export" / "README.md").is_file()
    assert fedmll("export", "moved/model.safetensors", "--to", "pt2", "--out", "program")[0] == 0
    refused(fedmll("export", "moved", "--to", "coreml"), "not to 'coreml'")
