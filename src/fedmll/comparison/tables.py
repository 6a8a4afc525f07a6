"""The tables of a comparison as files: table.md, table.csv, table.tex; tests.csv and tuning.md if there are any."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedmll.comparison.results import Comparison, ComparisonRow, format_settings, metric_value, notes_on_grid_edges
from fedmll.comparison.statistics import MarginTest
from fedmll.core import files
from fedmll.evaluation.metric_definitions import COSTS, SELECTION, lower_is_better
from fedmll.runs.formatting import TextTable, format_number, markdown_table

MARKDOWN_FILE, CSV_FILE, LATEX_FILE = "table.md", "table.csv", "table.tex"
TESTS_FILE, TUNING_FILE = "tests.csv", "tuning.md"
TABLE_FILES = (MARKDOWN_FILE, CSV_FILE, LATEX_FILE, TESTS_FILE, TUNING_FILE)

LATEX_CHARACTERS = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "|": "$|$", "[": "{[}", "]": "{]}",
    "±": r"$\pm$", "−": "$-$", "–": "--", "—": "---", "…": r"\ldots{}", "×": r"$\times$", "≤": r"$\leq$",
    "≥": r"$\geq$", "→": r"$\rightarrow$",
}  # fmt: skip
GREEK_LETTERS = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ": "theta",
    "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi",
    "χ": "chi", "ψ": "psi", "ω": "omega",
}  # fmt: skip


def write_tables(comparison: Comparison, out: Path) -> None:
    """Write all tables into a folder. Optional tables of an earlier comparison (tests, tuning) are removed."""
    tables, notes = comparison.tables, comparison.notes
    parts = [markdown_table(*table) for table in tables]
    parts += ["".join(f"- {note}\n" for note in notes)] if notes else []
    files.write_atomic(out / MARKDOWN_FILE, "\n".join(parts))
    files.write_atomic(out / LATEX_FILE, latex_tables(comparison, tables))
    write_runs_csv(comparison, out / CSV_FILE)
    for name, text in {TESTS_FILE: tests_csv(comparison.tests), TUNING_FILE: tuning_markdown(comparison)}.items():
        if text:
            files.write_atomic(out / name, text)
        else:
            (out / name).unlink(missing_ok=True)


def write_runs_csv(comparison: Comparison, path: Path) -> None:
    """Every metric of every run in the table: one line per method, seed and metric. A failed run has one line with the
    metric "failed" and the reason as its value."""
    lines: list[Sequence[Any]] = [["method", "tuned", "seed", "metric", "value"]]
    for row in comparison.rows:
        for cell in row.runs:
            start = [row.label, " ".join(f"{key}={value}" for key, value in cell.setting.items()), cell.seed]
            if cell.failure is not None:
                lines.append([*start, "failed", cell.failure])
            if cell.summary is not None and cell in row.cells:
                summary = cell.summary
                lines += [[*start, name, metric_value(summary, name)] for name in [*summary["metrics"], *COSTS]]
    files.write_atomic(path, _format_csv(lines))


def tests_csv(tests: Sequence[MarginTest]) -> str:
    """Every number of every test, not rounded."""
    if not tests:
        return ""
    return _format_csv([[field.name for field in fields(MarginTest)], *(list(asdict(test).values()) for test in tests)])


def _format_csv(lines: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def tuning_markdown(comparison: Comparison) -> str:
    """What --tune tried for each row, the metric on validation data, and the choice. Empty without --tune."""
    parts = []
    for row in comparison.rows:
        if row.trials:
            notes = "".join(f"\n- {line}" for line in notes_on_grid_edges(row))
            parts.append(f"## {row.label}\n\n{markdown_table(*_trial_table(row))}{notes}\n")
    return "\n".join(parts)


def _trial_table(row: ComparisonRow) -> TextTable:
    lines = []
    for cell in row.trials:
        score = "not run" if cell.summary is None else format_number(metric_value(cell.summary, SELECTION))
        score = score if cell.failure is None else "failed"
        chosen = bool(row.cells) and cell.setting == row.setting
        lines.append([", ".join(format_settings(cell.setting)), score, "chosen" if chosen else ""])
    return ["setting", f"{SELECTION}, seed {row.trials[0].seed}", ""], lines


# ---- LaTeX with booktabs


def latex_tables(comparison: Comparison, tables: Sequence[TextTable]) -> str:
    """All tables. In the first one the best value of each metric is bold and the second underlined; rows that do not
    have all seeds are not ranked."""
    parts = ["% \\usepackage{booktabs}; of each metric the best is bold, the second underlined\n"]
    for place, (header, rows) in enumerate(tables):
        ranks = _ranked_cells(comparison, header) if place == 0 else {}
        lines = [
            [_wrap(escape_latex(text), ranks.get((row[0], name))) for name, text in zip(header, row, strict=True)]
            for row in rows
        ]
        parts.append(_tabular([escape_latex(name) for name in header], lines))
    return "\n".join(parts)


def escape_latex(text: str) -> str:
    """Text for LaTeX. A character that the standard fonts lack becomes a question mark, so that the file compiles."""
    escaped = []
    for letter in text:
        if letter in GREEK_LETTERS:
            escaped.append(f"$\\{GREEK_LETTERS[letter]}$")
        elif letter in LATEX_CHARACTERS:
            escaped.append(LATEX_CHARACTERS[letter])
        else:
            escaped.append(letter if letter.isascii() or letter in "äöüÄÖÜßéèêàçñ" else "?")
    return "".join(escaped)


def _wrap(text: str, command: str | None) -> str:
    return text if command is None else f"\\{command}{{{text}}}"


def _tabular(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    columns = "l" + "r" * (len(header) - 1)
    body = [" & ".join(row) + r" \\" for row in rows]
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", " & ".join(header) + r" \\", r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _ranked_cells(comparison: Comparison, header: Sequence[str]) -> dict[tuple[str, str], str]:
    """By row and column: the LaTeX command for the best and the second value. Values that look equal are equal."""
    commands: dict[tuple[str, str], str] = {}
    for name in header:
        if name not in comparison.metrics:
            continue
        means = {}
        for row in comparison.rows:
            values = list(row.values(name).values())
            if len(values) == len(comparison.seeds) and not any(map(math.isnan, values)):
                means[row.label] = float(f"{np.mean(values):.2f}")
        order = sorted(set(means.values()), reverse=not lower_is_better(name))
        for mean, command in zip(order, ("textbf", "underline"), strict=False):
            commands |= {(label, name): command for label, value in means.items() if value == mean}
    return commands
