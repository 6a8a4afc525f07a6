"""A finished run and its model, used where nothing of the training is left: no data, no weights file, no experiment."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedmll import load_model, load_run, resume, run
from fedmll.core.errors import ConfigError, DataError
from fedmll.data.federation import Federation, build
from fedmll.evaluation.thresholds import best_thresholds
from fedmll.inference.image_predictions import decode_batches, find_images, read_pixels
from fedmll.inference.model_file import write_model
from fedmll.models.pretrained_weights import METADATA_KEY
from fedmll.runs.array_files import read_predictions
from fedmll.runs.run_folder import MODEL_FILE, PREDICTIONS_FILE


@pytest.fixture(scope="module")
def ctran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ctran") / "run"
    run(small(method__name="fedctran", method__layers=1, training__rounds=1), folder)
    return folder


def own_images(folder: Path) -> Path:
    """Forty colour pictures of 12 × 10, and their labels."""
    generator = np.random.default_rng(0)
    lines = ["image,red,blue,split"]
    for place in range(40):
        labels = generator.integers(0, 2, 2)
        pixels = generator.integers(0, 60, (10, 12, 3), dtype=np.uint8)
        pixels[:, :, 0] += 190 * labels[0].astype(np.uint8)
        pixels[:, :, 2] += 190 * labels[1].astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{place:02d}.png")
        split = "test" if place < 10 else "validation" if place < 16 else "train"
        lines.append(f"{place:02d}.png,{labels[0]},{labels[1]},{split}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    return own_images(folder)


def from_pictures(folder: Path, **more: object):  # type: ignore[no-untyped-def]
    name = f"folder:{folder / 'labels.csv'}"
    return small(
        data__name=name, data__limit=None, data__size=(8, 8), partition__clients=2, training__batch_size=4, **more
    )


def test_moved_run_predicts_without_its_data(pictures: Path, tmp_path: Path) -> None:
    """Then the model still sees the very pixels of the training: its probabilities of the files are the kept ones."""
    run(from_pictures(pictures), tmp_path / "run")
    elsewhere = tmp_path / "mail"
    elsewhere.mkdir()
    for place in range(10):
        shutil.copy(pictures / f"{place:02d}.png", elsewhere)
    shutil.rmtree(pictures)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    saved = load_run(tmp_path / "moved")
    kept = saved.predictions()
    assert [kept.name(place) for place in range(10)] == [f"{place:02d}.png" for place in range(10)]
    found = saved.predict([elsewhere / kept.name(place) for place in range(10)])
    np.testing.assert_allclose(found, kept.probabilities, atol=1e-6)
    assert saved.classes == kept.classes == ("red", "blue")
    (tmp_path / "moved" / MODEL_FILE).rename(tmp_path / "alone.safetensors")
    shutil.rmtree(tmp_path / "moved")
    alone = load_model(tmp_path / "alone.safetensors")
    np.testing.assert_array_equal(alone.predict(elsewhere / "03.png")[0], found[3])
    text = json.dumps(alone.description)
    assert str(tmp_path) not in text and "folder:labels.csv" in text


def test_model_file_contains_all_that_prediction_needs(ctran: Path, small_federation: Federation) -> None:
    with safe_open(ctran / MODEL_FILE, "pt") as opened:
        described = json.loads(opened.metadata()[METADATA_KEY])
    assert described["method"] == "fedctran" and described["head"] == "ctran" and described["takes_known_labels"]
    assert described["sample_shape"] == [1, 16, 16] and described["pixels"] == {"mean": [0.5], "std": [0.5]}
    assert described["classes"] == list(small_federation.test.classes)
    assert described["experiment"]["method"]["layers"] == 1
    assert described["round"] == 1 and described["clients"] == 4
    assert described["versions"]["torch"] == torch.__version__


def test_predictions_thresholds_and_tables_are_stored(ctran: Path, small_federation: Federation) -> None:
    data, saved = small_federation, load_run(ctran)
    test, validation = saved.predictions(), saved.predictions("validation")
    np.testing.assert_array_equal(test.probabilities, saved.predict(data.test))
    np.testing.assert_array_equal(test.targets, data.test.labels)
    np.testing.assert_array_equal(validation.targets, data.validation.labels)
    np.testing.assert_array_equal(validation.rows, data.validation.rows)
    assert test.name(3) == f"sample {data.test.rows[3]}" and len(test) == len(data.test)
    tuned = saved.model.tuned_thresholds
    np.testing.assert_array_equal(tuned, best_thresholds(validation.probabilities, validation.targets))
    assert saved.rows["round"].tolist() == [1] and saved.per_class["class"].tolist() == list(saved.classes)
    assert saved.per_class["ap"].mean() == pytest.approx(saved.metrics["map"], abs=1e-3)
    with pytest.raises(DataError, match="no predictions for held_out data"):
        saved.predictions("held_out")


def test_tables_without_pandas_are_lists(ctran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    saved = load_run(ctran)
    assert saved.rows[0]["round"] == 1
    assert saved.per_class[0]["class"] == "zero" and isinstance(saved.per_class[0]["positives"], int)
    assert isinstance(saved.per_class[0]["ap"], float)


def test_without_validation_data_nothing_is_tuned(tmp_path: Path) -> None:
    run(small(partition__holdout=0.0, training__rounds=1), tmp_path / "run")
    assert load_run(tmp_path / "run").model.tuned_thresholds is None


def test_known_labels_are_used_or_rejected(ctran: Path, small_federation: Federation, tmp_path: Path) -> None:
    saved, test = load_run(ctran), small_federation.test
    without, told = saved.predict(test), saved.predict(test, known={"two": 1, "five": 0})
    assert (told[:, 2] == 1).all() and (told[:, 5] == 0).all()
    assert not np.allclose(told[:, 0], without[:, 0])
    states = np.full((len(test), 10), -1)
    states[:, 2], states[:, 5] = 1, 0
    np.testing.assert_array_equal(saved.predict(test, known=states), told)
    np.testing.assert_allclose(saved.predict(test, known=np.full((len(test), 10), -1)), without, atol=1e-6)
    with pytest.raises(ConfigError, match="no class 'tow'; did you mean 'two'"):
        saved.predict(test, known={"tow": 1})
    for wrong in (states[:1], states + 5):
        with pytest.raises(ConfigError, match="known labels must be"):
            saved.predict(test, known=wrong)
    run(small(training__rounds=1), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"'fedavg', head 'linear'\) cannot use known labels"):
        load_run(tmp_path / "run").predict(test, known={"two": 1})


def test_a_frozen_backbone_is_in_the_file(tmp_path: Path) -> None:
    """Its weights file is deleted; another seed's backbone would give other numbers."""
    run(small(training__rounds=1, seed=5), tmp_path / "first")
    made = small(model__weights=f"run:{tmp_path / 'first'}", model__freeze="backbone", model__width=8)
    data = build(made)
    run(made, tmp_path / "run", prepared=data)
    kept = load_run(tmp_path / "run").predictions()
    shutil.rmtree(tmp_path / "first")
    model = load_model(tmp_path / "run" / MODEL_FILE)
    np.testing.assert_allclose(model.predict(data.test), kept.probabilities, atol=1e-5)
    frozen = model.description["frozen"]
    assert frozen and all(name.startswith("backbone.blocks") for name in frozen)
    assert model.description["initial_weights"] == "run:first"


def test_label_embeddings_and_the_layout_of_a_transformer_are_in_the_file(tmp_path: Path) -> None:
    """The encoder's file and the folder of the transformer are gone."""
    library = pytest.importorskip("transformers")
    config = library.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, image_size=32, patch_size=8
    )
    library.ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "vit")
    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    vectors = np.random.default_rng(1).standard_normal((10, 16))
    np.savez(tmp_path / "texts.npz", labels=vectors, labels_names=np.array(names))
    made = small(
        method__name="fedlgt",
        method__encoder=f"file:{tmp_path / 'texts.npz'}",
        method__layers=1,
        model__backbone="vit",
        model__weights=str(tmp_path / "vit"),
        training__rounds=1,
    )
    data = build(made)
    run(made, tmp_path / "run", prepared=data)
    kept = load_run(tmp_path / "run").predictions()
    shutil.rmtree(tmp_path / "vit")
    (tmp_path / "texts.npz").unlink()
    model = load_model(tmp_path / "run" / MODEL_FILE)
    assert model.description["frozen"] == ["labels"] and model.description["layout"]["intermediate_size"] == 48
    np.testing.assert_allclose(model.predict(data.test), kept.probabilities, atol=1e-6)


def changed(source: Path, file: Path, **facts: object) -> Path:
    """The same tensors with another description."""
    with safe_open(source / MODEL_FILE, "pt") as opened:
        described = json.loads(opened.metadata()[METADATA_KEY])
    write_model(file, load_file(source / MODEL_FILE), described | facts)
    return file


def test_unusable_files_are_rejected_with_a_reason(ctran: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"format version 9, and this fedmll reads version 1.*by fedmll 7.0"):
        load_model(changed(ctran, tmp_path / "later.safetensors", format=9, versions={"fedmll": "7.0"}))
    whole = (ctran / MODEL_FILE).read_bytes()
    for length in (len(whole) - 100, 50, 3, 0):
        (tmp_path / "cut.safetensors").write_bytes(whole[:length])
        with pytest.raises(DataError, match="not a complete model file"):
            load_model(tmp_path / "cut.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ConfigError, match="does not say what model it is"):
        load_model(tmp_path / "foreign.safetensors")
    with pytest.raises(ConfigError, match="There is no model file"):
        load_model(tmp_path / "none.safetensors")
    other = changed(ctran, tmp_path / "other.safetensors", sample_shape=[3, 16, 16])
    with pytest.raises(ConfigError, match=r"does not hold the model that it describes: 1 of \d+ tensors"):
        load_model(other).predict(np.zeros((1, 3, 16, 16), np.uint8))
    with pytest.raises(ConfigError, match=r"takes samples of shape \(1, 16, 16\), and these are \(1, 8, 8\)"):
        load_run(ctran).predict(np.zeros((1, 1, 8, 8), np.uint8))
    with pytest.raises(ConfigError, match="holds no run"):
        load_run(tmp_path)
    shutil.copytree(ctran, tmp_path / "half")
    (tmp_path / "half" / PREDICTIONS_FILE).write_bytes((ctran / PREDICTIONS_FILE).read_bytes()[:200])
    with pytest.raises(DataError, match=r"predictions\.npz is damaged .* writes it again"):
        load_run(tmp_path / "half").predictions()
    (tmp_path / "half" / "summary.json").unlink()
    with pytest.raises(ConfigError, match="no finished run; continue"):
        load_run(tmp_path / "half")


def test_resume_writes_deleted_files_again(ctran: Path, tmp_path: Path) -> None:
    shutil.copytree(ctran, tmp_path / "run")
    for name in (MODEL_FILE, PREDICTIONS_FILE):
        (tmp_path / "run" / name).unlink()
    with pytest.raises(DataError, match="no stored predictions"):
        read_predictions(tmp_path / "run" / PREDICTIONS_FILE)
    resume(tmp_path / "run")
    for name in (MODEL_FILE, PREDICTIONS_FILE):
        assert (tmp_path / "run" / name).read_bytes() == (ctran / name).read_bytes()


PLUGIN = """
from fedmll import Method

class Mine(Method):
    name = "mine-saved"
"""


def test_plugins_are_passed_by_the_user_and_never_loaded_because_a_file_names_them(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    run(small(plugins=[str(tmp_path / "mine.py")], method__name="mine-saved", training__rounds=1), tmp_path / "run")
    assert load_model(tmp_path / "run" / MODEL_FILE).description["plugins"] == ["mine.py"]
    (tmp_path / "mine.py").rename(tmp_path / "moved.py")
    blank = np.zeros((1, 1, 16, 16), np.uint8)
    with pytest.raises(ConfigError, match="does not exist"):
        load_run(tmp_path / "run").predict(blank)
    assert load_run(tmp_path / "run", plugins=[tmp_path / "moved.py"]).predict(blank).shape == (1, 10)


def test_images_are_predicted_in_order_and_unreadable_ones_have_a_reason(pictures: Path) -> None:
    (pictures / "11.png").write_bytes((pictures / "12.png").read_bytes()[:60])
    (pictures / "13.png").write_text("no image")
    Image.fromarray(np.full((4, 4), 4000, np.uint16)).save(pictures / "14.png")
    paths = [*find_images([pictures])[0], pictures / "missing.png"]
    assert [path.name for path in paths[:3]] == ["00.png", "01.png", "02.png"] and len(paths) == 41
    batches = list(decode_batches(paths, (3, 8, 8), None, 7))
    assert [len(batch) for batch in batches] == [7] * 5 + [6]
    found = [entry for batch in batches for entry in batch]
    assert [path for path, _ in found] == paths
    reasons = {path.name: pixels for path, pixels in found if isinstance(pixels, str)}
    assert reasons.keys() == {"11.png", "13.png", "14.png", "missing.png"}
    assert (
        reasons["13.png"] == "not an image in a supported format"
        and reasons["missing.png"] == "No such file or directory"
    )
    assert "more than 8 bits" in reasons["14.png"]
    assert read_pixels(pictures / "14.png", (1, 4, 4), (0.0, 8000.0)).max() == 128  # type: ignore[union-attr]
    (pictures / "empty").mkdir()
    with pytest.raises(DataError, match="holds no images"):
        find_images([pictures / "empty"])


def test_model_of_feature_vectors_rejects_images(ctran: Path) -> None:
    model = load_model(ctran / MODEL_FILE)
    features = replace(model, description=model.description | {"sample_shape": [7]})
    with pytest.raises(ConfigError, match="feature vectors of width 7"):
        next(features.stream([Path("x.png")]))
