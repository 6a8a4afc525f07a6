"""Damaged files of a run's folder: `resume` keeps what can be read, and every command names the file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small

from fedmll import Callback, resume, run
from fedmll.core.errors import DataError, FedmllError
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


def change_a_digit(file: Path) -> None:
    """Change a digit of the last number in a text file; in an array file, one bit in the middle."""
    content = bytearray(file.read_bytes())
    places = [place for place, byte in enumerate(content) if chr(byte) in "123456789"]
    if file.suffix == ".npz":
        content[len(content) // 2] ^= 1
    else:
        content[places[-1]] ^= 1 if content[places[-1]] != ord("1") else 2
    file.write_bytes(content)


CHECKED = (
    "summary.json", "experiment.toml", "data_fingerprint.json", "metrics.jsonl", "predictions.npz", "client_labels.npz",
    "per_class.csv", "per_client.csv",
)  # fmt: skip


def read_everything(out: Path) -> None:
    folder = RunFolder(out)
    folder.read_summary()
    folder.read_experiment_values()
    folder.load_experiment()
    folder.read_data_fingerprints()
    folder.read_metrics()
    folder.read_predictions()
    folder.read_client_labels()
    folder.read_table("per_class.csv")
    folder.read_table("per_client.csv")


@pytest.mark.parametrize("name", CHECKED)
def test_one_changed_digit_in_a_finished_run_is_an_error(finished: Path, tmp_path: Path, name: str) -> None:
    out = copy_of(finished, tmp_path)
    read_everything(out)
    change_a_digit(out / name)
    with pytest.raises(DataError, match=rf"/{name} is damaged \(its checksum .*\)\. (Restore|`fedmll resume)"):
        read_everything(out)


@pytest.mark.parametrize("name", CHECKED[1:])
def test_deleted_file_of_a_finished_run_is_an_error(finished: Path, tmp_path: Path, name: str) -> None:
    out = copy_of(finished, tmp_path)
    (out / name).unlink()
    with pytest.raises(FedmllError, match=rf"/{name} is missing|holds no run: it has no {name}"):
        read_everything(out)


@pytest.mark.parametrize("damage", ["digit", "deleted"])
@pytest.mark.parametrize("name", ["summary.json", "predictions.npz", "client_labels.npz", "per_class.csv"])
def test_resume_of_a_finished_run_writes_results_again(finished: Path, tmp_path: Path, name: str, damage: str) -> None:
    out, watch = copy_of(finished, tmp_path), StopIn()
    if damage == "digit":
        change_a_digit(out / name)
    else:
        (out / name).unlink()
    resume(out, callback=watch)
    read_everything(out)
    assert not watch.warnings
    if name != "summary.json":
        assert (out / name).read_bytes() == (finished / name).read_bytes()
    assert RunFolder(out).read_summary() == RunFolder(finished).read_summary()


@pytest.mark.parametrize("source", ["finished", "stopped"])
@pytest.mark.parametrize("damage", ["digit", "deleted", "doubled line"])
def test_resume_warns_about_changed_metrics(
    request: pytest.FixtureRequest, tmp_path: Path, source: str, damage: str
) -> None:
    out, watch = copy_of(request.getfixturevalue(source), tmp_path), StopIn()
    file = out / "metrics.jsonl"
    first, *others = file.read_bytes().splitlines(keepends=True)
    if damage == "digit":
        change_a_digit(file)
    elif damage == "doubled line":
        file.write_bytes(first + first + b"".join(others))
    else:
        file.unlink()
    resume(out, callback=watch)
    (warning,) = watch.warnings
    assert f"{file} is {'missing' if damage == 'deleted' else 'damaged: its checksum does not match'}" in warning
    assert (out / "metrics.jsonl.damaged-1").exists() == (damage != "deleted")
    read_everything(out)


def test_extended_run_has_no_old_checksums(finished: Path, tmp_path: Path) -> None:
    out = copy_of(finished, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        resume(out, rounds=ROUNDS + 1, callback=StopIn(ROUNDS + 1))
    assert not RunFolder(out).is_finished
    assert resume(out).summary["rounds"] == ROUNDS + 1
    read_everything(out)


def test_missing_records_of_a_finished_run_are_named(finished: Path, tmp_path: Path) -> None:
    out, watch = copy_of(finished, tmp_path), StopIn()
    folder = RunFolder(out)
    for round in (1, 2):
        folder.write_records(round, {"coverage": torch.ones(2)})
    folder.write_summary(folder.read_summary())
    assert list(folder.read_records("coverage")) == [1, 2]
    (out / "records" / "000001.safetensors").unlink()
    with pytest.raises(DataError, match=r"records/000001\.safetensors is missing\. Restore it from a copy\."):
        folder.read_records("coverage")
    resume(out, callback=watch)
    assert watch.warnings == [f"{out}/records/000001.safetensors is missing."]


@pytest.mark.parametrize("command", ["show", "report", "plot", "export", "tune"])
@pytest.mark.parametrize("name", ["summary.json", "predictions.npz", "per_class.csv", "metrics.jsonl"])
def test_commands_name_a_file_with_a_changed_digit(
    fedmll: Any, finished: Path, tmp_path: Path, command: str, name: str
) -> None:
    """A command that does not read the file prints the same as before."""
    out = copy_of(finished, tmp_path)
    words = (command, str(out), *(("--to", "safetensors") if command == "export" else ()))
    before = fedmll(*words)
    shutil.rmtree(out)
    copy_of(finished, tmp_path)
    change_a_digit(out / name)
    said = fedmll(*words)
    text = (said.error + said.out).replace("\n", "")
    assert "Traceback" not in text
    assert f"{name} is damaged" in text or f"{name} cannot be read" in text or said == before
    reads = {
        "summary.json": ("show", "report", "plot", "export", "tune"),
        "predictions.npz": ("report", "export", "tune"),
        "per_class.csv": ("report",),
        "metrics.jsonl": ("show", "report", "plot"),
    }
    assert (command in reads[name]) == (said != before)


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
    assert RunFolder(out).read_summary() == RunFolder(finished).read_summary()


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


@pytest.mark.parametrize("command", ["show", "runs", "plot", "report"])
@pytest.mark.parametrize("damage", ["digit", "deleted", "cut"])
def test_commands_compare_the_rows_of_a_stopped_run_with_its_checkpoint(
    fedmll: Any, stopped: Path, tmp_path: Path, command: str, damage: str
) -> None:
    out = copy_of(stopped, tmp_path)
    words = (command, str(tmp_path if command == "runs" else out))
    assert "metrics.jsonl" not in fedmll(*words).error
    if damage == "digit":
        change_a_digit(out / "metrics.jsonl")
    elif damage == "cut":
        lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        (out / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))
    else:
        (out / "metrics.jsonl").unlink()
    said = fedmll(*words)
    assert "metrics.jsonl is damaged (its checksum in 000003.safetensors does not match)" in said.error or (
        said.code == 2 and "No run in" in said.error
    )


def test_all_rounds_without_a_summary(fedmll: Any, finished: Path, tmp_path: Path) -> None:
    out = copy_of(finished, tmp_path)
    (out / "summary.json").unlink()
    assert read_run(out).reason == f"{ROUNDS} of {ROUNDS} rounds are done, but there is no summary.json"
