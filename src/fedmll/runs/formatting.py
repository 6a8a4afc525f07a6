"""Numbers, results and tables as text for people (terminal, notebook) and for programs (JSON, CSV)."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core import files, registry
from fedmll.evaluation.metric_definitions import CLIENT_MEAN, CLIENT_WORST, ERROR, HEADLINE, metrics_in
from fedmll.evaluation.site_metrics import SHARED

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


BY_SITE = ("macro_auc", "map", "macro_f1", "micro_f1")


def by_site_table(summary: Mapping[str, Any]) -> TextTable:
    """The metrics by site of a finished run with [[sites]]: header and rows; no rows for other runs."""
    rows = []
    for group in summary.get("by_site", ()):
        name = SHARED if group["site"] is None else str(group["site"])
        label = f"{name}, only its own classes" if group["only"] else name
        values = [format_number(group["metrics"].get(metric)) for metric in BY_SITE]
        rows.append([label, f"{group['samples']:,}", str(len(group["classes"])), *values])
    return ["test data of", "samples", "classes", *BY_SITE], rows


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
    return "".join("| " + " | ".join(map(escape_markdown, line)) + " |\n" for line in lines)


def escape_markdown(text: str) -> str:
    """Text for a table or a list: without HTML, links and line breaks."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("](", "]\\(")


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader accepts: an undefined metric is null."""

    def without_nan(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: without_nan(inner) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return [without_nan(inner) for inner in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(without_nan(value), indent=indent, allow_nan=False)


def to_checked_json(values: Mapping[str, Any], indent: int) -> str:
    """A JSON object with the key `checksum`: the SHA-256 of all other keys, for `from_checked_json`."""
    content = json.loads(to_json(values))
    return json.dumps(content | {"checksum": _checksum(content)}, indent=indent) + "\n"


def from_checked_json(text: bytes) -> dict[str, Any]:
    """The object that `to_checked_json` wrote, without its checksum; ValueError with the reason if it has changed."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    if content.pop("checksum", None) != _checksum(content):
        raise ValueError("its checksum does not match")
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ---- CSV. People open these files in spreadsheet programs, which execute a cell that looks like a formula. Names of
# classes, files and methods may come from others, so such a cell gets an apostrophe in front.

FORMULA = re.compile(r"'*[=+\-@\t\r]")
NUMBER = re.compile(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE)


def escape_cell(value: Any) -> Any:
    """A value for a CSV file: text that looks like a formula gets an apostrophe in front; -0.5 stays a number."""
    is_formula = isinstance(value, str) and FORMULA.match(value) and not NUMBER.fullmatch(value)
    return f"'{value}" if is_formula else value


def unescape_cell(text: str) -> str:
    """The text that `escape_cell` was given."""
    return text[1:] if text.startswith("'") and FORMULA.match(text) else text


def format_csv(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(escape_cell, row) for row in rows)
    return text.getvalue()


def dicts_to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """One column for each key that some row has. NaN, None and missing values are empty cells; no number is rounded."""

    def cell(value: Any) -> Any:
        return "" if value is None or (isinstance(value, float) and not math.isfinite(value)) else value

    keys = list(dict.fromkeys(key for row in rows for key in row))
    return format_csv([keys, *([cell(row.get(key)) for key in keys] for row in rows)])


def write_csv(path: Path, columns: dict[str, NDArray[Any]]) -> None:
    """Columns of equal length as a CSV file; floating-point numbers with four digits."""
    rows = zip(*columns.values(), strict=True)
    lines = ([f"{v:.4f}" if isinstance(v, np.floating) else v for v in row] for row in rows)
    files.write_atomic(path, format_csv([columns, *lines]))
