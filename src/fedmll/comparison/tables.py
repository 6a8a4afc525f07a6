"""The tables of a comparison as files: table.md, table.csv, table.tex; tests.csv and tuning.md if there are any. Also
the rule for which rows of a table are ranked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedmll.comparison.results import Comparison, ComparisonRow, format_settings, metric_value, notes_on_grid_edges
from fedmll.comparison.statistics import MarginTest
from fedmll.core import files
from fedmll.evaluation.metric_definitions import COSTS, SELECTION, lower_is_better
from fedmll.runs.formatting import TextTable, escape_markdown, format_csv, format_number, markdown_table

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
    parts += ["".join(f"- {escape_markdown(note)}\n" for note in notes)] if notes else []
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
    files.write_atomic(path, format_csv(lines))


def tests_csv(tests: Sequence[MarginTest]) -> str:
    """Every number of every test, not rounded."""
    if not tests:
        return ""
    return format_csv([[field.name for field in fields(MarginTest)], *(list(asdict(test).values()) for test in tests)])


def tuning_markdown(comparison: Comparison) -> str:
    """What --tune tried for each row, the metric on validation data, and the choice. Empty without --tune."""
    parts = []
    for row in comparison.rows:
        if row.trials:
            notes = "".join(f"\n- {escape_markdown(line)}" for line in notes_on_grid_edges(row))
            parts.append(f"## {escape_markdown(row.label)}\n\n{markdown_table(*_trial_table(row))}{notes}\n")
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
    """All tables. In the first one the ranks of the rows are marked."""
    parts = [f"% \\usepackage{{booktabs}}. {ranking_note(_rankable(comparison))}\n"]
    for place, (header, rows) in enumerate(tables):
        ranks = _ranked_cells(comparison, header) if place == 0 else {}
        lines = [
            [_wrap(escape_latex(text), ranks.get((row[0], name))) for name, text in zip(header, row, strict=True)]
            for row in rows
        ]
        parts.append(tabular([escape_latex(name) for name in header], lines))
    return "\n".join(parts)


def escape_latex(text: str) -> str:
    """Text for LaTeX. A character that the standard fonts lack becomes a question mark, so that the file compiles."""
    escaped = []
    for letter in " ".join(text.split()):  # a line break would end the row
        if letter in GREEK_LETTERS:
            escaped.append(f"$\\{GREEK_LETTERS[letter]}$")
        elif letter in LATEX_CHARACTERS:
            escaped.append(LATEX_CHARACTERS[letter])
        else:
            escaped.append(letter if letter.isascii() or letter in "äöüÄÖÜßéèêàçñ" else "?")
    return "".join(escaped)


def _wrap(text: str, command: str | None) -> str:
    return text if command is None else f"\\{command}{{{text}}}"


def tabular(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    columns = "l" + "r" * (len(header) - 1)
    body = [" & ".join(row) + r" \\" for row in rows]
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", " & ".join(header) + r" \\", r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _rankable(comparison: Comparison) -> list[RankableRow]:
    return [RankableRow(row.runs[0].experiment.method.name, len(row.finished)) for row in comparison.rows]


def _ranked_cells(comparison: Comparison, header: Sequence[str]) -> dict[tuple[str, str], str]:
    """By row and column: the LaTeX command for the best and the second value."""
    commands: dict[tuple[str, str], str] = {}
    for name in header:
        if name in comparison.metrics:
            means = [float(np.mean(list(row.values(name).values()) or math.nan)) for row in comparison.rows]
            ranks = rank_values(name, _rankable(comparison), means)
            commands |= {
                (row.label, name): {BEST: "textbf", SECOND: "underline"}[rank]
                for row, rank in zip(comparison.rows, ranks, strict=True)
                if rank
            }
    return commands


# ---- Ranking: the same rule in every table

UPPER_BOUND = "centralized"  # trained on all data in one place: it is not a method that one could choose
BEST, SECOND = "best", "second"


class RankableRow(NamedTuple):
    """What decides whether a row of a table is ranked."""

    method: str
    finished_seeds: int


def is_ranked(rows: Sequence[RankableRow]) -> list[bool]:
    """A row is ranked if no row has more finished seeds, and if it is not an upper bound."""
    most = max((row.finished_seeds for row in rows), default=0)
    return [row.finished_seeds == most > 0 and row.method != UPPER_BOUND for row in rows]


def rank_values(metric: str, rows: Sequence[RankableRow], means: Sequence[float]) -> list[str]:
    """BEST for the best mean of the ranked rows, SECOND for the next, else empty. Means that look equal in the table
    are equal; undefined ones (NaN) have no rank. Without two different means, and for costs, there are no ranks."""
    shown = [round(mean, 2) if ranked else math.nan for mean, ranked in zip(means, is_ranked(rows), strict=True)]
    order = sorted({mean for mean in shown if math.isfinite(mean)}, reverse=not lower_is_better(metric))
    if len(order) < 2 or metric in COSTS:
        return [""] * len(rows)
    return [{order[0]: BEST, order[1]: SECOND}.get(mean, "") for mean in shown]


def ranking_note(rows: Sequence[RankableRow]) -> str:
    """What bold and underlined mean, and which rows are not ranked; empty if there is nothing to rank."""
    ranked = is_ranked(rows)
    if sum(ranked) < 2:
        return ""
    others = [row for row, is_one in zip(rows, ranked, strict=True) if not is_one]
    left_out = []
    if any(row.method != UPPER_BOUND for row in others):
        left_out.append("Rows with fewer seeds than others are not ranked.")
    if any(row.method == UPPER_BOUND for row in others):
        left_out.append(f"{UPPER_BOUND} is not ranked, because it has all data in one place.")
    return " ".join(["The best value is bold, the second best is underlined.", *left_out])
