"""Claims of the papers, judged by the values of each seed."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedmll.cli.main import app
from fedmll.comparison.claims import FAILS, HOLDS, NOT_CLAIMED, NOT_RUN, UNDECIDED, Finding, judge_claims
from fedmll.config.claims import Claim, read_claims
from fedmll.config.presets import read_table
from fedmll.core.errors import DataError


def finding(*margins: float, published: float | None = 1.0, equal_within: float | None = None) -> Finding:
    claim = Claim(
        table="fedlgt/4", statement="s", better="a", worse=("b",), metrics=("map",), equal_within=equal_within
    )
    return Finding(claim=claim, worse="b", metric="map", group="", published=published, margins=margins)


def test_every_claim_is_about_rows_and_metrics_of_its_table() -> None:
    for claim in read_claims():
        table = read_table(claim.table)
        assert {claim.better, *claim.worse} <= table.rows.keys(), claim
        assert set(claim.metrics) <= set(table.metrics), claim
        assert claim.better not in claim.worse


def test_interval_is_students_t_over_the_seeds() -> None:
    """1, 2, 3: mean 2, deviation 1; t for 97.5 % with two degrees of freedom is 4.3027 (tables), so 4.3027/√3."""
    found = finding(1, 2, 3)
    assert found.mean == 2
    assert found.half_width == pytest.approx(2.4842, abs=1e-3)
    assert found.verdict == UNDECIDED
    assert found.text == "cannot be judged (+2.00 ± 2.48; paper +1.00)"


def test_verdicts() -> None:
    assert finding(2, 2.1, 1.9).verdict == HOLDS
    assert finding(-2, -2.1, -1.9).verdict == FAILS
    assert finding(5).verdict == UNDECIDED and "one seed" in finding(5).text
    assert finding().verdict == NOT_RUN
    assert finding(2, 2.1, 1.9, published=-0.1).verdict == NOT_CLAIMED
    assert finding(2, 2.1, 1.9, published=None).verdict == HOLDS


def test_verdicts_of_a_claim_of_equality() -> None:
    """The interval of 0.4, 0.5, 0.6 is 0.5 ± 0.248; a published difference of either sign does not matter."""
    assert finding(0.4, 0.5, 0.6, equal_within=1, published=-3).verdict == HOLDS
    assert finding(0.4, 0.5, 0.6, equal_within=0.6).verdict == UNDECIDED
    assert finding(0.4, 0.5, 0.6, equal_within=0.2).verdict == FAILS
    assert finding(-0.4, -0.5, -0.6, equal_within=0.2).verdict == FAILS


def record(table: str, values: list[tuple[str, str, str, float | None, dict[int, float | None]]]) -> dict[str, Any]:
    names = ("group", "row", "metric", "published", "ours")
    return {
        "table": table,
        "small": True,
        "seeds": [0, 1, 2],
        "title": f"{table}, small variant",
        "groups": ["flair"],
        "some_groups": True,
        "changed_settings": {"flair": {"training.rounds": ["50", "10"]}},
        "values": [dict(zip(names, value, strict=True)) for value in values],
        "tables": [],
        "notes": [],
    }


def write(folder: Path, content: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "reproduction.json").write_text(json.dumps(content))


def test_folder_with_tables_is_judged(tmp_path: Path) -> None:
    """Fewer seconds are better, seeds are paired by number, an undefined value does not count."""
    values: list[tuple[str, str, str, float | None, dict[int, float | None]]] = [
        ("flair", "no-block", "s/round", 10.0, {0: 5.0, 1: 7.0, 2: 6.0, 3: None}),
        ("flair", "block", "s/round", 8.0, {2: 4.0, 1: 5.1, 0: 3.0, 3: 1.0}),
    ]
    write(tmp_path / "a", record("fedharmony/2", values))
    judged = judge_claims(tmp_path)
    (found,) = judged.findings
    assert found.published == 2.0 and found.margins == pytest.approx((2.0, 1.9, 2.0)) and found.verdict == HOLDS
    assert "fedharmony/1" in {claim.table for claim in judged.not_run}
    result = CliRunner().invoke(app, ["reproduce", "--claims", str(tmp_path)])
    assert result.exit_code == 0
    page = (tmp_path / "claims.md").read_text()
    assert "fedmll reproduce fedharmony/2 --small --groups flair --seeds 0,1,2 --root DATA" in page
    assert "| block > no-block | s/round | holds (+1.97 ± 0.14; paper +2.00) |" in page
    assert "training.rounds: 10 (paper: 50)" in page and "`fedlgt/1`" in page
    (line,) = csv.DictReader((tmp_path / "claims.csv").open())
    assert line["verdict"] == HOLDS and line["seeds"] == "3" and float(line["difference"]) == pytest.approx(5.9 / 3)


def test_folders_that_cannot_be_judged(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folder of `fedmll reproduce`"):
        judge_claims(tmp_path)
    for name in "ab":
        write(tmp_path / name, record("fedharmony/2", []))
    with pytest.raises(DataError, match="two folders of fedharmony/2"):
        judge_claims(tmp_path)
    assert "leave the name" in str(
        CliRunner().invoke(app, ["reproduce", "fedlgt/1", "--claims", str(tmp_path)]).exception
    )
