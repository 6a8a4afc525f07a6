"""A result as a person sees it: a line, or in a notebook a small table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedmll.running.loop import Result

HEADLINES = ("macro_auc", "map", "macro_f1", "macro_f1_tuned", "micro_f1", "bacc", "accuracy")
BY_SITE = ("sites_macro_auc", "sites_map", "sites_macro_f1")  # averages over the sites' own
TOGETHER = ("pooled_macro_auc", "pooled_map", "pooled_macro_f1")  # of the sites' data together
OWN = ("client_mean_auc", "client_worst_auc")  # on what the clients hold out


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def headlines(result: Result) -> list[tuple[str, str]]:
    """The metrics to look at first, in percent."""
    from fedmll import registry

    names = [*HEADLINES, *registry.added("metric"), *TOGETHER, *BY_SITE, *OWN]
    return [
        (f"{name} (held-out)" if name in OWN else name, number(result.metrics[name]) + _error(result, name))
        for name in names
        if name in result.metrics
    ]


def _error(result: Result, name: str) -> str:
    """The most that it can be away from the exact value, where it is not exact."""
    error = result.metrics.get(f"{name}_error")
    return "" if error is None or not math.isfinite(error) else f" ± {number(error)}"


def result_repr(result: Result) -> str:
    found = ", ".join(f"{name} {value}" for name, value in headlines(result)[:3])
    where = "" if result.folder is None else f", in {result.folder}"
    return f"<{_title(result)}: {found}{where}>"


def result_html(result: Result) -> str:
    return html_table(_title(result), ["metric", "test, %"], headlines(result))


def html_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><caption>{escape(title)}</caption>{line(header, 'th')}{body}</table>"


def _title(result: Result) -> str:
    return f"{result.summary['method']} on {result.summary['data']}, round {result.summary['round']}"
