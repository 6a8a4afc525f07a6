"""Trackers: callbacks that send a run's numbers to TensorBoard or MLflow.

The run's own folder always has the numbers too (metrics.jsonl, metrics.csv). A tracker never stops or changes a run:
after its first error there is one warning, and it is not called again.

Trackers send settings without paths, numbers and summaries; never samples, file names, predictions, keys or models.

For MLflow, MLFLOW_TRACKING_URI is the address of the server, MLFLOW_EXPERIMENT_NAME the experiment there ("fedmll" by
default). The id of the MLflow run is stored in the run's folder (mlflow.json): a resumed run continues it.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmll.config.experiment import Experiment
from fedmll.config.toml_values import flatten
from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.core.text import suggest
from fedmll.data.federation import Federation
from fedmll.evaluation.metric_definitions import METRICS, POOLED, SITES
from fedmll.runs.run_folder import METRICS_CSV_FILE, PER_CLASS_FILE, SUMMARY_FILE, MetricsRow
from fedmll.training.callbacks import HOOKS, Callback, CallbackList, Result

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

TENSORBOARD, MLFLOW = "tensorboard", "mlflow"
REQUIRED_PACKAGES = {TENSORBOARD: "tensorboard", MLFLOW: "mlflow"}  # of the extra `track`
COSTS = ("seconds", "bytes_up", "bytes_down", "clients")
MLFLOW_FILE = "mlflow.json"
MLFLOW_ADDRESS = "MLFLOW_TRACKING_URI"
ROUND = "round"  # the metric that says which round was sent last
MAX_PARAMETER_CHARACTERS = 250  # every MLflow server accepts this many
PARAMETERS_PER_REQUEST = 100
# Settings that are not sent: paths of this machine, and what does not affect the result
PRIVATE_SETTINGS = ("data.root", "plugins", "engine.")
# By default MLflow would retry for minutes if the server is away. And it sends usage statistics.
CLIENT_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_DISABLE_TELEMETRY": "true"
}  # fmt: skip


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for an unknown tracker, or one that is not installed or not configured."""
    for name in names:
        if name not in REQUIRED_PACKAGES:
            raise ConfigError(f"There is no tracker '{name}' (--track){suggest(name, REQUIRED_PACKAGES)}")
        if find_spec(REQUIRED_PACKAGES[name]) is None:
            raise ConfigError(f"--track {name} needs a package that is not installed: pip install 'fedmll[track]'.")
    if MLFLOW in names and not os.environ.get(MLFLOW_ADDRESS):
        raise ConfigError(
            f"--track mlflow needs the address of a server: set {MLFLOW_ADDRESS}, for example "
            f"{MLFLOW_ADDRESS}=http://localhost:5000 (`mlflow server` starts one)."
        )


def add_trackers(names: Sequence[str], out: Path, callback: Callback, parent: str | None = None) -> Callback:
    """A callback together with the trackers of a run, whose errors it gets as warnings.

    `parent` is the id of the MLflow run of the comparison that the run belongs to.
    """
    check_trackers(names)
    trackers: dict[str, Callback] = {}
    if TENSORBOARD in names:
        trackers[TENSORBOARD] = TensorBoardTracker(out)
    if MLFLOW in names:
        trackers[MLFLOW] = MlflowTracker(out, parent)
    safe = [FailSafeTracker(name, tracker, callback.on_warning) for name, tracker in trackers.items()]
    return CallbackList(callback, *safe) if safe else callback


def metric_tag(name: str) -> str:
    """A metric's name with its group: `test/macro_auc`, `cost/seconds`."""
    if name in COSTS:
        return f"cost/{name}"
    if name == "loss":
        return f"training/{name}"
    if name.startswith("val_"):
        return f"validation/{name.removeprefix('val_')}"
    if name.startswith("client_"):
        return f"clients/{name.removeprefix('client_')}"
    if name.startswith((SITES, POOLED)):
        return f"sites/{name}"
    return f"test/{name}" if name in METRICS else f"method/{name}"


def tagged_numbers(row: MetricsRow) -> dict[str, float]:
    """The numbers of a round that are defined, by tag."""
    return {
        metric_tag(name): float(value)
        for name, value in row.items()
        if name != "round" and value is not None and math.isfinite(value)
    }


class FailSafeTracker(Callback):
    """A tracker whose first error becomes a warning; it is not called again after that."""

    def __init__(self, name: str, tracker: Callback, warn: Callable[[str], None]) -> None:
        self.failed = False

        def call_safely(hook: str) -> Callable[..., None]:
            def call(*arguments: Any) -> None:
                if self.failed:
                    return
                try:
                    getattr(tracker, hook)(*arguments)
                except Exception as error:
                    self.failed = True
                    warn(f"--track {name} failed and is switched off; the run continues: {_reason(error)}")

            return call

        for hook in HOOKS:
            setattr(self, hook, call_safely(hook))


class TensorBoardTracker(Callback):
    """Writes RUN/tensorboard for `tensorboard --logdir FOLDER`. A resumed run continues the same curves."""

    def __init__(self, out: Path) -> None:
        self.folder = out / "tensorboard"
        self.writer: Any = None

    def on_run_start(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # rounds that an interrupted run wrote after its last checkpoint are repeated, and replace the old ones
        self.writer = SummaryWriter(str(self.folder), purge_step=first_round if self.folder.exists() else None)

    def on_round_end(self, row: MetricsRow) -> None:
        for name, value in tagged_numbers(row).items():
            self.writer.add_scalar(name, value, row["round"])
        self.writer.flush()  # a run that is killed keeps its curves

    def on_run_end(self, result: Result) -> None:
        self.writer.close()

    def on_run_error(self, error: BaseException) -> None:
        if self.writer is not None:
            self.writer.close()


def experiment_parameters(experiment: Experiment) -> dict[str, str]:
    """Every setting as section.key. Paths of this machine are reduced to the file's name."""
    return {
        _valid_name(name): re.sub(r"(?<![^\s,:=\['\"])~?/[^\s,'\"]*/", "", str(value))[:MAX_PARAMETER_CHARACTERS]
        for name, value in flatten(experiment.model_dump(mode="json")).items()
        if value is not None and not name.startswith(PRIVATE_SETTINGS)
    }


def _valid_name(text: str) -> str:
    """Replace the characters that MLflow does not allow in names."""
    return re.sub(r"[^\w./ -]", "_", text)


class MlflowTracker(Callback):
    """Sends one run, or the parent run of a comparison, to MLflow."""

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

            self._client = MlflowClient(tracking_uri=os.environ[MLFLOW_ADDRESS])
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
        for start in range(0, len(params), PARAMETERS_PER_REQUEST):
            self.client.log_batch(run_id, params=params[start : start + PARAMETERS_PER_REQUEST])

    def end_run(self, status: str, artifacts: Sequence[Path] = ()) -> None:
        for file in artifacts:
            if file.is_file():
                self.client.log_artifact(self.run_id, str(file))
        self.client.set_terminated(self.run_id, status)

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


class ComparisonTrackers:
    """The trackers of all runs of a comparison; in MLflow the runs lie under one parent run."""

    def __init__(self, names: Sequence[str], out: Path, warn: Callable[[str], None] = lambda text: None) -> None:
        self.names, self.out, self.warn = list(names), out, warn
        self.parent: str | None = None
        self.parent_tracker: MlflowTracker | None = None

    def start(self) -> None:
        """Create the parent run; called before the first run, in the process of the comparison."""
        if MLFLOW in self.names and self.parent is None:
            self.parent_tracker = tracker = MlflowTracker(self.out)
            self.parent = self._call_safely(lambda: tracker.start_run(self.out.name))

    def add_to(self, callback: Callback, run_folder: Path) -> Callback:
        """The callback of one run together with the run's trackers."""
        return add_trackers(self.names, run_folder, callback, self.parent)

    def end(self, complete: bool, tables: Sequence[Path]) -> None:
        """Upload the tables and set the status of the parent run."""
        if self.parent_tracker is not None:
            tracker = self.parent_tracker
            self._call_safely(lambda: tracker.end_run("FINISHED" if complete else "KILLED", tables))

    def _call_safely(self, action: Callable[[], Any]) -> Any:
        """Switch MLflow off if its server cannot be reached."""
        try:
            return action()
        except Exception as error:
            self.names, self.parent_tracker = [name for name in self.names if name != MLFLOW], None
            self.warn(f"--track mlflow failed and is switched off; the runs continue: {_reason(error)}")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
