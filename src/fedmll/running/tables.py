"""The tables of a comparison as files: table.md, table.csv, table.tex; tests.csv and tuning.md where there are any."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fedmll import files
from fedmll.running.comparison import COSTS, Comparison, Row, edges, markdown, measure, settings
from fedmll.running.latex import latex
from fedmll.running.loop import SELECTION
from fedmll.running.margins import MarginTest
from fedmll.running.shown import number

MARKDOWN, CSV, LATEX, TESTS, TUNING = "table.md", "table.csv", "table.tex", "tests.csv", "tuning.md"
WRITTEN = (MARKDOWN, CSV, LATEX, TESTS, TUNING)


def write_tables(comparison: Comparison, out: Path) -> None:
    """Each whole or as it was. What this comparison has no more (tests, tuning) does not stay from an earlier one."""
    tables, notes = comparison.tables, comparison.notes
    parts = [markdown(*table) for table in tables]
    parts += ["".join(f"- {note}\n" for note in notes)] if notes else []
    files.write(out / MARKDOWN, "\n".join(parts))
    files.write(out / LATEX, latex(comparison, tables))
    write_csv(comparison, out / CSV)
    optional = {TESTS: tests_csv(comparison.tests), TUNING: tuning(comparison)}
    for name, text in optional.items():
        if text:
            files.write(out / name, text)
        else:
            (out / name).unlink(missing_ok=True)


def write_csv(comparison: Comparison, path: Path) -> None:
    """Every metric of every run in the table: one line a method, seed and metric; of a failed run, the reason."""
    lines: list[Sequence[Any]] = [["method", "tuned", "seed", "metric", "value"]]
    for row in comparison.rows:
        for cell in row.runs:
            start = [row.label, " ".join(f"{key}={value}" for key, value in cell.setting.items()), cell.seed]
            if cell.failure is not None:
                lines.append([*start, "failed", cell.failure])
            if cell.summary is not None and cell in row.cells:
                summary = cell.summary
                lines += [[*start, name, measure(summary, name)] for name in [*summary["metrics"], *COSTS]]
    files.write(path, _csv(lines))


def tests_csv(tests: Sequence[MarginTest]) -> str:
    """Every figure of every test, unrounded."""
    if not tests:
        return ""
    return _csv([[field.name for field in fields(MarginTest)], *(list(asdict(test).values()) for test in tests)])


def _csv(lines: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def tuning(comparison: Comparison) -> str:
    """What --tune tried for each row, what it gave on validation data, and what was chosen. Empty without --tune."""
    parts = []
    for row in comparison.rows:
        if row.trials:
            notes = "".join(f"\n- {line}" for line in edges(row))
            parts.append(f"## {row.label}\n\n{markdown(*_trials(row))}{notes}\n")
    return "\n".join(parts)


def _trials(row: Row) -> tuple[list[str], list[list[str]]]:
    lines = []
    for cell in row.trials:
        score = "not run" if cell.summary is None else number(measure(cell.summary, SELECTION))
        score = score if cell.failure is None else "failed"
        chosen = bool(row.cells) and cell.setting == row.setting
        lines.append([", ".join(settings(cell.setting)), score, "chosen" if chosen else ""])
    return ["setting", f"{SELECTION}, seed {row.trials[0].seed}", ""], lines
