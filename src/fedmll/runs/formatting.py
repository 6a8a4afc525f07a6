"""Numbers, results and tables as text for people (terminal, notebook) and for programs (JSON, CSV)."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core import files, registry
from fedmll.evaluation.metric_definitions import CLIENT_MEAN, CLIENT_WORST, ERROR, HEADLINE, metrics_in

if TYPE_CHECKING:
    from fedmll.training.callbacks import Result

TextTable = tuple[list[str], list[list[str]]]  # header, rows


def format_number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def mean_and_std(values: NDArray[np.float64], sign: str = "") -> str:
    """`34.10 ± 0.20`; without a standard deviation for a single value. `sign` "+" also shows a plus."""
    return f"{values.mean():{sign}.2f}" + (f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else "")


def headline_metrics(result: Result) -> list[tuple[str, str]]:
    """The main metrics of a result, in percent: names and formatted values."""
    return [
        (
            f"{name} (held-out)" if name.startswith((CLIENT_MEAN, CLIENT_WORST)) else name,
            format_number(result.metrics[name]) + _error_bound(result, name),
        )
        for name in [*metrics_in(HEADLINE), *registry.find_added("metric")]
        if name in result.metrics
    ]


def _error_bound(result: Result, name: str) -> str:
    """` ± 0.12` for a metric that is computed from histograms and therefore not exact."""
    error = result.metrics.get(name + ERROR)
    return "" if error is None or not math.isfinite(error) else f" ± {format_number(error)}"


def format_result(result: Result) -> str:
    """One line."""
    metrics = ", ".join(f"{name} {value}" for name, value in headline_metrics(result)[:3])
    folder = "" if result.folder is None else f", in {result.folder}"
    return f"<{result_title(result)}: {metrics}{folder}>"


def result_html(result: Result) -> str:
    return html_table(result_title(result), ["metric", "test, %"], headline_metrics(result))


def result_title(result: Result) -> str:
    return f"{result.summary['method']} on {result.summary['data']}, round {result.summary['round']}"


def html_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><caption>{escape(title)}</caption>{line(header, 'th')}{body}</table>"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader accepts: an undefined metric is null."""

    def without_nan(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: without_nan(inner) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return [without_nan(inner) for inner in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(without_nan(value), indent=indent, allow_nan=False)


def write_csv(path: Path, columns: dict[str, NDArray[Any]]) -> None:
    """Columns of equal length as a CSV file; floating-point numbers with four digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for values in zip(*columns.values(), strict=True):
        writer.writerow([f"{v:.4f}" if isinstance(v, np.floating) else v for v in values])
    files.write_atomic(path, text.getvalue())
