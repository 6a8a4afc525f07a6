"""Trackers: observers that send a run's numbers elsewhere. The run's own folder always has them (metrics.jsonl,
metrics.csv); a tracker never stops or changes a run: one that fails is named once, and left alone from then on.

What is sent: settings without paths, numbers, summaries. Never samples, file names, predictions, keys or models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmll.data.federation import Federation
from fedmll.errors import ConfigError, nearest
from fedmll.evaluation.pooled import METRICS, POOLED, SITES
from fedmll.experiment import Experiment
from fedmll.running.loop import Observer, Result, Row

if TYPE_CHECKING:
    from fedmll.running.comparison import Cell
    from fedmll.running.mlflow_runs import Mlflow

TENSORBOARD, MLFLOW = "tensorboard", "mlflow"
NEEDED = {TENSORBOARD: "tensorboard", MLFLOW: "mlflow"}  # tracker → the package that it needs, of the extra `track`
COSTS = ("seconds", "bytes_up", "bytes_down", "clients")
EVENTS = [name for name in vars(Observer) if not name.startswith("_")]


def check(names: Sequence[str]) -> None:
    """Refuse, before anything runs, what is no tracker or is not set up."""
    for name in names:
        if name not in NEEDED:
            raise ConfigError(f"There is no tracker '{name}' (--track){nearest(name, NEEDED)}")
        if find_spec(NEEDED[name]) is None:
            raise ConfigError(f"--track {name} needs a package that is not installed: pip install 'fedmll[track]'.")
    if MLFLOW in names:
        from fedmll.running.mlflow_runs import check_address

        check_address()


def tag(name: str) -> str:
    """The group that a number of a round belongs to, and its name there."""
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


def numbers(row: Row) -> dict[str, float]:
    """A round's numbers that are defined, by tag."""
    return {
        tag(name): float(value)
        for name, value in row.items()
        if name != "round" and value is not None and math.isfinite(value)
    }


class Together(Observer):
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        def all_told(event: str) -> Callable[..., None]:
            def tell(*what: Any) -> None:
                for observer in observers:
                    getattr(observer, event)(*what)

            return tell

        for event in EVENTS:
            setattr(self, event, all_told(event))


class Guarded(Observer):
    """A tracker that can do no harm: its first error is a warning, and then it hears nothing more."""

    def __init__(self, name: str, tracker: Observer, warn: Callable[[str], None]) -> None:
        self.failed = False

        def guarded(event: str) -> Callable[..., None]:
            def tell(*what: Any) -> None:
                if self.failed:
                    return
                try:
                    getattr(tracker, event)(*what)
                except Exception as error:
                    self.failed = True
                    reason = " ".join(str(error).split())[:300] or type(error).__name__
                    warn(f"--track {name} failed, and is left alone from here on; the run goes on: {reason}")

            return tell

        for event in EVENTS:
            setattr(self, event, guarded(event))


class TensorBoard(Observer):
    """`fedmll run --track`, then `tensorboard --logdir FOLDER`. A resumed run goes on in the same curves."""

    def __init__(self, out: Path) -> None:
        self.out = out / "tensorboard"
        self.writer: Any = None

    def started(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # what an interrupted run wrote after its last checkpoint is made again: it does not count
        self.writer = SummaryWriter(str(self.out), purge_step=first_round if self.out.exists() else None)

    def round_done(self, row: Row) -> None:
        for name, value in numbers(row).items():
            self.writer.add_scalar(name, value, row["round"])
        self.writer.flush()  # a run that is killed keeps its curves

    def finished(self, result: Result) -> None:
        self.writer.close()

    def stopped(self, reason: str) -> None:
        if self.writer is not None:
            self.writer.close()


def tracked(names: Sequence[str], out: Path, observer: Observer, parent: str | None = None) -> Observer:
    """An observer, with the trackers of a run in `out` beside it."""
    check(names)
    trackers: dict[str, Observer] = {}
    if TENSORBOARD in names:
        trackers[TENSORBOARD] = TensorBoard(out)
    if MLFLOW in names:
        from fedmll.running.mlflow_runs import Mlflow

        trackers[MLFLOW] = Mlflow(out, parent)
    guarded = [Guarded(name, tracker, observer.warning) for name, tracker in trackers.items()]
    return Together(observer, *guarded) if guarded else observer


class Trackers:
    """Of a comparison: of each of its runs, and in MLflow a run that they all lie under."""

    def __init__(self, names: Sequence[str], out: Path, warn: Callable[[str], None] = lambda text: None) -> None:
        self.names, self.out, self.warn = list(names), out, warn
        self.parent: str | None = None
        self.above: Mlflow | None = None

    def _try(self, act: Callable[[], Any]) -> Any:
        """MLflow may be away: then it is left alone."""
        try:
            return act()
        except Exception as error:
            self.names, self.above = [name for name in self.names if name != MLFLOW], None
            reason = " ".join(str(error).split())[:300]
            self.warn(f"--track mlflow failed, and is left alone from here on; the runs go on: {reason}")

    def begin(self) -> None:
        """Before the first run, in the process of the comparison."""
        if MLFLOW in self.names and self.parent is None:
            from fedmll.running.mlflow_runs import Mlflow

            self.above = Mlflow(self.out)
            self.parent = self._try(lambda: self.above.begin(self.out.name) if self.above else None)

    def beside(self, cell: Cell, observer: Observer) -> Observer:
        """A run's observer, and its trackers."""
        return tracked(self.names, cell.folder, observer, self.parent)

    def leave(self, done: bool, tables: Sequence[Path]) -> None:
        """In the end: the tables, and how it ended."""
        if self.above is not None:
            above = self.above
            self._try(lambda: above.end("FINISHED" if done else "KILLED", tables))
