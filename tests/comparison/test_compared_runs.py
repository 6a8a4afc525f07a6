"""Studies: rows, seeds and chosen settings of the runs in some folders; a reason for every run that is not finished."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from report_runs import METHODS, comparison, write_run

from fedmll.comparison.compared_runs import read_compared_runs
from fedmll.comparison.comparison_folder import RECORD_FILE
from fedmll.core.errors import ConfigError
from fedmll.runs.formatting import to_checked_json

__all__ = ["comparison"]


def seeds_by_row(*paths: Path) -> dict[str, list[int]]:
    return {row.label: [run.seed for run in row.runs] for row in read_compared_runs(paths).rows}


def recorded_run(folder: str, in_table: bool = True, state: str = "finished", reason: str | None = None) -> dict:
    seed = int(folder.rpartition("-")[2])
    return {
        "folder": folder, "seed": seed, "setting": {}, "state": state, "reason": reason, "in_table": in_table
    }  # fmt: skip


def write_record(folder: Path, rows: dict[str, list[dict]]) -> None:
    record = {
        "rows": [{"label": label, "runs": runs} for label, runs in rows.items()],
        "tables": [],
        "notes": [],
        "done": True,
    }
    (folder / RECORD_FILE).write_text(to_checked_json(record, indent=1))


def test_a_comparison_has_its_rows_and_metrics(comparison: Path) -> None:
    study = read_compared_runs([comparison])
    assert [row.label for row in study.rows] == list(METHODS), "with the colon that its folder cannot have"
    for row, folder in zip(study.rows, ("local-only", "fedprox-mu=0.1"), strict=True):
        files = [comparison / folder / f"seed-{seed}" / "summary.json" for seed in (0, 1)]
        assert row.values("map").tolist() == [json.loads(file.read_text())["metrics"]["map"] for file in files]
    assert (study.title, study.missing, study.damaged, study.trials) == ("digits", [], [], [])


ROWS = {"fedavg": ("fedavg", "0.1"), "fedavg:weighting=equal": ("fedavg-weighting=equal", "0.2")}  # folder, best lr


def write_tuned_runs(folder: Path) -> None:
    """Two rows with two settings, chosen on seed 9; the table has the seeds 1, 2 and 10."""
    for name, best in ROWS.values():
        for lr in ("0.1", "0.2"):
            for seed in (1, 2, 9, 10) if lr == best else (9,):
                score = {"map": 10.0 + seed, "val_macro_auc": 60.0 if lr == best else 50.0}
                write_run(folder / name / f"training.lr={lr}" / f"seed-{seed}", seed=seed, lr=float(lr), metrics=score)


def test_the_record_says_which_settings_and_seeds_are_shown(tmp_path: Path) -> None:
    write_tuned_runs(tmp_path / "a")
    rows = {}
    for label in reversed(ROWS):
        name, best = ROWS[label]
        trials = [recorded_run(f"{name}/training.lr={lr}/seed-9", in_table=False) for lr in ("0.1", "0.2")]
        rows[label] = trials + [recorded_run(f"{name}/training.lr={best}/seed-{seed}") for seed in (1, 2, 10)]
    write_record(tmp_path / "a", rows)
    assert seeds_by_row(tmp_path / "a") == {"fedavg:weighting=equal": [1, 2, 10], "fedavg": [1, 2, 10]}
    study = read_compared_runs([tmp_path / "a"])
    assert [run.experiment["training"]["lr"] for row in study.rows for run in row.runs] == [0.2] * 3 + [0.1] * 3
    assert len(study.trials) == 4


def test_without_a_record_the_setting_with_the_most_runs_is_shown(tmp_path: Path) -> None:
    write_tuned_runs(tmp_path / "a")
    expected = {"fedavg": [1, 2, 9, 10], "fedavg-weighting=equal": [1, 2, 9, 10]}
    assert seeds_by_row(tmp_path / "a") == expected
    (tmp_path / "a" / RECORD_FILE).write_text('{"rows": [')
    assert seeds_by_row(tmp_path / "a") == expected, "a damaged record is ignored"
    for lr, score in (("0.1", 50.0), ("0.2", 70.0)):  # all settings have one run: the best so far
        write_run(tmp_path / "b" / "x" / f"training.lr={lr}" / "seed-0", lr=float(lr), metrics={"val_macro_auc": score})
    (row,) = read_compared_runs([tmp_path / "b"]).rows
    assert row.first.experiment["training"]["lr"] == 0.2


def test_a_run_that_the_record_does_not_have_is_shown(tmp_path: Path) -> None:
    for name in ("fedavg", "fedprox"):
        write_run(tmp_path / "a" / name / "seed-0", method=name, metrics={"map": 50.0})
    write_record(tmp_path / "a", {"fedavg": [recorded_run("fedavg/seed-0"), recorded_run("../elsewhere/seed-0")]})
    assert seeds_by_row(tmp_path / "a") == {"fedavg": [0], "fedprox": [0]}


def test_unfinished_runs_are_named_with_a_reason(tmp_path: Path) -> None:
    write_run(tmp_path / "good" / "seed-0", metrics={"map": 50.0})
    failed = write_run(tmp_path / "failed" / "seed-0", rounds=[{"round": 1, "loss": 1.0}])
    (failed / "failed.json").write_text(json.dumps({"error": "E", "reason": "it diverged"}))
    early = tmp_path / "early" / "seed-0"
    early.mkdir(parents=True)
    (early / "failed.json").write_text(json.dumps({"error": "E", "reason": "no memory"}))
    stopped = write_run(tmp_path / "stopped" / "seed-0", rounds=[{"round": 1, "loss": 1.0}, {"round": 2, "loss": 0.5}])
    (stopped / "log.txt").write_text("12:00 INFO round 2\n12:01 ERROR stopped: interrupted\n")
    cut = write_run(tmp_path / "cut" / "seed-0", metrics={"map": 50.0})
    (cut / "summary.json").write_text((cut / "summary.json").read_text()[:40])
    incomplete = write_run(tmp_path / "incomplete" / "seed-0", metrics={})
    (incomplete / "summary.json").write_text("{}")
    damaged = write_run(tmp_path / "damaged" / "seed-0")
    (damaged / "experiment.toml").write_bytes(b"\xff\xfe = [")
    rejected = recorded_run("fedprox-mu=9/seed-0", state="failed", reason="mu is too large")
    known = recorded_run("failed/seed-0", state="failed", reason="it diverged")
    write_record(tmp_path, {"fedprox:mu=9": [rejected], "failed": [known]})
    missing = dict(read_compared_runs([tmp_path]).missing)
    assert missing.keys() == {
        *(f"{name}/seed-0" for name in ("failed", "early", "stopped", "cut", "incomplete", "damaged", "fedprox-mu=9"))
    }
    assert missing["failed/seed-0"] == "failed: it diverged"
    assert missing["early/seed-0"] == "failed: no memory"
    assert missing["stopped/seed-0"] == "stopped: 2 of 3 rounds are done; it stopped: interrupted"
    assert f"{cut / 'summary.json'} is damaged (Expecting" in missing["cut/seed-0"]
    assert f"{incomplete / 'summary.json'} is damaged (its checksum does not match)" in missing["incomplete/seed-0"]
    assert f"unreadable: {damaged / 'experiment.toml'} is not a TOML file" in missing["damaged/seed-0"]
    assert missing["fedprox-mu=9/seed-0"] == "failed: mu is too large", "it was rejected, and has no folder"


def test_folders_without_results_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no folder .*none"):
        read_compared_runs([tmp_path / "none"])
    with pytest.raises(ConfigError, match=r"no experiment\.toml is below it"):
        read_compared_runs([tmp_path])
    write_run(tmp_path / "new")
    with pytest.raises(
        ConfigError, match=r"No run in .* has done a round.* new: not started: 0 of 3 rounds are done\."
    ):
        read_compared_runs([tmp_path / "new"])


def test_runs_that_differ_only_by_their_seed_are_one_row(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"s{seed}", seed=seed, metrics={"map": 1.0}) for seed in (0, 1)]
    assert seeds_by_row(*folders) == {"fedavg": [0, 1]}
    other = write_run(tmp_path / "faster", lr=0.9, metrics={"map": 1.0})
    assert seeds_by_row(*folders, other) == {"fedavg (s0)": [0, 1], "fedavg (faster)": [0]}
    assert seeds_by_row(tmp_path) == {"fedavg (faster)": [0], "fedavg (s0)": [0, 1]}, "or all runs below a folder"


def test_equal_rows_of_two_comparisons_have_different_labels(tmp_path: Path, comparison: Path) -> None:
    shutil.copytree(comparison, tmp_path / "again")
    assert [label for label in seeds_by_row(comparison, tmp_path / "again") if label.startswith("local")] == [
        "local-only (digits)",
        "local-only (again)",
    ]
