"""How a result is shown in Python and in a notebook."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from conftest import small
from rich.console import Console

from fedmll import run
from fedmll.cli import display, methods
from fedmll.runs.formatting import format_result, headline_metrics, result_html


def test_result_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar shows where rich finds a notebook, and is gone from the process when the run is over."""
    shown: list[str] = []
    console = Console(force_jupyter=True, width=100, file=io.StringIO())
    monkeypatch.setattr(display, "console", console)
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: shown.append(text))
    progress = display.RunProgress()
    assert not progress.progress.disable
    result = run(small(), callback=progress)
    assert progress.total == 2
    assert progress.progress.finished
    assert not progress.progress.live.is_started
    line, page = format_result(result), result_html(result)
    assert line.startswith("<fedavg on ml-digits, round 2: macro_auc ")
    assert f"<td>macro_auc</td><td>{result.metrics['macro_auc']:.2f}</td>" in page


def test_inexact_metric_is_shown_with_its_error_bound() -> None:
    metrics = {
        "pooled_macro_auc": 81.212,
        "pooled_macro_auc_error": 14.407,
        "pooled_map": 60.0,
        "pooled_map_error": None,
    }
    found = headline_metrics(SimpleNamespace(metrics=metrics))  # type: ignore[arg-type]
    assert found == [("pooled_macro_auc", "81.21 ± 14.41"), ("pooled_map", "60.00")]
    undefined = {"pooled_macro_auc": float("nan"), "pooled_macro_auc_error": float("nan")}
    assert headline_metrics(SimpleNamespace(metrics=undefined)) == [("pooled_macro_auc", "–")]  # type: ignore[arg-type]


def test_text_from_others_is_escaped_in_html() -> None:
    summary = {"method": "<b>", "data": "x", "round": 1}
    assert "<b>" not in result_html(SimpleNamespace(summary=summary, metrics={}, folder=None))  # type: ignore[arg-type]


def test_method_options_are_shown_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """The options of each piece under its name, with what they mean, their range and default."""
    methods.show_method("fedprox")
    said = capsys.readouterr().out
    proximal, _, average = said.partition("part 'proximal'")[2].partition("average 'mean'")
    assert {"mu", "strength", "penalty", "≥", "0.01"} <= set(proximal.split())
    assert {"weighting", "size,", "equal", "size"} <= set(average.split())
    assert "penalty" not in average
