"""Image files that attack: decompression bombs, files that start other programs, pipes instead of files."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedmll.config.settings import ReadingOptions
from fedmll.core.errors import DataError
from fedmll.data.images import open_image as formats
from fedmll.data.images.decode import read_images
from fedmll.data.sources import load
from fedmll.data.sources.packed import pack
from fedmll.deploy.site import site_data
from fedmll.deploy.site.site_config import Site
from fedmll.inference.image_predictions import read_pixels

MEGABYTE = 2**20


@cache
def png_bomb(side: int) -> bytes:
    """A valid grey PNG of side × side zeros, in about a thousandth of the bytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(side + 1)) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def write_dicom(file: Path, *, rows: int = 8, columns: int = 8, deflated: int = 0, values: np.ndarray | None = None,
                intercept: int | None = None, photometric: str = "MONOCHROME2", frames: int = 1) -> None:  # fmt: skip
    """A small DICOM file; `deflated` adds this many bytes of compressed zeros to its data."""
    pydicom = pytest.importorskip("pydicom", reason="pydicom is not installed (fedmll[dicom])")
    from pydicom.uid import CTImageStorage, DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian, generate_uid

    found = pydicom.Dataset()
    found.file_meta = pydicom.dataset.FileMetaDataset()
    found.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    found.file_meta.MediaStorageSOPClassUID, found.file_meta.MediaStorageSOPInstanceUID = CTImageStorage, generate_uid()
    found.Rows, found.Columns, found.SamplesPerPixel, found.PhotometricInterpretation = rows, columns, 1, photometric
    found.BitsAllocated, found.BitsStored, found.HighBit, found.PixelRepresentation = 16, 12, 11, 0
    if frames > 1:
        found.NumberOfFrames = frames
    if intercept is not None:
        found.RescaleSlope, found.RescaleIntercept = 1, intercept
    found.PixelData = (np.arange(64, dtype=np.uint16) * 60 if values is None else values).tobytes()
    if not deflated:
        found.save_as(file, enforce_file_format=True)
        return
    found.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    found.save_as(file, enforce_file_format=True)
    content = file.read_bytes()
    start = 132 + 12 + pydicom.filereader.read_file_meta_info(file).FileMetaInformationGroupLength
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    data = [packer.compress(zlib.decompress(content[start:], -zlib.MAX_WBITS))]
    data.append(packer.compress(struct.pack("<HH2sHI", 0x7FE1, 0x10, b"OB", 0, deflated)))
    data += [packer.compress(bytes(MEGABYTE)) for _ in range(deflated // MEGABYTE)]
    file.write_bytes(content[:start] + b"".join(data) + packer.flush())


def folder_of(tmp_path: Path, ending: str = "png") -> Path:
    """Ten good images and their labels file."""
    folder = tmp_path / "images"
    folder.mkdir()
    lines = ["image,cat,dog"]
    for number in range(10):
        if ending == "png":
            Image.fromarray(np.full((8, 8), 20 * number, np.uint8)).save(folder / f"{number}.png")
        else:
            write_dicom(folder / f"{number}.{ending}", values=np.full(64, 40 * number, np.uint16))
        lines.append(f"{number}.{ending},{number % 2},{(number + 1) % 2}")
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder


def train(tmp_path: Path) -> None:
    load(f"folder:{tmp_path / 'labels.csv'}", tmp_path / "images")


def check_as_site(tmp_path: Path) -> None:
    here = Site(name="a", csv=tmp_path / "labels.csv", images=tmp_path / "images", state_dir=tmp_path / "state")
    site_data.check_site_data(here)


def join_as_site(tmp_path: Path) -> None:
    here = Site(name="a", csv=tmp_path / "labels.csv", images=tmp_path / "images", state_dir=tmp_path / "state")
    site_data.load_site_data(here, ("cat", "dog"), (1, 8, 8), seed=0, holdout=0.2)


def pack_images(tmp_path: Path) -> None:
    pack(tmp_path / "labels.csv", tmp_path / "images", tmp_path / "packed.npz")


def tune(tmp_path: Path) -> None:
    read_images(tmp_path / "images", (1, 8, 8))


def predict(tmp_path: Path) -> None:
    for path in sorted((tmp_path / "images").iterdir()):
        found = read_pixels(path, (1, 8, 8), (0.0, 4095.0))
        if isinstance(found, str):
            raise DataError(f"'{path}' ({found})")


READERS = [train, check_as_site, join_as_site, pack_images, tune, predict]
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("read", READERS)
def test_postscript_never_starts_ghostscript(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], None]
) -> None:
    folder_of(tmp_path)
    (tmp_path / "images" / "3.png").write_bytes(EPS)
    programs, marker = tmp_path / "bin", tmp_path / "started"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\ntouch {marker}\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # as in a new process: not searched for yet
    with pytest.raises(DataError, match=r"3\.png' \(not an image "):
        read(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("read", READERS)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_png_bomb_is_rejected_by_name(tmp_path: Path, read: Callable[[Path], None]) -> None:
    folder_of(tmp_path)
    (tmp_path / "images" / "3.png").write_bytes(png_bomb(10_000))
    assert (tmp_path / "images" / "3.png").stat().st_size < MEGABYTE / 5
    with pytest.raises(DataError, match=r"3\.png' \(10000 × 10000 pixels are more than 89,478,485.*bomb"):
        read(tmp_path)


def test_larger_png_bomb_is_rejected_by_name(tmp_path: Path) -> None:
    folder_of(tmp_path)
    (tmp_path / "images" / "3.png").write_bytes(png_bomb(14_000))
    with pytest.raises(DataError, match=r"3\.png' \(more than 89,478,485 pixels.*bomb"):
        train(tmp_path)


@pytest.mark.parametrize("read", READERS)
def test_deflated_dicom_bomb_is_rejected_by_name_without_inflating_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], None]
) -> None:
    folder_of(tmp_path, "dcm")
    monkeypatch.setattr(formats, "MAX_DICOM_BYTES", 60 * MEGABYTE)
    write_dicom(tmp_path / "images" / "3.dcm", deflated=300 * MEGABYTE)
    assert (tmp_path / "images" / "3.dcm").stat().st_size < MEGABYTE
    tracemalloc.start()
    with pytest.raises(DataError, match=r"3\.dcm' \(.*its data has more than 62,914,560 bytes.*bomb"):
        read(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 * MEGABYTE


def test_honest_deflated_dicom_is_read(tmp_path: Path) -> None:
    folder_of(tmp_path, "dcm")
    before = load(f"folder:{tmp_path / 'labels.csv'}", tmp_path / "images")
    write_dicom(tmp_path / "images" / "3.dcm", values=np.full(64, 120, np.uint16), deflated=MEGABYTE)
    after = load(f"folder:{tmp_path / 'labels.csv'}", tmp_path / "images")
    assert np.array_equal(before.train.store, after.train.store)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rows": 30_000, "columns": 30_000}, "30000 × 30000 pixels are more than 89,478,485"),
        ({"frames": 100_000}, "must have one frame and one channel; it has 100000 and 1"),
    ],
)
def test_dicom_header_with_too_many_pixels_is_rejected_before_decoding(
    tmp_path: Path, changes: dict[str, int], reason: str
) -> None:
    folder_of(tmp_path, "dcm")
    write_dicom(tmp_path / "images" / "3.dcm", **changes)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=rf"3\.dcm' \(.*{reason}"):
        train(tmp_path)


def test_pipe_in_a_folder_of_images_is_rejected_without_waiting(tmp_path: Path) -> None:
    """FLAIR opens its images when they are needed, so nothing else has looked at the file before."""
    entries = [
        {"user_id": "u", "image_id": f"{n}", "labels": ["cat"], "fine_grained_labels": ["cat"], "partition": part}
        for n, part in enumerate(["train", "train", "test"])
    ]
    (tmp_path / "labels_and_metadata.json").write_text(json.dumps(entries))
    folder = tmp_path / "small_images"
    folder.mkdir()
    for number in (0, 2):
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / f"{number}.jpg")
    os.mkfifo(folder / "1.jpg")
    splits = load("flair:coarse", tmp_path)
    with pytest.raises(DataError, match=r"1\.jpg' cannot be decoded \(it is not a regular file"):
        splits.train.samples(slice(None))


@pytest.mark.parametrize("shape", [(60_000, 60_000, 3), (8, 8), (8, 8, 3, 1)])
def test_hdf5_image_of_absurd_shape_is_rejected_before_it_is_read(tmp_path: Path, shape: tuple[int, ...]) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed (fedmll[hdf5])")
    with h5py.File(tmp_path / "flair.hdf5", "w") as archive:
        for part in ("train", "val", "test"):
            group = archive.create_group(f"{part}/{part}-image")
            group.create_dataset("image", shape=shape, dtype=np.uint8, chunks=tuple(min(s, 64) for s in shape))
            for name, value in (("labels", "cat"), ("fine_grained_labels", "cat"), ("user_id", "u")):
                group[name] = value
    assert (tmp_path / "flair.hdf5").stat().st_size < MEGABYTE
    with pytest.raises(
        DataError, match=r"The first image of .* cannot be decoded \((60000 × 60000 pixels|an image must be)"
    ):
        load("flair:coarse", tmp_path)


def test_pipe_instead_of_annotations_is_missing(tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    (tmp_path / "train2017").mkdir()
    (tmp_path / "annotations" / "instances_val2017.json").write_text("{}")
    os.mkfifo(tmp_path / "annotations" / "instances_train2017.json")
    with pytest.raises(DataError, match=r"missing: .*instances_train2017\.json"):
        load("coco:2017", tmp_path)


@pytest.mark.parametrize("read", READERS[:4])
def test_pipe_in_the_labels_file_is_a_missing_image(tmp_path: Path, read: Callable[[Path], None]) -> None:
    folder_of(tmp_path)
    (tmp_path / "images" / "3.png").unlink()
    os.mkfifo(tmp_path / "images" / "3.png")
    with pytest.raises(DataError, match=r"1 of its 10 images do not exist: row 5: .*3\.png"):
        read(tmp_path)


# DICOM that is good, but has more than 8 bits


def test_12_bit_dicom_is_scaled_like_a_12_bit_png(tmp_path: Path) -> None:
    folder_of(tmp_path, "dcm")
    write_dicom(tmp_path / "images" / "3.dcm", values=np.arange(64, dtype=np.uint16) * 65)  # up to 4095
    splits = load(f"folder:{tmp_path / 'labels.csv'}", tmp_path / "images")
    assert splits.window == (0.0, 4095.0)
    assert splits.train.store[3].ravel().tolist() == [65 * value // 16 for value in range(64)]
    write_dicom(tmp_path / "images" / "3.dcm", values=np.full(64, 4000, np.uint16), photometric="MONOCHROME1")
    inverted = load(f"folder:{tmp_path / 'labels.csv'}", tmp_path / "images")
    assert inverted.window == (0.0, 511.0), "95 is the value of the inverted image, 360 the largest of the others"
    assert inverted.train.store[3, 0, 0, 0] == 95 // 2


@pytest.mark.parametrize("skip", [False, True])
def test_rescaled_dicom_needs_a_window_and_is_never_skipped(tmp_path: Path, skip: bool) -> None:
    folder = folder_of(tmp_path, "dcm")
    for number in range(10):
        write_dicom(folder / f"{number}.dcm", values=np.full(64, 100 * number, np.uint16), intercept=-1000)
    here = Site(
        name="a",
        csv=tmp_path / "labels.csv",
        images=folder,
        state_dir=tmp_path / "state",
        reading=ReadingOptions(skip_unreadable=skip, by_options=True),
    )
    with pytest.raises(DataError) as error:
        site_data.check_site_data(here)
    text = str(error.value)
    assert "10 of 10 images need a window: " in text and "0.dcm'; and 9 more" in text
    assert "from -1000 to -100," in text and text.endswith("for example --window=-1000.0,-100.0.")
    assert "unreadable" not in text.lower().replace("--skip-unreadable", "") and "32-bit pixels" not in text
