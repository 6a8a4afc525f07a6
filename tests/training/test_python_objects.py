"""Data, models, losses and metrics given as Python objects."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedmll
from fedmll.core import registry
from fedmll.core.errors import ConfigError, DataError, FedmllError
from fedmll.data.objects import register_data
from fedmll.data.sources import load

EXAMPLES = Path(__file__).parents[2] / "examples"
RNG = np.random.default_rng(3)
X = RNG.normal(size=(120, 6))
Y = (X[:, :3] > 0).astype(int)
IMAGES = RNG.integers(0, 256, size=(60, 8, 8, 3), dtype=np.uint8)
IMAGE_LABELS = (IMAGES.mean((1, 2)) > 127).astype(int)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    for kind, named in registry._registered.items():
        registry.all_of(kind)
        monkeypatch.setitem(registry._registered, kind, dict(named))


def splits_of(data: Any, **options: Any) -> Any:
    return load(register_data(data, **options))


def all_of(splits: Any) -> Any:
    """Samples and targets of all splits in the order of the data."""
    parts = [part for part in (splits.train, splits.validation, splits.test) if part is not None]
    rows = np.concatenate([part.rows for part in parts])
    order = np.argsort(rows)
    return parts[0].store[rows[order]], np.concatenate([part.labels for part in parts])[order]


class Items(torch.utils.data.Dataset):
    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, position: int) -> Any:
        return self.x[position], self.y[position]


def test_arrays_become_samples_and_targets() -> None:
    y = Y.astype(float)
    y[0, 1] = np.nan
    y[1, 2] = -1
    splits = splits_of((X, y))
    x, targets = all_of(splits)
    assert np.array_equal(x, X.astype(np.float32))
    expected = Y.astype(np.int8)
    expected[0, 1] = expected[1, 2] = -1
    assert np.array_equal(targets, expected)
    assert splits.train.classes == ("class 0", "class 1", "class 2")
    assert len(splits.test) == 24  # a fifth is drawn


def test_clients_groups_split_and_class_names_are_used() -> None:
    clients = np.array(["a", "b", "c"])[np.arange(120) % 3]
    groups = np.arange(120) // 2
    split = np.array(["train"] * 80 + ["validation"] * 20 + ["test"] * 20)
    names = ["x", "y", "z"]
    splits = splits_of({"x": X, "y": Y, "clients": clients, "groups": groups, "split": split, "classes": names})
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (80, 20, 20)
    assert splits.train.groups.tolist() == clients[:80].tolist()
    assert splits.train.patients.tolist() == [str(number) for number in groups[:80]]
    assert (splits.train.classes, splits.group) == (("x", "y", "z"), "groups")


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_data_frames_have_label_columns_and_features(library: str) -> None:
    module = pytest.importorskip(library)
    columns = {"age": X[:, 0], "client": ["a", "b"] * 60, "dose": X[:, 1], "label:ill": Y[:, 0], "label:well": Y[:, 1]}
    splits = splits_of(module.DataFrame(columns))
    x, targets = all_of(splits)
    assert np.array_equal(x, X[:, :2].astype(np.float32))
    assert np.array_equal(targets, Y[:, :2])
    assert splits.train.classes == ("ill", "well")
    assert set(splits.train.groups) == {"a", "b"}


def test_missing_labels_of_a_data_frame_are_unknown() -> None:
    pandas = pytest.importorskip("pandas")
    labels = pandas.Series([None, 1, 0] * 40, dtype=object)
    _, targets = all_of(splits_of(pandas.DataFrame({"a": X[:, 0], "ill": labels}), classes=["ill"]))
    assert targets[:3, 0].tolist() == [-1, 1, 0]


def test_torch_datasets_and_data_loaders() -> None:
    items = Items(torch.from_numpy(X), torch.from_numpy(Y))
    for data in (items, torch.utils.data.DataLoader(items, batch_size=7)):
        x, targets = all_of(splits_of(data))
        assert np.array_equal(x, X.astype(np.float32))
        assert np.array_equal(targets, Y)


def test_hugging_face_datasets_with_lists_of_class_numbers() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "vector": datasets.Sequence(datasets.Value("float32")),
            "labels": datasets.Sequence(datasets.ClassLabel(names=["cat", "dog", "cow"])),
        }
    )
    lists = [np.flatnonzero(row).tolist() for row in Y]
    made = datasets.Dataset.from_dict({"vector": X.tolist(), "labels": lists}, features=features)
    splits = splits_of(datasets.DatasetDict({"train": made, "test": made}))
    assert splits.train.classes == ("cat", "dog", "cow")
    assert np.array_equal(splits.test.labels, Y)


def test_one_dataset_per_client_with_different_classes() -> None:
    parts = [
        {"x": X[:60], "y": Y[:60, :2], "classes": ["a", "b"]},
        {"x": X[60:], "y": Y[60:, 1:], "classes": ["b", "c"]},
    ]
    splits = splits_of(parts)
    _, targets = all_of(splits)
    assert splits.train.classes == ("a", "b", "c")
    assert (targets[:60, 2] == -1).all()
    assert (targets[60:, 0] == -1).all()
    assert np.array_equal(targets[60:, 1], Y[60:, 1])
    assert set(splits.train.groups) == {"c000", "c001"}


def test_images_in_all_layouts_are_the_same() -> None:
    expected, _ = all_of(splits_of((IMAGES, IMAGE_LABELS)))
    assert np.array_equal(expected, IMAGES.transpose(0, 3, 1, 2))
    for images in (IMAGES.transpose(0, 3, 1, 2), IMAGES / 255, torch.from_numpy(IMAGES)):
        assert np.array_equal(all_of(splits_of((images, IMAGE_LABELS)))[0], expected)
    grey, _ = all_of(splits_of((IMAGES[..., 0], IMAGE_LABELS)))
    assert np.array_equal(grey[:, 0], IMAGES[..., 0])


def test_the_name_follows_from_the_content() -> None:
    assert register_data((X, Y)) == register_data((X.copy(), Y.copy()))
    assert register_data((X, Y)) != register_data((X, 1 - Y))
    assert register_data((X, Y)) != register_data((X, Y), classes=["a", "b", "c"])


def test_run_with_arrays_a_model_a_loss_and_a_metric() -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))

    def loss(logits: Any, targets: Any) -> Any:
        return nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")

    def positives(scores: Any, targets: Any) -> float:
        return 100 * float((targets == 1).mean())

    arguments = {"data": (X, Y), "method": "fedavg", "rounds": 2, "clients": 3}
    result = fedmll.run(**arguments, model=net, loss=loss, metrics={"share": positives})
    assert result.summary["parameters"] == 6 * 5 + 5 + 5 * 3 + 3  # the last layer of the network is the head
    assert 30 < result.summary["metrics"]["share"] < 70
    assert result.summary["clients"] == 3


def test_a_function_builds_the_model_from_the_seed(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Linear(6, 4)

    def run(seed: int, name: str) -> Any:
        fedmll.run(None, tmp_path / name, data=(X, Y), model=build, rounds=1, clients=2, seed=seed)
        return fedmll.load_model(tmp_path / name / "model.safetensors", model=build).weights

    first, again, other = run(0, "a"), run(0, "b"), run(1, "c")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_resume_needs_the_same_objects(tmp_path: Path) -> None:
    net, out = nn.Linear(6, 4), tmp_path / "run"
    fedmll.run(None, out, data=(X, Y), model=net, rounds=1, clients=2)
    with pytest.raises(ConfigError, match="another one"):
        fedmll.resume(out, rounds=2, data=(X, 1 - Y), model=net)
    result = fedmll.resume(out, rounds=2, data=(X, Y), model=net)
    whole = fedmll.run(None, tmp_path / "whole", data=(X, Y), model=net, rounds=2, clients=2)
    assert result.summary["metrics"] == whole.summary["metrics"]


def test_objects_of_another_process_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(logits: Any, targets: Any) -> Any:
        return nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")

    out, net = tmp_path / "run", nn.Linear(6, 4)
    fedmll.run(None, out, data=(X, Y), model=net, loss=loss, rounds=1, clients=2)
    objects = {kind: dict(named) for kind, named in registry._registered.items()}
    for kind, named in objects.items():
        kept = {name: thing for name, thing in named.items() if not name.startswith("object-")}
        monkeypatch.setitem(registry._registered, kind, kept)
    with pytest.raises(ConfigError, match=r"fedmll\.resume\(FOLDER, loss=…\)"):
        fedmll.resume(out, rounds=2)
    with pytest.raises(ConfigError, match=r"fedmll\.resume\(FOLDER, data=…\)"):
        fedmll.resume(out, rounds=2, loss=loss)
    with pytest.raises(ConfigError, match=r"load_model\(FILE, model=…\)"):
        fedmll.load_model(out / "model.safetensors").predict(X[:2].astype(np.float32))
    assert fedmll.load_run(out).summary["rounds"] == 1  # results can be read without them
    monkeypatch.delitem(registry._registered["loss"], "object-loss")  # predictions need the model and not the loss
    model = fedmll.load_model(out / "model.safetensors", model=net)
    assert model.predict(X[:2].astype(np.float32)).shape == (2, 3)


def test_a_convolutional_module_and_workers() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    arguments = {"data": (IMAGES, IMAGE_LABELS), "model": net, "rounds": 1, "clients": 2}
    alone, workers = (fedmll.run(**arguments, settings={"engine.workers": n}).summary["metrics"] for n in (0, 2))
    assert alone == workers


def test_the_name_alone_stands_for_a_section() -> None:
    made = fedmll.Experiment.make({"method": "fedprox", "data": "digits"})
    assert (made.method.name, made.data.name) == ("fedprox", "digits")


class Output:
    last_hidden_state = torch.zeros(2, 5, 7)


class HuggingFaceLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 7)

    def forward(self, x: Any) -> Any:
        output = Output()
        output.last_hidden_state = self.layer(x)[:, None].expand(-1, 5, -1)
        return output


def test_outputs_of_hugging_face_models_are_tokens() -> None:
    result = fedmll.run(data=(X, Y), model=HuggingFaceLike(), rounds=1, clients=2)
    assert result.summary["parameters"] == 6 * 7 + 7 + 7 * 3 + 3


class Scalar(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.sum()


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "one array": ({"data": X}, "must be .x, y. arrays"),
    "three arrays": ({"data": (X, Y, Y)}, "tuple of 3"),
    "different lengths": ({"data": (X, Y[:-1])}, "x has 120 samples and y has 119"),
    "text": ({"data": (np.array([["a"]] * 3), Y[:3])}, "must be vectors"),
    "NaN": ({"data": (np.where(X > 2, np.nan, X), Y)}, "NaN or infinite"),
    "a label of 2": ({"data": (X, Y + 1)}, "must be"),
    "a label of 0.5": ({"data": (X, Y / 2)}, "has 0.5 for class"),
    "a key": ({"data": {"x": X, "labels": Y}}, "key 'labels'"),
    "no y": ({"data": {"x": X}}, "lacks 'y'"),
    "clients": ({"data": {"x": X, "y": Y, "clients": ["a"]}}, "one per sample"),
    "a split": ({"data": {"x": X, "y": Y, "split": ["dev"] * 120}}, "train, validation or test"),
    "no test split": ({"data": {"train": (X, Y)}}, "no 'test'"),
    "an empty list": ({"data": []}, "empty list"),
    "items": ({"data": Items(X, Y).x.tolist()[:1]}, "list"),
    "class names": ({"data": (X, Y), "classes": ["a", "b"]}, "2 classes"),
    "a class twice": ({"data": (X, Y), "classes": ["a", "b", "b"]}, "twice"),
    "pixels": ({"data": (IMAGES * 3.0, IMAGE_LABELS)}, "pixels must be"),
    "a loss of one number": ({"data": (X, Y), "loss": nn.BCEWithLogitsLoss()}, "per sample and class"),
    "no loss": ({"data": (X, Y), "loss": 3}, "loss is a int"),
    "a metric of a vector": ({"data": (X, Y), "metrics": {"m": lambda s, t: s}}, "one number"),
    "a metric with one parameter": ({"data": (X, Y), "metrics": {"m": lambda s: 1}}, "scores, targets"),
    "a model for other samples": ({"data": (X, Y), "model": nn.Linear(9, 4)}, "fails on a batch of shape"),
    "a model of one number": ({"data": (X, Y), "model": Scalar()}, "must return"),
    "no model": ({"data": (X, Y), "model": 3}, "must be a torch module"),
    "a class instead of a model": ({"data": (X, Y), "model": nn.Linear}, "without arguments"),
    "a function without a model": ({"data": (X, Y), "model": lambda: 3}, "must return a torch module"),
    "weights": ({"data": (X, Y), "model": nn.Linear(6, 4), "settings": {"model.weights": "run:x"}}, "weights"),
    "a method": ({"data": (X, Y), "method": "fedporx"}, "fedprox"),
    "a setting": ({"data": (X, Y), "settings": {"training.lrr": 1}}, "lr"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(name: str) -> None:
    arguments, expected = MISTAKES[name]
    with pytest.raises(FedmllError, match=expected):
        fedmll.run(**{"rounds": 1, "clients": 2, **arguments})


@pytest.mark.parametrize("item", [X[0], (X[0], Y[0], 1)])
def test_items_of_a_dataset_must_be_pairs(item: Any) -> None:
    class OneItem(Items):
        def __getitem__(self, position: int) -> Any:
            return item

    with pytest.raises(DataError, match=r"every item must be \(x, y\)"):
        register_data(OneItem([0], [0]))


@pytest.mark.parametrize("name", ["arrays", "own_model", "hugging_face_dataset"])
def test_examples_run_and_are_short(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "hugging_face_dataset":
        pytest.importorskip("datasets")
    file = EXAMPLES / f"{name}.py"
    assert len(file.read_text().splitlines()) <= 20
    runpy.run_path(str(file), run_name="__main__")
    assert "macro_auc" in capsys.readouterr().out
