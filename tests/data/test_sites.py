"""`[[sites]]`: sources with different label sets become one federation; what a site does not annotate is unknown."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import official_datasets as official
import pytest
from numpy.typing import NDArray
from PIL import Image
from site_folders import CLASSES, RENAME, SIDE, draw_things, federation_of_both
from typer.testing import CliRunner

from fedmll.cli.main import app
from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError, FedmllError
from fedmll.data import federation
from fedmll.data.dataset import Dataset
from fedmll.data.federation import Federation
from fedmll.data.joined_store import JoinedStore, convert_channels

Values = dict[str, Any]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMLL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def both(tmp_path: Path) -> Values:
    return federation_of_both(tmp_path)


def build(values: Values) -> Federation:
    return federation.build(Experiment.make(values))


def of_site(data: Dataset, site: str) -> Dataset:
    assert data.sites is not None
    return data.subset(np.flatnonzero(data.sites == site))


def test_each_site_has_its_own_names_and_what_it_does_not_annotate_is_unknown(both: Values) -> None:
    found = build(both)
    assert found.source.classes == tuple(CLASSES)
    assert found.names == ("coco", "voc")
    for data, site, seed in ((found.source, "coco", 1), (found.test, "coco", 2), (found.source, "voc", 3),
                             (found.test, "voc", 4)):  # fmt: skip
        own = of_site(data, site)
        expected = draw_things(len(own), seed).astype(np.int8)
        expected[:, CLASSES.index("airplane" if site == "coco" else "zebra")] = -1
        np.testing.assert_array_equal(own.labels, expected)
    assert found.annotated.tolist() == [[True, True, True, True, False], [True, True, True, False, True]]
    assert any("voc" in note and "bicycle" in note for note in found.notes)


def test_images_of_a_site_are_those_of_its_own_folder(both: Values, tmp_path: Path) -> None:
    found = build(both)
    shown = of_site(found.test, "voc").samples(np.array([3]))[0]
    path = tmp_path / "voc" / "VOCdevkit" / "VOC2007" / "JPEGImages" / "004003.jpg"
    np.testing.assert_array_equal(shown, np.asarray(Image.open(path)).transpose(2, 0, 1))
    assert found.test.files is not None
    assert found.test.files[of_site(found.test, "voc").rows[3]] == "JPEGImages/004003.jpg"


def test_without_chosen_classes_the_study_has_all_of_all_sites(both: Values) -> None:
    both.pop("study")
    both["sites"][1]["data"] = "voc:2007"
    with pytest.raises(FedmllError, match="no training sample has the classes 'bicycle'"):
        build(both)  # VOC's other classes have no positive in this small folder, which is said


# Names


def nih_and_chexpert(tmp_path: Path, **of_nih: Any) -> Values:
    official.chest(tmp_path / "nih")
    official.chexpert_small(tmp_path / "chexpert")
    return {
        "data": {"size": 16, "root": str(tmp_path)},
        "study": {"classes": ["Cardiomegaly", "Effusion", "Fracture"]},
        "sites": [
            {"name": "nih", "data": "chestxray14", "root": "nih", **of_nih},
            {
                "name": "chexpert", "data": "chexpert", "root": "chexpert",
                "rename": {"Pleural Effusion": "Effusion"}, "excludes": {"No Finding": ["Cardiomegaly", "Effusion"]},
            },
        ],
        "partition": {"holdout": 0.0},
    }  # fmt: skip


def test_a_label_says_what_it_excludes_by_definition(tmp_path: Path) -> None:
    found = build(nih_and_chexpert(tmp_path))
    nih, chexpert = of_site(found.source, "nih"), of_site(found.source, "chexpert")
    assert nih.labels.tolist() == [[1, 1, -1], [0, 0, -1], [1, 1, -1]]
    # the first image of CheXpert has no finding: two classes are absent, a fracture is still unknown
    assert chexpert.labels.tolist() == [[0, 0, -1], [1, 1, 1]]
    assert nih.patients is not None and chexpert.patients is not None
    assert nih.patients.tolist() == ["nih/1", "nih/1", "nih/2"]
    assert chexpert.patients[0] == "chexpert/patient00001"


def test_an_image_without_findings_can_exclude_all_classes_of_the_study(tmp_path: Path) -> None:
    found = build(nih_and_chexpert(tmp_path, excludes={"No Finding": "all"}))
    assert of_site(found.source, "nih").labels.tolist() == [[1, 1, -1], [0, 0, 0], [1, 1, -1]]


def test_no_finding_of_nih_can_be_a_class(tmp_path: Path) -> None:
    values = nih_and_chexpert(tmp_path, rename={"No Finding": "Healthy"}, excludes={"No Finding": "all"})
    values["study"]["classes"] = ["Effusion", "Healthy"]
    values["sites"][1] |= {"rename": {"Pleural Effusion": "Effusion", "No Finding": "Healthy"}, "excludes": {}}
    found = build(values)
    assert of_site(found.source, "nih").labels.tolist() == [[1, 0], [0, 1], [1, 0]]
    assert of_site(found.source, "chexpert").labels.tolist() == [[-1, 1], [1, 1]]


def test_several_names_of_a_site_can_be_one_class(tmp_path: Path) -> None:
    """Present if one of them is, absent if all of them are, otherwise unknown."""
    values = nih_and_chexpert(tmp_path, rename={"Cardiomegaly": "Any", "Hernia": "Any"})
    values["study"]["classes"] = ["Any"]
    values["sites"][1] |= {"rename": {"Edema": "Any", "Fracture": "Any"}, "excludes": {}}
    found = build(values)
    assert of_site(found.source, "nih").labels.tolist() == [[1], [0], [1]]
    assert of_site(found.test, "nih").labels.tolist() == [[1]]
    assert of_site(found.source, "chexpert").labels.tolist() == [[-1], [1]]


# Samples


def test_a_joined_store_reads_like_one_array_and_copies_nothing(tmp_path: Path) -> None:
    colour = np.random.default_rng(0).integers(0, 256, (4, 3, 5, 6)).astype(np.uint8)
    grey = np.random.default_rng(1).integers(0, 256, (3, 1, 5, 6)).astype(np.uint8)
    np.save(tmp_path / "colour.npy", colour)
    mapped = np.load(tmp_path / "colour.npy", mmap_mode="r")
    store = JoinedStore([mapped, grey], channels=3)
    whole = np.concatenate([colour, np.repeat(grey, 3, axis=1)])
    assert store.shape == whole.shape and len(store) == 7
    for rows in (slice(None), np.array([6, 0, 3, 6]), slice(2, 6), 5, -1, np.zeros(0, int)):
        np.testing.assert_array_equal(store[rows], whole[rows])
    assert store.parts[0] is mapped
    sent = pickle.dumps(store)
    assert bytes(colour) not in sent
    np.testing.assert_array_equal(pickle.loads(sent)[:], whole)
    assert JoinedStore([mapped, grey], 3).cache_key == store.cache_key != JoinedStore([grey, mapped], 3).cache_key


def test_colour_becomes_grey_as_pillow_does_it() -> None:
    colour = np.random.default_rng(2).integers(0, 256, (2, 3, 40, 50)).astype(np.uint8)
    for image, grey in zip(colour, convert_channels(colour, 1), strict=True):
        np.testing.assert_array_equal(grey[0], np.asarray(Image.fromarray(image.transpose(1, 2, 0)).convert("L")))


def test_grey_and_colour_sites_get_the_same_channels_and_it_is_said(tmp_path: Path) -> None:
    values = nih_and_chexpert(tmp_path)
    official.voc2007(tmp_path / "voc")
    values["sites"].append({"name": "voc", "data": "voc:2007", "root": "voc", "rename": {"dog": "Fracture"}})
    found = build(values)
    assert found.train.sample_shape == (3, 16, 16)
    assert any("site nih: grey images are used as colour images" in note for note in found.notes)
    values["study"]["channels"] = 1
    found = build(values)
    assert found.train.sample_shape == (1, 16, 16)
    assert any("site voc: colour images are used as grey images" in note for note in found.notes)


# Clients


def test_a_site_can_be_divided_among_clients_of_its_own(both: Values) -> None:
    both["sites"][0]["partition"] = {"kind": "iid", "clients": 3}
    both["partition"] = {"holdout": 0.0}
    found = build(both)
    assert found.names == ("coco-c000", "coco-c001", "coco-c002", "voc")
    assert found.sizes.tolist() == [10, 10, 10, 30]
    assert found.train.sites is not None
    assert [set(found.train.sites[rows]) for rows in found.samples] == [{"coco"}] * 3 + [{"voc"}]
    both["seed"] = 1
    assert not np.array_equal(build(both).samples[0], found.samples[0])


def test_labels_of_a_sites_partition_are_those_that_it_annotates(both: Values) -> None:
    both["sites"][1]["partition"] = {"kind": "labels-per-client", "clients": 4, "labels_per_client": 1}
    both["sites"][1]["partition"]["unassignable"] = "withhold"
    found = build(both)
    zebra = CLASSES.index("zebra")
    assert found.allowed[1:, [c for c in range(5) if c != zebra]].sum(1).tolist() == [1, 1, 1, 1]
    assert not found.annotated[1:, zebra].any()


def test_limits(both: Values) -> None:
    both["sites"][0]["limit"] = 10
    found = build(both)
    assert len(of_site(found.source, "coco")) == 10 and len(of_site(found.source, "voc")) == 30
    both["data"]["limit"] = 20
    assert len(build(both).source) == 20
    both["data"]["top_classes"] = 2
    assert len(build(both).source.classes) == 2


def test_all_images_of_a_patient_are_held_out_together(tmp_path: Path) -> None:
    values = nih_and_chexpert(tmp_path) | {"partition": {"holdout": 0.5}}
    found = build(values)
    held, train = found.held_out.patients, found.train.patients
    assert held is not None and train is not None
    trained = np.concatenate([train[rows] for rows in found.samples])
    assert len(held) and not set(held) & set(trained)


# Experiments


def weights(tmp_path: Path, values: Values, name: str) -> dict[str, NDArray[Any]]:
    from fedmll import run

    result = run(Experiment.make(values), out=tmp_path / name)
    return {key: tensor.numpy() for key, tensor in result.weights.items()}


@pytest.mark.parametrize("method", ["fedavg-pl", "fedmlp", "private-fedavg"])
def test_methods_run_on_sites_and_the_number_of_workers_does_not_matter(
    both: Values, tmp_path: Path, method: str
) -> None:
    both["method"] = {"name": method, **({"loss": "sigmoid"} if method == "private-fedavg" else {})}
    one = weights(tmp_path, both, "one")
    both["engine"] = {"workers": 2}
    two = weights(tmp_path, both, "two")
    assert all(np.array_equal(value, two[key]) for key, value in one.items())


def test_a_resumed_run_ends_with_the_same_weights(both: Values, tmp_path: Path) -> None:
    from fedmll import resume

    whole = weights(tmp_path, both, "whole")
    both["training"]["rounds"] = 1
    weights(tmp_path, both, "part")
    resumed = resume(tmp_path / "part", rounds=2)
    assert all(np.array_equal(value, resumed.weights[key].numpy()) for key, value in whole.items())


def test_changed_labels_of_a_site_are_noticed(both: Values, tmp_path: Path) -> None:
    from fedmll import resume

    both["training"]["rounds"] = 1
    weights(tmp_path, both, "run")
    labels = tmp_path / "voc" / "VOCdevkit" / "VOC2007" / "ImageSets" / "Main" / "dog_trainval.txt"
    labels.write_text(labels.read_text().replace(" -1", " 1"))
    with pytest.raises(FedmllError, match="labels of the training data changed"):
        resume(tmp_path / "run", rounds=2)


def test_the_folders_of_the_sites_are_not_part_of_the_fingerprint(both: Values, tmp_path: Path) -> None:
    one = Experiment.make(both)
    moved = [{**site, "root": str(tmp_path / "elsewhere" / site["name"])} for site in both["sites"]]
    two = Experiment.make(both | {"sites": moved})
    assert one.fingerprint() == two.fingerprint() and not one.differs(two)
    other = [both["sites"][0], {**both["sites"][1], "rename": {"sofa": "couch"}}]
    assert Experiment.make(both | {"sites": other}).fingerprint() != one.fingerprint()


def test_the_stored_experiment_says_the_same(both: Values) -> None:
    found = build(both).experiment
    import tomllib

    again = Experiment.make(tomllib.loads(found.to_toml()))
    assert again == found and again.fingerprint() == found.fingerprint()


def test_frozen_features_of_sites(both: Values, tmp_path: Path) -> None:
    both["model"] = {"channels": (8, 8), "freeze": "backbone", "weights": "random"}
    both["method"] = {"name": "fed-ridge"}
    assert weights(tmp_path, both, "frozen")


def test_the_model_file_has_no_folder_of_a_site_and_predicts(both: Values, tmp_path: Path) -> None:
    from fedmll import load_model

    weights(tmp_path, both, "run")
    file = tmp_path / "run" / "model.safetensors"
    assert str(tmp_path).encode() not in file.read_bytes()
    images = np.zeros((2, 3, SIDE, SIDE), np.uint8)
    assert load_model(file).predict(images).shape == (2, len(CLASSES))


def test_official_validation_data_is_training_data_unless_all_sites_have_some(tmp_path: Path) -> None:
    values = nih_and_chexpert(tmp_path)
    folder = tmp_path / "chexpert" / "CheXpert-v1.0-small"
    valid = (folder / "valid.csv").read_text()
    (folder / "test.csv").write_text(valid.replace("/valid/", "/test/"))
    (folder / "test").mkdir()
    (folder / "valid" / "patient64541").rename(folder / "test" / "patient64541")
    official.picture(folder / "valid" / "patient64541" / "study1" / "view1_frontal.jpg", 5, grey=True)
    (folder / "test.csv").write_text(valid.replace("/valid/", "/test/").replace("64541", "64999"))
    (folder / "test" / "patient64541").rename(folder / "test" / "patient64999")
    found = build(values)
    assert len(of_site(found.source, "chexpert")) == 3 and len(of_site(found.test, "chexpert")) == 1
    assert any("its validation data is used for training" in note for note in found.notes)
    values["sites"] = values["sites"][1:]
    values["study"]["classes"] = ["Cardiomegaly", "Effusion", "Fracture"]
    found = build(values)
    assert len(of_site(found.source, "chexpert")) == 2 and len(found.validation) == 1


def test_sites_of_feature_vectors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, classes in (("a", ["x", "y"]), ("b", ["y", "z"])):
        x, y = rng.random((40, 3)).astype(np.float32), np.eye(2, dtype=np.int8)[np.arange(40) % 2]
        arrays = {"x_train": x[:30], "y_train": y[:30], "x_test": x[30:], "y_test": y[30:]}
        np.savez(tmp_path / f"{name}.npz", **arrays, classes=np.array(classes))
    found = build({"sites": [{"name": name, "data": f"features:{tmp_path / name}.npz"} for name in ("a", "b")]})
    assert found.train.classes == ("x", "y", "z") and found.train.sample_shape == (3,)
    assert found.experiment.model.backbone == "mlp"


def test_tables_are_not_comparable(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    rows = [f"{number},{number % 2},{number // 2 % 2}" for number in range(30)]
    table.write_text("\n".join(["f,label:x,label:y", *rows]) + "\n")
    with pytest.raises(ConfigError, match="'a': a table's columns become numbers by its own rows"):
        build({"sites": [{"name": "a", "data": f"table:{table}"}]})


# Beginner's mistakes: each is one sentence


def site(number: int, **values: Any) -> Callable[[Values], None]:
    return lambda experiment: experiment["sites"][number].update(values)


def section(name: str, /, **values: Any) -> Callable[[Values], None]:
    return lambda experiment: experiment.setdefault(name, {}).update(values)


def named_without_sites(values: Values) -> None:
    values.pop("sites")
    values["data"]["name"] = "sites"


def two_spellings(values: Values) -> None:
    values.pop("study")
    values["sites"][1]["rename"] = {"sofa": "Couch "}


MISTAKES: dict[str, tuple[Callable[[Values], None], str]] = {
    "a name that the source does not have": (site(1, rename={"soffa": "couch"}), "names the class 'soffa'.*did you"),
    "a class that the study does not have": (site(1, rename={"sofa": "coach"}), "uses the class 'coach'.*did you"),
    "a name that is taken": (site(1, rename={"sofa": "dog"}), "makes 'sofa' the class 'dog', and voc:2007 has a class"),
    "a folder that does not exist": (site(0, root="/nowhere/coco"), "'coco': '/nowhere/coco' does not exist"),
    "another dataset's folder": (site(0, root="../voc"), "'coco': .*does not exist|'coco': The data of 'coco:2014'"),
    "a source that does not exist": (site(0, data="cocoo:2014"), "'coco': There is no data source called 'cocoo"),
    "a source without its year": (site(0, data="coco"), "'coco': 'coco' is not known; write coco:2014"),
    "two sites of one name": (site(0, name="voc"), "two sites have the name 'voc'"),
    "a name with blanks": (site(0, name="my site"), "sites: .*a site's name has"),
    "an unknown key": (site(0, renames={}), "renames"),
    "a window for 8-bit images": (site(0, window=[0, 4095]), "'coco': data.window is for"),
    "a setting of another source": (site(0, uncertain_labels="absent"), "'coco': data.uncertain_labels is for"),
    "too many clients": (site(0, partition={"kind": "iid", "clients": 500}), "'coco': partition.clients = 500 is more"),
    "no number of clients": (site(0, partition={"kind": "iid"}), "'coco': its partition needs the number of clients"),
    "an unknown partition": (site(0, partition={"kind": "idd", "clients": 2}), "idd"),
    "natural without clients": (site(0, partition={"kind": "natural"}), "'coco': partition.kind = 'natural' needs"),
    "a label that excludes and does not exist": (site(1, excludes={"nothing": "all"}), "excludes names the class"),
    "excluding a class of no study": (site(1, excludes={"dog": ["kat"]}), "excludes lists 'kat'.*did you mean 'cat'"),
    "a class of no site": (section("study", classes=[*CLASSES, "lion"]), "study.classes names 'lion', which no site"),
    "no common class": (section("study", classes=["zebra"]), "'voc': rename uses the class 'couch'"),
    "data beside sites": (section("data", name="digits"), "data.name = 'digits' and .* exclude each other"),
    "clients beside sites": (section("partition", clients=5), "partition.clients is for data from one source"),
    "kind beside sites": (section("partition", kind="iid"), "partition.kind is for data from one source"),
    "columns beside sites": (section("data", classes=["dog"]), "data.classes is for data from one source"),
    "annotation beside sites": (section("annotation", kind="one-class"), "the sources say which classes"),
    "the old section": (lambda values: values.update(sites={"classes": ["a"]}), "is called \\[study\\] now"),
    "no sites": (lambda values: values.update(sites=[]), "sites"),
    "named without sites": (named_without_sites, "needs \\[\\[sites"),
    "the same data twice": (
        lambda values: values["sites"].append({**values["sites"][0], "name": "again"}), "read the same data"
    ),
    "two spellings": (two_spellings, "'couch' and 'Couch ' differ only in their spelling"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_explained_in_one_sentence(both: Values, mistake: tuple[Callable[[Values], None], str]) -> None:
    change, said = mistake
    change(both)
    with pytest.raises(FedmllError, match=said) as error:
        build(both)
    assert "\n" not in str(error.value)


def test_different_image_sizes_need_a_common_one(both: Values) -> None:
    both["sites"].append({"name": "small", "data": "digits", "rename": {"zero": "dog"}})
    both["data"] = {}
    with pytest.raises(ConfigError, match=r"different shapes.*coco 3 × 20 × 20.*small 1 × 8 × 8.*Set data.size"):
        build(both)
    both["data"] = {"size": SIDE}
    assert build(both).train.sample_shape == (3, SIDE, SIDE)


# Commands


def write(values: Values, path: Path) -> Path:
    import tomli_w

    values["model"]["channels"] = list(values["model"]["channels"])
    path.write_text(tomli_w.dumps(values))
    return path


def test_describe_shows_the_matrix_of_sites_and_classes(both: Values, tmp_path: Path) -> None:
    file, table = write(both, tmp_path / "both.toml"), tmp_path / "labels.csv"
    result = CliRunner().invoke(
        app, ["data", "describe", str(file), "--out", str(tmp_path / "map.png"), "--csv", str(table)]
    )
    assert result.exit_code == 0, result.output
    lines = table.read_text().splitlines()
    shown = draw_things(30, 3)[:, 0].sum()
    assert lines[0] == "part,site,class,present,absent,unknown"
    assert f"training,voc,dog,{shown},{30 - shown},0" in lines
    assert "test,voc,zebra,0,0,12" in lines and len(lines) == 1 + 2 * 2 * 5
    cells = next(line for line in result.output.splitlines() if "airplane" in line and "/" in line)
    assert "–" in cells


def test_a_run_shows_and_stores_metrics_by_site(both: Values, tmp_path: Path) -> None:
    file, out = write(both, tmp_path / "both.toml"), tmp_path / "run"
    result = CliRunner().invoke(app, ["run", str(file), "--out", str(out), "--method", "fedavg-pl"])
    assert result.exit_code == 0, result.output
    assert "coco, only its own classes" in result.output and RENAME["sofa"] not in result.output.splitlines()[0]
    shown = CliRunner().invoke(app, ["show", str(out)]).output
    assert "shared classes" in shown
    page = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["report", str(out), "--out", str(page)]).exit_code == 0
    assert "voc, only its own classes" in page.read_text()


def test_exit_code_of_a_mistake(both: Values, tmp_path: Path, fedmll: Callable[..., Any]) -> None:
    both["sites"][1]["rename"] = {"sofa": "coach"}
    file = write(both, tmp_path / "both.toml")
    for command in (("run", file, "--out", tmp_path / "run"), ("data", "describe", file)):
        said = fedmll(*command)
        assert said.code == 2 and len(said.error.splitlines()) <= 4 and "coach" in said.error
