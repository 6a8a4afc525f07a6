"""Every data source with good and bad files; also with real data, if it is available."""

from __future__ import annotations

import csv
import gzip
import io
import os
import pickle
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from fedmll.core.errors import ConfigError, DataError
from fedmll.data.dataset import Dataset
from fedmll.data.images.labels_csv import read_labels
from fedmll.data.sources import describe_sources, fashion_mnist, load
from fedmll.data.sources.digits import read as read_digits
from fedmll.data.sources.packed import pack

REAL = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDMLL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def real(name: str) -> Path:
    if not (REAL / name).exists():
        pytest.skip(f"{REAL / name} is not here")
    return REAL / name


def read_pixels(number: int, side: int = 12, colour: bool = True) -> np.ndarray:
    generator = np.random.default_rng(number)
    return generator.integers(256, size=(side, side, 3) if colour else (side, side), dtype=np.uint8)


# --- digits


def test_digits_equal_scikit_learns_times_sixteen_split_by_class() -> None:
    splits = load("digits", seed=3)
    assert splits.train.sample_shape == (1, 8, 8)
    assert (len(splits.train), len(splits.test)) == (1438, 359)
    together = np.sort(np.concatenate([splits.train.rows, splits.test.rows]))
    assert np.array_equal(together, np.arange(1797))
    original = load_digits()
    row = splits.test.rows[5]
    assert splits.test.labels[5].argmax() == original.target[row]
    assert np.array_equal(splits.test.samples(slice(5, 6))[0, 0], np.minimum(original.images[row] * 16, 255))
    by_class = splits.test.labels.sum(axis=0) / (splits.test.labels.sum(axis=0) + splits.train.labels.sum(axis=0))
    assert np.abs(by_class - 0.2).max() < 0.01


@pytest.mark.parametrize("from_file", [True, False])
def test_digits_are_the_same_without_scikit_learns_file(monkeypatch: pytest.MonkeyPatch, from_file: bool) -> None:
    original = load_digits()
    if from_file:
        monkeypatch.setattr("sklearn.datasets.load_digits", None)
    else:
        monkeypatch.setattr("fedmll.data.sources.digits.Path.is_file", lambda self: False)
    pixels, digits = read_digits()
    assert np.array_equal(pixels, original.data)
    assert np.array_equal(digits, original.target)


def test_the_test_images_are_the_same_for_every_seed() -> None:
    assert np.array_equal(load("digits", seed=1).test.rows, load("digits", seed=2).test.rows)


def test_composites_of_two_seeds_share_no_image_between_training_and_test() -> None:
    """Every digit can be recognised in its quadrant: what one seed trains on, another does not test on."""

    def cells(images: np.ndarray) -> set[bytes]:
        parts = [images[:, 0, y : y + 8, x : x + 8] for y in (0, 8) for x in (0, 8)]
        return {cell.tobytes() for cell in np.concatenate(parts) if cell.any()}

    one, other = load("ml-digits", seed=1), load("ml-digits", seed=2)
    assert not np.array_equal(one.test.store, other.test.store)
    plain = load("digits")
    twins = cells(np.pad(plain.train.samples(slice(None)), ((0, 0), (0, 0), (0, 8), (0, 8)))) & cells(
        np.pad(plain.test.samples(slice(None)), ((0, 0), (0, 0), (0, 8), (0, 8)))
    )
    assert cells(one.train.store) & cells(other.test.store) <= twins
    assert len(twins) < 10


def test_sizes_and_composites_by_name() -> None:
    assert load("digits", size=16).train.sample_shape == (1, 16, 16)
    composed = load("ml-digits")
    assert composed.train.sample_shape == (1, 16, 16)
    assert set(composed.train.labels.sum(axis=1).tolist()) == {1, 2}
    assert load("ml-digits", size=10, options={"layout": "side-by-side"}).train.sample_shape == (1, 10, 20)


# --- cifar10


def cifar_arrays(count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(count)
    return generator.integers(256, size=(count, 32, 32, 3), dtype=np.uint8), np.arange(count) % 10


def write_batches(root: Path, module: bytes = b"numpy.core.multiarray") -> tuple[np.ndarray, np.ndarray]:
    """The official layout: pickles of protocol 2 with rows of 1,024 red, green and blue values, and numpy 1's names."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    images, labels = cifar_arrays(60)
    for place, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        part = slice(place * 10, place * 10 + 10)
        rows = images[part].transpose(0, 3, 1, 2).reshape(10, 3072)
        batch = {b"batch_label": b"x", b"labels": labels[part].tolist(), b"data": rows, b"filenames": [b"a.png"] * 10}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2).replace(b"numpy._core.multiarray", module))
    return images, labels


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
@pytest.mark.parametrize("root", ["", "cifar-10-batches-py"])
def test_cifar10_reads_the_official_batches(tmp_path: Path, module: bytes, root: str) -> None:
    images, labels = write_batches(tmp_path, module)
    splits = load("cifar10", tmp_path / root)
    assert np.array_equal(splits.train.store, images[:50].transpose(0, 3, 1, 2))
    assert np.array_equal(splits.test.store, images[50:].transpose(0, 3, 1, 2))
    assert np.array_equal(splits.train.labels.argmax(axis=1), labels[:50])
    assert splits.train.classes[6] == "frog"


@pytest.mark.parametrize("root", ["", "cifar10_small.npz"])
def test_cifar10_reads_an_npz(tmp_path: Path, root: str) -> None:
    (x_train, y_train), (x_test, y_test) = cifar_arrays(30), cifar_arrays(20)
    np.savez(tmp_path / "cifar10_small.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    splits = load("cifar10", tmp_path / root)
    assert np.array_equal(splits.test.store, x_test.transpose(0, 3, 1, 2))
    assert np.array_equal(splits.test.labels.argmax(axis=1), y_test)


def test_cifar10_batch_with_code_is_rejected(tmp_path: Path) -> None:
    write_batches(tmp_path)
    witness = tmp_path / "witness"

    class Attack:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(witness),)

    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(pickle.dumps({b"data": Attack()}, protocol=2))
    with pytest.raises(DataError, match=r"data_batch_3.*posix.mkdir"):
        load("cifar10", tmp_path)
    assert not witness.exists()


def test_damaged_and_incomplete_batches_are_named(tmp_path: Path) -> None:
    write_batches(tmp_path)
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_4"
    batch.write_bytes(batch.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"data_batch_4' is not a CIFAR-10 batch"):
        load("cifar10", tmp_path)
    batch.unlink()
    with pytest.raises(DataError, match=r"data_batch_4' is missing"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("root", [None, "empty", "nowhere"])
def test_missing_cifar10_says_where_to_get_it_and_the_layout(tmp_path: Path, root: str | None) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as error:
        load("cifar10", None if root is None else tmp_path / root)
    text = str(error.value)
    assert "cifar-10-batches-py/" in text
    assert "cs.toronto.edu" in text
    assert "--root" in text
    assert "\n" not in text


def test_two_npz_files_are_ambiguous(tmp_path: Path) -> None:
    for name in ("cifar10_a.npz", "cifar10_b.npz"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"cifar10_a.npz, cifar10_b.npz"):
        load("cifar10", tmp_path)


def test_real_cifar10_and_its_composites() -> None:
    file = real("cifar10_15k.npz")
    splits = load("cifar10", file)
    assert splits.train.labels.sum(axis=0).tolist() == [1200] * 10
    with np.load(file) as arrays:
        assert np.array_equal(splits.test.store[17, 2], arrays["x_test"][17, :, :, 2])
    composed = load("ml-cifar10", REAL, seed=1, options={"singles": 30, "pairs": 3})
    assert composed.train.sample_shape == (3, 64, 64)
    assert len(composed.train) == 300 + 45 * 3


# --- fashion-mnist


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    content = header + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_fashion(folder: Path, suffix: str = ".gz") -> np.ndarray:
    images = np.random.default_rng(0).integers(256, size=(30, 28, 28), dtype=np.uint8)
    write_idx(folder / f"train-images-idx3-ubyte{suffix}", images[:20])
    write_idx(folder / f"t10k-images-idx3-ubyte{suffix}", images[20:])
    write_idx(folder / f"train-labels-idx1-ubyte{suffix}", np.arange(20, dtype=np.uint8) % 10)
    write_idx(folder / f"t10k-labels-idx1-ubyte{suffix}", np.arange(10, dtype=np.uint8))
    return images


@pytest.mark.parametrize("suffix", [".gz", ""])
def test_fashion_mnist_reads_idx_files(tmp_path: Path, suffix: str) -> None:
    images = write_fashion(tmp_path, suffix)
    splits = load("fashion-mnist", tmp_path)
    assert np.array_equal(splits.train.store[:, 0], images[:20])
    assert np.array_equal(splits.test.store[:, 0], images[20:])
    assert splits.test.labels.argmax(axis=1).tolist() == list(range(10))


def test_bad_fashion_mnist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fashion_mnist, "DEBIAN", tmp_path / "debian")
    with pytest.raises(DataError, match=r"debian.*t10k-labels-idx1-ubyte.gz.*apt install dataset-fashion-mnist"):
        load("fashion-mnist")
    write_fashion(tmp_path)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz' is not a complete idx file"):
        load("fashion-mnist", tmp_path)
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", np.zeros((7, 28, 28), np.uint8))
    with pytest.raises(DataError, match=r"\(7, 28, 28\).*\(20,\)"):
        load("fashion-mnist", tmp_path)


def test_real_fashion_mnist() -> None:
    if not fashion_mnist.available(None):
        pytest.skip("Debian's dataset-fashion-mnist is not installed")
    splits = load("fashion-mnist")
    assert splits.train.sample_shape == (1, 28, 28)
    assert splits.train.labels.sum(axis=0).tolist() == [6000] * 10
    assert splits.test.labels.sum(axis=0).tolist() == [1000] * 10
    assert splits.train.labels[0].argmax() == 9  # the first image is an ankle boot


# --- packed


def jpeg_of(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=95)
    return stream.getvalue()


def packed_arrays(count: int = 10, colour: bool = True) -> dict[str, np.ndarray]:
    jpegs = [jpeg_of(read_pixels(number, colour=colour)) for number in range(count)]
    labels = np.zeros((count, 3), dtype=np.int8)
    labels[np.arange(count), np.arange(count) % 3] = 1
    labels[1, 2] = -1
    return {
        "jpeg": np.frombuffer(b"".join(jpegs), dtype=np.uint8),
        "offset": np.cumsum([0, *map(len, jpegs)]),
        "labels": labels,
        "classes": np.array(["a", "b", "c"]),
        "split": np.array([0] * (count - 4) + [1, 1, 2, 2], dtype=np.uint8),
    }


def write_packed(folder: Path, **changes: Any) -> str:
    arrays = {name: array for name, array in (packed_arrays() | changes).items() if array is not None}
    np.savez(folder / "data.npz", **arrays)
    return f"packed:{folder / 'data.npz'}"


def decoded(jpeg: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(jpeg))).transpose(2, 0, 1)


def test_packed_images_labels_splits_and_groups(tmp_path: Path) -> None:
    arrays = packed_arrays()
    splits = load(write_packed(tmp_path, patient_id=np.arange(10) // 2))
    assert splits.train.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert splits.validation is not None
    assert splits.validation.rows.tolist() == [6, 7]
    assert splits.test.rows.tolist() == [8, 9]
    assert splits.train.labels[1].tolist() == [0, 1, -1], "unknown is not zero"
    assert splits.test.groups is None, "a patient is no client"
    assert splits.test.patients is not None
    assert splits.test.patients.tolist() == ["4", "4"]
    jpeg = arrays["jpeg"][arrays["offset"][8] : arrays["offset"][9]].tobytes()
    assert np.array_equal(splits.test.samples(slice(0, 1))[0], decoded(jpeg))


def test_packed_with_is_test_with_class_numbers_and_without_a_split(tmp_path: Path) -> None:
    splits = load(write_packed(tmp_path, split=None, is_test=np.arange(10) >= 7))
    assert splits.test.rows.tolist() == [7, 8, 9]
    assert splits.validation is None
    splits = load(write_packed(tmp_path, labels=np.arange(10) % 3))
    assert splits.train.labels[4].tolist() == [0, 1, 0]
    splits = load(write_packed(tmp_path, split=None), seed=1)
    assert (len(splits.train), len(splits.test)) == (7, 3)


def test_packed_is_found_from_the_root_and_can_be_composed(tmp_path: Path) -> None:
    write_packed(tmp_path, labels=np.arange(10) % 3)
    splits = load("ml-packed:data.npz", tmp_path, options={"singles": "all", "pairs": 2})
    assert splits.train.sample_shape == (3, 24, 24)
    assert len(splits.train) == 6 + 3 * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"labels": np.full((10, 3), 2)}, r"sample 0 for class 'a' is 2"),
        ({"labels": np.arange(10)}, r"sample 3 has the class number 3; there are 3 classes"),
        ({"labels": np.zeros((10, 4), np.int8)}, r"\(10, 4\), and there are 3 classes"),
        ({"labels": np.zeros((10, 3))}, "whole numbers"),
        ({"labels": None}, "no array 'labels'"),
        ({"jpeg": None}, "no array 'jpeg'"),
        ({"classes": np.array(["a", "b", "a"])}, "class 'a' appears twice"),
        ({"classes": np.array(["a", "b", None])}, "not a readable .npz of plain arrays"),
        ({"split": np.full(10, 3)}, "sample 0 has the split 3"),
        ({"split": np.zeros(10, int)}, "no test samples"),
        ({"split": np.zeros(9, int)}, "'split' has 9 entries"),
        ({"offset": np.arange(10)}, "'offset' has 10 entries"),
        ({"offset": np.arange(11)}, "'offset' must rise"),
    ],
)
def test_bad_packed_files_are_explained(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said) as error:
        load(write_packed(tmp_path, **changes))
    assert "data.npz" in str(error.value)


def test_a_packed_image_that_is_damaged_is_named(tmp_path: Path) -> None:
    jpeg = packed_arrays()["jpeg"].copy()
    offset = packed_arrays()["offset"]
    jpeg[offset[4] : offset[4] + 50] = 0
    with pytest.raises(DataError, match=r"1 of 10 images.*image 4 of '.*data.npz', 'scan4.png'"):
        load(write_packed(tmp_path, jpeg=jpeg, name=np.array([f"scan{number}.png" for number in range(10)])))


def test_file_that_is_not_packed_is_rejected(tmp_path: Path) -> None:
    for name, content in (("a.npz", b"nothing"), ("b.npz", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=name):
            load(f"packed:{tmp_path / name}")
    np.save(tmp_path / "plain.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"plain.npy.*not a zip archive"):
        load(f"packed:{tmp_path / 'plain.npy'}")
    with pytest.raises(DataError, match=r"missing.npz' does not exist"):
        load(f"packed:{tmp_path / 'missing.npz'}")


def subset_of_real(name: str, tmp_path: Path, count: int) -> tuple[str, dict[str, np.ndarray]]:
    """The first images of a real file, so that a test decodes few."""
    with np.load(real(name), allow_pickle=False) as archive:
        arrays = {key: archive[key] for key in archive.files}
    end = arrays["offset"][count]
    arrays = {key: value if key == "classes" else value[:count] for key, value in arrays.items() if key != "jpeg"} | {
        "jpeg": arrays["jpeg"][:end],
        "offset": arrays["offset"][: count + 1],
    }
    np.savez(tmp_path / name, **arrays)
    return f"packed:{tmp_path / name}", arrays


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("coco2014_8k_112.npz", (3, 112, 112)),
        ("chestxray14_part001_112jpeg.npz", (1, 112, 112)),
        ("ham10000_200x150.npz", (3, 112, 112)),
    ],
)
def test_real_packed_files(tmp_path: Path, name: str, shape: tuple[int, int, int]) -> None:
    packed, arrays = subset_of_real(name, tmp_path, 400)
    splits = load(packed, require_positives=False)
    assert splits.train.sample_shape == shape
    is_test = arrays["is_test"] if "is_test" in arrays else arrays["split"] == 2
    assert np.array_equal(splits.test.rows, np.flatnonzero(is_test))
    expected = arrays["labels"][is_test]
    found = splits.test.labels if expected.ndim == 2 else splits.test.labels.argmax(axis=1)
    assert np.array_equal(found, expected)
    row = int(splits.test.rows[0])
    image = Image.open(io.BytesIO(arrays["jpeg"][arrays["offset"][row] : arrays["offset"][row + 1]].tobytes()))
    resized = np.asarray(image.resize((112, 112), Image.Resampling.BILINEAR) if image.size != (112, 112) else image)
    assert np.array_equal(
        splits.test.samples(slice(0, 1))[0], resized[None] if shape[0] == 1 else resized.transpose(2, 0, 1)
    )
    assert splits.train.groups is None
    assert (splits.train.patients is not None) == ("patient_id" in arrays)


# --- folder and pack


def write_folder(folder: Path, text: str, count: int = 8) -> str:
    (folder / "images").mkdir(exist_ok=True)
    for number in range(count):
        Image.fromarray(read_pixels(number)).save(folder / "images" / f"{number}.png")
    (folder / "labels.csv").write_text(text, encoding="utf-8")
    return f"folder:{folder / 'labels.csv'}"


TABLE = """image,cat,dog,split,client
0.png,1,0,train,north
1.png,0,1,train,north
2.png,,1,train,south
3.png,1,1.0,train,south
4.png,0,0.0,val,north
5.png,0,1,validation,south
6.png,1,,test,north
7.png,0,1,Test,south
"""


def test_folder_with_one_column_per_class(tmp_path: Path) -> None:
    splits = load(write_folder(tmp_path, TABLE), tmp_path / "images")
    assert splits.train.classes == ("cat", "dog")
    assert splits.train.labels.tolist() == [[1, 0], [0, 1], [-1, 1], [1, 1]]
    assert splits.validation is not None
    assert splits.validation.labels.tolist() == [[0, 0], [0, 1]]
    assert splits.test.labels.tolist() == [[1, -1], [0, 1]]
    assert splits.train.groups is not None
    assert splits.train.groups.tolist() == ["north", "north", "south", "south"]
    assert np.array_equal(splits.test.samples(slice(1, 2))[0], read_pixels(7).transpose(2, 0, 1))


def test_folder_with_lists_of_labels(tmp_path: Path) -> None:
    text = "labels,split,file\nb|a,train,0.png\n c ,train,1.png\nNone,test,2.png\na|c,test,3.png\nb,train,4.png\n"
    text += ",test,5.png\nNo Finding,test,6.png\n"
    splits = load(write_folder(tmp_path, text), tmp_path / "images")
    assert splits.train.classes == ("a", "b", "c")
    assert splits.train.labels.tolist() == [[1, 1, 0], [0, 0, 1], [0, 1, 0]]
    assert splits.test.labels.tolist() == [[0, 0, 0], [1, 0, 1], [-1, -1, -1], [0, 0, 0]], "blank is not none"


def test_folder_as_spreadsheets_write_it(tmp_path: Path) -> None:
    """A byte-order mark, semicolons, spaces, blank lines, and an image column with a name of its own."""
    text = "\ufeffphoto ; cat;dog\r\n0.png;1; 0 \r\n\r\n1.png;0;1\r\n2.png;1;1\r\n3.png;0;1\r\n4.png;1;\r\n"
    splits = load(write_folder(tmp_path, text), tmp_path / "images")
    assert splits.train.classes == ("cat", "dog")
    assert len(splits.train) + len(splits.test) == 5


def test_images_beside_the_csv_need_no_root(tmp_path: Path) -> None:
    text = TABLE.replace(".png", ".png").replace("\n", "\nimages/").removesuffix("images/")
    splits = load(write_folder(tmp_path, text))
    assert len(splits.train) == 4


def test_folder_without_a_split_keeps_the_only_positive_in_training(tmp_path: Path) -> None:
    rows = "".join(f"{number}.png,{int(number % 2 == 0)},{int(number == 7)}\n" for number in range(40))
    name = write_folder(tmp_path, "image,even,seven\n" + rows, count=40)
    for seed in range(5):
        splits = load(name, tmp_path / "images", seed=seed)
        assert len(splits.test) == 8
        assert splits.train.labels[:, 1].sum() == 1
    again = load(name, tmp_path / "images", seed=4)
    assert np.array_equal(again.test.rows, splits.test.rows)


def test_a_changed_image_is_decoded_again_and_a_changed_label_is_not(tmp_path: Path, cache_folder: Path) -> None:
    name = write_folder(tmp_path, TABLE)
    load(name, tmp_path / "images")
    (tmp_path / "labels.csv").write_text(TABLE.replace("7.png,0", "7.png,1"))
    assert load(name, tmp_path / "images").test.labels[1, 0] == 1
    assert len(list(cache_folder.glob("*.npy"))) == 1
    Image.fromarray(read_pixels(99)).save(tmp_path / "images" / "7.png")
    os.utime(tmp_path / "images" / "7.png", ns=(1, 1))
    changed = load(name, tmp_path / "images")
    assert np.array_equal(changed.test.samples(slice(1, 2))[0], read_pixels(99).transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("3.png", "lost.png", r"1 of its 8 images do not exist: row 5: '.*lost.png'"),
        ("2.png,,1", "2.png,2,1", r"1 in column 'cat' \(row 4: '2'\).*data.ignore=\[\"cat\"\]'"),
        ("2.png,,1", "2.png,-1,1", r"column 'cat' \(row 4: '-1'\)"),
        ("2.png,,1", "2.png,yes,1", r"column 'cat' \(row 4: 'yes'\)"),
        ("cat,dog", "cat,cat", "class 'cat' appears twice"),
        ("cat,dog", "cat,", "have no name in the header: 3\\."),
        ("cat,dog", "cat,labels", "a column 'labels' and also 'cat'"),
        ("7.png", "6.png", r"row 9: '6.png' is already in row 8"),
        ("0,1,Test", "0,1,later", r"a split other than .*row 9: 'later'"),
        ("0.png,1,0,", "0.png,1,0,0,", r"the header, which has 5: row 2: 6 cells"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in TABLE
    with pytest.raises(DataError, match=said) as error:
        load(write_folder(tmp_path, TABLE.replace(old, new, 1)), tmp_path / "images")
    assert "labels.csv" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "\n", "image,cat\n"])
def test_empty_csv_is_reported(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"labels.csv' is empty"):
        load(write_folder(tmp_path, text, 0), tmp_path / "images")


def test_csv_without_classes_in_another_encoding_or_missing_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no class column besides 'image'"):
        load(write_folder(tmp_path, "image,split\n0.png,train\n"), tmp_path / "images")
    (tmp_path / "labels.csv").write_bytes("image,Käse\n0.png,1\n".encode("latin1"))
    with pytest.raises(DataError, match="UTF-8"):
        load(f"folder:{tmp_path / 'labels.csv'}", tmp_path / "images")
    with pytest.raises(DataError, match=r"none.csv' does not exist"):
        load(f"folder:{tmp_path / 'none.csv'}", tmp_path / "images")
    with pytest.raises(DataError, match=r"nowhere' does not exist.*--root"):
        load(f"folder:{tmp_path / 'labels.csv'}", tmp_path / "nowhere")


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    name = write_folder(tmp_path, TABLE)
    (tmp_path / "images" / "5.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"1 of 8 images.*images/5.png' \(not an image"):
        load(name, tmp_path / "images")


def test_class_without_training_positives_is_named_except_at_a_site(tmp_path: Path) -> None:
    rows = "".join(f"{number}.png,{number % 2},,{'test' if number > 4 else 'train'}\n" for number in range(8))
    name = write_folder(tmp_path, "image,cat,dog,split\n" + rows)
    with pytest.raises(DataError, match=r"labels.csv': no training sample has the class 'dog'"):
        load(name, tmp_path / "images")
    splits = load(name, tmp_path / "images", require_positives=False)
    assert set(splits.train.labels[:, 1].tolist()) == {-1}


def test_many_classes_without_positives_are_not_all_listed(tmp_path: Path) -> None:
    header = "image,split,cat," + ",".join(f"c{number}" for number in range(30))
    rows = "".join(f"{n}.png,{'test' if n > 4 else 'train'},1{',0' * 30}\n" for n in range(8))
    with pytest.raises(DataError, match=r"classes 'c0', 'c1', 'c2', 'c3', 'c4' and 25 more"):
        load(write_folder(tmp_path, f"{header}\n{rows}"), tmp_path / "images")


def through_jpeg(image: np.ndarray, quality: int) -> np.ndarray:
    stream = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(stream, "JPEG", quality=quality, subsampling=0)
    return decoded(stream.getvalue())


def test_pack_writes_what_packed_reads(tmp_path: Path) -> None:
    write_folder(tmp_path, TABLE)
    calls: list[tuple[int, int, str]] = []
    out = tmp_path / "new" / "set.npz"
    pack(tmp_path / "labels.csv", tmp_path / "images", out, size=10, progress=lambda *call: calls.append(call))
    assert calls[-1] == (8, 8, "packing images")
    assert [path.name for path in out.parent.iterdir()] == ["set.npz"], "nothing else is left"
    with np.load(out, allow_pickle=False) as arrays:
        assert arrays["labels"].dtype == np.int8
        assert arrays["labels"][2].tolist() == [-1, 1]
        assert arrays["name"][3] == "3.png"
    direct = load(f"folder:{tmp_path / 'labels.csv'}", tmp_path / "images", size=10)
    packed = load(f"packed:{out}")
    for one, other in (
        (direct.train, packed.train),
        (direct.validation, packed.validation),
        (direct.test, packed.test),
    ):
        assert isinstance(one, Dataset)
        assert isinstance(other, Dataset)
        assert np.array_equal(one.labels, other.labels)
        assert np.array_equal(one.groups, other.groups)  # type: ignore[arg-type]
        assert one.classes == other.classes
        expected = [through_jpeg(image, quality=95) for image in one.samples(slice(None))]
        assert np.array_equal(other.samples(slice(None)), expected)


def test_pack_keeps_sizes_grey_and_the_old_file_when_it_fails(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for number, side in enumerate((20, 30, 40)):
        Image.fromarray(read_pixels(number, side, colour=False)).save(tmp_path / "images" / f"{number}.png")
    (tmp_path / "labels.csv").write_text("image,labels\n0.png,a\n1.png,b\n2.png,a|b\n")
    out = tmp_path / "set.npz"
    pack(tmp_path / "labels.csv", tmp_path / "images", out)
    with np.load(out) as arrays:
        images = [
            Image.open(io.BytesIO(arrays["jpeg"][start:end].tobytes()))
            for start, end in zip(arrays["offset"], arrays["offset"][1:], strict=False)
        ]
        assert [(image.mode, image.size) for image in images] == [("L", (20, 20)), ("L", (30, 30)), ("L", (40, 40))]
        assert "split" not in arrays.files
    before = out.read_bytes()
    (tmp_path / "images" / "1.png").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"1 of 3 images.*1.png"):
        pack(tmp_path / "labels.csv", tmp_path / "images", out)
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "labels.csv", "set.npz"]
    with pytest.raises(DataError, match=r"must end in .npz"):
        pack(tmp_path / "labels.csv", tmp_path / "images", tmp_path / "set.zip")


def test_real_chest_labels_of_all_112120_images_are_read_quickly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without their images, which are not here: every path is found to be some file."""
    with gzip.open(real("chestxray14_labels.csv.gz"), "rt", newline="") as stream:
        rows = list(csv.reader(stream))
    keep = [0, *range(3, len(rows[0]))]  # without patient and view
    with (tmp_path / "labels.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([row[column] for column in keep] for row in rows)
    (tmp_path / "image").touch()
    status = (tmp_path / "image").stat()
    monkeypatch.setattr(Path, "stat", lambda path, **_: status)
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    start = time.process_time()  # not by the clock: the machine may be busy
    table = read_labels(tmp_path / "labels.csv", tmp_path)
    assert time.process_time() - start < 10
    assert table.labels.shape == (112_120, 14)
    expected = np.array([[int(cell) for cell in row[3:]] for row in rows[1:]], dtype=np.int8)
    assert np.array_equal(table.labels, expected)


# --- features


def feature_arrays() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "x_train": generator.normal(size=(6, 4)),
        "y_train": np.array([[1, 0], [0, 1], [-1, 1], [1, 1], [0, 0], [1, 0]]),
        "x_test": generator.normal(size=(3, 4)),
        "y_test": np.array([[1, 0], [0, 1], [-1, 0]]),
    }


def write_features(folder: Path, **changes: Any) -> str:
    arrays: dict[str, Any] = feature_arrays() | changes
    np.savez(folder / "vectors.npz", **arrays)
    return f"features:{folder / 'vectors.npz'}"


def test_features_are_float32_with_three_valued_targets(tmp_path: Path) -> None:
    splits = load(write_features(tmp_path, classes=np.array(["x", "y"])))
    assert splits.train.store.dtype == np.float32
    assert np.array_equal(splits.train.store, feature_arrays()["x_train"].astype(np.float32))
    assert splits.train.labels.tolist()[2] == [-1, 1]
    assert splits.train.classes == ("x", "y")
    assert not splits.train.is_images


def test_features_with_class_numbers_get_class_names(tmp_path: Path) -> None:
    splits = load(write_features(tmp_path, y_train=np.array([0, 1, 2, 0, 1, 2]), y_test=np.array([0, 1, 0])))
    assert splits.test.labels.tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 0]]
    assert splits.test.classes == ("class 0", "class 1", "class 2")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x_train": np.full((6, 4), np.nan)}, "6 vectors of x_train hold NaN.*row 0"),
        ({"x_test": np.zeros((3, 5))}, "have 4 numbers and test vectors 5"),
        ({"x_test": np.zeros((2, 4))}, "x_test must be numbers.*3 rows"),
        ({"y_train": np.zeros((6, 2), int)}, "has the classes 'class 0', 'class 1'"),
    ],
)
def test_bad_features_are_explained(tmp_path: Path, changes: dict[str, np.ndarray], said: str) -> None:
    with pytest.raises(DataError, match=said):
        load(write_features(tmp_path, **changes))


# --- names


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cifar", "did you mean 'cifar10'"),
        ("ml-digit", "did you mean 'ml-digits'"),
        ("imagenet-of-everything", "known: chestxray14, .*cifar10, coco, digits"),
        ("packed", "write packed:FILE.npz"),
        ("ml-packed", "write ml-packed:FILE.npz"),
        ("digits:x.npz", "takes no file"),
        ("ml-features:x.npz", "composites are made of images"),
    ],
)
def test_unknown_source_suggests_a_name(name: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        load(name)


def test_composite_options_of_other_sources_are_rejected() -> None:
    with pytest.raises(ConfigError, match="'ml-digits'"):
        load("digits", options={"layout": "blend"})
    with pytest.raises(ConfigError, match=r"data.size must be"):
        load("digits", size=0)
    load("digits", options={"layout": "quadrants", "singles": "proportional", "pairs": "proportional"})


def test_sources_are_listed_with_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fashion_mnist, "DEBIAN", tmp_path / "debian")
    listed = {line.name: line for line in describe_sources()}
    assert listed["digits"].available
    assert listed["ml-digits"].available
    assert not listed["cifar10"].available
    assert not listed["ml-fashion-mnist"].available
    assert {"packed:FILE.npz", "folder:labels.csv", "features:FILE.npz"} <= set(listed)
    assert "ml-features:FILE.npz" not in listed
    write_batches(tmp_path)
    assert {line.name: line.available for line in describe_sources(tmp_path)}["cifar10"]


def test_features_may_have_clients_patients_and_validation_data(tmp_path: Path) -> None:
    rng, sizes = np.random.default_rng(0), {"train": 12, "validation": 4, "test": 6}
    arrays: dict[str, Any] = {f"x_{part}": rng.normal(size=(size, 3)) for part, size in sizes.items()}
    arrays |= {f"y_{part}": np.tile([[1, 0], [0, 1]], (size // 2, 1)) for part, size in sizes.items()}
    arrays |= {f"groups_{part}": np.arange(size) + 100 * place for place, (part, size) in enumerate(sizes.items())}
    arrays["clients_train"] = np.array(["a", "b", "c"] * 4)
    np.savez(tmp_path / "f.npz", **arrays)
    splits = load(f"features:{tmp_path / 'f.npz'}")
    assert splits.validation is not None
    assert len(splits.validation) == 4
    assert splits.train.groups is not None
    assert splits.train.groups.tolist() == ["a", "b", "c"] * 4
    assert splits.test.patients is not None
    assert splits.test.patients.tolist() == ["200", "201", "202", "203", "204", "205"]
    assert splits.group == "groups"
    np.savez(tmp_path / "f.npz", **(arrays | {"groups_test": np.arange(6)}))
    with pytest.raises(DataError, match="more than one part of the split"):
        load(f"features:{tmp_path / 'f.npz'}")
    np.savez(tmp_path / "f.npz", **(arrays | {"clients_train": np.arange(5)}))
    with pytest.raises(DataError, match="clients_train must be 12 names"):
        load(f"features:{tmp_path / 'f.npz'}")
