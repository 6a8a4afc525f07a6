"""Local-only training: metrics, workers, resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedmll import load_run, resume, run
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message
from fedmll.data import federation
from fedmll.engines.client_trainer import Trainer
from fedmll.evaluation import metrics
from fedmll.methods.framework.task import task_of
from fedmll.testing import experiment


def test_means_are_over_the_clients_own_models(tmp_path: Path) -> None:
    """Against every client trained by itself, round after round, with nothing but the learner."""
    made = experiment(method__name="local-only", training__rounds=3)
    data = federation.build(made)
    result = run(made, tmp_path / "run", prepared=data)
    trainer = Trainer(task_of(data))
    scores, tests, own = trainer.predict, [], []
    for peer in trainer.client_infos(data):
        memory: dict[str, torch.Tensor] = {}
        for number in (1, 2, 3):
            reply = trainer.train(trainer.client_in_round(data, peer, number), Message(), memory)
        assert not reply.tensors
        trainer.receive(Message({key.removeprefix("alone/"): tensor for key, tensor in memory.items()}))
        tests.append(
            metrics.evaluate(scores(data.test, 0, len(data.test)).numpy(), data.test.labels, data.test.classes)
        )
        held = data.held_out.subset(np.flatnonzero(data.held_out_owners == peer.index))
        own.append(metrics.evaluate(scores(held, 0, len(held)).numpy(), held.labels, held.classes).values["macro_auc"])
    assert result.metrics["map"] == pytest.approx(np.mean([found.values["map"] for found in tests]))
    np.testing.assert_allclose(result.per_class["ap"], np.nanmean([found.per_class["ap"] for found in tests], axis=0))
    np.testing.assert_allclose(result.per_client["auc"], own)
    assert result.metrics["client_mean_auc"] == pytest.approx(np.nanmean(own))
    assert sum(row["bytes_down"] for row in result.rows) == 0  # nothing is exchanged
    assert "map" not in result.rows[0] and "map" in result.rows[-1]
    with pytest.raises(ConfigError, match="no common model"):
        load_run(tmp_path / "run").predict(data.test)


def test_same_bits_with_workers_and_after_resume(tmp_path: Path) -> None:
    made = experiment(method__name="local-only", training__rounds=4, partition__clients=12, data__limit=240)
    whole = run(made)
    run(made.changed({"training.rounds": 2, "engine.workers": 2}), tmp_path / "run")
    longer = resume(tmp_path / "run", rounds=4)
    assert longer.metrics == whole.metrics


def test_single_local_client_equals_a_federation_of_one() -> None:
    one = {"partition__clients": 1, "training__rounds": 3}
    assert run(experiment(method__name="local-only", **one)).metrics["map"] == pytest.approx(
        run(experiment(method__name="fedavg-pl", **one)).metrics["map"]
    )


def test_combination_of_parts_without_a_federation() -> None:
    made = experiment().changed(
        {"method": {"name": "compose", "parts": ["unknown-as-negative"], "average": "local-models"}}
    )
    assert np.isfinite(run(made).metrics["macro_auc"])
