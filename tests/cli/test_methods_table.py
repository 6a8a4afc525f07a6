"""`fedmll methods` in terminals of several widths."""

from __future__ import annotations

import pytest

from fedmll.cli import methods as table
from fedmll.cli.methods import About, cells
from fedmll.registry import find

BROAD = {"paper", "up", "down", "a client keeps"}


def printed(width: int, name: str | None = None) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table.console, "width", width)
        with table.console.capture() as capture:
            table.methods(name)
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
def test_a_narrow_terminal_has_fewer_columns(width: int, headings: set[str]) -> None:
    lines = printed(width)
    assert max(map(len, lines)) <= width
    if width != 120:  # where a heading may be broken
        assert {cell.strip() for cell in lines[2].strip("┃").split("┃")} == headings
    names = {line.strip("│").split("│")[0].strip() for line in lines if line.startswith("│")}
    assert names >= {"fedavg", "fedmlp", "private-fedprox"}  # never broken
    assert "benchmarks/method_costs.py" in " ".join(" ".join(lines).split())


def test_a_row_says_what_travels_what_stays_and_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "costs", lambda: {"mine": 1.26})
    about = About("mine", "it does", "Me, 2026", ("skew", "private labels"), "a", "b", "c")
    assert cells(about) == {
        "name": "mine", "what it does": "it does", "paper": "Me, 2026", "for": "skew, private", "up": "a",
        "down": "b", "a client keeps": "c", "cost": "1.3",
    }  # fmt: skip
    bare = cells(About("other", "it does"))
    assert {bare[key] for key in (*BROAD, "cost")} == {"–"}
    assert bare["for"] == "skew"
    assert cells(About("other", "it does", setting=("skew", "partial annotation", "private labels")))["for"] == "any"


def test_one_method_is_shown_in_full() -> None:
    text = "\n".join(printed(80, "fedmlp"))
    for expected in ("paper: Sun et al., 2024", "for: partial annotation", "up, beside the weights: two prototypes",
                     "a client keeps: its tags", "cost of a round, FedAvg's being 1: "):  # fmt: skip
        assert expected in text
    assert "a client keeps" not in "\n".join(printed(80, "fedavg"))


def test_a_class_is_read_without_being_imported() -> None:
    import ast

    source = 'class A:\n    name: ClassVar[str] = "a"\n    setting = ("skew",)\n    head = Linear\n    up: str\n'
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.ClassDef)
    assert dict(table.literals(node)) == {"name": "a", "setting": ("skew",)}
    assert table.about(find("method", "fedmlp")) == table.built_in()["fedmlp"]
