"""TensorBoard (extra `track`): every number of every round as a curve, in the run's folder."""

from __future__ import annotations

import math
from pathlib import Path

from fedmll.data.federation import Federation
from fedmll.errors import ConfigError
from fedmll.experiment import Experiment
from fedmll.runs.loop import Observer, Result, Row


class Together(Observer):
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def preparing(self, done: int, total: int, what: str) -> None:
        for observer in self.observers:
            observer.preparing(done, total, what)

    def started(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        for observer in self.observers:
            observer.started(experiment, federation, first_round)

    def client_done(self, round: int, done: int, total: int) -> None:
        for observer in self.observers:
            observer.client_done(round, done, total)

    def round_done(self, row: Row) -> None:
        for observer in self.observers:
            observer.round_done(row)

    def note(self, text: str) -> None:
        for observer in self.observers:
            observer.note(text)

    def warning(self, text: str) -> None:
        for observer in self.observers:
            observer.warning(text)

    def finished(self, result: Result) -> None:
        for observer in self.observers:
            observer.finished(result)


class TensorBoard(Observer):
    """`fedmll run --track`, then `tensorboard --logdir FOLDER/tensorboard`."""

    def __init__(self, out: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("--track needs TensorBoard: pip install 'fedmll[track]'.") from None
        self.make = lambda: SummaryWriter(str(out / "tensorboard"))
        self.writer: SummaryWriter | None = None

    def round_done(self, row: Row) -> None:
        if self.writer is None:  # only now: the folder must be empty when a run starts
            self.writer = self.make()
        for name, value in row.items():
            if name != "round" and value is not None and math.isfinite(value):
                self.writer.add_scalar(name, value, row["round"])

    def finished(self, result: Result) -> None:
        if self.writer is not None:
            self.writer.close()
