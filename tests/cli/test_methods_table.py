"""`fedmll methods` in terminals of several widths."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fedmll.cli import methods
from fedmll.cli.methods import table_cells
from fedmll.methods import catalog, find
from fedmll.methods.catalog import MethodSummary, built_in_methods, describe_options, read_catalog

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


def test_catalog_file_is_written_from_the_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "FILE", tmp_path / "catalog.toml")
    catalog.main()
    assert read_catalog() == built_in_methods()
    fedavg = tomllib.loads((tmp_path / "catalog.toml").read_text())["fedavg"]
    assert fedavg["setting"] == ["skew"] and not {"name", "remembers"} & fedavg.keys()  # no name twice, nothing empty


def test_options_are_described_with_range_and_default() -> None:
    groups = dict(describe_options(find("fedlgt")))
    rows = {row[0]: row[2:] for group in groups.values() for row in group}
    assert rows["ca_mle"] == ("true, false", "true")
    assert rows["layers"] == ("≥ 1", "3")
    assert rows["dropout"] == ("≥ 0 and < 1", "0.1")
    assert rows["inducing"] == ("≥ 1 or none", "none")
    assert rows["server_beta1"] == ("≥ 0 and < 1 or auto", "auto")
    assert rows["fine_names"] == ("text or none", "none")
    assert rows["fine"] == ("concat, average", "concat")
    assert [row[0] for row in groups[""]] == [
        "start",
        "ca_mle",
        "refit",
        "average",
    ]  # the method's own, of no head or part
    assert any(title.startswith("average 'trimmed-mean': The mean in every coordinate") for title in groups)
    composed = {row[0]: row[2:] for row in dict(describe_options(find("compose")))[""]}
    assert composed["parts"] == ("names", "unknown-as-negative")


def test_symbols_of_a_paper_stand_behind_the_options() -> None:
    method = next(find(name) for name in built_in_methods() if find(name).symbols)
    names = {row[0] for _, rows in describe_options(method) for row in rows}
    assert {f"{option} ({symbol})" for symbol, option in method.symbols.items()} <= names
