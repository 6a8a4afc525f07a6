"""What a run tells whoever watches it, and what it leaves in the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fedmll.data.federation import Federation
from fedmll.experiment import Experiment
from fedmll.message import Tensors
from fedmll.running import shown
from fedmll.running.folder import Row

INTERRUPTED = "interrupted"  # why a run stopped, if a person did it


class Observer:
    """Is told what happens; changes nothing. Override what you want to see."""

    def preparing(self, done: int, total: int, what: str) -> None: ...

    def started(self, experiment: Experiment, federation: Federation, first_round: int) -> None: ...

    def client_done(self, round: int, done: int, total: int) -> None: ...

    def round_done(self, row: Row) -> None: ...

    def note(self, text: str) -> None: ...

    def warning(self, text: str) -> None: ...

    def finished(self, result: Result) -> None: ...

    def stopped(self, reason: str) -> None: ...


@dataclass(frozen=True, repr=False)
class Result:
    experiment: Experiment
    folder: Path | None
    rows: list[Row]  # one a round
    summary: dict[str, Any]
    weights: Tensors  # the resulting model, under its own names
    per_class: dict[str, NDArray[Any]] = field(repr=False, default_factory=dict)
    per_client: dict[str, NDArray[Any]] = field(repr=False, default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = self.summary["metrics"]
        return values

    def __repr__(self) -> str:
        return shown.result_repr(self)

    def _repr_html_(self) -> str:
        return shown.result_html(self)
