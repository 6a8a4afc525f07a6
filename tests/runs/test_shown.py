"""What a person sees of a result in Python and in a notebook."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from conftest import small
from rich.console import Console

from fedmll import run
from fedmll.cli import display, methods
from fedmll.runs.shown import result_html, result_repr


def test_a_result_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar shows where rich finds a notebook, and is gone from the process when the run is over."""
    shown: list[str] = []
    console = Console(force_jupyter=True, width=100, file=io.StringIO())
    monkeypatch.setattr(display, "console", console)
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: shown.append(text))
    progress = display.RunProgress()
    assert not progress.progress.disable
    result = run(small(), observer=progress)
    assert progress.total == 2
    assert progress.progress.finished
    assert not progress.progress.live.is_started
    line, page = result_repr(result), result_html(result)
    assert line.startswith("<fedavg on ml-digits, round 2: macro_auc ")
    assert f"<td>macro_auc</td><td>{result.metrics['macro_auc']:.2f}</td>" in page


def test_a_page_has_no_markup_of_strangers() -> None:
    summary = {"method": "<b>", "data": "x", "round": 1}
    assert "<b>" not in result_html(SimpleNamespace(summary=summary, metrics={}, folder=None))  # type: ignore[arg-type]


def test_a_method_that_describes_itself_is_shown_in_groups(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Described:
        __module__ = __name__
        summary, symbols, published = "s", {}, {}  # type: ignore[var-annotated]

        @classmethod
        def described(cls) -> list[tuple[str, list[tuple[str, str, str, str]]]]:
            return [("proximal", [("mu", "how near to stay", "≥ 0", "0.01")]), ("", [("weights", "w", "", "size")])]

    monkeypatch.setattr(methods.registry, "find", lambda kind, name: Described)
    methods.show("mine")
    said = capsys.readouterr().out
    assert "proximal" in said and "how near to stay" in said and "≥ 0" in said
