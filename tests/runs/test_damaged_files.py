"""Damaged files of a run's folder: `resume` keeps what can be read, and every command names the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small

from fedmll import Callback, resume, run
from fedmll.runs.run_folder import RunFolder, RunState
from fedmll.runs.run_overview import read_run

ROUNDS = 4
DAMAGE = {"cut": b'{"method": "fed', "not UTF-8": b'{"method": "\xff"}', "other type": b"[1]", "nested": b"[" * 100_000}


class StopIn(Callback):
    """Stops like Ctrl-C, and collects warnings."""

    def __init__(self, round: int = 0) -> None:
        self.round = round
        self.warnings: list[str] = []

    def on_client_end(self, round: int, done: int, total: int) -> None:
        if (round, done) == (self.round, 1):
            raise KeyboardInterrupt

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run(small(training__rounds=ROUNDS), out)
    return out


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(KeyboardInterrupt):
        run(small(training__rounds=ROUNDS), out, callback=StopIn(ROUNDS))
    return out


def copy_of(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "run"))


@pytest.mark.parametrize("damage", ["byte", "key", "empty line", "text instead of a number"])
def test_resume_keeps_every_readable_row_of_damaged_metrics(
    finished: Path, stopped: Path, tmp_path: Path, damage: str
) -> None:
    out = copy_of(stopped, tmp_path)
    file = out / "metrics.jsonl"
    first, *others = file.read_bytes().splitlines(keepends=True)
    lines = {
        "byte": b"\xff" + first[1:],
        "key": first.replace(b'"seconds"', b'"teconds"'),
        "empty line": b"\n",
        "text instead of a number": first.replace(b'"clients": ', b'"clients": "x", "y": '),
    }
    file.write_bytes(lines[damage] + b"".join(others))
    before, watch = file.read_bytes(), StopIn()
    result = resume(out, callback=watch)
    assert [row["round"] for row in RunFolder(out).read_metrics()] == [2, 3, 4]
    assert [row["round"] for row in result.rows] == [2, 3, 4]
    assert (out / "metrics.jsonl.damaged-1").read_bytes() == before
    assert len(watch.warnings) == 1 and f"{file} is damaged: line 1 cannot be read" in watch.warnings[0]
    assert "metrics.jsonl.damaged-1" in watch.warnings[0]
    assert all(torch.equal(weight, result.weights[name]) for name, weight in weights_of(finished).items())


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    return resume(out).weights


def test_last_line_that_a_kill_cut_off_is_dropped_without_a_warning(stopped: Path, tmp_path: Path) -> None:
    out, watch = copy_of(stopped, tmp_path), StopIn()
    with (out / "metrics.jsonl").open("ab") as file:
        file.write(b'{"round": 4, "sec')
    resume(out, callback=watch)
    assert [row["round"] for row in RunFolder(out).read_metrics()] == [1, 2, 3, 4]
    assert not watch.warnings and not (out / "metrics.jsonl.damaged-1").exists()


def test_damaged_metrics_are_named_by_readers(finished: Path, tmp_path: Path) -> None:
    out = copy_of(finished, tmp_path)
    file = out / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b"\x00" + lines[1] + b"".join(lines[2:]))
    record = read_run(out)
    assert [row["round"] for row in record.rows] == [1, 3, 4]
    assert record.damaged == ["line 2 of metrics.jsonl cannot be read"]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("command", ["tune", "plot", "errors", "export", "report", "show"])
def test_commands_name_a_damaged_summary(
    fedmll: Any, finished: Path, tmp_path: Path, command: str, damage: str
) -> None:
    out = copy_of(finished, tmp_path)
    (out / "summary.json").write_bytes(DAMAGE[damage])
    said = fedmll(command, str(out), *(("--to", "onnx") if command == "export" else ()))
    text = said.error + said.out
    assert "summary.json is damaged" in text.replace("\n", "") and "Traceback" not in text
    assert said.code == (0 if command in ("show", "report", "plot") else 2)  # these show the rest


def test_resume_writes_a_damaged_summary_again(finished: Path, tmp_path: Path) -> None:
    out = copy_of(finished, tmp_path)
    (out / "summary.json").write_bytes(DAMAGE["cut"])
    assert read_run(out).state is RunState.UNREADABLE
    resume(out)
    again, before = (json.loads((folder / "summary.json").read_text()) for folder in (out, finished))
    assert {**again, "seconds": 0} == {**before, "seconds": 0}


@pytest.mark.parametrize("name", ["plugins.json", "data_fingerprint.json", "experiment.toml"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_resume_names_a_damaged_file_and_changes_nothing(
    fedmll: Any, stopped: Path, tmp_path: Path, name: str, damage: str
) -> None:
    out = copy_of(stopped, tmp_path)
    (out / name).write_bytes(DAMAGE[damage])
    metrics = (out / "metrics.jsonl").read_bytes()
    said = fedmll("resume", str(out))
    assert said.code == 2 and "Traceback" not in said.error
    assert str(out / name) in said.error.replace("\n", "")
    assert (out / "metrics.jsonl").read_bytes() == metrics


def test_damaged_failure_file_does_not_hide_that_the_run_failed(stopped: Path, tmp_path: Path) -> None:
    out = copy_of(stopped, tmp_path)
    (out / "failed.json").write_bytes(DAMAGE["cut"])
    record = read_run(out)
    assert record.state is RunState.FAILED and "failed.json is damaged" in record.reason
