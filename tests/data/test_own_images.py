"""A user's own images, from file to federation: clients, patients, sizes, 16-bit pixels, skipped images."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedmll import run
from fedmll.cli.main import app
from fedmll.config.experiment import Experiment
from fedmll.config.settings import ReadingOptions
from fedmll.core.errors import ConfigError, DataError
from fedmll.data import federation
from fedmll.data.sources import load
from fedmll.data.sources.packed import pack
from fedmll.deploy.site import site_data
from fedmll.deploy.site.site_config import Site, read_site_file, write_site_file
from fedmll.training.round_loop import resume

REAL = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDMLL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def scan(number: int, height: int = 12, width: int = 16, bits: int = 8) -> np.ndarray:
    kind = np.uint8 if bits == 8 else np.uint16
    pixels = np.random.default_rng(number).integers(2**bits, size=(height, width)).astype(kind)
    pixels[0, 0] = 2**bits - 1
    return pixels


def hospital(folder: Path, count: int = 40, client: bool = True, patients_of: int = 4, **image: Any) -> str:
    """Two sites with backslash paths, `patients_of` images per patient, ages, free text and some blank cells."""
    rows = ["image,patient,age,note,sick,old" + (",client" if client else "")]
    for number in range(count):
        place = "north" if number < count // 2 else "south"
        (folder / "images" / place).mkdir(parents=True, exist_ok=True)
        Image.fromarray(scan(number, **image)).save(folder / "images" / place / f"{number}.png")
        cells = [f"{place}\\{number}.png", f"p{number // patients_of}", str(20 + number), '"a, b"']
        cells += [str(number % 2), "" if number % 5 == 0 else str(number // 2 % 2)]
        rows.append(",".join([*cells, *([place] if client else [])]))
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    return f"folder:{folder / 'labels.csv'}"


def experiment(folder: Path, name: str, **changes: Any) -> Experiment:
    values = {"data.name": name, "data.root": folder / "images", "data.ignore": ["patient", "age", "note"]}
    return Experiment().changed(values | {key.replace("__", "."): value for key, value in changes.items()})


PATIENTS = {"data__ignore": ["age", "note"], "data__group": "patient"}


def patients_in(data: Any, rows: np.ndarray | slice = slice(None)) -> set[str]:
    return set(data.patients[rows].tolist())


# --- clients


def test_client_column_gives_natural_partition_in_the_experiment(tmp_path: Path) -> None:
    found = federation.build(experiment(tmp_path, hospital(tmp_path)))
    assert found.names == ("north", "south")
    assert found.experiment.partition.kind == "natural"
    assert found.experiment.partition.clients is None
    again = federation.build(Experiment.make(found.experiment.model_dump(exclude_none=True)))
    assert [rows.tolist() for rows in again.samples] == [rows.tolist() for rows in found.samples]
    assert again.experiment == found.experiment


def test_requested_partition_replaces_natural(tmp_path: Path) -> None:
    name = hospital(tmp_path)
    found = federation.build(experiment(tmp_path, name, partition__kind="iid", partition__clients=3))
    assert len(found.names) == 3
    unused = experiment(tmp_path, name, data__ignore=["patient", "age", "note", "client"], partition__clients=2)
    assert federation.build(unused).experiment.partition.kind == "dirichlet"


def test_without_clients_the_partition_is_dirichlet_over_ten(tmp_path: Path) -> None:
    assert Experiment().partition.kind == "auto"
    found = federation.build(experiment(tmp_path, hospital(tmp_path, client=False)))
    assert (found.experiment.partition.kind, found.experiment.partition.clients) == ("dirichlet", 10)
    assert len(found.names) == 10


def test_patients_are_clients_only_with_natural(tmp_path: Path) -> None:
    name = hospital(tmp_path, client=False)
    assert federation.build(experiment(tmp_path, name, **PATIENTS)).experiment.partition.kind == "dirichlet"
    natural = federation.build(experiment(tmp_path, name, **PATIENTS, partition__kind="natural"))
    assert set(natural.names) <= {f"p{number}" for number in range(10)}


def test_packed_clients_and_patients(tmp_path: Path) -> None:
    hospital(tmp_path)
    out, reading = tmp_path / "set.npz", ReadingOptions(ignore=("age", "note"), group="patient")
    pack(tmp_path / "labels.csv", tmp_path / "images", out, reading=reading)
    plain = Experiment().changed({"data.name": f"packed:{out}"})
    assert federation.build(plain).experiment.partition.kind == "natural"
    with np.load(out) as arrays:
        assert arrays["patient"].tolist() == [f"p{number // 4}" for number in range(40)]
        clientless = {name: arrays[name] for name in arrays.files if name != "client"}
    np.savez(tmp_path / "clientless.npz", **clientless)
    plain = Experiment().changed({"data.name": f"packed:{tmp_path / 'clientless.npz'}"})
    assert federation.build(plain).experiment.partition.kind == "dirichlet", "a patient is no client"
    assert "p9" in federation.build(plain.changed({"partition.kind": "natural"})).names


def test_real_chest_x_rays_still_have_natural_clients(tmp_path: Path) -> None:
    file = REAL / "chestxray14_part001_112jpeg.npz"
    if not file.exists():
        pytest.skip(f"{file} is not here")
    with np.load(file) as arrays:
        patients = np.unique(arrays["patient_id"][arrays["split"] == 0])
    wanted = {"data.name": f"packed:{file}", "data.size": 8, "partition.kind": "natural"}
    assert len(federation.build(Experiment().changed(wanted)).names) == len(patients)


def test_run_stores_derived_settings_and_resumes_with_them(tmp_path: Path) -> None:
    name = hospital(tmp_path, height=150, width=200, bits=12)
    spoil(tmp_path)
    quick = {"model.channels": (4, 8), "training.rounds": 1, "engine.workers": 0}
    wanted = experiment(tmp_path, name, data__skip_unreadable=True, data__size=16).changed(quick)
    first = run(wanted, tmp_path / "run")
    stored = Experiment.load(tmp_path / "run" / "experiment.toml")
    assert (stored.partition.kind, stored.data.size, stored.data.window) == ("natural", 16, (0, 4095))
    for said in ("200 × 150 resized to 16 × 16", "0 … 4095 became 0 … 255", "skipped (--skip-unreadable): 3"):
        assert any(said in note for note in first.summary["notes"])
    assert len(resume(tmp_path / "run", rounds=2).rows) == 2


# --- patients


@pytest.mark.parametrize("kind", ["natural", "iid"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_patient_is_on_one_side_of_every_split(tmp_path: Path, kind: str, seed: int) -> None:
    name = hospital(tmp_path, count=120)
    wanted = experiment(
        tmp_path, name, **PATIENTS, partition__kind=kind, partition__clients=2, partition__holdout=0.2, seed=seed
    )
    found = federation.build(wanted)
    trained = patients_in(found.train, np.concatenate(found.samples))
    held_out, tested = patients_in(found.validation), patients_in(found.test)
    assert not tested & (trained | held_out)
    assert not trained & held_out
    assert 0.1 < len(found.test) / 120 < 0.3
    share = len(found.validation) / (len(found.validation) + found.sizes.sum())
    assert 0.1 < share < 0.3
    assert tested == patients_in(federation.build(wanted.changed({"seed": seed + 7})).test), "the same for every seed"


def test_without_a_group_the_splits_are_by_image(tmp_path: Path) -> None:
    found = federation.build(experiment(tmp_path, hospital(tmp_path, count=120), partition__kind="iid"))
    rows = found.train.rows[np.concatenate(found.samples)]
    assert {row // 4 for row in rows.tolist()} & {row // 4 for row in found.validation.rows.tolist()}


def test_site_and_simulation_hold_out_the_same_patients(tmp_path: Path) -> None:
    name = hospital(tmp_path, count=80)
    found = federation.build(experiment(tmp_path, name, **PATIENTS, partition__holdout=0.25))
    north = found.train.rows[found.samples[0]]
    lines = (tmp_path / "labels.csv").read_text().splitlines()
    own = [lines[0], *(lines[row + 1] for row in sorted([*north, *found.held_out.rows[found.held_out_owners == 0]]))]
    (tmp_path / "north.csv").write_text("\n".join(own).replace(",client", ",note2"))
    here = Site(
        name="north",
        csv=tmp_path / "north.csv",
        images=tmp_path / "images",
        state_dir=tmp_path,
        device="cpu",
        reading=ReadingOptions(ignore=("age", "note", "note2"), group="patient", by_options=True),
    )
    data = site_data.load_site_data(here, ("sick", "old"), (1, 12, 16), seed=0, holdout=0.25)
    assert len(data.held_out) > 0
    assert np.array_equal(data.train.samples(slice(None)), found.train.samples(found.samples[0]))


def test_client_whose_patients_are_all_held_out_elsewhere_is_reported(tmp_path: Path) -> None:
    name = hospital(tmp_path, count=80, patients_of=20)
    wanted = experiment(tmp_path, name, **PATIENTS, partition__kind="iid", partition__clients=16)
    with pytest.raises(ConfigError, match=r"partition.holdout = 0.9 leaves client c\d+ without training samples"):
        federation.build(wanted.changed({"partition.holdout": 0.9}))


def test_few_patients_with_many_images_can_be_split_and_two_cannot(tmp_path: Path) -> None:
    reading = ReadingOptions(ignore=("age", "note"), group="patient")
    splits = load(hospital(tmp_path, count=60, patients_of=20), tmp_path / "images", reading=reading)
    assert len(splits.test) == 20
    with pytest.raises(DataError, match=r"no test samples.*with other values of 'patient', or a split"):
        load(hospital(tmp_path, count=60, patients_of=30), tmp_path / "images", reading=reading)


def test_packed_split_that_divides_a_patient_is_rejected_only_with_a_group(tmp_path: Path) -> None:
    hospital(tmp_path)
    out, reading = tmp_path / "set.npz", ReadingOptions(ignore=("age", "note"), group="patient")
    pack(tmp_path / "labels.csv", tmp_path / "images", out, reading=reading)
    with np.load(out) as arrays:
        changed = {name: arrays[name] for name in arrays.files} | {"split": np.arange(40) % 10 // 8 * 2}
    np.savez(out, **changed)
    load(f"packed:{out}")
    with pytest.raises(DataError, match=r"set.npz': 4 of 'patient' are in more than one part of the split: 'p2'; 'p4'"):
        load(f"packed:{out}", reading=ReadingOptions(group="patient"))
    with pytest.raises(DataError, match="no array 'lesion'"):
        load(f"packed:{out}", reading=ReadingOptions(group="lesion"))


# --- sizes and depth


def test_derived_size_is_reported_and_stored(tmp_path: Path, cache_folder: Path) -> None:
    name = hospital(tmp_path, count=20, height=150, width=200)
    found = federation.build(experiment(tmp_path, name))
    assert found.notes == ("images: 200 × 150 resized to 112 × 112 (data.size = 112)",)
    assert found.experiment.data.size == 112
    again = federation.build(found.experiment)
    assert np.array_equal(again.train.store, found.train.store)
    assert len(list(cache_folder.glob("*.npy"))) == 1
    wide = federation.build(experiment(tmp_path, name, data__size=[30, 40]))
    assert wide.train.sample_shape == (1, 30, 40)
    assert wide.experiment.data.size == (30, 40)
    assert federation.build(wide.experiment).train.sample_shape == (1, 30, 40)


def test_data_that_keeps_its_size_stores_it_and_composites_store_their_images(tmp_path: Path) -> None:
    found = federation.build(experiment(tmp_path, hospital(tmp_path)))
    assert (found.experiment.data.size, found.notes) == ((12, 16), ())
    composed = federation.build(Experiment().changed({"data.limit": 100}))
    assert composed.experiment.data.size == 8, "of each source image"
    assert composed.train.sample_shape == (1, 16, 16)
    again = federation.build(composed.experiment)
    assert np.array_equal(again.train.store, composed.train.store)


def test_features_have_no_size(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    arrays = {f"x_{part}": generator.normal(size=(40, 4)) for part in ("train", "test")}
    np.savez(tmp_path / "f.npz", **arrays, **{f"y_{part}": np.arange(40) % 2 for part in ("train", "test")})
    found = federation.build(
        Experiment().changed({"data.name": f"features:{tmp_path / 'f.npz'}", "model.backbone": "mlp"})
    )
    assert found.experiment.data.size is None


def test_scans_of_12_bits_use_the_whole_range_and_the_window_is_stored(tmp_path: Path) -> None:
    found = federation.build(experiment(tmp_path, hospital(tmp_path, bits=12)))
    assert found.train.store.max() == 255
    assert found.experiment.data.window == (0, 4095)
    assert found.notes == ("pixels of more than 8 bits: 0 … 4095 became 0 … 255 (data.window)",)
    row = int(found.test.rows[0])
    assert np.array_equal(found.test.samples(slice(0, 1))[0, 0], scan(row, bits=12) >> 4)
    assert np.array_equal(federation.build(found.experiment).train.store, found.train.store)


def test_pack_scales_images_of_more_than_8_bits(tmp_path: Path) -> None:
    hospital(tmp_path, count=20, bits=12)
    reading = ReadingOptions(ignore=("patient", "age", "note"))
    notes = pack(tmp_path / "labels.csv", tmp_path / "images", tmp_path / "set.npz", reading=reading)
    assert notes == ("pixels of more than 8 bits: 0 … 4095 became 0 … 255 (data.window)",)
    store = load(f"packed:{tmp_path / 'set.npz'}").train.store
    expected = np.stack([scan(number, bits=12) >> 4 for number in range(20)])
    assert np.abs(store[:, 0].astype(int) - expected).mean() < 8, "as JPEG keeps noise"


# --- what cannot be read


def spoil(folder: Path) -> None:
    """One image is missing, one is not an image, one is truncated."""
    (folder / "images" / "north" / "2.png").unlink()
    (folder / "images" / "north" / "3.png").write_bytes(b"not an image")
    file = folder / "images" / "south" / "30.png"
    file.write_bytes(file.read_bytes()[:60])


def test_labels_and_images_are_reported_together(tmp_path: Path) -> None:
    name = hospital(tmp_path)
    spoil(tmp_path)
    with pytest.raises(DataError) as error:
        load(name, tmp_path / "images")
    text = str(error.value)
    assert "has 3 problems" in text
    assert """--set 'data.ignore=["patient","age","note"]'""" in text
    assert "1 of its 40 images do not exist: row 4: " in text
    assert "2 of 39 images cannot be read: " in text
    assert "30.png' (" in text
    assert text.count("--skip-unreadable") == 2


def test_skipped_rows_are_dropped_everywhere_and_counted(tmp_path: Path) -> None:
    name = hospital(tmp_path)
    whole = federation.build(experiment(tmp_path, name, partition__holdout=0.0))
    spoil(tmp_path)
    with pytest.raises(DataError, match="skip-unreadable"):
        federation.build(experiment(tmp_path, name))
    found = federation.build(experiment(tmp_path, name, data__skip_unreadable=True, partition__holdout=0.0))
    assert len(found.train) + len(found.test) == 37
    assert found.notes[0].startswith("images skipped (--skip-unreadable): 3 (1 missing, 2 unreadable): row 4: ")
    by_image = {
        data.samples(slice(place, place + 1)).tobytes(): (data.labels[place].tolist(), str(data.groups[place]))
        for data in (whole.train, whole.test)
        for place in range(len(data))
        if data.groups is not None
    }
    for data in (found.train, found.test):
        for place in range(len(data)):
            assert data.groups is not None
            image = data.samples(slice(place, place + 1))
            assert by_image[image.tobytes()] == (data.labels[place].tolist(), data.groups[place])


def test_no_readable_image_is_an_error_even_with_skip_unreadable(tmp_path: Path) -> None:
    name = hospital(tmp_path)
    for path in (tmp_path / "images").rglob("*.png"):
        path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="40 of 40 images cannot be read"):
        federation.build(experiment(tmp_path, name, data__skip_unreadable=True))


def test_unreadable_packed_images_are_skipped(tmp_path: Path) -> None:
    hospital(tmp_path)
    out, reading = tmp_path / "set.npz", ReadingOptions(ignore=("patient", "age", "note"))
    pack(tmp_path / "labels.csv", tmp_path / "images", out, reading=reading)
    with np.load(out) as arrays:
        changed = {name: arrays[name].copy() for name in arrays.files}
    changed["jpeg"][changed["offset"][4] : changed["offset"][4] + 50] = 0
    changed["split"] = np.arange(40) % 5 // 4 * 2
    np.savez(out, **changed)
    with pytest.raises(DataError, match=r"1 of 40 images cannot be read: image 4 of .*skip-unreadable"):
        load(f"packed:{out}")
    splits = load(f"packed:{out}", reading=ReadingOptions(skip_unreadable=True))
    assert splits.test.rows.tolist() == [9, 14, 19, 24, 29, 34, 39], "without 4"
    assert splits.notes[0].startswith("images skipped (--skip-unreadable): 1 (1 unreadable): image 4 of ")


def test_pack_skips_or_rejects_unreadable_images(tmp_path: Path) -> None:
    hospital(tmp_path)
    spoil(tmp_path)
    columns, out = ("patient", "age", "note"), tmp_path / "set.npz"
    with pytest.raises(DataError, match="has 2 problems"):
        pack(tmp_path / "labels.csv", tmp_path / "images", out, reading=ReadingOptions(ignore=columns))
    assert not out.exists()
    reading = ReadingOptions(ignore=columns, skip_unreadable=True)
    notes = pack(tmp_path / "labels.csv", tmp_path / "images", out, reading=reading)
    assert notes[0].startswith("images skipped (--skip-unreadable): 3 (1 missing, 2 unreadable)")
    with np.load(out) as arrays:
        assert len(arrays["labels"]) == len(arrays["name"]) == len(arrays["client"]) == len(arrays["offset"]) - 1 == 37
        assert "north\\3.png" not in arrays["name"]


# --- a site, and the command line


def test_site_has_the_same_reading_options(tmp_path: Path) -> None:
    hospital(tmp_path, bits=12)
    spoil(tmp_path)
    bare = Site(name="north", csv=tmp_path / "labels.csv", images=tmp_path / "images", state_dir=tmp_path / "memory")
    with pytest.raises(DataError, match=r"has 3 problems.*--ignore=patient,age,note"):
        site_data.check_site_data(bare)
    here = Site(
        name="north",
        csv=bare.csv,
        images=bare.images,
        state_dir=bare.state_dir,
        device="cpu",
        reading=ReadingOptions(
            ignore=("age", "note"), group="patient", window=(0.0, 4095.0), skip_unreadable=True, by_options=True
        ),
    )
    write_site_file(here, tmp_path / "site.json")
    assert read_site_file(tmp_path / "site.json") == here
    summary = site_data.check_site_data(here)
    assert (summary.images, summary.classes) == (37, ("sick", "old"))
    assert summary.notes[0].endswith("0 … 4095 became 0 … 255 (data.window)")
    assert summary.notes[1].startswith("images skipped (--skip-unreadable): 3 (1 missing, 2 unreadable)")
    data = site_data.load_site_data(here, ("sick", "old"), (1, 12, 16), seed=0, holdout=0.2)
    assert len(data.train) + len(data.held_out) == 37
    with pytest.raises(DataError, match=r"--classes names 'sik', which is not a column; did you mean 'sick'"):
        site_data.check_site_data(replace(bare, reading=ReadingOptions(classes=("sik",), by_options=True)))


def test_colour_images_do_not_fit_a_grey_federation(tmp_path: Path) -> None:
    Image.fromarray(np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)).save(tmp_path / "0.png")
    (tmp_path / "labels.csv").write_text("image,sick\n0.png,1\n")
    here = Site(name="north", csv=tmp_path / "labels.csv", images=tmp_path, state_dir=tmp_path / "memory")
    with pytest.raises(DataError, match=r"have the shape \(3, 8, 8\).*needs \(1, 8, 8\)"):
        site_data.load_site_data(here, ("sick",), (1, 8, 8), seed=0, holdout=0.0)


def test_command_line_options_for_own_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hospital(tmp_path, bits=12)
    spoil(tmp_path)
    base = ["data", "describe", "--data", "folder:labels.csv", "--root", "images", "--set", "data.group=patient"]
    columns = ["--set", 'data.ignore=["age","note"]']
    refused = CliRunner().invoke(app, [*base, *columns])
    assert "--skip-unreadable" in str(refused.exception)
    done = CliRunner().invoke(app, [*base, *columns, "--skip-unreadable"])
    assert done.exit_code == 0, done.exception
    assert "images skipped (--skip-unreadable): 3" in done.output
    assert "0 … 4095 became 0 … 255" in done.output
    packed = ["data", "pack", "labels.csv", "--root", "images", "--out", "set.npz", "--ignore", "age,note"]
    packed += ["--group", "patient", "--window", "0,2000", "--skip-unreadable"]
    done = CliRunner().invoke(app, packed)
    assert done.exit_code == 0, done.exception
    assert "0 … 2000 became 0 … 255" in done.output
    wrong = CliRunner().invoke(app, [*packed, "--window", "0"])
    assert "--window takes LOW,HIGH" in str(wrong.exception)
    one = CliRunner().invoke(app, [*base, "--set", "data.ignore=age"])
    assert """--set 'data.ignore=["age","note"]'""" in str(one.exception), "it replaces what was set before"


# --- settings that mean nothing, and DermaMNIST


@pytest.mark.parametrize(
    ("name", "reading", "said"),
    [
        (
            "digits",
            ReadingOptions(classes=("one",)),
            "data.classes is for folder:labels.csv and table:FILE.csv, but data.name is 'digits'",
        ),
        ("digits", ReadingOptions(group="x"), "data.group is for folder:labels.csv and packed:FILE.npz"),
        ("ml-digits", ReadingOptions(window=(0, 9)), "data.window is for"),
        ("packed:x.npz", ReadingOptions(ignore=("x",)), "data.ignore is for folder:labels.csv"),
    ],
)
def test_settings_that_a_source_does_not_use_are_rejected(name: str, reading: ReadingOptions, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(name, reading=reading)


def test_dermamnist_composites_of_ham10000() -> None:
    """All singles and 50 composites per pair of the 7 classes, as in docs/guide/data.md; lesions stay together."""
    file = REAL / "ham10000_200x150.npz"
    if not file.exists():
        pytest.skip(f"{file} is not here")
    options = {"singles": "all", "pairs": 50}
    splits = load(f"ml-packed:{file}", size=28, options=options, reading=ReadingOptions(group="lesion_id"))
    assert splits.train.sample_shape == (3, 56, 56)
    assert len(splits.train) == 7068 + 21 * 50
    assert splits.notes == ("images: 200 × 150 resized to 28 × 28 (data.size = 28)",)
    assert splits.size == (28, 28)


def test_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    """A site reads it; an experiment, which is stored as text, says what to do."""
    hospital(tmp_path)
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/im\xff"))
    (tmp_path / "images").rename(folder)
    here = Site(
        name="north",
        csv=tmp_path / "labels.csv",
        images=folder,
        state_dir=tmp_path / "state",
        reading=ReadingOptions(ignore=("patient", "age", "note"), by_options=True),
    )
    assert site_data.check_site_data(here).images == 40
    data = site_data.load_site_data(here, ("sick", "old"), (1, 12, 16), seed=0, holdout=0.2)
    assert len(data.train) + len(data.held_out) == 40
    with pytest.raises(ConfigError, match=r"data\.root: the path is not UTF-8, .*; rename it, or give a link"):
        Experiment().changed({"data.root": str(folder)})
    (tmp_path / "link").symlink_to(folder)
    splits = load(f"folder:{tmp_path / 'labels.csv'}", tmp_path / "link", reading=here.reading)
    assert len(splits.train) + len(splits.test) == 40
