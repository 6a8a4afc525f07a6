"""MLflow: a run's settings, its numbers by round and its small tables. Where: MLFLOW_TRACKING_URI; the experiment
there: MLFLOW_EXPERIMENT_NAME, or fedmll. The id of the MLflow run is in the folder (mlflow.json): who resumes goes on
with it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmll import files
from fedmll.data.federation import Federation
from fedmll.errors import ConfigError
from fedmll.experiment import Experiment
from fedmll.running.folder import METRICS_CSV, PER_CLASS, SUMMARY
from fedmll.running.observers import INTERRUPTED, Observer, Result, Row
from fedmll.running.tracking import numbers

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

FILE = "mlflow.json"
ADDRESS = "MLFLOW_TRACKING_URI"
ROUND = "round"  # the last one that was sent
LONGEST = 250  # characters of a parameter: what every MLflow server takes
AT_ONCE = 100  # parameters
# Paths of this machine, and what says nothing of the result
PRIVATE = ("data.root", "plugins", "engine.")
# A server that is away must not hold a run up: MLflow itself would try for minutes. And it does not phone home.
PATIENCE = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_DISABLE_TELEMETRY": "true"
}  # fmt: skip


def check_address() -> None:
    if not os.environ.get(ADDRESS):
        raise ConfigError(
            f"--track mlflow needs to know where: set {ADDRESS}, for example {ADDRESS}=http://localhost:5000 "
            "(`mlflow server` starts one)."
        )


def parameters(experiment: Experiment) -> dict[str, str]:
    """Every setting as section.key, but no path of this machine: of a file only its name."""
    found: dict[str, str] = {}

    def add(values: dict[str, Any], prefix: str) -> None:
        for key, value in values.items():
            name = f"{prefix}{key}"
            if name.startswith(PRIVATE) or value is None:
                continue
            if isinstance(value, dict):
                add(value, f"{name}.")
            else:
                text = re.sub(r"(?<![^\s,:=\['\"])~?/[^\s,'\"]*/", "", str(value))
                found[_name(name)] = text[:LONGEST]

    add(experiment.model_dump(mode="json"), "")
    return found


def _name(text: str) -> str:
    """With the letters that MLflow allows."""
    return re.sub(r"[^\w./ -]", "_", text)


class Mlflow(Observer):
    def __init__(self, out: Path, parent: str | None = None) -> None:
        self.out, self.parent = out, parent
        self.run, self.sent = "", -1  # the last round that the server has
        self._client: MlflowClient | None = None

    @property
    def client(self) -> MlflowClient:
        if self._client is None:
            for name, value in PATIENCE.items():
                os.environ.setdefault(name, value)
            from mlflow.tracking import MlflowClient

            self._client = MlflowClient(tracking_uri=os.environ[ADDRESS])
        return self._client

    def begin(self, name: str, settings: dict[str, str] | None = None) -> str:
        """Start a run, or go on with the one that the folder names. Its id."""
        found = self._earlier()
        if found is None:
            tags = {"mlflow.runName": name} | ({"mlflow.parentRunId": self.parent} if self.parent else {})
            found = self.client.create_run(self._experiment(), tags=tags)
            self._log_parameters(found.info.run_id, settings or {})
            files.write(self.out / FILE, json.dumps({"run": found.info.run_id}) + "\n")
        else:
            self.client.update_run(found.info.run_id, status="RUNNING")
        self.run, self.sent = found.info.run_id, int(found.data.metrics.get(ROUND, -1))
        return self.run

    def _earlier(self) -> Any:
        """None without one, or if this server does not know it."""
        from mlflow.exceptions import MlflowException

        try:
            saved = json.loads((self.out / FILE).read_text())["run"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        try:
            return self.client.get_run(saved)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedmll"
        known = self.client.get_experiment_by_name(name)
        return str(known.experiment_id if known else self.client.create_experiment(name))

    def _log_parameters(self, run: str, settings: dict[str, str]) -> None:
        from mlflow.entities import Param

        every = [Param(key, value) for key, value in settings.items()]
        for begin in range(0, len(every), AT_ONCE):
            self.client.log_batch(run, params=every[begin : begin + AT_ONCE])

    def end(self, status: str, artefacts: Sequence[Path] = ()) -> None:
        for file in artefacts:
            if file.is_file():
                self.client.log_artifact(self.run, str(file))
        self.client.set_terminated(self.run, status)

    # ---- what a run tells

    def started(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        name = f"{experiment.method.name}, {experiment.data.label}, seed {experiment.seed}"
        self.begin(name, parameters(experiment))

    def round_done(self, row: Row) -> None:
        from mlflow.entities import Metric

        if row["round"] <= self.sent:
            return  # made again after an interruption, and the same
        now = int(time.time() * 1000)
        values = numbers(row) | {ROUND: float(row["round"])}
        self.client.log_batch(self.run, [Metric(_name(key), value, now, row["round"]) for key, value in values.items()])

    def finished(self, result: Result) -> None:
        self.end("FINISHED", [self.out / name for name in (SUMMARY, METRICS_CSV, PER_CLASS)])

    def stopped(self, reason: str) -> None:
        if self.run:
            self.end("KILLED" if reason == INTERRUPTED else "FAILED")
