"""Trackers: what TensorBoard's own reader and a real MLflow server receive; their errors never stop a run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import small

from fedmll import compare, resume, run
from fedmll.cli.options import fill_optional_values
from fedmll.core.errors import ClientError, ConfigError
from fedmll.runs.run_folder import RunFolder
from fedmll.training import trackers
from fedmll.training.callbacks import Callback, CallbackList
from fedmll.training.trackers import (
    CLIENT_SETTINGS,
    MAX_PARAMETER_CHARACTERS,
    FailSafeTracker,
    add_trackers,
    check_trackers,
    experiment_parameters,
    metric_tag,
    tagged_numbers,
)

HAS_MLFLOW = trackers.find_spec("mlflow") is not None


class Ears(Callback):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


class Stop(Callback):
    """Ctrl-C after a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_round_end(self, row: dict[str, Any]) -> None:
        if row["round"] == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss", "training/loss"),
        ("seconds", "cost/seconds"),
        ("bytes_up", "cost/bytes_up"),
        ("macro_auc", "test/macro_auc"),
        ("val_map", "validation/map"),
        ("client_worst_auc", "clients/worst_auc"),
        ("sites_map", "sites/sites_map"),
        ("pooled_map", "sites/pooled_map"),
        ("tags_precision", "method/tags_precision"),
    ],
)
def test_metric_tag_names_the_group(name: str, expected: str) -> None:
    assert metric_tag(name) == expected


def test_undefined_numbers_are_not_sent() -> None:
    assert tagged_numbers({"round": 3, "loss": 0.5, "map": None, "bacc": float("nan")}) == {"training/loss": 0.5}


def test_resumed_run_continues_the_same_curves(tmp_path: Path) -> None:
    """It is stopped after round 3; the last checkpoint is of round 2, so round 3 is repeated."""
    wanted = small(training__rounds=4, engine__checkpoint_every=2)
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(wanted, out, callback=CallbackList(add_trackers(["tensorboard"], out, Callback()), Stop(3)))
    assert [step for step, _ in curves(out)["test/macro_auc"]] == [1, 2, 3]
    resume(out, callback=add_trackers(["tensorboard"], out, Callback()))
    found, rows = curves(out), RunFolder(out).read_metrics()
    assert found["test/macro_auc"] == [(row["round"], pytest.approx(row["macro_auc"], rel=1e-6)) for row in rows]
    assert found["training/loss"] == [(row["round"], pytest.approx(row["loss"], rel=1e-6)) for row in rows]
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    header, *lines = (out / "metrics.csv").read_text().splitlines()
    assert header.split(",")[:2] == ["round", "seconds"] and len(lines) == 4


def test_failed_tracker_gives_one_warning_and_changes_nothing(tmp_path: Path) -> None:
    class Broken(Callback):
        def on_round_end(self, row: dict[str, Any]) -> None:
            raise OSError("No space\nleft")

    ears = Ears()
    told = CallbackList(ears, FailSafeTracker("broken", Broken(), ears.on_warning))
    result = run(small(), tmp_path / "run", callback=told)
    assert ears.warnings == ["--track broken failed and is switched off; the run continues: No space left"]
    plain = run(small(), tmp_path / "plain")
    assert {name: weight.tolist() for name, weight in result.weights.items()} == {
        name: weight.tolist() for name, weight in plain.weights.items()
    }


def test_stopped_run_logs_the_reason(tmp_path: Path) -> None:
    reasons: list[str] = []

    class Last(Callback):
        def on_round_end(self, row: dict[str, Any]) -> None:
            raise ClientError("the loss became nan") if row["round"] == 1 else KeyboardInterrupt

        def on_run_error(self, error: BaseException) -> None:
            reasons.append(str(error))

    with pytest.raises(ClientError):
        run(small(), tmp_path / "run", callback=Last())
    with pytest.raises(KeyboardInterrupt):
        resume(tmp_path / "run", callback=Last())
    assert reasons == ["the loss became nan", ""]


def test_unknown_and_missing_trackers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no tracker 'tensorbord'.*did you mean 'tensorboard'"):
        check_trackers(["tensorbord"])
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fedmll\[track\]'"):
        check_trackers(["tensorboard"])
    monkeypatch.setattr(trackers, "find_spec", lambda name: "there")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="set MLFLOW_TRACKING_URI"):
        check_trackers(["mlflow"])


def test_track_option_takes_an_optional_value(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert fill_optional_values(["run", "--track"]) == ["run", "--track", "tensorboard"]
    assert fill_optional_values(["run", "--track", "mlflow"]) == ["run", "--track", "mlflow"]
    assert fill_optional_values(["resume", "--track", folder]) == ["resume", "--track", "tensorboard", folder]
    assert fill_optional_values(["run", "--track", "x.toml"]) == ["run", "--track", "tensorboard", "x.toml"]
    assert fill_optional_values(["run", "--track", "--rounds", "1"])[2] == "tensorboard"


def test_settings_are_sent_without_paths() -> None:
    found = experiment_parameters(
        small(data__root="/home/someone/patients", model__weights="/home/someone/w.safetensors", training__lr=0.25)
    )
    assert found["training.lr"] == "0.25" and found["method.name"] == "fedavg" and found["seed"] == "0"
    assert found["model.weights"] == "w.safetensors"
    assert not any("someone" in value or len(value) > MAX_PARAMETER_CHARACTERS for value in found.values())
    assert not any(key.startswith(("engine.", "data.root", "plugins")) for key in found)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MLFLOW, reason="mlflow is not installed")
def test_unreachable_server_does_not_delay_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{find_free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    ears = Ears()
    run(small(), tmp_path / "run", callback=add_trackers(["mlflow"], tmp_path / "run", ears))
    assert len(ears.warnings) == 1 and ears.warnings[0].startswith("--track mlflow failed")
    # by default it is asked again once, not for minutes
    assert (
        int(CLIENT_SETTINGS["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]) <= 1
        and int(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]) <= 10
    )
    assert (tmp_path / "run" / "summary.json").is_file() and not (tmp_path / "run" / "mlflow.json").exists()


# ---- a real MLflow server -------------------------------------------------------------------------------------------


def find_free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if trackers.find_spec("mlflow.server") is None or trackers.find_spec("sqlalchemy") is None:
        pytest.skip("the full mlflow, with its server, is not installed")
    folder, address = tmp_path_factory.mktemp("mlflow"), f"http://127.0.0.1:{find_free_port()}"
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", address.rpartition(":")[2]),
        *("--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artefacts")),
        *("--workers", "1"),
    ]
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment, start_new_session=True)
        try:
            for _ in range(240):
                try:
                    with urllib.request.urlopen(f"{address}/health", timeout=2):
                        break
                except OSError:
                    assert process.poll() is None, (folder / "log.txt").read_text()
                    time.sleep(0.5)
            yield address
        finally:
            os.killpg(process.pid, 15)  # its own session: the server and its worker, and nobody else
            process.wait(30)


@pytest.mark.slow
def test_real_mlflow_server_receives_the_runs(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    client = MlflowClient(tracking_uri=server)

    # a run that is stopped after round 3, with a checkpoint of round 2; then resumed
    out = tmp_path / "run"
    wanted = small(training__rounds=4, engine__checkpoint_every=2)
    ears = Ears()
    with pytest.raises(KeyboardInterrupt):
        run(wanted, out, callback=CallbackList(add_trackers(["mlflow"], out, ears), Stop(3)))
    (found,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert found.info.status == "KILLED" and found.data.params["training.rounds"] == "4"
    resume(out, callback=add_trackers(["mlflow"], out, ears))
    assert ears.warnings == []
    (found,) = client.search_runs([found.info.experiment_id])
    assert found.info.status == "FINISHED"
    rows = RunFolder(out).read_metrics()
    history = client.get_metric_history(found.info.run_id, "test/macro_auc")
    assert [(point.step, point.value) for point in history] == [(row["round"], row["macro_auc"]) for row in rows]
    assert sorted(item.path for item in client.list_artifacts(found.info.run_id)) == [
        "metrics.csv", "per_class.csv", "summary.json"
    ]  # fmt: skip
    assert json.loads((out / "mlflow.json").read_text()) == {"run": found.info.run_id}

    # a comparison: its runs lie under one, two at a time
    done = compare(small(training__rounds=1), ["fedavg", "fedprox"], [0], tmp_path / "grid", track=["mlflow"], jobs=2)
    assert len(done.finished) == 2
    every = {run.info.run_id: run for run in client.search_runs([found.info.experiment_id])}
    del every[found.info.run_id]
    (parent,) = (run for run in every.values() if "mlflow.parentRunId" not in run.data.tags)
    children = [run for run in every.values() if run is not parent]
    assert parent.info.run_name == "grid" and parent.info.status == "FINISHED" and len(children) == 2
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert {run.data.params["method.name"] for run in children} == {"fedavg", "fedprox"}
    assert all(run.info.status == "FINISHED" and run.data.metrics["round"] == 1 for run in children)
    assert {"table.md", "table.csv", "table.tex"} <= {item.path for item in client.list_artifacts(parent.info.run_id)}

    # a seed more: the same parent, and only the new runs are new
    compare(small(training__rounds=1), ["fedavg", "fedprox"], [0, 1], tmp_path / "grid", track=["mlflow"])
    after = client.search_runs([found.info.experiment_id])
    nested = [run for run in after if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(after) == 6 and len(nested) == 4
