"""The metrics of a run: which there are, on which data, and which classes are left out of the averages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small

from fedmll import run
from fedmll.cli import display
from fedmll.data.dataset import Dataset
from fedmll.data.federation import Federation
from fedmll.engines.client_trainer import Trainer
from fedmll.evaluation import metrics
from fedmll.evaluation.evaluate import evaluate_global_model, evaluate_local_models
from fedmll.evaluation.metric_definitions import METRICS
from fedmll.evaluation.thresholds import best_thresholds


def test_a_run_has_the_metrics_of_the_table() -> None:
    """Digits have one label each, and the clients hold samples out, so every metric is defined."""
    assert set(run(small(data__name="digits", training__rounds=1)).metrics) == set(METRICS)
    without = run(small(data__name="digits", training__rounds=1, partition__holdout=0.0)).metrics
    assert {name for name in METRICS if "_tuned" in name or name.startswith(("val_", "client_"))} == (
        set(METRICS) - set(without)
    )


def data_of(
    federation: Federation, test: np.ndarray, validation: np.ndarray, owner: list[int] | None = None
) -> Federation:
    def dataset(labels: np.ndarray) -> Dataset:
        return Dataset(np.zeros((len(labels), 1), np.float32), labels.astype(np.int8), ("a", "b", "c"))

    if owner is None:  # the source has its own validation data, and no client holds anything out
        return replace(federation, test=dataset(test), validation=dataset(validation), held_out=dataset(test[:0]))
    held = dataset(validation)
    return replace(federation, test=dataset(test), validation=held, held_out=held, held_out_owners=np.array(owner))


def both(test: np.ndarray, validation: np.ndarray) -> dict[str, np.ndarray]:
    return {"test": test, "validation": validation}


@pytest.mark.parametrize("present", [True, False])
def test_a_metric_is_undefined_without_what_it_needs(small_federation: Federation, present: bool) -> None:
    """If every class is present everywhere, metrics that need a negative are undefined; if none is, those that need a
    positive."""
    targets, scores = np.full((6, 3), int(present)), np.full((6, 3), 0.4, np.float32)
    values = evaluate_global_model(
        data_of(small_federation, targets, targets, [0, 0, 0, 1, 1, 1]), both(scores, scores)
    ).values
    lacking = "and a negative" if present else "a positive"
    assert {name for name, value in values.items() if np.isnan(value)} == {
        n for n in values if lacking in METRICS[n].needs
    }


def test_test_and_validation_data_are_kept_apart(small_federation: Federation) -> None:
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 2, (40, 3))
    test, validation = rng.random((40, 3), np.float32), rng.random((30, 3), np.float32) ** 3
    owner = [n % 13 for n in range(30)]
    found = evaluate_global_model(data_of(small_federation, targets, targets[:30], owner), both(test, validation))
    labels, held_out = targets.astype(np.int8), targets[:30].astype(np.int8)
    thresholds = best_thresholds(validation, held_out)
    expected = metrics.evaluate(test, labels, ("a", "b", "c"), thresholds).values
    on_validation = metrics.evaluate(validation, held_out, ("a", "b", "c")).values
    expected |= {f"val_{name}": on_validation[name] for name in ("macro_auc", "map", "macro_f1")}
    expected |= metrics.evaluate_per_client(validation, held_out, np.array(owner), ("a", "b", "c")).values
    assert found.values == expected
    assert found.clients is not None and found.clients.table["client"].tolist() == list(range(13))
    central = evaluate_global_model(
        data_of(small_federation, targets, targets[:30]), both(test, validation)
    )  # the source's own
    assert central.clients is None
    assert central.values == {name: value for name, value in expected.items() if not name.startswith("client_")}


def test_accuracy_needs_exactly_one_label_on_every_sample(small_federation: Federation) -> None:
    scores, nothing = np.array([[0.8, 0.1, 0.1], [0.2, 0.1, 0.7]], np.float32), np.zeros((0, 3), np.float32)
    one = evaluate_global_model(
        data_of(small_federation, np.array([[1, 0, 0], [0, 1, 0]]), nothing), both(scores, nothing)
    )
    assert one.values["accuracy"] == 50
    np.testing.assert_array_equal(one.report.per_class["accuracy"], [100, 0, np.nan])
    assert one.report.left_out["f1"] == ("c",)
    for second in ([0, 1, 1], [0, 0, 0]):
        found = evaluate_global_model(
            data_of(small_federation, np.array([[1, 0, 0], second]), nothing), both(scores, nothing)
        )
        assert "accuracy" not in found.values


def test_predictions_come_batch_by_batch_in_evaluation_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmll.engines.client_trainer.EVALUATION_BATCH", 4)
    sizes: list[int] = []

    class Method:
        def predict(self, model: torch.nn.Module, inputs: torch.Tensor, known: object = None) -> torch.Tensor:
            assert not model.training and torch.is_inference_mode_enabled()
            sizes.append(len(inputs))
            return model(inputs)

    data = Dataset(np.arange(13, dtype=np.float32)[:, None], np.zeros((13, 1), np.int8), ("a",))
    trainer: Any = Trainer.__new__(Trainer)
    trainer.method, trainer.model = Method(), torch.nn.Identity()
    trainer.task = SimpleNamespace(model_inputs=lambda data, places: torch.from_numpy(data.samples(places)) + 1)
    found = trainer.predict(data, 2, 12)
    assert found.flatten().tolist() == list(range(3, 13))
    assert sizes == [4, 4, 2]


def test_a_run_names_the_classes_that_are_left_out_of_the_averages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twelve classes; in the test data one is never present, and one always."""
    rng = np.random.default_rng(1)
    train, test = rng.integers(0, 2, (60, 12)), rng.integers(0, 2, (20, 12))
    test[:, 10], test[:, 2] = 0, 1
    np.savez(
        tmp_path / "f.npz", x_train=rng.random((60, 5)), y_train=train, x_test=rng.random((20, 5)), y_test=test,
        classes=np.array([f"[finding {number}]" for number in range(12)]),
    )  # fmt: skip
    source = f"features:{tmp_path / 'f.npz'}"
    experiment = small(data__name=source, model__backbone="mlp", data__limit=60, training__rounds=1)
    result = run(experiment, tmp_path / "run")
    display.show_result(result)
    said = " ".join(capsys.readouterr().out.split())
    assert "left out of AP, F1, precision and recall (no positive in the test data): [finding 10]" in said
    assert (
        "left out of AUC and balanced accuracy (no positive, or no negative, in the test data): [finding 2], [f" in said
    )
    f1 = result.per_class["f1"]
    assert np.isnan(f1).nonzero()[0].tolist() == [10]
    assert result.metrics["macro_f1"] == pytest.approx(np.nanmean(f1))
    left_out = json.loads((tmp_path / "run" / "summary.json").read_text())["left_out"]
    assert left_out["f1"] == left_out["ap"] == ["[finding 10]"]
    lines = (tmp_path / "run" / "per_class.csv").read_text().splitlines()
    assert "nan" in lines[11] and "nan" not in lines[1]


def test_local_models_are_averaged_on_the_test_data_and_each_is_evaluated_on_its_own_samples(
    small_federation: Federation,
) -> None:
    """Clients 0 and 1 have models; client 2 holds samples out and has none."""
    rng = np.random.default_rng(3)
    targets, owner = rng.integers(0, 2, (24, 3)), [0] * 12 + [1] * 8 + [2] * 4
    labels, names = targets.astype(np.int8), ("a", "b", "c")
    scores = {client: both(*rng.random((2, 24, 3), np.float32)) for client in (0, 1)}
    data = data_of(small_federation, targets, targets, owner)
    found = evaluate_local_models(data, scores)
    single = [
        metrics.evaluate(each["test"], labels, names, best_thresholds(each["validation"], labels))
        for each in scores.values()
    ]
    for name in ("map", "macro_auc", "macro_f1_tuned"):
        assert found.values[name] == pytest.approx(np.mean([report.values[name] for report in single]))
    np.testing.assert_allclose(found.report.per_class["ap"], np.mean([r.per_class["ap"] for r in single], axis=0))
    own = np.concatenate([scores[0]["validation"][:12], scores[1]["validation"][12:20]])
    expected = metrics.evaluate_per_client(own, labels[:20], np.array(owner[:20]), names)
    assert found.clients is not None and found.clients.table["client"].tolist() == [0, 1]
    assert (
        found.clients.values == expected.values
        and found.values["client_mean_auc"] == expected.values["client_mean_auc"]
    )


def test_one_local_model_without_held_out_samples(small_federation: Federation) -> None:
    rng = np.random.default_rng(4)
    targets, scores = rng.integers(0, 2, (20, 3)), rng.random((20, 3), np.float32)
    data = data_of(small_federation, targets, targets, [1] * 20)
    found = evaluate_local_models(data, {0: both(scores, scores)})  # the samples are another client's
    alone = evaluate_global_model(replace(data, held_out=data.held_out.subset(np.arange(0))), both(scores, scores))
    assert found.clients is None and found.values == pytest.approx(alone.values)
    assert found.report.left_out == alone.report.left_out


def test_without_validation_scores_nothing_is_tuned(small_federation: Federation) -> None:
    rng = np.random.default_rng(5)
    targets, scores = rng.integers(0, 2, (20, 3)), rng.random((20, 3), np.float32)
    data = data_of(small_federation, targets, targets[:1])
    found = evaluate_global_model(data, {"test": scores})
    assert not [name for name in found.values if "tuned" in name or name.startswith("val_")] and found.clients is None
