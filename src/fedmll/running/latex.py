"""A table for a paper: LaTeX with booktabs. Of each metric the best is bold, the second underlined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fedmll.running.comparison import Comparison, Table

LOWER_IS_BETTER = ("hamming",)
SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "|": "$|$", "[": "{[}", "]": "{]}",
    "±": r"$\pm$", "−": "$-$", "–": "--", "—": "---", "…": r"\ldots{}", "×": r"$\times$", "≤": r"$\leq$",
    "≥": r"$\geq$", "→": r"$\rightarrow$",
}  # fmt: skip
GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ": "theta",
    "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi",
    "χ": "chi", "ψ": "psi", "ω": "omega",
}  # fmt: skip


def escaped(text: str) -> str:
    """As LaTeX prints it. What its plain fonts do not have becomes a question mark, so that a file always compiles."""
    found = []
    for letter in text:
        if letter in GREEK:
            found.append(f"$\\{GREEK[letter]}$")
        elif letter in SPECIAL:
            found.append(SPECIAL[letter])
        else:
            found.append(letter if letter.isascii() or letter in "äöüÄÖÜßéèêàçñ" else "?")
    return "".join(found)


def latex(comparison: Comparison, tables: Sequence[Table]) -> str:
    """All tables; in the first the best of each metric stand out. Rows without all their seeds do not compete."""
    parts = ["% \\usepackage{booktabs}; of each metric the best is bold, the second underlined\n"]
    for place, (header, rows) in enumerate(tables):
        marks = _marks(comparison, header) if place == 0 else {}
        lines = [
            [_set(escaped(text), marks.get((row[0], name))) for name, text in zip(header, row, strict=True)]
            for row in rows
        ]
        parts.append(_tabular([escaped(name) for name in header], lines))
    return "\n".join(parts)


def _set(text: str, command: str | None) -> str:
    return text if command is None else f"\\{command}{{{text}}}"


def _tabular(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    columns = "l" + "r" * (len(header) - 1)
    body = [" & ".join(row) + r" \\" for row in rows]
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", " & ".join(header) + r" \\", r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _marks(comparison: Comparison, header: Sequence[str]) -> dict[tuple[str, str], str]:
    """By row and column: the command for its figure. Equal as printed is equal."""
    found: dict[tuple[str, str], str] = {}
    for name in header:
        if name not in comparison.metrics:
            continue
        means = {}
        for row in comparison.rows:
            values = list(row.values(name).values())
            if len(values) == len(comparison.seeds) and not any(map(math.isnan, values)):
                means[row.label] = float(f"{np.mean(values):.2f}")
        order = sorted(set(means.values()), reverse=name not in LOWER_IS_BETTER)
        for mean, how in zip(order, ("textbf", "underline"), strict=False):
            found |= {(label, name): how for label, value in means.items() if value == mean}
    return found
