"""What the terminal shows: progress while a run goes, tables after it. Quiet when nobody looks (no terminal)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedmll.cli.tables import console, errors, plain_table, say
from fedmll.data.federation import Federation
from fedmll.deploy.site import Summary
from fedmll.errors import printable
from fedmll.experiment import Experiment
from fedmll.running.compare import GridObserver
from fedmll.running.comparison import Cell
from fedmll.running.loop import Observer, Result, Row
from fedmll.running.shown import BY_SITE, headlines, number

if TYPE_CHECKING:
    from fedmll.deploy.checking import Finding

# Of the families of averages (metrics.Report.left_out) the two pairs that lose the same classes: their names, and why.
LEFT_OUT = {
    "f1": ("AP, F1, precision and recall", "no positive"),
    "auc": ("AUC and balanced accuracy", "no positive, or no negative,"),
}


class RunProgress(GridObserver):
    """One bar over rounds: clients done, the current metric, time left; of a comparison over the rounds of all runs.
    Also in a notebook: `fedmll.run(…, observer=RunProgress())`.

    It refreshes on events, without a thread of its own: worker processes are forked from this one."""

    def __init__(self, total_rounds: int | None = None) -> None:
        """`total_rounds` None: the experiment, or the comparison, says it."""
        self.label, self.total, self.inside = "", total_rounds, False
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            disable=not (console.is_terminal or console.is_jupyter),
        )
        self.bar = self.progress.add_task("rounds", total=total_rounds, note="", start=False)
        self.data_bar: Any = None
        self.noted: set[str] = set()
        self.metric = ""
        self.beside: dict[Cell, CellLine] = {}  # of runs at the same time: a line each

    def __enter__(self) -> RunProgress:
        self.inside = True
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def planned(self, rounds: int) -> None:
        self.total = rounds
        self.progress.update(self.bar, total=rounds)

    def running(self, cell: Cell) -> None:
        self.label = str(cell)

    def watching(self, cell: Cell, alone: bool) -> Observer:
        if alone:
            return super().watching(cell, alone)
        self.beside[cell] = line = CellLine(self, cell)
        return line

    def over(self, cell: Cell) -> None:
        line = self.beside.pop(cell, None)
        if line is not None and line.bar is not None:
            self.progress.remove_task(line.bar)

    def skipped(self, rounds: int) -> None:
        """Rounds that were done before."""
        if self.total is not None:
            self.planned(self.total - rounds)

    def preparing(self, done: int, total: int, what: str) -> None:
        self.progress.start()
        if self.data_bar is None:
            self.data_bar = self.progress.add_task(what, total=total, note="")
        self.progress.update(self.data_bar, completed=done, total=total, description=what)
        self.progress.refresh()

    def prepared(self) -> None:
        if self.data_bar is not None:
            self.progress.remove_task(self.data_bar)
            self.data_bar = None

    def started(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        self.prepared()
        self.progress.start()
        self.progress.start_task(self.bar)
        if self.total is None:
            self.planned(experiment.training.rounds)
        self.skipped(first_round - 1)
        self.progress.update(self.bar, description=self.label or experiment.method.name)
        self.progress.refresh()

    def client_done(self, round: int, done: int, total: int) -> None:
        self.progress.update(self.bar, note=f"round {round}, client {done}/{total}{self.metric}")
        self.progress.refresh()

    def round_done(self, row: Row) -> None:
        if "macro_auc" in row:
            self.metric = f", macro AUC {row['macro_auc']:.1f}"
        self.progress.update(self.bar, advance=1, note=f"round {row['round']}{self.metric}")
        self.progress.refresh()

    def note(self, text: str) -> None:
        """Once, however many runs it is true of."""
        if text not in self.noted:
            self.noted.add(text)
            console.print(f"[dim]{escape(text)}", highlight=False, soft_wrap=True)

    def finished(self, result: Result) -> None:
        if not self.inside:
            self.progress.stop()

    def warning(self, text: str) -> None:
        errors.print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)


class CellLine(Observer):
    """One of several runs at the same time: a bar of its own above the bar of all."""

    def __init__(self, whole: RunProgress, cell: Cell) -> None:
        self.whole, self.cell, self.metric = whole, cell, ""
        self.bar: Any = None  # from when it starts
        self.preparing, self.note, self.warning = whole.preparing, whole.note, whole.warning  # type: ignore[method-assign]

    def _show(self, note: str, **changes: Any) -> None:
        self.whole.progress.update(self.bar, note=note, **changes)
        self.whole.progress.refresh()

    def started(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        self.whole.prepared()
        self.whole.progress.start_task(self.whole.bar)
        self.whole.skipped(first_round - 1)
        self.bar = self.whole.progress.add_task(f"  {self.cell}", total=experiment.training.rounds, note="")
        self._show("", completed=first_round - 1)

    def client_done(self, round: int, done: int, total: int) -> None:
        self._show(f"round {round}, client {done}/{total}{self.metric}")

    def round_done(self, row: Row) -> None:
        if "macro_auc" in row:
            self.metric = f", macro AUC {row['macro_auc']:.1f}"
        self.whole.progress.update(self.whole.bar, advance=1)
        self._show(f"round {row['round']}{self.metric}", advance=1)


class FederationProgress(RunProgress):
    """A real federation takes its time: say who comes and goes, and a line a round even where there is no terminal."""

    def warning(self, text: str) -> None:
        say(text)

    def round_done(self, row: Row) -> None:
        super().round_done(row)
        shown = ("loss", "macro_auc", "map", "macro_f1", *BY_SITE)
        values = ", ".join(f"{name} {number(row[name], 3)}" for name in shown if name in row)
        line = f"round {row['round']}: {row['clients']} clients, {values}, {row['seconds']:.1f} s"
        say(line)


def site_table(name: str, summary: Summary) -> Table:
    held_out = "" if summary.held_out is None else f", {summary.held_out} of them held out"
    title = f"{name}: {summary.images} images, all readable{held_out}"
    counts = zip(summary.classes, summary.present, summary.absent, summary.unknown, strict=True)
    rows = [(escape(label), *map(str, line)) for label, *line in counts]
    return plain_table(title, ("class", "present", "absent", "unknown"), rows)


LEVELS = {"good": "[green]good[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}


def findings_table(findings: Sequence[Finding]) -> Table:
    rows = [(found.topic, LEVELS[found.level], escape(printable(found.text, 2000))) for found in findings]
    return plain_table("check", ("about", "", "found"), rows, words=True)


def result_table(result: Result) -> Table:
    title = f"{result.summary['method']} on {result.summary['data']}, round {result.summary['round']}"
    return plain_table(title, ("metric", "test, %"), headlines(result))


def show_result(result: Result) -> None:
    console.print(result_table(result))
    for family, (averages, lacking) in LEFT_OUT.items():
        if names := result.summary["left_out"].get(family):
            listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            console.print(f"[yellow]left out of {averages}[/] ({lacking} in the test data): {escape(listed)}")
    touched = {rule: count for rule, count in result.summary["partition"].items() if count}
    if touched:
        console.print("partition: " + ", ".join(f"{count} samples {rule}" for rule, count in touched.items()))
    traffic = (result.summary["bytes_up"] + result.summary["bytes_down"]) / 1e6
    console.print(
        f"{result.summary['seconds']:.1f} s, {traffic:.1f} MB sent; results in {result.folder}", soft_wrap=True
    )
