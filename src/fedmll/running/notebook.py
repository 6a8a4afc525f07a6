"""A bar in a notebook, where nobody asked for another way to watch a run."""

from __future__ import annotations

import sys
from typing import Any

from fedmll.data.federation import Federation
from fedmll.experiment import Experiment
from fedmll.running.folder import Row
from fedmll.running.observers import Observer, Result


def default_observer() -> Observer:
    """A bar in a notebook's kernel, silence elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return Bar() if getattr(shell, "kernel", None) is not None else Observer()


class Bar(Observer):
    def __init__(self) -> None:
        self.handle: Any = None
        self.rounds, self.what = 1, ""

    def show(self, done: float, total: float, text: str) -> None:
        from IPython.display import HTML, display

        bar = HTML(f"<progress value='{done:g}' max='{max(1, total):g}'></progress> {text}")
        if self.handle is None:
            self.handle = display(bar, display_id=True)
        else:
            self.handle.update(bar)

    def preparing(self, done: int, total: int, what: str) -> None:
        self.show(done, total, what)

    def started(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        self.rounds, self.what = experiment.training.rounds, experiment.method.name
        self.show(first_round - 1, self.rounds, self.what)

    def round_done(self, row: Row) -> None:
        found = ", ".join(f"{name} {row[name]:.2f}" for name in ("macro_auc", "map") if name in row)
        self.show(row["round"], self.rounds, f"{self.what}, round {row['round']} of {self.rounds}: {found}")

    def warning(self, text: str) -> None:
        print(text)

    def finished(self, result: Result) -> None:
        self.handle = None
