"""Progress bars during a run and tables after it. Nothing is shown without a terminal or a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedmll.cli.output import console, plain_table, print_markup, say, warn
from fedmll.comparison.compare import ComparisonCallback
from fedmll.comparison.results import ComparisonCell
from fedmll.config.experiment import Experiment
from fedmll.core.text import printable
from fedmll.data.federation import Federation
from fedmll.evaluation.metric_definitions import ROUND_TABLE, metrics_in
from fedmll.runs.formatting import by_site_table, format_number, headline_metrics
from fedmll.runs.run_folder import MetricsRow
from fedmll.training.callbacks import Callback, Result

if TYPE_CHECKING:
    from fedmll.deploy.site.check import CheckResult
    from fedmll.deploy.site.site_data import SiteDataSummary

# Averages that leave out the same classes (ClassificationReport.left_out): their names, and the reason.
LEFT_OUT = {
    "f1": ("AP, F1, precision and recall", "no positive"),
    "auc": ("AUC and balanced accuracy", "no positive, or no negative,"),
}


class RunProgress(ComparisonCallback):
    """A progress bar over the rounds of a run, or over the rounds of all runs of a comparison.

    It shows the finished clients, the current metric and the remaining time. In a notebook: `fedmll.run(…,
    callback=RunProgress())`. It has no thread of its own, because worker processes are forked from this process.
    """

    def __init__(self, total_rounds: int | None = None) -> None:
        """Without `total_rounds`, the number of rounds comes from the experiment or the comparison."""
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
        self.parallel_lines: dict[ComparisonCell, CellProgress] = {}  # parallel runs: one line each

    def __enter__(self) -> RunProgress:
        self.inside = True
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def on_comparison_start(self, rounds: int) -> None:
        self.total = rounds
        self.progress.update(self.bar, total=rounds)

    def on_cell_start(self, cell: ComparisonCell) -> None:
        self.label = str(cell)

    def callback_for(self, cell: ComparisonCell, parallel: bool) -> Callback:
        if not parallel:
            return super().callback_for(cell, parallel)
        self.parallel_lines[cell] = line = CellProgress(self, cell)
        return line

    def on_cell_end(self, cell: ComparisonCell) -> None:
        line = self.parallel_lines.pop(cell, None)
        if line is not None and line.bar is not None:
            self.progress.remove_task(line.bar)

    def on_rounds_skipped(self, rounds: int) -> None:
        """Rounds that were done before."""
        if self.total is not None:
            self.on_comparison_start(self.total - rounds)

    def on_setup_progress(self, done: int, total: int, what: str) -> None:
        self.progress.start()
        if self.data_bar is None:
            self.data_bar = self.progress.add_task(what, total=total, note="")
        self.progress.update(self.data_bar, completed=done, total=total, description=what)
        self.progress.refresh()

    def prepared(self) -> None:
        if self.data_bar is not None:
            self.progress.remove_task(self.data_bar)
            self.data_bar = None

    def on_run_start(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        self.prepared()
        self.progress.start()
        self.progress.start_task(self.bar)
        if self.total is None:
            self.on_comparison_start(experiment.training.rounds)
        self.on_rounds_skipped(first_round - 1)
        self.progress.update(self.bar, description=self.label or experiment.method.name)
        self.progress.refresh()

    def on_client_end(self, round: int, done: int, total: int) -> None:
        self.progress.update(self.bar, note=f"round {round}, client {done}/{total}{self.metric}")
        self.progress.refresh()

    def on_round_end(self, row: MetricsRow) -> None:
        if "macro_auc" in row:
            self.metric = f", macro AUC {row['macro_auc']:.1f}"
        self.progress.update(self.bar, advance=1, note=f"round {row['round']}{self.metric}")
        self.progress.refresh()

    def on_note(self, text: str) -> None:
        """Once, however many runs it is true of."""
        if text not in self.noted:
            self.noted.add(text)
            print_markup(f"[dim]{escape(text)}")

    def on_run_end(self, result: Result) -> None:
        if not self.inside:
            self.progress.stop()

    def on_warning(self, text: str) -> None:
        warn(text)


class CellProgress(Callback):
    """One of several runs at the same time: a bar of its own above the bar of all."""

    def __init__(self, whole: RunProgress, cell: ComparisonCell) -> None:
        self.whole, self.cell, self.metric = whole, cell, ""
        self.bar: Any = None  # from when it starts
        self.on_setup_progress, self.on_note, self.on_warning = whole.on_setup_progress, whole.on_note, whole.on_warning  # type: ignore[method-assign]

    def _show(self, note: str, **changes: Any) -> None:
        self.whole.progress.update(self.bar, note=note, **changes)
        self.whole.progress.refresh()

    def on_run_start(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        self.whole.prepared()
        self.whole.progress.start_task(self.whole.bar)
        self.whole.on_rounds_skipped(first_round - 1)
        self.bar = self.whole.progress.add_task(f"  {self.cell}", total=experiment.training.rounds, note="")
        self._show("", completed=first_round - 1)

    def on_client_end(self, round: int, done: int, total: int) -> None:
        self._show(f"round {round}, client {done}/{total}{self.metric}")

    def on_round_end(self, row: MetricsRow) -> None:
        if "macro_auc" in row:
            self.metric = f", macro AUC {row['macro_auc']:.1f}"
        self.whole.progress.update(self.whole.bar, advance=1)
        self._show(f"round {row['round']}{self.metric}", advance=1)


class FederationProgress(RunProgress):
    """Progress of a real federation: prints joining and leaving clients, and one line per round, also without a
    terminal."""

    def on_warning(self, text: str) -> None:
        say(text)

    def on_round_end(self, row: MetricsRow) -> None:
        super().on_round_end(row)
        shown = metrics_in(ROUND_TABLE)
        values = ", ".join(f"{name} {format_number(row[name], 3)}" for name in shown if name in row)
        line = f"round {row['round']}: {row['clients']} clients, {values}, {row['seconds']:.1f} s"
        say(line)


def site_table(name: str, summary: SiteDataSummary) -> Table:
    held_out = "" if summary.held_out is None else f", {summary.held_out} of them held out"
    title = f"{name}: {summary.images} images, all readable{held_out}"
    counts = zip(summary.classes, summary.present, summary.absent, summary.unknown, strict=True)
    rows = [(label, *map(str, line)) for label, *line in counts]
    return plain_table(title, ("class", "present", "absent", "unknown"), rows)


LEVEL_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


def check_table(results: Sequence[CheckResult]) -> Table:
    rows = [(one.topic, Text(one.level, LEVEL_COLOURS[one.level]), printable(one.text, 2000)) for one in results]
    return plain_table("check", ("topic", "", "result"), rows, words=True)


def result_table(result: Result) -> Table:
    title = f"{result.summary['method']} on {result.summary['data']}, round {result.summary['round']}"
    return plain_table(title, ("metric", "test, %"), headline_metrics(result))


def show_by_site(summary: dict[str, Any]) -> None:
    header, rows = by_site_table(summary)
    if rows:
        console.print(plain_table("by site, %", header, rows))


def show_result(result: Result) -> None:
    console.print(result_table(result))
    show_by_site(result.summary)
    for family, (averages, lacking) in LEFT_OUT.items():
        if names := result.summary["left_out"].get(family):
            listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            console.print(f"[yellow]left out of {averages}[/] ({lacking} in the test data): {escape(listed)}")
    touched = {rule: count for rule, count in result.summary["partition"].items() if count}
    if touched:
        say("partition: " + ", ".join(f"{count} samples {rule}" for rule, count in touched.items()))
    traffic = (result.summary["bytes_up"] + result.summary["bytes_down"]) / 1e6
    say(f"{result.summary['seconds']:.1f} s, {traffic:.1f} MB sent; results in {result.folder}")
