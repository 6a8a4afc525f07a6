"""Files of arrays that are damaged, wrong or made to use up memory: one sentence each, before anything is read."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small

from fedmll.core.errors import DataError
from fedmll.data import federation
from fedmll.data.sources import fashion_mnist, load

RNG = np.random.default_rng(0)
GOOD: dict[str, Any] = {
    "x_train": RNG.random((20, 4), dtype=np.float32),
    "y_train": np.arange(40).reshape(20, 2) // 3 % 2,
    "x_test": RNG.random((6, 4), dtype=np.float32),
    "y_test": np.arange(12).reshape(6, 2) % 2,
}


def build(file: Path) -> federation.Federation:
    """What `fedmll run --data features:FILE.npz` does before training."""
    return federation.build(small(data__name=f"features:{file}", data__limit=None))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"y_train": np.int64(3)}, "'y_train' is a single value, and one entry per sample"),
        ({"x_test": np.float32(1)}, "'x_test' is a single value"),
        ({"y_train": np.array(["cat"] * 20)}, "y_train: labels must be whole numbers; they are <U3"),
        ({"x_train": np.array([["a"] * 4] * 20)}, r"x_train must be numbers of shape \(N, D\)"),
        ({"y_train": np.zeros((20, 2, 2), int)}, r"y_train: labels have the shape \(20, 2, 2\)"),
        ({"y_train": np.zeros((20, 0), int), "y_test": np.zeros((6, 0), int)}, "has no classes"),
        ({"classes": np.array([], dtype=str)}, "has no classes"),
        ({"classes": np.array([["a", "b"]])}, r"'classes' has the shape \(1, 2\); a list of names"),
        ({"classes": np.array("cat")}, "'classes' is a single value"),
        ({"classes": np.array(["a", None])}, "'classes' contains Python objects"),
        ({"y_train": np.append(np.arange(19) % 2, 2 * 10**9)}, "y_train: sample 19 has the class number 2000000000"),
        (
            {"y_test": np.array([0, 1, 0, 1, 0, 25_000])},
            "y_test: sample 5 has the class number 25000; class",
        ),
        ({"y_train": np.append(np.arange(19) % 2, -1)}, "sample 19 has the class number -1"),
    ],
)
def test_wrong_arrays_are_explained(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    file = tmp_path / "data.npz"
    np.savez(file, allow_pickle=True, **GOOD | changes)
    with pytest.raises(DataError, match=reason) as error:
        build(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


def test_good_arrays_are_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "data.npz", **GOOD)
    assert build(tmp_path / "data.npz").train.classes == ("class 0", "class 1")
    np.savez(tmp_path / "data.npz", classes=np.array(["größe".encode(), b"dog"]), **GOOD)
    assert build(tmp_path / "data.npz").train.classes == ("größe", "dog")


def with_header(shape: tuple[int, ...], kind: str = "<i8") -> Callable[[bytes], bytes]:
    def change(array: bytes) -> bytes:
        stream = io.BytesIO()
        np.lib.format.write_array_header_1_0(stream, {"descr": kind, "fortran_order": False, "shape": shape})
        return stream.getvalue() + array[128:]

    return change


def rewrite(file: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Replace the bytes of one array."""
    with zipfile.ZipFile(file) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    members[name] = change(members[name])
    with zipfile.ZipFile(file, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_header((10**12, 2)), r"declares the shape \(1000000000000, 2\) of int64, and has 320 bytes"),
        (with_header((20, 10**15)), r"declares the shape \(20, 1000000000000000\)"),
        (with_header((-20, -2)), r"declares the shape \(-20, -2\)"),
        (with_header((20, 2), "<U100000000"), r"declares the shape \(20, 2\) of <U100000000"),
        (lambda array: array[:200], r"declares the shape \(20, 2\) of int64, and has 72 bytes"),
        (lambda array: b"", "is not a readable .npz"),
        (lambda array: b"\x93NUMPY\x09\x00" + array[8:], "is not a readable .npz"),
        (lambda array: array[:10] + b"(" * 118 + array[128:], "is not a readable .npz"),
        (lambda array: array.replace(b"<i8", b"|O8"), "contains Python objects"),
    ],
)
def test_damaged_array_is_explained_before_memory_is_allocated(
    tmp_path: Path, change: Callable[[bytes], bytes], reason: str
) -> None:
    file = tmp_path / "data.npz"
    np.savez(file, **GOOD)
    rewrite(file, "y_train.npy", change)
    with pytest.raises(DataError, match=reason) as error:
        build(file)
    assert str(file) in str(error.value)


def test_encrypted_archive_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "data.npz"
    np.savez(file, **GOOD)
    content = bytearray(file.read_bytes())
    for start, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # mark all members as encrypted
        found = content.find(start)
        while found >= 0:
            content[found + place] |= 1
            found = content.find(start, found + 4)
    file.write_bytes(content)
    with pytest.raises(DataError, match="it is encrypted; store it without a password"):
        build(file)


def test_arrays_larger_than_memory_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "data.npz"
    np.savez_compressed(file, **GOOD | {"x_train": np.zeros((10**6, 40), np.float32)})
    assert file.stat().st_size < 10**6
    monkeypatch.setattr("os.sysconf", lambda name: 10_000)
    with pytest.raises(DataError, match=r"have 0\.1 GB, and this machine has 0\.1 GB of memory"):
        build(file)


def test_packed_file_with_wrong_arrays_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "set.npz"
    good: dict[str, Any] = {
        "jpeg": np.zeros(4, np.uint8),
        "offset": np.arange(5),
        "labels": np.array([0, 1, 0, 1]),
        "classes": np.array(["a", "b"]),
    }
    for changes, reason in (
        ({"split": np.array(["train"] * 4)}, r"'split' must be one whole number per entry; it is <U5 \(4,\)"),
        ({"client": np.array([["x"]] * 4)}, r"'client' must be one text per entry; it is <U1 \(4, 1\)"),
        ({"offset": np.arange(5.0)}, "'offset' must be one whole number per entry; it is float64"),
        ({"offset": np.int64(4)}, "'offset' is a single value"),
        ({"labels": np.array(["a", "b", "a", "b"])}, "labels must be whole numbers; they are <U1"),
        ({"jpeg": np.zeros((2, 2), np.uint8)}, r"'jpeg' must be the bytes of all images, uint8 \(N,\)"),
        ({"labels": np.zeros((4, 0), int), "classes": np.array([], dtype=str)}, "has no classes"),
    ):
        np.savez(file, **good | changes)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=reason):
            load(f"packed:{file}")


def test_idx_file_is_not_inflated_beyond_its_declared_size(tmp_path: Path) -> None:
    for name in fashion_mnist.FILES:
        (tmp_path / name).write_bytes(gzip.compress(b"\0\0\x08\x01" + struct.pack(">I", 3) + bytes(10**6)))
    with pytest.raises(DataError, match="is not a complete idx file of bytes"):
        load("fashion-mnist", tmp_path)
    huge = b"\0\0\x08\x03" + struct.pack(">III", 60_000, 60_000, 60_000)
    for name in fashion_mnist.FILES:
        (tmp_path / name).write_bytes(gzip.compress(huge))
    with pytest.raises(DataError, match=r"declares the shape \(60000, 60000, 60000\)"):
        load("fashion-mnist", tmp_path)
