"""What a report is about: rows, seeds, chosen settings; and everything that is not finished has a name and a reason."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from compared import METHODS, comparison, made_run

from fedmll.errors import ConfigError
from fedmll.report.study import gather

__all__ = ["comparison"]


def rows_of(*paths: Path) -> dict[str, list[int]]:
    return {row.label: [run.seed for run in row.runs] for row in gather(paths).rows}


def write_table(folder: Path, lines: list[tuple[str, str, int, str, object]]) -> None:
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("method", "tuned", "seed", "metric", "value"), *lines])


def test_a_comparison_has_its_rows_and_figures(comparison: Path) -> None:
    study = gather([comparison])
    assert [row.label for row in study.rows] == list(METHODS), "with the colon that its folder cannot have"
    for row, folder in zip(study.rows, ("local-only", "fedprox-mu=0.1"), strict=True):
        files = [comparison / folder / f"seed-{seed}" / "summary.json" for seed in (0, 1)]
        assert row.values("map").tolist() == [json.loads(file.read_text())["metrics"]["map"] for file in files]
    assert (study.title, study.lost, study.damaged, study.trials) == ("digits", [], [], [])


def tuned(folder: Path) -> None:
    """Two rows, two settings, chosen on seed 9; rows of the table: seeds 1, 2 and 10."""
    for label, best in (("fedavg", "0.1"), ("fedavg-weights=equal", "0.2")):
        for lr in ("0.1", "0.2"):
            for seed in (1, 2, 9, 10) if lr == best else (9,):
                score = {"map": 10.0 + seed, "val_macro_auc": 60.0 if lr == best else 50.0}
                made_run(folder / label / f"training.lr={lr}" / f"seed-{seed}", seed=seed, lr=float(lr), metrics=score)


def test_the_table_says_which_setting_and_seeds_are_shown(tmp_path: Path) -> None:
    tuned(tmp_path / "a")
    chosen = [(label, lr) for label, lr in (("fedavg:weights=equal", "training.lr=0.2"), ("fedavg", "training.lr=0.1"))]
    write_table(tmp_path / "a", [(label, lr, seed, "map", 1) for label, lr in chosen for seed in (1, 2, 10)])
    assert rows_of(tmp_path / "a") == {"fedavg:weights=equal": [1, 2, 10], "fedavg": [1, 2, 10]}
    study = gather([tmp_path / "a"])
    assert [run.experiment["training"]["lr"] for row in study.rows for run in row.runs] == [0.2] * 3 + [0.1] * 3
    assert len(study.trials) == 4


def test_without_a_table_the_setting_that_went_on_is_shown(tmp_path: Path) -> None:
    tuned(tmp_path / "a")
    assert rows_of(tmp_path / "a") == {"fedavg": [1, 2, 9, 10], "fedavg-weights=equal": [1, 2, 9, 10]}
    for lr, score in (("0.1", 50.0), ("0.2", 70.0)):  # no setting has gone on: the best so far
        made_run(tmp_path / "b" / "x" / f"training.lr={lr}" / "seed-0", lr=float(lr), metrics={"val_macro_auc": score})
    (row,) = gather([tmp_path / "b"]).rows
    assert row.first.experiment["training"]["lr"] == 0.2


def test_what_is_not_finished_is_named_with_its_reason(tmp_path: Path) -> None:
    made_run(tmp_path / "good" / "seed-0", metrics={"map": 50.0})
    failed = made_run(tmp_path / "broken" / "seed-0", rounds=[{"round": 1, "loss": 1.0}])
    (failed / "failed.json").write_text(json.dumps({"error": "E", "reason": "it diverged"}))
    stopped = made_run(tmp_path / "stopped" / "seed-0", rounds=[{"round": 1, "loss": 1.0}, {"round": 2, "loss": 0.5}])
    (stopped / "log.txt").write_text("12:00 INFO round 2\n12:01 ERROR stopped: interrupted\n")
    cut = made_run(tmp_path / "cut" / "seed-0", metrics={"map": 50.0})
    (cut / "summary.json").write_text((cut / "summary.json").read_text()[:40])
    lacking = made_run(tmp_path / "lacking" / "seed-0", metrics={})
    (lacking / "summary.json").write_text("{}")
    torn = made_run(tmp_path / "torn" / "seed-0")
    (torn / "experiment.toml").write_bytes(b"\xff\xfe = [")
    write_table(
        tmp_path, [("fedprox:mu=9", "", 0, "failed", "mu is too large"), ("broken", "", 0, "failed", "it diverged")]
    )
    lost = dict(gather([tmp_path]).lost)
    assert lost.keys() == {
        "broken/seed-0",
        "stopped/seed-0",
        "cut/seed-0",
        "lacking/seed-0",
        "torn/seed-0",
        "fedprox-mu=9/seed-0",
    }
    assert lost["broken/seed-0"] == "failed: it diverged"
    assert lost["stopped/seed-0"] == "unfinished: 2 of 3 rounds are done; it stopped: interrupted"
    assert lost["cut/seed-0"].startswith("unreadable: its summary.json cannot be read (")
    assert lost["lacking/seed-0"] == "unreadable: its summary.json has no method"
    assert lost["torn/seed-0"].startswith("unreadable: cannot be read: ")
    assert lost["fedprox-mu=9/seed-0"] == "failed: mu is too large", "it was refused, and has no folder"


def test_nothing_to_show_is_one_paragraph(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no folder .*none"):
        gather([tmp_path / "none"])
    with pytest.raises(ConfigError, match=r"no experiment\.toml is below it"):
        gather([tmp_path])
    made_run(tmp_path / "new")
    with pytest.raises(ConfigError, match=r"No run in .* has done a round.* new: unfinished: 0 of 3 rounds are done\."):
        gather([tmp_path / "new"])


def test_single_runs_are_one_row_where_only_the_seed_differs(tmp_path: Path) -> None:
    folders = [made_run(tmp_path / f"s{seed}", seed=seed, metrics={"map": 1.0}) for seed in (0, 1)]
    assert rows_of(*folders) == {"fedavg": [0, 1]}
    other = made_run(tmp_path / "faster", lr=0.9, metrics={"map": 1.0})
    assert rows_of(*folders, other) == {"fedavg (s0)": [0, 1], "fedavg (faster)": [0]}
    assert rows_of(tmp_path) == {"fedavg (faster)": [0], "fedavg (s0)": [0, 1]}, "or all below a folder"


def test_the_same_row_of_two_comparisons_is_told_apart(tmp_path: Path, comparison: Path) -> None:
    shutil.copytree(comparison, tmp_path / "again")
    assert [label for label in rows_of(comparison, tmp_path / "again") if label.startswith("local")] == [
        "local-only (digits)",
        "local-only (again)",
    ]
