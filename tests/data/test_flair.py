"""FLAIR in its four layouts, read lazily; and datasets of the Hugging Face hub on disk."""

from __future__ import annotations

import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import official_datasets as official
import pytest
from official_datasets import shade
from PIL import Image
from test_official import numbers_of, told
from typer.testing import CliRunner

import fedmll
from fedmll.cli.main import app
from fedmll.config.experiment import Experiment
from fedmll.core.errors import DataError
from fedmll.data import federation, participation
from fedmll.data.dataset import Dataset
from fedmll.data.images import decode as image_decoding
from fedmll.data.sources import load
from fedmll.data.sources.flair import fine_names
from fedmll.models.label_embeddings import read_fine_names
from fedmll.testing import experiment

# image id → user, partition, coarse labels, fine labels; the number of an image is its place here
IMAGES = {
    "b2": ("zoe@N00", "train", ["plant", "animal"], ["tree", "dog"]),
    "a1": ("zoe@N00", "train", ["plant"], ["rose"]),
    "c3": ("adam@N01", "train", ["animal"], ["cat"]),
    "d4": ("eve@N02", "val", ["structure"], ["house"]),
    "e5": ("kai@N03", "test", [], []),
}
EXPECTED = {
    "coarse": ({0: {"plant": 1, "animal": 1}, 1: {"plant": 1}, 2: {"animal": 1}}, {3: {"structure": 1}}, {4: {}}),
    "fine": ({0: {"tree": 1, "dog": 1}, 1: {"rose": 1}, 2: {"cat": 1}}, {3: {"house": 1}}, {4: {}}),
}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMLL_CACHE", str(tmp_path / "cache"))


def pixels(number: int) -> np.ndarray:
    return np.full((16, 20, 3), shade(number), dtype=np.uint8)


def raw(root: Path) -> Path:
    entries = []
    for number, (image, (user, part, coarse, fine)) in enumerate(IMAGES.items()):
        official.picture(root / "small_images" / f"{image}.jpg", number)
        entries.append(
            {"user_id": user, "image_id": image, "partition": part, "labels": coarse, "fine_grained_labels": fine}
        )
    (root / "labels_and_metadata.json").write_text(json.dumps(entries, indent=2))
    return root


def by_user(root: Path, sparse: bool = False) -> Path:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed (fedmll[hdf5])")
    names = {
        "label": sorted({name for _, _, coarse, _ in IMAGES.values() for name in coarse}),
        "fine_grained_label": sorted({name for *_, fine in IMAGES.values() for name in fine}),
    }
    with h5py.File(root / "flair.hdf5", "w") as archive:
        for user, part in dict.fromkeys((user, part) for user, part, *_ in IMAGES.values()):
            owned = [(number, image) for number, image in enumerate(IMAGES) if IMAGES[image][0] == user]
            group = archive.create_group(f"{part}/{user}")
            group["images"] = np.stack([pixels(number) for number, _ in owned])
            group["image_ids"] = [image.encode() for _, image in owned]
            for kind, place in (("label", 2), ("fine_grained_label", 3)):
                listed = [IMAGES[image][place] for _, image in owned]
                if sparse:
                    pairs = [(row, names[kind].index(n)) for row, shown in enumerate(listed) for n in shown]
                    group[f"{kind}s_row"] = np.array([row for row, _ in pairs], np.uint16)
                    group[f"{kind}s_col"] = np.array([column for _, column in pairs], np.uint16)
                else:
                    group[f"{kind}s"] = ["|".join(shown).encode() for shown in listed]
        for kind, known in names.items() if sparse else ():
            archive[f"metadata/{kind}_mapping"] = json.dumps({name: place for place, name in enumerate(known)})
    return root / "flair.hdf5"


def pfl(root: Path) -> Path:
    by_user(root, sparse=True)
    return root


def by_image(root: Path) -> Path:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed (fedmll[hdf5])")
    with h5py.File(root / "central.h5", "w") as archive:
        for number, (image, (user, part, coarse, fine)) in enumerate(IMAGES.items()):
            group = archive.create_group(f"{part}/{image}")
            group["image"], group["user_id"] = pixels(number), user
            group["labels"], group["fine_grained_labels"] = "|".join(coarse), "|".join(fine)
    return root


@pytest.mark.parametrize("kind", ["coarse", "fine"])
@pytest.mark.parametrize("make", [raw, by_user, pfl, by_image], ids=lambda make: make.__name__)
def test_every_layout_gives_the_same_users_images_and_labels(tmp_path: Path, make: Any, kind: str) -> None:
    root = make(tmp_path)
    for _ in range(2):  # made, then from the cache
        splits = load(f"flair:{kind}", root)
        assert splits.validation is not None and splits.train.groups is not None
        assert (told(splits.train), told(splits.validation), told(splits.test)) == EXPECTED[kind]
        assert splits.train.groups.tolist() == ["adam@N01", "zoe@N00", "zoe@N00"]
        assert numbers_of(splits.train) == [2, 1, 0]  # a user's images by their ids
        assert list(splits.train.classes) == sorted(splits.train.classes)
        assert any("on no training image" in note for note in splits.notes)
    assert load(f"flair:{kind}", root, size=8).train.samples(slice(0, 1)).shape == (1, 3, 8, 8)


def test_only_requested_images_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw(tmp_path)
    opened: list[str] = []
    decode = image_decoding.decode_image
    monkeypatch.setattr(
        image_decoding, "decode_image", lambda file, shape: (opened.append(file.stem), decode(file, shape))[1]
    )
    made = Experiment().changed({"data.name": "flair:coarse", "data.root": str(tmp_path), "training.rounds": 1})
    found = federation.build(made)
    assert found.names == ("adam@N01", "zoe@N00") and found.experiment.partition.kind == "natural"
    assert found.fingerprints["training"]["images"] != found.fingerprints["test"]["images"]
    assert opened == []
    second_user = found.train.subset(found.samples[1])
    assert numbers_of(second_user) == [1, 0] and opened == ["a1", "b2"]


def broken_entry(root: Path) -> str:
    file = root / "labels_and_metadata.json"
    file.write_text(file.read_text().replace('"user_id": "eve@N02"', '"user": "eve@N02"'))
    return "entry 4 (KeyError: 'user_id')"


def cut_metadata(root: Path) -> str:
    file = root / "labels_and_metadata.json"
    file.write_text(file.read_text()[:-40])
    return "cannot be read as JSON"


def image_gone(root: Path) -> str:
    (root / "small_images" / "c3.jpg").unlink()
    return "1 of 5 images are not in small_images/: 'c3.jpg'"


def no_folder(root: Path) -> str:
    (root / "small_images").rename(root / "other")
    return "small_images"


def empty_folder(root: Path) -> str:
    for place in (root / "small_images").iterdir():
        place.unlink()
    return "5 of 5 images are not in small_images/"


BROKEN = (broken_entry, cut_metadata, image_gone, no_folder, empty_folder)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_damaged_flair_data_is_reported(tmp_path: Path, broken: Any) -> None:
    raw(tmp_path)
    said = broken(tmp_path)
    with pytest.raises(DataError) as error:
        load("flair:coarse", tmp_path)
    assert said in str(error.value)


def test_all_flair_problems_are_in_one_report_and_a_truncated_image_is_named_when_read(tmp_path: Path) -> None:
    raw(tmp_path)
    words = [broken_entry(tmp_path), image_gone(tmp_path).partition(" of 5")[0]]
    with pytest.raises(DataError, match="2 problems") as error:
        load("flair:coarse", tmp_path)
    assert all(word in str(error.value) for word in words)
    raw(tmp_path)
    place = tmp_path / "small_images" / "b2.jpg"
    place.write_bytes(place.read_bytes()[:-40])
    splits = load("flair:coarse", tmp_path)
    with pytest.raises(DataError, match=r"b2\.jpg' cannot be decoded"):
        splits.train.samples(slice(2, 3))
    (tmp_path / "small_images" / "c3.jpg").write_bytes(b"no image")  # the first, which tells the size
    with pytest.raises(DataError, match=r"c3\.jpg' cannot be decoded"):
        load("flair:coarse", tmp_path)


def test_broken_hdf5_files_are_explained(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed (fedmll[hdf5])")
    file = by_user(tmp_path)
    with h5py.File(file, "a") as archive:
        del archive["val"]
        del archive["train/zoe@N00/labels"]
        archive["train/zoe@N00/labels"] = [b"plant"]
    with pytest.raises(DataError, match=r"no group 'val'.*1 groups .*/train/zoe@N00 \(2 images, 2 ids and 1 labels\)"):
        load("flair:coarse", tmp_path)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(DataError, match="not a readable HDF5 file"):
        load("flair:coarse", tmp_path)


@pytest.fixture(scope="module")
def script() -> Any:
    """The benchmark that measures how long 429,078 images take to open."""
    path = Path(__file__).parents[2] / "benchmarks" / "flair_shaped.py"
    spec = importlib.util.spec_from_file_location("flair_shaped", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_flair_users_have_the_published_sizes(script: Any) -> None:
    """ml-flair's explore_labels.ipynb: mean 8.345548, std 51.3, quartiles 1, 2, 5, at most 4,151."""
    sizes = script.sizes()
    assert (len(sizes), sizes.sum(), sizes.min(), sizes.max()) == (51_414, 429_078, 1, 4_151)
    assert np.percentile(sizes, [25, 50, 75]).tolist() == [1, 2, 5]
    assert abs(sizes.std() - 51.3) < 5


@pytest.mark.parametrize("layout", ["raw", "users", "pfl"])
def test_generated_flair_data_has_flairs_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: Any, layout: str
) -> None:
    root = tmp_path / "made"
    if layout == "raw":
        script.write(root, users=70, images=600)
    else:
        pytest.importorskip("h5py", reason="h5py is not installed (fedmll[hdf5])")
        script.write_hdf5(root / "flair.hdf5", layout == "pfl", users=70, images=600)
    splits = load("flair:coarse", root)
    assert splits.validation is not None and splits.train.groups is not None and splits.test.groups is not None
    assert len(splits.train) + len(splits.validation) + len(splits.test) == 600
    assert len(set(splits.train.groups)) == 56 and not set(splits.train.groups) & set(splits.test.groups)
    script.measure_opening(root, "fine")
    said = capsys.readouterr().out
    images = re.search(r"a round of 50 of 56 users: (\S+) images, (\S+) images read", said)
    assert images is not None and images[1] == images[2]


def test_a_round_reads_the_images_of_its_clients_and_no_others(tmp_path: Path, script: Any) -> None:
    script.write(tmp_path / "made", users=70, images=600)
    asked = experiment(
        data__name="flair:coarse", data__root=str(tmp_path / "made"), data__limit=None, partition__clients=None,
        training__rounds=1, participation__count=5, participation__sampling="size",
    )  # fmt: skip
    data = federation.build(asked)
    read: list[int] = []
    store: Any = data.train.store
    one = store.read
    store.read = lambda row: (read.append(row), one(row))[1]
    fedmll.run(asked, tmp_path / "run", prepared=data)
    chosen = participation.choose_clients(data.sizes, 1, asked.seed, count=5, sampling="size")
    trained = [row for row in read if row < len(data.train)]
    assert len(chosen) == 5 and sorted(trained) == sorted(np.concatenate([data.samples[k] for k in chosen]).tolist())


# The hub's datasets


def encoded(number: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels(number)).save(stream, "PNG")
    return stream.getvalue()


def hub_table(numbers: list[int], labels: list[Any], features: dict[str, Any] | None = None) -> Any:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (fedmll[tables])")
    images = [{"bytes": encoded(number), "path": None} for number in numbers]
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    table = pyarrow.table({"image": pyarrow.array(images, image), "id": numbers, "labels": labels})
    if features is not None:
        info = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": info})
    return table


def write_hub(folder: Path, arrow: bool = False) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (fedmll[tables])")
    import pyarrow

    features = {"labels": {"_type": "Sequence", "feature": {"_type": "ClassLabel", "names": ["cat", "dog", "owl"]}}}
    parts = {"train": ([0, 1, 2], [[0, 1], [2], None]), "test": ([3, 4], [[1], []])}
    for part, (numbers, labels) in parts.items():
        table = hub_table(numbers, labels, features)
        if arrow:
            (folder / part).mkdir(parents=True)
            with pyarrow.ipc.new_stream(folder / part / "data-00000-of-00001.arrow", table.schema) as stream:
                stream.write_table(table, max_chunksize=2)
        else:
            (folder / "data").mkdir(parents=True, exist_ok=True)
            parquet.write_table(table, folder / "data" / f"{part}-00000-of-00001.parquet", row_group_size=2)


@pytest.mark.parametrize("arrow", [False, True])
def test_hub_dataset_with_label_numbers(tmp_path: Path, arrow: bool) -> None:
    write_hub(tmp_path / "birds", arrow)
    splits = load("hf:birds", tmp_path)
    assert splits.train.classes == ("cat", "dog", "owl")
    unknown = dict.fromkeys(splits.train.classes, -1)
    assert told(splits.train) == {0: {"cat": 1, "dog": 1}, 1: {"owl": 1}, 2: unknown}
    assert told(splits.test) == {3: {"dog": 1}, 4: {}}


def test_hub_dataset_with_label_names_without_a_test_split(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (fedmll[tables])")
    labels = [["b"], ["a", "b"], ["a"], ["b"], ["a"], ["a"], ["b"], ["a", "b"], ["b"], ["a"]]
    parquet.write_table(hub_table(list(range(10)), labels), tmp_path / "train-0.parquet")
    splits = load(f"hf:{tmp_path}")
    assert splits.train.classes == ("a", "b") and len(splits.train) + len(splits.test) == 10
    for data in (splits.train, splits.test):
        assert told(data) == {number: dict.fromkeys(labels[number], 1) for number in numbers_of(data)}


def test_broken_hub_datasets_are_explained(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (fedmll[tables])")
    with pytest.raises(DataError, match="holds no Hugging Face dataset"):
        load(f"hf:{tmp_path}")
    file = tmp_path / "train-0.parquet"
    table = hub_table([0, 1], [["a"], ["a"]])
    parquet.write_table(table.drop_columns(["image"]).drop_columns(["labels"]), file)
    with pytest.raises(
        DataError, match=r"2 problems.*no column has images.*no column has lists of labels; there are id"
    ):
        load(f"hf:{tmp_path}")
    parquet.write_table(hub_table([0, 1], [[0], [1]]), file)
    with pytest.raises(DataError, match="has numbers, and the dataset does not say which class"):
        load(f"hf:{tmp_path}")
    damaged = table.set_column(0, "image", [[{"bytes": encoded(0)[:60], "path": None}, {"bytes": None, "path": "x"}]])
    parquet.write_table(damaged, file)
    with pytest.raises(DataError, match=r"2 of 2 images cannot be read: row 0 of part 0 of 'train-0\.parquet'"):
        load(f"hf:{tmp_path}")
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(DataError, match=r"'train-0\.parquet' cannot be read"):
        load(f"hf:{tmp_path}")


def test_a_lazy_store_is_indexed_as_the_array_it_stands_for() -> None:
    images = np.random.default_rng(0).integers(256, size=(5, 6, 4, 3), dtype=np.uint8)
    whole = images.transpose(0, 3, 1, 2)
    store: Any = image_decoding.LazyImages("key", (5, 3, 6, 4), lambda row: images[row])
    for rows in (slice(1, 4), np.array([3, 0, 3]), np.array([], dtype=np.int64), [True, False, True, False, False], 2):
        assert np.array_equal(store[rows], whole[rows])
    data = Dataset(store, np.zeros((5, 1), np.int8), ("a",)).subset(np.array([4, 1]))
    assert np.array_equal(data.samples(slice(None)), whole[[4, 1]])


def test_fine_names_of_coarse_classes_are_sorted_by_frequency(tmp_path: Path) -> None:
    """Names of the same frequency in reverse alphabetical order, as in the released code of FedLGT."""
    root = raw(tmp_path)
    entries = json.loads((root / "labels_and_metadata.json").read_text())
    entries[0]["fine_grained_labels"] += ["rose", "cat"]
    (root / "labels_and_metadata.json").write_text(json.dumps(entries))
    with pytest.raises(DataError, match=r"label_relationship.txt \(lines `fine -> coarse`\)"):
        fine_names(root)
    relations = {"tree": "plant", "rose": "plant", "fern": "plant", "dog": "animal", "cat": "animal"}
    lines = [f"{fine} -> {coarse}" for fine, coarse in relations.items()]
    (root / "label_relationship.txt").write_text("\n".join(lines))
    with pytest.raises(DataError, match="no fine label of structure"):
        fine_names(root)
    (root / "label_relationship.txt").write_text("\n".join([*lines, "house -> structure"]))
    done = CliRunner().invoke(app, ["data", "fine-names", "--root", str(root)])
    assert done.exit_code == 0, done.output
    found = read_fine_names("fine_names.json", root)
    assert found == {"animal": ["cat", "dog"], "plant": ["rose", "tree"], "structure": ["house"]}
