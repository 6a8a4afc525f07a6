"""Trackers: callbacks that send a run's numbers to TensorBoard or MLflow.

The run's own folder always has the numbers too (metrics.jsonl, metrics.csv). A tracker never stops or changes a run:
after its first error there is one warning, and it is not called again.

Trackers send settings without paths, numbers and summaries; never samples, file names, predictions, keys or models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.core.text import suggest
from fedmll.data.federation import Federation
from fedmll.evaluation.metric_definitions import METRICS, POOLED, SITES
from fedmll.runs.run_folder import MetricsRow
from fedmll.training.callbacks import HOOKS, Callback, CallbackList, Result

if TYPE_CHECKING:
    from fedmll.training.mlflow_tracker import MlflowTracker

TENSORBOARD, MLFLOW = "tensorboard", "mlflow"
REQUIRED_PACKAGES = {TENSORBOARD: "tensorboard", MLFLOW: "mlflow"}  # of the extra `track`
COSTS = ("seconds", "bytes_up", "bytes_down", "clients")


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for an unknown tracker, or one that is not installed or not configured."""
    for name in names:
        if name not in REQUIRED_PACKAGES:
            raise ConfigError(f"There is no tracker '{name}' (--track){suggest(name, REQUIRED_PACKAGES)}")
        if find_spec(REQUIRED_PACKAGES[name]) is None:
            raise ConfigError(f"--track {name} needs a package that is not installed: pip install 'fedmll[track]'.")
    if MLFLOW in names:
        from fedmll.training.mlflow_tracker import check_address

        check_address()


def add_trackers(names: Sequence[str], out: Path, callback: Callback, parent: str | None = None) -> Callback:
    """A callback together with the trackers of a run.

    Args:
        names: tensorboard, mlflow.
        out: the run's folder.
        callback: is called too, and gets a tracker's error as a warning.
        parent: id of the MLflow run of the comparison that the run belongs to.
    """
    check_trackers(names)
    trackers: dict[str, Callback] = {}
    if TENSORBOARD in names:
        trackers[TENSORBOARD] = TensorBoardTracker(out)
    if MLFLOW in names:
        from fedmll.training.mlflow_tracker import MlflowTracker

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


class ComparisonTrackers:
    """The trackers of all runs of a comparison; in MLflow the runs lie under one parent run."""

    def __init__(self, names: Sequence[str], out: Path, warn: Callable[[str], None] = lambda text: None) -> None:
        self.names, self.out, self.warn = list(names), out, warn
        self.parent: str | None = None
        self.parent_tracker: MlflowTracker | None = None

    def start(self) -> None:
        """Create the parent run; called before the first run, in the process of the comparison."""
        if MLFLOW in self.names and self.parent is None:
            from fedmll.training.mlflow_tracker import MlflowTracker

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
