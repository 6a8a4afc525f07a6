"""MLflow: a run's settings, its metrics per round and its small tables.

MLFLOW_TRACKING_URI is the address of the server, MLFLOW_EXPERIMENT_NAME the experiment there ("fedmll" by default). The
id of the MLflow run is stored in the run's folder (mlflow.json): a resumed run continues it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmll.config.experiment import Experiment
from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.data.federation import Federation
from fedmll.runs.run_folder import METRICS_CSV_FILE, PER_CLASS_FILE, SUMMARY_FILE, MetricsRow
from fedmll.training.callbacks import Callback, Result
from fedmll.training.trackers import tagged_numbers

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

MLFLOW_FILE = "mlflow.json"
ADDRESS = "MLFLOW_TRACKING_URI"
ROUND = "round"  # the metric that says which round was sent last
MAX_CHARACTERS = 250  # of a parameter: every MLflow server accepts this many
BATCH_SIZE = 100  # parameters per request
# Settings that are not sent: paths of this machine, and what does not affect the result
PRIVATE_SETTINGS = ("data.root", "plugins", "engine.")
# By default MLflow would retry for minutes if the server is away. And it sends usage statistics.
CLIENT_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_DISABLE_TELEMETRY": "true"
}  # fmt: skip


def check_address() -> None:
    if not os.environ.get(ADDRESS):
        raise ConfigError(
            f"--track mlflow needs the address of a server: set {ADDRESS}, for example {ADDRESS}=http://localhost:5000 "
            "(`mlflow server` starts one)."
        )


def experiment_parameters(experiment: Experiment) -> dict[str, str]:
    """Every setting as section.key. Paths of this machine are reduced to the file's name."""
    parameters: dict[str, str] = {}

    def add(values: dict[str, Any], prefix: str) -> None:
        for key, value in values.items():
            name = f"{prefix}{key}"
            if name.startswith(PRIVATE_SETTINGS) or value is None:
                continue
            if isinstance(value, dict):
                add(value, f"{name}.")
            else:
                text = re.sub(r"(?<![^\s,:=\['\"])~?/[^\s,'\"]*/", "", str(value))
                parameters[_valid_name(name)] = text[:MAX_CHARACTERS]

    add(experiment.model_dump(mode="json"), "")
    return parameters


def _valid_name(text: str) -> str:
    """Replace the characters that MLflow does not allow in names."""
    return re.sub(r"[^\w./ -]", "_", text)


class MlflowTracker(Callback):
    """Sends one run to MLflow.

    Args:
        out: the run's folder, or a comparison's for the parent run.
        parent: id of the parent run.
    """

    def __init__(self, out: Path, parent: str | None = None) -> None:
        self.out, self.parent = out, parent
        self.run_id, self.last_sent_round = "", -1
        self._client: MlflowClient | None = None

    @property
    def client(self) -> MlflowClient:
        if self._client is None:
            for name, value in CLIENT_SETTINGS.items():
                os.environ.setdefault(name, value)
            from mlflow.tracking import MlflowClient

            self._client = MlflowClient(tracking_uri=os.environ[ADDRESS])
        return self._client

    def start_run(self, name: str, parameters: dict[str, str] | None = None) -> str:
        """Start an MLflow run, or continue the one that the folder names. Returns its id."""
        run = self._find_earlier_run()
        if run is None:
            tags = {"mlflow.runName": name} | ({"mlflow.parentRunId": self.parent} if self.parent else {})
            run = self.client.create_run(self._experiment_id(), tags=tags)
            self._log_parameters(run.info.run_id, parameters or {})
            files.write_atomic(self.out / MLFLOW_FILE, json.dumps({"run": run.info.run_id}) + "\n")
        else:
            self.client.update_run(run.info.run_id, status="RUNNING")
        self.run_id, self.last_sent_round = run.info.run_id, int(run.data.metrics.get(ROUND, -1))
        return self.run_id

    def _find_earlier_run(self) -> Any:
        """None if the folder names no run, or a run that this server does not know."""
        from mlflow.exceptions import MlflowException

        try:
            saved = json.loads((self.out / MLFLOW_FILE).read_text())["run"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        try:
            return self.client.get_run(saved)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _experiment_id(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedmll"
        known = self.client.get_experiment_by_name(name)
        return str(known.experiment_id if known else self.client.create_experiment(name))

    def _log_parameters(self, run_id: str, parameters: dict[str, str]) -> None:
        from mlflow.entities import Param

        params = [Param(key, value) for key, value in parameters.items()]
        for start in range(0, len(params), BATCH_SIZE):
            self.client.log_batch(run_id, params=params[start : start + BATCH_SIZE])

    def end_run(self, status: str, artifacts: Sequence[Path] = ()) -> None:
        for file in artifacts:
            if file.is_file():
                self.client.log_artifact(self.run_id, str(file))
        self.client.set_terminated(self.run_id, status)

    # ---- hooks

    def on_run_start(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        name = f"{experiment.method.name}, {experiment.data.label}, seed {experiment.seed}"
        self.start_run(name, experiment_parameters(experiment))

    def on_round_end(self, row: MetricsRow) -> None:
        from mlflow.entities import Metric

        if row["round"] <= self.last_sent_round:
            return  # repeated after an interruption, with the same numbers
        now = int(time.time() * 1000)
        values = tagged_numbers(row) | {ROUND: float(row["round"])}
        metrics = [Metric(_valid_name(key), value, now, row["round"]) for key, value in values.items()]
        self.client.log_batch(self.run_id, metrics)

    def on_run_end(self, result: Result) -> None:
        self.end_run("FINISHED", [self.out / name for name in (SUMMARY_FILE, METRICS_CSV_FILE, PER_CLASS_FILE)])

    def on_run_error(self, error: BaseException) -> None:
        if self.run_id:
            self.end_run("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
