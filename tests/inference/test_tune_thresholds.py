"""Thresholds and calibration chosen after training, and every use of the model that must follow them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import small
from scipy.special import expit, logit
from typer.testing import CliRunner

from fedmll import load_model, load_run, run
from fedmll.cli.main import app
from fedmll.core.errors import ConfigError
from fedmll.evaluation.metrics import evaluate
from fedmll.evaluation.thresholds import format_threshold
from fedmll.inference.export import export
from fedmll.inference.tune_thresholds import tune
from fedmll.runs.run_folder import MODEL_FILE


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned") / "run"
    run(small(training__rounds=12, training__lr=1e-2, data__singles=40, data__pairs=6), folder)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def known_share(folder: Path, thresholds: np.ndarray, hit: bool) -> np.ndarray:
    """Recall of each class on the validation data, or with `hit` false precision, by a plain loop."""
    kept = load_run(folder).predictions("validation")
    shares = []
    for column in range(len(kept.classes)):
        present, said = kept.targets[:, column] == 1, kept.probabilities[:, column] > thresholds[column]
        both = (present & said & (kept.targets[:, column] >= 0)).sum()
        shares.append(both / present.sum() if hit and present.any() else np.nan if hit else both / max(1, said.sum()))
    return np.array(shares)


def log_loss(folder: Path) -> float:
    """Of the validation data: the least of it is what is fitted. (The calibration error of 15 samples is chance.)"""
    kept = load_run(folder).predictions("validation")
    p = np.where(kept.targets == 1, kept.probabilities, 1 - kept.probabilities.astype(np.float64))
    return float(-np.log(p[kept.targets >= 0]).mean())


def test_recall_goal_is_reached_and_stored(folder: Path) -> None:
    before = load_model(folder / MODEL_FILE)
    found = tune(load_run(folder), "recall=0.9")
    model = load_model(folder / MODEL_FILE)
    np.testing.assert_array_equal(model.tuned_thresholds, found.thresholds)
    assert model.description["thresholds_for"] == "recall=0.9"
    assert before.description["thresholds_for"] == "f1"
    recall = known_share(folder, found.thresholds, hit=True)
    np.testing.assert_allclose(found.confusion.recall, recall)
    assert (recall[np.isfinite(recall)] >= 0.9).all()
    assert (found.thresholds > 0).any()
    for name, tensor in before.weights.items():
        assert model.weights[name].equal(tensor), name


def test_precision_goal_is_reached(folder: Path) -> None:
    found = tune(load_run(folder), "precision=0.7")
    reachable = (found.thresholds < 1) & (found.confusion.positives > 0)
    assert reachable.any()
    assert (known_share(folder, found.thresholds, hit=False)[reachable] >= 0.7).all()


def test_reported_f1_equals_the_f1_of_the_samples(folder: Path) -> None:
    kept = load_run(folder).predictions("validation")
    found = tune(load_run(folder))
    own = evaluate(kept.probabilities, kept.targets, kept.classes, found.thresholds).values["macro_f1_tuned"]
    assert own == pytest.approx(100 * np.nanmean(found.confusion.f1))
    assert own > evaluate(kept.probabilities, kept.targets, kept.classes).values["macro_f1"]


def test_calibrated_probabilities_are_used_everywhere(folder: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    images = np.random.default_rng(0).integers(
        0, 256, (5, *load_model(folder / MODEL_FILE).sample_shape), dtype=np.uint8
    )
    plain, kept = load_model(folder / MODEL_FILE).predict(images), load_run(folder).predictions()
    before = log_loss(folder)
    found = tune(load_run(folder), "recall=0.8", "platt")
    model = load_model(folder / MODEL_FILE)
    by = model.calibration
    assert by is not None
    assert not np.allclose(by, [1, 0])
    expected = expit(by[:, 0] * logit(plain.astype(np.float64)) + by[:, 1])
    np.testing.assert_allclose(model.predict(images), expected, atol=1e-6)
    again = expit(by[:, 0] * logit(kept.probabilities.astype(np.float64)) + by[:, 1])
    np.testing.assert_allclose(load_run(folder).predictions().probabilities, again, atol=1e-6)
    file, card, *_ = export(load_run(folder), "onnx", folder / "export")
    session = onnxruntime.InferenceSession(str(file))
    np.testing.assert_allclose(session.run(None, {"images": images})[0], expected, atol=1e-4)
    assert "recall=0.8" in card.read_text()
    assert "calibrated" in card.read_text()
    np.testing.assert_allclose(known_share(folder, found.thresholds, hit=True), found.confusion.recall)
    assert found.after is not None
    assert (found.after.samples.sum(axis=1) == found.before.samples.sum(axis=1)).all()
    assert log_loss(folder) < before


def test_tuning_again_starts_from_uncalibrated_probabilities(folder: Path) -> None:
    first = tune(load_run(folder), "f1", "platt")
    by = load_model(folder / MODEL_FILE).calibration
    second = tune(load_run(folder), "f1", "platt")
    np.testing.assert_array_equal(first.thresholds, second.thresholds)
    np.testing.assert_array_equal(by, load_model(folder / MODEL_FILE).calibration)
    tune(load_run(folder), "f1")
    assert load_model(folder / MODEL_FILE).calibration is None


@pytest.mark.parametrize("goal", ["auc", "recall", "recall=much", "recall=90", "conformal_recall=0", "=0.9"])
def test_unknown_goals_are_rejected(folder: Path, goal: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.9"):
        tune(load_run(folder), goal)


def test_tune_command(folder: Path) -> None:
    done = CliRunner().invoke(app, ["tune", str(folder), "--for", "conformal_recall=0.9", "--calibrate", "temperature"])
    assert done.exit_code == 0, done.output
    for word in (
        "conformal_recall=0.9",
        "recall, %",
        "at least the wanted share",
        "expected calibration error",
        "model.safetensors",
    ):
        assert word in done.output.replace("\n", " ")
    assert load_model(folder / MODEL_FILE).description["thresholds_for"] == "conformal_recall=0.9"


def card_of(folder: Path) -> tuple[str, dict[str, list[str]]]:
    """The card that `fedmll export` writes, and the rows of its tables by their first cell."""
    done = CliRunner().invoke(app, ["export", str(folder), "--to", "safetensors", "--out", str(folder / "export")])
    assert done.exit_code == 0, done.output
    text = (folder / "export" / "README.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return text, {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize("calibrate", ["none", "platt"])
def test_card_and_command_show_what_tuned_thresholds_give_on_the_test_data(folder: Path, calibrate: str) -> None:
    done = CliRunner().invoke(app, ["tune", str(folder), "--for", "precision=0.7", "--calibrate", calibrate])
    assert done.exit_code == 0, done.output
    saved = load_run(folder)
    kept, thresholds = saved.predictions(), saved.model.tuned_thresholds
    assert thresholds is not None
    text, rows = card_of(folder)
    alone = export(saved.model, "safetensors", folder / "alone")[1].read_text()
    stored = saved.model.description["threshold_results"]
    f1 = []
    for column, name in enumerate(kept.classes):  # by a plain loop over the test data
        present, said = kept.targets[:, column] == 1, kept.probabilities[:, column] > thresholds[column]
        hits = (present & said).sum()
        shares = [hits / present.sum(), hits / max(1, said.sum()), 2 * hits / (present.sum() + said.sum())]
        f1.append(shares[2])
        percent = [f"{100 * share:.2f}" for share in shares]
        assert rows[name][:4] == [format_threshold(thresholds[column]), *percent]
        assert rows[name][-2] == str(present.sum()) == str(stored["positives"][column])
        np.testing.assert_allclose(
            [stored[key][column] for key in ("recall", "precision", "f1")], np.multiply(100, shares)
        )
        line = next(line for line in done.output.split("on the test data")[1].splitlines() if f" {name} " in line)
        assert [cell.strip() for cell in line.strip("│┃ ").split("│")][2:] == [
            str(present.sum()),
            *(f"{100 * share:.1f}" for share in shares),
        ]
        assert f"| {name} | {format_threshold(thresholds[column])} | {percent[0]} |" in alone
    value, interval = rows["macro F1, tuned"]
    assert float(value) == pytest.approx(100 * np.mean(f1), abs=0.006)
    low, high = map(float, interval.split(" … "))
    assert low <= float(value) <= high
    assert float(rows["macro F1"][0]) == pytest.approx(
        evaluate(kept.probabilities, kept.targets, kept.classes).values["macro_f1"], abs=0.006
    )
    assert ("not calibrated" in text) is (calibrate == "none") and ("were calibrated" in text) is (calibrate == "platt")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.34214, "0.3421"), (0.000012341, "0.00001234"), (1 - 1.2341e-7, "0.9999998766"), (1.0, "1"), (-0.5, "-0.5")],
)
def test_thresholds_near_0_and_1_keep_their_digits(value: float, text: str) -> None:
    assert format_threshold(value) == text


def test_tune_command_lists_the_accepted_values(folder: Path) -> None:
    done = CliRunner().invoke(app, ["tune", str(folder), "--calibrate", "isotonic"])
    assert done.exit_code != 0
    assert "platt" in str(done.exception) + done.output
