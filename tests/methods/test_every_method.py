"""What holds for every method: twelve clients with missing annotations, half of them in a round, BatchNorm; the same
bits with one worker and with two, and for a run that was stopped and went on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from all_methods import names, settings_of
from builders import same_bits, twelve

from fedmll.config.experiment import Experiment
from fedmll.data.federation import Federation, build
from fedmll.runs.run_folder import MetricsRow
from fedmll.training.callbacks import Callback
from fedmll.training.round_loop import resume, run

ROUNDS = 3


def setting(name: str, workers: int) -> Experiment:
    return twelve(
        **{
            "annotation__kind": "missing", "annotation__missing": 4, "participation__fraction": 0.5,
            "model__channels": (4, 12), "training__rounds": ROUNDS, "engine__evaluate_every": ROUNDS,
            "engine__workers": workers,
        }
        | settings_of(name)
    )  # fmt: skip


@pytest.fixture(scope="module")
def federation() -> Federation:
    made = build(setting("fedavg", 0))
    assert len(made.names) == 12
    assert (made.train.labels == -1).mean() > 0.2
    return made


class Stop(Callback):
    """After the round before the last, so that what clients remember matters."""

    def on_round_end(self, row: MetricsRow) -> None:
        if row["round"] == ROUNDS - 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("name", names())
def test_same_bits_with_one_worker_two_workers_and_after_resume(
    name: str, federation: Federation, tmp_path: Path
) -> None:
    whole = run(setting(name, 1), tmp_path / "whole", prepared=federation)
    stopped, experiment = tmp_path / "stopped", setting(name, 2)
    if experiment.training.rounds:
        with pytest.raises(KeyboardInterrupt):
            run(experiment, stopped, callback=Stop(), prepared=federation)
        again = resume(stopped, prepared=federation)
    else:
        again = run(experiment, stopped, prepared=federation)
    assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in whole.weights.values())
    assert same_bits(again.weights, whole.weights)
    assert again.metrics == whole.metrics
    trained = [row["clients"] for row in again.rows if row["round"] and "closing" not in row]
    everybody = len(federation.names)  # in rounds without training
    count = {"centralized": 1, "fed-logistic": everybody}.get(name, 6)
    assert trained == [count] * experiment.training.rounds
    assert [row.get("loss") for row in again.rows] == [row.get("loss") for row in whole.rows]
