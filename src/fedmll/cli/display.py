"""What the terminal shows: progress while a run goes, tables after it. Quiet when nobody looks (no terminal)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedmll.data.federation import Federation
from fedmll.deploy.site import Summary
from fedmll.experiment import Experiment
from fedmll.runs.loop import Observer, Result, Row

console = Console()
errors = Console(stderr=True)
if not console.is_terminal:
    console.width = 200  # a file or a pipe has no width: cut no column

HEADLINES = ("macro_auc", "map", "macro_f1", "macro_f1_tuned", "micro_f1", "bacc", "accuracy")

# Of the families of averages (metrics.Report.left_out) the two pairs that lose the same classes: their names, and why.
LEFT_OUT = {
    "f1": ("AP, F1, precision and recall", "no positive"),
    "auc": ("AUC and balanced accuracy", "no positive, or no negative,"),
}


class RunProgress(Observer):
    """One bar over rounds: clients done, the current metric, time left. `label` names the run where there are several.

    It refreshes on events, without a thread of its own: worker processes are forked from this one."""

    def __init__(self, total_rounds: int, label: str = "") -> None:
        self.label = label
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self.total = total_rounds
        self.bar = self.progress.add_task("rounds", total=total_rounds, note="", start=False)
        self.data_bar: Any = None
        self.noted: set[str] = set()
        self.metric = ""

    def __enter__(self) -> RunProgress:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def skip(self, rounds: int) -> None:
        """Rounds that were done before."""
        self.progress.update(self.bar, total=self.progress.tasks[self.bar].total - rounds)  # type: ignore[operator]

    def preparing(self, done: int, total: int, what: str) -> None:
        if self.data_bar is None:
            self.data_bar = self.progress.add_task(what, total=total, note="")
        self.progress.update(self.data_bar, completed=done, total=total, description=what)
        self.progress.refresh()

    def started(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        if self.data_bar is not None:
            self.progress.remove_task(self.data_bar)
            self.data_bar = None
        self.progress.start_task(self.bar)
        self.skip(first_round - 1)
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

    def warning(self, text: str) -> None:
        errors.print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)


class FederationProgress(RunProgress):
    """A real federation takes its time: say who comes and goes, and a line a round even where there is no terminal."""

    def warning(self, text: str) -> None:
        console.print(escape(text), highlight=False, soft_wrap=True)

    def round_done(self, row: Row) -> None:
        super().round_done(row)
        shown = ("loss", "macro_auc", "map", "macro_f1")
        values = ", ".join(f"{name} {number(row[name], 3)}" for name in shown if name in row)
        line = f"round {row['round']}: {row['clients']} clients, {values}, {row['seconds']:.1f} s"
        console.print(line, highlight=False, soft_wrap=True)


def site_table(name: str, summary: Summary) -> Table:
    held_out = "" if summary.held_out is None else f", {summary.held_out} of them held out"
    title = f"{name}: {summary.images} images, all readable{held_out}"
    counts = zip(summary.classes, summary.present, summary.absent, summary.unknown, strict=True)
    rows = [(label, *map(str, line)) for label, *line in counts]
    return plain_table(title, ("class", "present", "absent", "unknown"), rows)


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def result_table(result: Result) -> Table:
    table = Table(title=f"{result.summary['method']} on {result.summary['data']}, round {result.summary['round']}")
    table.add_column("metric")
    table.add_column("test, %", justify="right")
    for name in HEADLINES:
        if name in result.metrics:
            table.add_row(name, number(result.metrics[name]))
    for name in ("client_mean_auc", "client_worst_auc"):
        if name in result.metrics:
            table.add_row(f"{name} [dim](held-out)", number(result.metrics[name]))
    return table


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


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def options_table(title: str, options: Mapping[str, Any]) -> Table:
    return plain_table(title, ("option", "default"), [(name, str(value)) for name, value in options.items()])
