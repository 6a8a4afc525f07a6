"""`Callback`: what a run reports while it goes. `Result`: what it returns."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fedmll.config.experiment import Experiment
from fedmll.core.message import Tensors
from fedmll.data.federation import Federation
from fedmll.evaluation.metric_definitions import PROGRESS, metrics_in
from fedmll.runs import formatting
from fedmll.runs.run_folder import MetricsRow

INTERRUPTED = "interrupted"  # the reason in the log when a person stopped a run


@dataclass(frozen=True, repr=False, kw_only=True)
class Result:
    """The result of a run.

    Attributes:
        experiment: the experiment, with every "auto" resolved.
        folder: the run's folder; None if the run had none.
        rows: one row of metrics per round.
        summary: the content of summary.json.
        weights: the tensors of the resulting model by name.
        per_class: metrics of each class, as columns.
        per_client: metrics of each client on its held-out samples, as columns.
    """

    experiment: Experiment
    folder: Path | None
    rows: list[MetricsRow]
    summary: dict[str, Any]
    weights: Tensors
    per_class: dict[str, NDArray[Any]] = field(repr=False, default_factory=dict)
    per_client: dict[str, NDArray[Any]] = field(repr=False, default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = self.summary["metrics"]
        return values

    def __repr__(self) -> str:
        return formatting.format_result(self)

    def _repr_html_(self) -> str:
        return formatting.result_html(self)


class Callback:
    """Watches a run without changing it. Override the hooks that you need."""

    def on_setup_progress(self, done: int, total: int, what: str) -> None:
        """Data or features are being prepared: `done` of `total`."""

    def on_run_start(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        """The first round is about to start; `first_round` is larger than 1 in a resumed run."""

    def on_client_end(self, round: int, done: int, total: int) -> None:
        """`done` of the `total` clients of a round have replied; called with 0 at the start of the round."""

    def on_round_end(self, row: MetricsRow) -> None:
        """A round is over; `row` has its numbers."""

    def on_note(self, text: str) -> None:
        """Information about the run, such as a setting that was chosen automatically."""

    def on_warning(self, text: str) -> None: ...

    def on_run_end(self, result: Result) -> None:
        """The run is finished and all of its files are written."""

    def on_run_error(self, error: BaseException) -> None:
        """The run stopped with an error or was interrupted (KeyboardInterrupt)."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class CallbackList(Callback):
    """Several callbacks as one. Each hook calls them in order."""

    def __init__(self, *callbacks: Callback) -> None:
        def call_all(hook: str) -> Callable[..., None]:
            def call(*arguments: Any) -> None:
                for callback in callbacks:
                    getattr(callback, hook)(*arguments)

            return call

        for hook in HOOKS:
            setattr(self, hook, call_all(hook))


def default_callback() -> Callback:
    """A progress bar in a notebook, nothing elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return NotebookProgress() if getattr(shell, "kernel", None) is not None else Callback()


class NotebookProgress(Callback):
    """A progress bar in a notebook."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.rounds, self.method = 1, ""

    def show(self, done: float, total: float, text: str) -> None:
        from IPython.display import HTML, display

        bar = HTML(f"<progress value='{done:g}' max='{max(1, total):g}'></progress> {text}")
        if self.handle is None:
            self.handle = display(bar, display_id=True)
        else:
            self.handle.update(bar)

    def on_setup_progress(self, done: int, total: int, what: str) -> None:
        self.show(done, total, what)

    def on_run_start(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        self.rounds, self.method = experiment.training.rounds, experiment.method.name
        self.show(first_round - 1, self.rounds, self.method)

    def on_round_end(self, row: MetricsRow) -> None:
        metrics = ", ".join(f"{name} {row[name]:.2f}" for name in metrics_in(PROGRESS) if name in row)
        self.show(row["round"], self.rounds, f"{self.method}, round {row['round']} of {self.rounds}: {metrics}")

    def on_warning(self, text: str) -> None:
        print(text)

    def on_run_end(self, result: Result) -> None:
        self.handle = None
