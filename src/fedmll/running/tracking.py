"""TensorBoard (extra `track`): every number of every round as a curve, in the run's folder."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedmll.errors import ConfigError
from fedmll.running.loop import Observer, Result, Row


class Together(Observer):
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        def all_told(event: str) -> Callable[..., None]:
            def tell(*what: Any) -> None:
                for observer in observers:
                    getattr(observer, event)(*what)

            return tell

        for event in (name for name in vars(Observer) if not name.startswith("_")):
            setattr(self, event, all_told(event))


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
