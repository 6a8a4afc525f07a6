"""The folder of a run, and resuming it."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
import torch
from conftest import small
from safetensors.torch import load_file

from fedmll import Callback, Experiment, resume, run
from fedmll.core.errors import CheckpointError, ConfigError, DataError


class StopIn(Callback):
    """Stops like Ctrl-C, in the middle of a round."""

    def __init__(self, round: int, client: int) -> None:
        self.where = (round, client)

    def on_client_end(self, round: int, done: int, total: int) -> None:
        if (round, done) == self.where:
            raise KeyboardInterrupt


def test_run_folder_has_every_file(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run(small(annotation__kind="missing", annotation__missing=2), out)
    assert Experiment.load(out / "experiment.toml") == result.experiment
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2]
    wanted = {"seconds", "bytes_up", "bytes_down", "loss", "clients", "macro_auc", "micro_auc", "macro_f1", "micro_f1"}
    wanted |= {"c_ap", "o_ap", "c_p", "c_r", "o_p", "o_r", "c_f1", "o_f1", "bacc", "auc", "map", "hamming"}
    wanted |= {"macro_f1_tuned", "micro_f1_tuned", "client_mean_auc", "client_worst_auc", "val_macro_auc"}
    assert wanted <= rows[0].keys()
    size = sum(w.numel() * w.element_size() for w in result.weights.values())
    assert rows[0]["bytes_down"] == 4 * size
    assert rows[0]["bytes_up"] == 4 * (size + 3 * 8)  # samples, steps, loss
    summary = json.loads((out / "summary.json").read_text())
    assert summary["metrics"]["macro_auc"] == pytest.approx(rows[-1]["macro_auc"])
    assert summary["samples"]["train"] + summary["samples"]["validation"] == 160
    weights = load_file(out / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in result.weights.items())
    with (out / "per_class.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [line["class"] for line in table] == summary["classes"]
    assert float(table[0]["auc"]) == pytest.approx(result.per_class["auc"][0], abs=1e-3)
    with (out / "per_client.csv").open() as file:
        assert [line["client"] for line in csv.DictReader(file)] == ["c000", "c001", "c002", "c003"]
    assert "round 2" in (out / "log.txt").read_text()


@pytest.mark.parametrize("where", [(1, 0), (2, 2), (3, 4)])
@pytest.mark.parametrize("method", ["fedavg", "centralized"])
def test_stopped_and_resumed_run_gives_the_same_bits(tmp_path: Path, where: tuple[int, int], method: str) -> None:
    experiment = small(training__rounds=3, method__name=method)
    if method == "centralized":
        where = (where[0], min(where[1], 1))
    expected = run(experiment)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", callback=StopIn(*where))
    result = resume(tmp_path / "run")
    assert all(torch.equal(result.weights[name], value) for name, value in expected.weights.items())
    strip = [{k: v for k, v in row.items() if k != "seconds"} for row in result.rows]
    assert strip == [{k: v for k, v in row.items() if k != "seconds"} for row in expected.rows]
    assert result.metrics == expected.metrics


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    first = run(small(), tmp_path / "run")
    again = resume(tmp_path / "run")
    assert again.metrics == first.metrics
    assert len(again.rows) == 2


def test_checkpoints_every_few_rounds(tmp_path: Path) -> None:
    experiment = small(training__rounds=5, engine__checkpoint_every=2, engine__evaluate_every=2)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", callback=StopIn(4, 1))
    assert [p.name for p in (tmp_path / "run" / "checkpoint").glob("*.safetensors")] == ["000002.safetensors"]
    result = resume(tmp_path / "run")
    assert ["macro_auc" in row for row in result.rows] == [False, True, False, True, True]
    expected = run(experiment.changed({"engine.checkpoint_every": 1}))
    assert all(torch.equal(result.weights[name], value) for name, value in expected.weights.items())


def test_resume_skips_a_damaged_checkpoint(tmp_path: Path) -> None:
    experiment = small(training__rounds=3)
    expected = run(experiment)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", callback=StopIn(3, 1))
    newest = tmp_path / "run" / "checkpoint" / "000002.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    warnings: list[str] = []

    class Hear(Callback):
        def on_warning(self, text: str) -> None:
            warnings.append(text)

    result = resume(tmp_path / "run", callback=Hear())
    assert len(warnings) == 1
    assert "000002.safetensors is damaged" in warnings[0]
    assert all(torch.equal(result.weights[name], value) for name, value in expected.weights.items())


def test_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    run(small(), tmp_path / "run")
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="not empty; nothing was changed"):
        run(small(seed=1), tmp_path / "run")
    text = (tmp_path / "run" / "experiment.toml").read_text()
    (tmp_path / "run" / "experiment.toml").write_text(text.replace("seed = 0", "seed = 1"))
    with pytest.raises(DataError, match=r"experiment\.toml is damaged .*delete summary\.json"):
        resume(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(CheckpointError, match="another experiment"):
        resume(tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before
    with pytest.raises(ConfigError, match="holds no run"):
        resume(tmp_path / "nothing")


def test_one_process_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    codes = []

    class Intrude(Callback):
        def on_round_end(self, row: dict) -> None:
            child = os.fork()
            if child == 0:
                try:
                    resume(tmp_path / "run")
                except ConfigError as error:
                    os._exit(7 if "Another process" in str(error) else 8)
                os._exit(0)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    run(small(), tmp_path / "run", callback=Intrude())
    assert codes == [7, 7]


def test_without_holdout_there_is_no_validation(tmp_path: Path) -> None:
    result = run(small(partition__holdout=0.0), tmp_path / "run")
    assert "macro_f1_tuned" not in result.metrics
    assert not (tmp_path / "run" / "per_client.csv").exists()


def test_single_label_data_has_an_accuracy() -> None:
    assert 0 <= run(small(data__name="digits", training__rounds=1)).metrics["accuracy"] <= 100
    assert "accuracy" not in run(small(training__rounds=1)).metrics
