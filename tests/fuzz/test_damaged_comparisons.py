"""Every file of a comparison's folder, damaged in many ways: each command names it, or answers as before."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
from commands import Answer, ask, find_fault
from mutations import MUTATIONS, SEED, damage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXPERIMENT = """
[data]
limit = 120
[partition]
clients = 3
[model]
channels = [4]
[training]
rounds = 2
[engine]
workers = 0
"""
COMPARE = (
    *("compare", "experiment.toml", "--methods", "fedavg,local-only", "--seeds", "0,1", "--against", "fedavg"),
    *("--out", "grid"),
)
TABLES = tuple(f"grid/{name}" for name in ("table.md", "table.csv", "table.tex", "tests.csv"))
CHEAP = {"show": (("show", "grid"), ()), "runs": (("runs", "grid"), ()), "compare": (COMPARE, TABLES)}
DRAWING = {
    "plot": (("plot", "grid", "--metric", "loss", "--out", "curve.csv"), ("curve.csv",)),
    "report": (("report", "grid", "--out", "page.html"), ("page.html",)),
}


def test_every_file_of_a_comparison(fedmll: Any) -> None:
    """`compare` runs a run without a summary again, and its tables are then the same; it names other damaged files."""
    Path("experiment.toml").write_text(EXPERIMENT)
    assert fedmll(*COMPARE).code == 0
    shutil.copytree("grid", "whole")
    draw, faults, count = Random(f"{SEED} comparison"), [], 0
    before: dict[str, Answer] = {}
    files = ["comparison.json", *TABLES_IN_FOLDER]
    files += [f"fedavg/seed-1/{name.name}" for name in Path("whole/fedavg/seed-1").iterdir() if name.is_file()]
    for name in sorted(files):
        if name.endswith(("log.txt", ".lock", "metrics.csv")):
            continue
        for mutation in (None, *MUTATIONS):
            commands = CHEAP if mutation is not draw.choice(MUTATIONS) else DRAWING
            command = draw.choice(sorted(commands))
            words, written = commands[command]
            if command not in before:
                copy_whole()
                before[command] = ask(fedmll, words, written)
            copy_whole()
            file = Path("grid", name)
            if damage(file, mutation, draw):
                count += 1
                if fault := find_fault(ask(fedmll, words, written), before[command], file):
                    faults.append(f"{command}, {name}, {mutation.__name__ if mutation else 'deleted'}: {fault}")
    assert count > 50
    assert not faults, f"{len(faults)} of {count}:\n" + "\n\n".join(faults)


TABLES_IN_FOLDER = tuple(name.removeprefix("grid/") for name in TABLES)


def copy_whole() -> None:
    shutil.rmtree("grid", ignore_errors=True)
    shutil.copytree("whole", "grid")
    for name in ("curve.csv", "page.html"):
        Path(name).unlink(missing_ok=True)
