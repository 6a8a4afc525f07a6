"""Damaged data of a user: tables of labels, arrays and images. Each is used, or rejected in one sentence."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from commands import ask, find_fault
from conftest import small
from mutations import MUTATIONS, SEED, damage
from PIL import Image

from fedmll import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TRAIN = (
    *("--rounds", "1", "--clients", "2", "--workers", "0", "--out", "out"),
    *("--set", "model.channels=[4]", "--set", "training.batch_size=8"),
)
SAMPLES = 24


def write_images(folder: Path) -> None:
    """SAMPLES small PNG images with their table of labels."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    lines = ["image,patient,client,split,sick,old"]
    for number in range(SAMPLES):
        Image.fromarray(draw.integers(256, size=(12, 10), dtype=np.uint8)).save(folder / f"{number}.png")
        unknown = "" if number % 5 == 0 else str(number // 2 % 2)
        split, client = ("train", "test")[number // 2 % 3 == 0], ("north", "south")[number // 2 % 2]
        lines.append(f"{number}.png,p{number // 2},{client},{split},{number % 2},{unknown}")
    Path("labels.csv").write_text("\n".join(lines) + "\n")


def write_arrays() -> None:
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {"classes": np.array(["sick", "old"])}
    for part in ("train", "test"):
        arrays[f"x_{part}"] = draw.random((SAMPLES, 5), dtype=np.float32)
        arrays[f"y_{part}"] = np.arange(2 * SAMPLES).reshape(SAMPLES, 2) // 3 % 2
    np.savez("stored.npz", **arrays)
    np.savez_compressed("compressed.npz", **arrays)


def try_training(fedmll: Any, file: Path, words: tuple[str, ...], seed: str, times: int) -> None:
    """Train on a damaged file, many times."""
    draw, content, faults, codes = Random(f"{SEED} {seed}"), file.read_bytes(), [], []
    for mutation in MUTATIONS * times:
        file.write_bytes(content)
        if not damage(file, mutation, draw):
            continue
        shutil.rmtree("out", ignore_errors=True)
        answer = ask(fedmll, words)
        codes.append(answer.said.code)
        if fault := find_fault(answer, None, file):
            faults.append(f"{file.name}, {mutation.__name__}: {fault}\n{file.read_bytes()[:2000]!r}")
    file.write_bytes(content)
    assert not faults, f"{len(faults)} of {len(codes)}:\n" + "\n\n".join(faults)
    assert 2 in codes, "no damage was noticed"


def test_tables_of_labels(fedmll: Any) -> None:
    write_images(Path("images"))
    words = ("run", "--data", "folder:labels.csv", "--root", "images", *TRAIN, "--set", "data.size=8")
    words += ("--set", "data.group=patient")
    assert fedmll(*words).code == 0
    try_training(fedmll, Path("labels.csv"), words, "labels", 6)


def test_arrays(fedmll: Any) -> None:
    write_arrays()
    for name in ("stored.npz", "compressed.npz"):
        shutil.rmtree("out", ignore_errors=True)
        words = ("run", "--data", f"features:{name}", "--backbone", "mlp", *TRAIN)
        assert fedmll(*words).code == 0
        try_training(fedmll, Path(name), words, name, 4)


def test_packed_images(fedmll: Any) -> None:
    write_images(Path("images"))
    assert (
        fedmll("data", "pack", "labels.csv", "--root", "images", "--group", "patient", "--out", "packed.npz").code == 0
    )
    words = ("run", "--data", "packed:packed.npz", *TRAIN)
    assert fedmll(*words).code == 0
    try_training(fedmll, Path("packed.npz"), words, "packed", 4)


# ---- images for a trained model


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(small(training__rounds=1, data__limit=120), folder)
    return folder


def encoded_images() -> Iterator[tuple[str, bytes]]:
    pixels = np.random.default_rng(0).integers(256, size=(20, 24, 3), dtype=np.uint8)
    for name, image, options in (
        ("grey.png", Image.fromarray(pixels[:, :, 0]), {}),
        ("colours.png", Image.fromarray(pixels).quantize(16), {}),
        ("colour.jpg", Image.fromarray(pixels), {}),
        ("progressive.jpg", Image.fromarray(pixels), {"progressive": True}),
        ("scan.tif", Image.fromarray(pixels[:, :, 0]), {"compression": "tiff_lzw"}),
        ("photo.webp", Image.fromarray(pixels), {}),
    ):
        stream = io.BytesIO()
        image.save(stream, {"jpg": "JPEG", "tif": "TIFF"}.get(name[-3:], name.split(".")[1].upper()), **options)
        yield name, stream.getvalue()


def write_dicom(file: Path) -> None:
    pydicom = pytest.importorskip("pydicom", reason="pydicom is not installed (fedmll[dicom])")
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    scan = pydicom.Dataset()
    scan.file_meta = pydicom.dataset.FileMetaDataset()
    scan.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    scan.file_meta.MediaStorageSOPClassUID = scan.SOPClassUID = CTImageStorage
    scan.file_meta.MediaStorageSOPInstanceUID = scan.SOPInstanceUID = generate_uid()
    scan.Rows, scan.Columns, scan.SamplesPerPixel, scan.PhotometricInterpretation = 16, 16, 1, "MONOCHROME2"
    scan.BitsAllocated, scan.BitsStored, scan.HighBit, scan.PixelRepresentation = 8, 8, 7, 0
    scan.PixelData = np.random.default_rng(0).integers(256, size=(16, 16), dtype=np.uint8).tobytes()
    scan.save_as(file, enforce_file_format=True)


def predicted_rows() -> dict[str, list[str]]:
    with Path("p.csv").open(newline="") as file:
        return {row[0]: row[1:] for row in csv.reader(file)}


def test_images(fedmll: Any, trained: Path) -> None:
    """An image beside the damaged one is predicted as before. The damaged one has probabilities or a reason."""
    Path("images").mkdir()
    write_dicom(Path("scan.dcm"))
    sources = dict(encoded_images()) | {"scan.dcm": Path("scan.dcm").read_bytes()}
    Path("images/whole.png").write_bytes(sources["grey.png"])
    words = ("predict", str(trained), "images", "--out", "p.csv")
    assert fedmll(*words).code == 0
    whole = predicted_rows()["images/whole.png"]
    assert len(whole) == 12
    draw, faults, count = Random(f"{SEED} images"), [], 0
    for name, content in sources.items():
        file = Path("images", name)
        for mutation in MUTATIONS * 3:
            file.write_bytes(content)
            if not damage(file, mutation, draw):
                continue
            count += 1
            answer = ask(fedmll, words)
            fault = find_fault(answer, None, file) or wrong_rows(name, whole, answer.text)
            if fault:
                faults.append(f"{name}, {mutation.__name__}: {fault}")
        file.unlink()
    assert not faults, f"{len(faults)} of {count}:\n" + "\n\n".join(faults)


def wrong_rows(name: str, whole: list[str], text: str) -> str | None:
    rows = predicted_rows()
    if rows.get("images/whole.png") != whole:
        return f"the other image has another prediction: {rows}"
    _, reason, *cells = rows[f"images/{name}"]
    values = [float(cell) for cell in cells if cell]
    if len(values) == 10 and all(0 <= value <= 1 for value in values):
        return None
    return None if not values and reason and f"images/{name}" in text else f"no probabilities, no reason: {rows} {text}"


def test_training_with_a_damaged_image(fedmll: Any) -> None:
    write_images(Path("images"))
    words = ("run", "--data", "folder:labels.csv", "--root", "images", *TRAIN, "--set", "data.size=8")
    words += ("--set", 'data.ignore=["patient"]')
    assert fedmll(*words).code == 0
    try_training(fedmll, Path("images/7.png"), words, "image", 3)
