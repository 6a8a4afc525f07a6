"""`fedmll methods` in terminals of several widths."""

from __future__ import annotations

import pytest

from fedmll.cli import methods
from fedmll.cli.methods import table_cells
from fedmll.methods.catalog import MethodSummary, built_in_methods, read_catalog

BROAD = {"paper", "up", "down", "a client keeps"}


def printed(width: int, name: str | None = None) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods.console, "width", width)
        with methods.console.capture() as capture:
            methods.methods(name)
    return capture.get().splitlines()


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (80, {"name", "what it does", "for", "cost"}),
        (119, {"name", "what it does", "for", "cost"}),
        (120, {"name", "for", "cost"} | BROAD),
        (160, {"name", "for", "cost"} | BROAD),
        (190, {"name", "what it does", "for", "cost"} | BROAD),
    ],
)
def test_narrow_terminal_shows_fewer_columns(width: int, headings: set[str]) -> None:
    lines = printed(width)
    assert max(map(len, lines)) <= width
    if width != 120:  # where a heading may be broken
        assert {cell.strip() for cell in lines[2].strip("┃").split("┃")} == headings
    names = {line.strip("│").split("│")[0].strip() for line in lines if line.startswith("│")}
    assert names >= {"fedavg", "fedmlp", "private-fedprox"}  # never broken
    assert "benchmarks/method_costs.py" in " ".join(" ".join(lines).split())


def test_row_shows_communication_client_state_and_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "read_costs", lambda: {"mine": 1.26})
    summary = MethodSummary(
        name="mine", summary="it does", paper="Me, 2026", setting=("skew", "private labels"), up="a", down="b",
        remembers="c",
    )  # fmt: skip
    assert table_cells(summary) == {
        "name": "mine", "what it does": "it does", "paper": "Me, 2026", "for": "skew, private", "up": "a",
        "down": "b", "a client keeps": "c", "cost": "1.3",
    }  # fmt: skip
    bare = table_cells(MethodSummary(name="other", summary="it does"))
    assert {bare[key] for key in (*BROAD, "cost")} == {"–"}
    assert bare["for"] == "skew"
    assert (
        table_cells(
            MethodSummary(name="other", summary="it does", setting=("skew", "partial annotation", "private labels"))
        )["for"]
        == "any"
    )


def test_one_method_is_shown_in_full() -> None:
    text = "\n".join(printed(80, "fedmlp"))
    for expected in ("paper: Sun et al., 2024", "for: partial annotation",
                     "sent in addition to the weights: two prototypes",
                     "a client keeps: its tags", "cost of a round relative to FedAvg: "):  # fmt: skip
        assert expected in text
    assert "a client keeps" not in "\n".join(printed(80, "fedavg"))


def test_catalog_agrees_with_the_method_classes() -> None:
    """If it does not, run `python -m fedmll.methods.catalog`."""
    assert read_catalog() == built_in_methods()
