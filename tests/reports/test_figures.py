"""The numbers behind the figures of a model, by hand or with NumPy, and that these numbers are drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from safetensors.torch import load_file

from fedmll import load_run, run
from fedmll.data.dataset import Dataset
from fedmll.data.federation import Federation
from fedmll.inference.load_run import SavedRun
from fedmll.models.class_attention import positional_encoding
from fedmll.reports.figure import TEXT_COLOUR, ReportFigure, new_figure, show_image
from fedmll.reports.figures import (
    attention,
    class_features,
    image_sheets,
    label_correlation,
    label_coverage,
    pseudo_labels,
)
from fedmll.reports.figures.class_features import ClassFeatures
from fedmll.runs.run_folder import RunFolder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_federation: Federation) -> dict[str, SavedRun]:
    """Of the same data: a linear head, the LADM, C-Tran, the sphere."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    wide = {"model__channels": (4, 16)}
    for name, options in {"fedharmony": {}, "fednca-ml": wide, "fedctran": {}, "spherefed": wide}.items():
        run(small(method__name=name, **options), folder / name, prepared=small_federation)
        found[name] = load_run(folder / name)
    return found


def drawn(figure: ReportFigure, panel: int = 0) -> np.ndarray[Any, Any]:
    """What the first image of a panel shows."""
    return np.ma.filled(figure.figure.axes[panel].images[0].get_array().astype(float), np.nan)


def features_of(vectors: np.ndarray[Any, Any], classes: np.ndarray[Any, Any]) -> ClassFeatures:
    return ClassFeatures(vectors=vectors, classes=classes, per_class=False, images=len(vectors))


def pairs(matrix: np.ndarray[Any, Any]) -> list[float]:
    return matrix[np.triu_indices(len(matrix), 1)].tolist()


def test_cosines_by_hand() -> None:
    found = class_features.cosines(np.array([[2, 0], [1, 1], [0, 0], [-3, 0]], np.float32))
    root = 0.5**0.5
    assert found[0].tolist() == pytest.approx([1, root, np.nan, -1], nan_ok=True)
    assert np.isnan(found[2]).all() and found[1, 3] == pytest.approx(-root)


@pytest.mark.parametrize(
    ("method", "vectors"),
    [
        ("fedharmony", {"classifier rows": "head.weight"}),
        ("fednca-ml", {"classifier rows": "prototypes"}),
        ("spherefed", {"classifier rows": "classifier"}),
        ("fedctran", {"label embeddings": "labels", "classifier rows": "weight"}),
    ],
)
def test_class_vectors_of_the_head(runs: dict[str, SavedRun], method: str, vectors: dict[str, str]) -> None:
    figure = class_features.class_vector_figure(runs[method])
    assert figure is not None and figure.name == "class-vectors"
    weights = load_file(runs[method].path / "model.safetensors")
    for panel, (name, tensor) in enumerate(vectors.items()):
        rows = weights[tensor].double().numpy()
        length = np.sqrt((rows**2).sum(1))
        expected = rows @ rows.T / np.outer(length, length)
        assert [row[name] for row in figure.rows] == pytest.approx(pairs(expected))
        assert pairs(drawn(figure, panel)) == pytest.approx(pairs(expected))
    assert (figure.rows[0]["class"], figure.rows[0]["other"]) == ("zero", "one")
    if method == "fednca-ml":  # a simplex: every pair at the largest angle that ten classes can have
        assert [row["classifier rows"] for row in figure.rows] == pytest.approx([-1 / 9] * 45, abs=1e-6)
        assert "every cosine would be -0.11" in figure.caption and "classifier rows -0.11." in figure.caption


def test_mean_features_by_hand(runs: dict[str, SavedRun]) -> None:
    """Class zero has the mean (2, 0), one (1, 1); nobody shows another."""
    of = np.zeros((3, 10), dtype=bool)
    of[0, 0] = of[1, 0] = of[1, 1] = of[2, 1] = True
    vectors = np.array([[1, -1], [3, 1], [-1, 1]], np.float32)
    figure = class_features.class_feature_figure(runs["fedharmony"], features_of(vectors, of))
    assert figure is not None
    assert figure.rows == [{"class": "zero", "other": "one", "mean features": pytest.approx(0.5**0.5)}]
    of[:, 1] = False
    assert class_features.class_feature_figure(runs["fedharmony"], features_of(vectors, of)) is None


def test_features_of_whole_images(runs: dict[str, SavedRun], small_federation: Federation) -> None:
    found = class_features.compute_class_features(runs["fedharmony"], small_federation.test)
    assert found is not None and not found.per_class
    test, trainer = small_federation.test, runs["fedharmony"].trainer
    assert np.array_equal(found.classes, test.labels == 1)  # every image of this data shows something
    with torch.no_grad():
        images = torch.from_numpy(test.samples(slice(None))).float() / 255
        expected = trainer.model.backbone(trainer.task.normalise(images)).mean((2, 3)).numpy()
    assert np.allclose(found.vectors, expected, atol=1e-5)


@pytest.mark.parametrize("method", ["fednca-ml", "fedctran"])
def test_features_of_classes(runs: dict[str, SavedRun], small_federation: Federation, method: str) -> None:
    test, trainer = small_federation.test, runs[method].trainer
    found = class_features.compute_class_features(runs[method], test)
    assert found is not None and found.per_class and found.images == len(test)
    with torch.no_grad():
        images = trainer.task.preprocess(torch.from_numpy(test.samples(slice(None))))
        every = trainer.model.features(images).numpy()
    expected = [(every[i, c], c) for i in range(len(test)) for c in range(10) if test.labels[i, c] == 1]
    assert np.allclose(found.vectors, np.stack([vector for vector, _ in expected]), atol=1e-5)
    assert found.classes.argmax(1).tolist() == [label for _, label in expected] and (found.classes.sum(1) == 1).all()


def test_tsne(runs: dict[str, SavedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two far clusters stay apart; what has two labels is grey; the same twice; what is drawn are the rows."""
    monkeypatch.setattr(class_features, "MAX_POINTS", 30)
    rng = np.random.default_rng(0)
    kind = np.arange(40) % 2
    vectors = (rng.normal(size=(40, 5)) + 50 * kind[:, None]).astype(np.float32)
    of = np.eye(10, dtype=bool)[kind]
    of[:4, 7] = True
    features = features_of(vectors, of)
    first, second = (class_features.tsne_figure(runs["fedharmony"], features) for _ in range(2))
    assert first is not None and second is not None and first.rows == second.rows
    assert len(first.rows) == 30 and {row["class"] for row in first.rows} == {"zero", "one", "several labels"}
    places = {name: np.array([[r["x"], r["y"]] for r in first.rows if r["class"] == name]) for name in ("zero", "one")}
    centres = {name: found.mean(0) for name, found in places.items()}
    apart = np.linalg.norm(centres["zero"] - centres["one"])
    assert all(np.linalg.norm(found - centres[name], axis=1).max() < apart / 2 for name, found in places.items())
    shown = {c.get_label(): np.asarray(c.get_offsets()) for c in first.figure.axes[0].collections}
    assert all(np.allclose(shown[name], found) for name, found in places.items()) and "several labels" in shown
    assert class_features.tsne_figure(runs["fedharmony"], features_of(vectors[:11], of[:11])) is None


def test_attention_of_the_ladm(runs: dict[str, SavedRun], small_federation: Federation) -> None:
    """softmax(q kᵀ / √d) of each head from the weights in the file, then the mean over the four heads."""
    saved, test = runs["fednca-ml"], small_federation.test
    found = attention.attention_maps(saved, test)
    figure = attention.attention_figure(saved, test)
    assert figure is not None and len({one.sample for one in found}) == 4
    file, trainer = load_file(saved.path / "model.safetensors"), saved.trainer
    for one in found:
        assert test.labels[one.sample, one.label] == 1 and one.share == pytest.approx(1, abs=1e-5)
    one = found[-1]
    with torch.no_grad():
        image = trainer.task.preprocess(torch.from_numpy(test.samples(np.array([one.sample]))))
        tokens = trainer.model.tokens(image)
    rows, columns = tokens.shape[2:]
    sequence = (tokens + positional_encoding(16, rows, columns, torch.device("cpu")))[0].flatten(1).T.double()
    query = file["prototypes"][one.label].double() @ file["ladm.attention.query.weight"].double().T
    query = (query + file["ladm.attention.query.bias"]).view(4, 4)
    key = (
        sequence @ file["ladm.attention.key_value.weight"][:16].double().T + file["ladm.attention.key_value.bias"][:16]
    )
    scores = np.einsum("hd,shd->hs", query.numpy(), key.view(-1, 4, 4).numpy()) / 2
    weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    assert np.allclose(one.weights, weights.mean(0).reshape(rows, columns), atol=1e-5)
    assert [row["share"] for row in figure.rows[-one.weights.size :]] == one.weights.ravel().tolist()
    panel = [axes for axes in figure.figure.axes if len(axes.images) == 2][-1]
    assert np.array_equal(panel.images[1].get_array(), one.weights)
    assert panel.get_title() == saved.classes[one.label]
    assert np.array_equal(panel.images[0].get_array(), test.samples(np.array([one.sample]))[0, 0])


def test_attention_of_c_tran(runs: dict[str, SavedRun], small_federation: Federation) -> None:
    saved, test = runs["fedctran"], small_federation.test
    trainer, found = saved.trainer, attention.attention_maps(saved, test)
    with torch.no_grad():
        image = trainer.task.preprocess(torch.from_numpy(test.samples(np.array([found[0].sample]))))
        expected = trainer.model.class_maps(image)[0, :, found[0].label].mean(0)
    assert np.allclose(found[0].weights, expected.numpy(), atol=1e-6)
    assert 0 < found[0].share < 0.999
    figure = attention.attention_figure(saved, test)
    assert figure is not None and "on the label tokens" in figure.caption


def test_no_attention_figure_without_attention(runs: dict[str, SavedRun], small_federation: Federation) -> None:
    assert attention.attention_figure(runs["fedharmony"], small_federation.test) is None


def test_examples(runs: dict[str, SavedRun], small_federation: Federation) -> None:
    """The probabilities are the kept ones, the images those that are named; of a class that is neither true nor given
    there is nothing."""
    saved, test = runs["fedharmony"], small_federation.test
    figure, kept = image_sheets.example_figure(saved, test), saved.predictions()
    assert figure is not None
    names = list(dict.fromkeys(row["image"] for row in figure.rows))
    assert len(names) == 12
    place = {kept.name(sample): sample for sample in range(len(kept))}
    said = {(row["image"], row["class"]): row for row in figure.rows}
    for name in names:
        for label, (p, target) in enumerate(
            zip(kept.probabilities[place[name]], kept.targets[place[name]], strict=True)
        ):
            row = said.get((name, saved.classes[label]))
            assert (row is not None) == (target == 1 or p > 0.5)
            if row is not None:
                assert row["probability"] == pytest.approx(p, abs=1e-6) and row["predicted"] == (p > 0.5)
                assert row["truth"] == ("present" if target == 1 else "absent")
    for axes, name in zip(figure.figure.axes, names, strict=True):
        assert np.array_equal(axes.images[0].get_array(), test.samples(np.array([place[name]]))[0, 0])


def test_marks_of_examples() -> None:
    marks = [("present", True), ("present", False), ("absent", True), ("unknown", True)]
    said = [image_sheets._mark({"truth": truth, "predicted": predicted})[0] for truth, predicted in marks]
    assert said == ["✓", "−", "+", "?"]


@pytest.mark.parametrize("method", ["fedharmony", "fednca-ml"])
def test_correlation_figure_agrees_with_the_stored_predictions(
    runs: dict[str, SavedRun], small_federation: Federation, method: str
) -> None:
    """As `write_run_correlations` gives it from the data itself, in the order of the blocks."""
    figure = label_correlation.correlation_figure(runs[method])
    found = label_correlation.write_run_correlations(runs[method].path, small_federation)
    assert figure is not None
    matrices = {"learned": found.learned, "consensus": found.consensus, "true": found.true}
    panels = [name for name, matrix in matrices.items() if matrix is not None]
    assert ("consensus" in panels) == (method == "fedharmony")
    order = np.argsort(found.blocks, kind="stable")
    for panel, name in enumerate(panels):
        expected = pairs(matrices[name][np.ix_(order, order)])
        assert [row[name] for row in figure.rows] == pytest.approx(expected, abs=1e-5)
        assert pairs(drawn(figure, panel)) == pytest.approx(expected, abs=1e-5)
    assert (figure.rows[0]["class"], figure.rows[0]["other"]) == tuple(found.classes[c] for c in order[:2])


def by_hand(folder: Path, rows: list[dict[str, Any]], records: dict[int, dict[str, Any]]) -> SavedRun:
    """A run's folder with these rows and records, of the classes a, b and c."""
    (folder / "records").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number, tensors in records.items():
        RunFolder(folder).write_records(number, {k: torch.tensor(v) for k, v in tensors.items()})
    return SavedRun(folder, {"classes": ["a", "b", "c"], "seed": 0})


ROWS = [
    {"round": 1, "loss": 0.5},
    {"round": 2, "tags_0": 0.0, "tags_1": 0.0},
    {"round": 3, "tags_0": 3.0, "tags_1": 0.0, "tag_precision": 75.0, "tag_precision_0": 75.0},
    {"round": 4, "tags_0": 5.0, "tags_1": 2.0, "tag_precision": 70.0, "tag_precision_0": 80.0, "tag_precision_1": 50.0},
]


def test_pseudo_labels_of_a_simulation(tmp_path: Path) -> None:
    """Counts are of all clients (the round's own may be fewer); a precision of nothing is nothing."""
    made = {3: [[4, 0, 0], [0, 0, 0]], 4: [[4, 6, 0], [1, 0, 3]]}
    true = {3: [[3, 0, 0], [0, 0, 0]], 4: [[3, 5, 0], [1, 0, 1]]}
    saved = by_hand(tmp_path, ROWS, {n: {"tags_made": made[n], "tags_true": true[n]} for n in (3, 4)})
    first, second = pseudo_labels.pseudo_label_figures(saved)
    keys = ("round", "tags_absent", "tags_present", "precision_absent", "precision_present")
    assert [tuple(row[key] for key in keys) for row in first.rows] == [
        (2, 0, 0, None, None), (3, 4, 0, 75.0, None), (4, 10, 4, 80.0, 50.0),
    ]  # fmt: skip
    counts, precision = first.figure.axes
    assert [line.get_ydata().tolist() for line in counts.lines] == [[0, 4, 10], [0, 0, 4]]
    assert precision.lines[0].get_ydata().tolist() == pytest.approx([np.nan, 75, 80], nan_ok=True)
    assert "Only a simulation" in first.caption and "round 4" in second.caption
    assert second.rows == [
        {"class": "a", "made_absent": 4, "true_absent": 3, "made_present": 1, "true_present": 1},
        {"class": "b", "made_absent": 6, "true_absent": 5, "made_present": 0, "true_present": 0},
        {"class": "c", "made_absent": 0, "true_absent": 0, "made_present": 3, "true_present": 1},
    ]
    assert [bar.get_width() for bar in second.figure.axes[0].patches] == [4, 6, 0, 3, 5, 0]


def test_pseudo_labels_of_a_real_federation(tmp_path: Path) -> None:
    """Counts only: nobody knows the truth."""
    rows = [{k: v for k, v in row.items() if "precision" not in k} for row in ROWS]
    (figure,) = pseudo_labels.pseudo_label_figures(by_hand(tmp_path, rows, {}))
    assert figure.rows[-1] == {"round": 4, "tags_absent": 5, "tags_present": 2}
    assert len(figure.figure.axes) == 1 and "not known" in figure.caption


def test_coverage_by_hand(tmp_path: Path) -> None:
    records = {1: {"coverage": [2, 1, 0]}, 2: {"coverage": [1, 1, 0]}, 3: {"coverage": [0, 1, 3]}, 4: {"other": [1]}}
    figure = label_coverage.coverage_figure(by_hand(tmp_path, [], records))
    assert figure is not None
    assert figure.rows == [
        {"round": 1, "a": 2, "b": 1, "c": 0},
        {"round": 2, "a": 1, "b": 1, "c": 0},
        {"round": 3, "a": 0, "b": 1, "c": 3},
    ]
    assert drawn(figure).T.tolist() == [[2, 1, 0], [1, 1, 0], [0, 1, 3]]
    assert "longest gap is 2 rounds (c)" in figure.caption


def test_class_called_round_has_its_own_column(tmp_path: Path) -> None:
    saved = by_hand(tmp_path, [], {1: {"coverage": [2, 1, 0]}})
    figure = label_coverage.coverage_figure(SavedRun(tmp_path, saved.summary | {"classes": ["a", "round", "c"]}))
    assert figure is not None and figure.rows == [{"_round": 1, "a": 2, "round": 1, "c": 0}]
    assert label_coverage.coverage_csv(np.array([[2, 1]]), ["round", "x"]) == "_round,round,x\n1,2,1\n"


def test_coverage_without_a_long_gap(tmp_path: Path) -> None:
    figure = label_coverage.coverage_figure(
        by_hand(tmp_path, [], {1: {"coverage": [1, 0, 2]}, 2: {"coverage": [1, 1, 2]}})
    )
    assert figure is not None and "In 1 of 2 rounds some label was missing" in figure.caption


def test_of_many_classes_the_most_frequent_are_shown(
    runs: dict[str, SavedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = runs["fedharmony"]
    assert saved.most_frequent_classes(200).tolist() == list(range(10))
    for module in (class_features, label_correlation):
        monkeypatch.setattr(module, "MAX_CLASSES", 3)
    counts = (saved.predictions().targets == 1).sum(0)
    shown = saved.most_frequent_classes(3)
    assert len(shown) == 3 and shown.tolist() == sorted(shown)
    assert counts[shown].min() >= np.delete(counts, shown).max()
    figure, other = class_features.class_vector_figure(saved), label_correlation.correlation_figure(saved)
    assert figure is not None and other is not None and len(figure.rows) == len(other.rows) == 3
    assert {row["class"] for row in figure.rows} <= {saved.classes[c] for c in shown}


def test_text_is_readable_on_white_and_on_black(runs: dict[str, SavedRun]) -> None:
    figure = class_features.class_vector_figure(runs["fedharmony"])
    assert figure is not None and figure.figure.get_facecolor()[3] == 0  # the page shows through
    axes = figure.figure.axes[0]
    assert {axes.title.get_color(), axes.get_xticklabels()[0].get_color()} == {TEXT_COLOUR}
    value = int(TEXT_COLOUR[1:3], 16) / 255
    luminance = ((value + 0.055) / 1.055) ** 2.4
    black = ((17 / 255 + 0.055) / 1.055) ** 2.4
    assert 1.05 / (luminance + 0.05) > 4.2 and (luminance + 0.05) / (black + 0.05) > 4.2


def test_images_in_colour() -> None:
    sample = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
    axes = new_figure(1, 1).subplots()
    show_image(axes, sample)
    show_image(axes, sample[:1])
    colour, grey = (image.get_array() for image in axes.images)
    assert colour[1, 2].tolist() == sample[:, 1, 2].tolist()
    assert np.array_equal(grey, sample[0])


def test_choose_images_depends_on_the_seed() -> None:
    labels = np.array([[1, 0], [0, 0], [1, 1], [-1, 1], [0, -1]], np.int8)
    data = Dataset(np.zeros((5, 1, 2, 2), np.uint8), labels, ("a", "b"))
    assert class_features.choose_images(data, 9, 0, "x").tolist() == [0, 2, 3]
    assert class_features.choose_images(data, 9, 0, "x", labels=2).tolist() == [2]
    assert (
        class_features.choose_images(data, 1, 5, "x").tolist() == class_features.choose_images(data, 1, 5, "x").tolist()
    )
    assert len({tuple(class_features.choose_images(data, 2, seed, "x")) for seed in range(20)}) == 3
