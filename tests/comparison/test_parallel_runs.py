"""Real comparisons, one run after the other and side by side; kills; comparison.json; what show and runs read."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import small

from fedmll import compare
from fedmll.comparison.compare import ComparisonCallback, ComparisonRunner
from fedmll.comparison.comparison_folder import ComparisonFolder, git_commit
from fedmll.comparison.plan import Variant
from fedmll.comparison.results import ComparisonCell
from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.core.files import checksum
from fedmll.core.processes import fork_process
from fedmll.runs.run_folder import RunFolder
from fedmll.runs.run_overview import find_runs, read_run

TUNE = {"fedprox:mu": [0.1, 1.0]}


def asked(
    out: Path, methods: tuple[str, ...] = ("fedavg", "fedprox"), seeds: tuple[int, ...] = (0, 1), **rest: Any
) -> Any:
    wanted = small(training__rounds=1, engine__workers="auto" if rest.get("jobs") else 0)
    return compare(wanted, methods, seeds, out, tune=TUNE, against="fedavg", metrics=["macro_auc"], **rest)


class Watch(ComparisonCallback):
    def __init__(self) -> None:
        self.began: list[str] = []
        self.ended: list[str] = []
        self.rounds = self.gone = self.planned_rounds = 0
        self.warnings: list[str] = []

    def on_comparison_start(self, rounds: int) -> None:
        self.planned_rounds = rounds

    def on_cell_start(self, cell: ComparisonCell) -> None:
        self.began.append(str(cell))

    def on_cell_end(self, cell: ComparisonCell) -> None:
        self.ended.append(str(cell))

    def on_rounds_skipped(self, rounds: int) -> None:
        self.gone += rounds

    def on_round_end(self, row: dict[str, Any]) -> None:
        self.rounds += 1

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fedavg and fedprox, which is tuned, at two seeds."""
    out = tmp_path_factory.mktemp("done") / "grid"
    asked(out, command="fedmll compare --seeds 0,1")
    return out


def models(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): checksum(path) for path in sorted(folder.rglob("model.safetensors"))}


def without_costs(file: Path) -> list[list[str]]:
    with file.open() as opened:
        return [line for line in csv.reader(opened) if line[3] != "s/round"]


def test_parallel_runs_give_the_same_bits(done: Path, tmp_path: Path) -> None:
    watch = Watch()
    asked(tmp_path / "grid", jobs=2, callback=watch)
    assert models(tmp_path / "grid") == models(done) and len(models(done)) == 5  # 2, and 2 settings and a second seed
    assert without_costs(tmp_path / "grid" / "table.csv") == without_costs(done / "table.csv")
    assert (tmp_path / "grid" / "tests.csv").read_text() == (done / "tests.csv").read_text()
    assert sorted(watch.began) == sorted(watch.ended) and len(watch.ended) == 5
    assert watch.rounds + watch.gone == watch.planned_rounds == 5
    assert Experiment.load(tmp_path / "grid" / "fedavg" / "seed-0" / "experiment.toml").engine.workers == 0


def test_added_method_and_seed_run_without_the_others(done: Path, tmp_path: Path) -> None:
    shutil.copytree(done, tmp_path / "grid")
    watch = Watch()
    found = asked(tmp_path / "grid", ("fedavg", "fedprox", "fedavg-pl"), (0, 1, 2), callback=watch, command="more")
    assert watch.ended == [
        "fedavg, seed 2", "fedprox, mu=0.1, seed 2" if found.rows[1].setting == {"method.mu": 0.1} else
        "fedprox, mu=1.0, seed 2", "fedavg-pl, seed 0", "fedavg-pl, seed 1", "fedavg-pl, seed 2",
    ]  # fmt: skip
    commands = json.loads((tmp_path / "grid" / "comparison.json").read_text())["commands"]
    assert [entry["command"] for entry in commands] == ["fedmll compare --seeds 0,1", "more"]
    before = models(tmp_path / "grid")
    again = Watch()
    asked(tmp_path / "grid", ("fedavg", "fedprox", "fedavg-pl"), (0, 1, 2), callback=again, command="more")
    assert again.ended == [] and models(tmp_path / "grid") == before
    assert len(json.loads((tmp_path / "grid" / "comparison.json").read_text())["commands"]) == 2


def test_contents_of_comparison_json(done: Path) -> None:
    record = json.loads((done / "comparison.json").read_text())
    (command,) = record["commands"]
    assert command["command"] == "fedmll compare --seeds 0,1"
    assert {"python", "fedmll", "torch", "numpy", "scipy"} == command["versions"].keys()
    assert record["seeds"] == [0, 1] and record["tune"] == {"fedprox:mu": [0.1, 1.0]} and record["tune_seed"] == 0
    assert record["done"] is True and record["against"] == "fedavg" and record["metrics"] == ["macro_auc"]
    assert [(row["label"], len(row["runs"])) for row in record["rows"]] == [("fedavg", 2), ("fedprox", 3)]
    assert record["rows"][0]["chosen"] == {} and record["rows"][1]["chosen"].keys() == {"method.mu"}
    for row in record["rows"]:
        assert sum(run["in_table"] for run in row["runs"]) == 2
        for run in row["runs"]:
            assert run["state"] == "finished" and (done / run["folder"] / "summary.json").is_file()
    assert record["data"] and all(len(data["digest"]) == 32 and data["samples"]["test"] for data in record["data"])
    assert len(record["tables"]) == 3 and record["tables"][0]["header"][:2] == ["method", "tuned"]
    tuning = (done / "tuning.md").read_text()
    assert "## fedprox" in tuning and "## fedavg" not in tuning and tuning.count("| chosen |") == 1


def test_changed_comparison_json_is_noticed(done: Path, tmp_path: Path, fedmll: Callable[..., Any]) -> None:
    """One digit of a table is another one: the table is made from the runs, and compare keeps the damaged record."""
    out = Path(shutil.copytree(done, tmp_path / "grid"))
    record = (out / "comparison.json").read_text()
    value = json.loads(record)["tables"][0]["rows"][0][2].split()[0]
    changed = record.replace(value, f"{(int(value[0]) + 1) % 10}{value[1:]}", 1)
    assert changed != record
    (out / "comparison.json").write_text(changed)
    said = fedmll("show", "grid")
    assert said.code == 0 and "grid/comparison.json is damaged (its checksum does not match)" in said.out
    watch = Watch()
    asked(out, callback=watch)
    assert len(watch.warnings) == 1 and "It is kept as comparison.json.damaged-1" in watch.warnings[0]
    assert (out / "comparison.json.damaged-1").read_text() == changed
    assert json.loads((out / "comparison.json").read_text())["tables"] == json.loads(record)["tables"]
    (out / "comparison.json").unlink()
    asked(out, callback=watch)
    assert watch.warnings[1:] == [
        f"{out}/comparison.json is missing. It is written again without the earlier commands."
    ]


def test_git_commit_of_a_folder(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None

    def git(*words: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (tmp_path / "a.txt").write_text("1")
    git("add", "a.txt")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD").strip()
    assert git_commit(tmp_path) == commit == git_commit(tmp_path, "a.txt")
    (tmp_path / "b.txt").write_text("2")
    assert git_commit(tmp_path, "b.txt") is None  # not a part of it
    (tmp_path / "a.txt").write_text("3")
    assert git_commit(tmp_path) == f"{commit}-dirty"


def test_table_is_written_after_every_run(tmp_path: Path) -> None:
    class Reader(Watch):
        tables: list[str]

        def on_cell_start(self, cell: ComparisonCell) -> None:
            super().on_cell_start(cell)
            file = tmp_path / "grid" / "table.md"
            self.tables = [*getattr(self, "tables", []), file.read_text() if file.is_file() else ""]

    watch = Reader()
    compare(small(training__rounds=1), ["fedavg", "fedprox"], [0], tmp_path / "grid", callback=watch)
    assert watch.tables[0] == "" and "| fedprox | not run |" in watch.tables[1]
    assert "not all runs are done" in watch.tables[1]


def test_diverged_or_killed_parallel_run_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = ComparisonRunner._train

    def dies(self: Any, cell: ComparisonCell, *rest: Any) -> None:
        if cell.variant.label == "fedavg-pl":
            os.kill(os.getpid(), signal.SIGKILL)
        trained(self, cell, *rest)

    monkeypatch.setattr(ComparisonRunner, "_train", dies)
    watch = Watch()
    rows = ["fedavg-pl", "fedprox:training.lr=1e38", "fedavg"]
    found = compare(small(training__optimizer="sgd"), rows, [0], tmp_path / "grid", jobs=2, callback=watch)
    assert [cell.variant.label for cell in found.failed] == rows[:2] and len(found.finished) == 1
    assert "killed by signal 9" in str(found.failed[0].failure)
    assert [path.parent.parent.name for path in (tmp_path / "grid").rglob("failed.json")] == [
        "fedprox-training.lr=1e38"
    ]
    assert len(watch.warnings) == 2
    assert watch.rounds + watch.gone == watch.planned_rounds
    monkeypatch.undo()
    again = compare(small(training__optimizer="sgd"), rows, [0], tmp_path / "grid", jobs=2)
    assert [cell.variant.label for cell in again.finished] == ["fedavg-pl", "fedavg"]  # the killed one goes on


def test_programming_error_in_a_parallel_run_stops_all_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any) -> None:
        raise ZeroDivisionError("a slip of the pen")

    monkeypatch.setattr(ComparisonRunner, "_train", wrong)
    with pytest.raises(RuntimeError, match="a slip of the pen"):
        compare(small(), ["fedavg", "fedprox"], [0], tmp_path / "grid", jobs=2)


def test_progress_has_one_line_per_parallel_run() -> None:
    from fedmll.cli.display import RunProgress

    progress = RunProgress()
    progress.on_comparison_start(4)
    cells = [
        ComparisonCell(variant=Variant(name, {}), seed=0, setting={}, path=Path(name), experiment=small())
        for name in ("fedavg", "fedprox")
    ]
    lines = [progress.callback_for(cell, parallel=True) for cell in cells]
    for line, first in zip(lines, (1, 2), strict=True):  # the second goes on after its first round
        line.on_run_start(small(), None, first)  # type: ignore[arg-type]
    lines[0].on_round_end({"round": 1, "macro_auc": 51.26})
    lines[1].on_client_end(2, 3, 4)
    whole, one, other = progress.progress.tasks
    assert (whole.completed, whole.total) == (1, 3)
    assert (one.description.strip(), one.completed, one.fields["note"]) == (
        "fedavg, seed 0",
        1,
        "round 1, macro AUC 51.3",
    )
    assert (other.completed, other.fields["note"]) == (1, "round 2, client 3/4")
    progress.on_cell_end(cells[0])
    assert [task.description.strip() for task in progress.progress.tasks] == ["rounds", "fedprox, seed 0"]


def test_jobs_below_one_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        asked(tmp_path / "grid", jobs=-1)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopped_parallel_runs_continue_to_the_same_weights(tmp_path: Path, how: signal.Signals) -> None:
    """Ctrl-C, or kill -9 of the parent alone: nobody is left, and the same again goes on to the same weights."""
    wanted = small(training__rounds=15)

    def go(out: str, jobs: int) -> None:
        compare(wanted, ["fedavg", "fedprox"], [0], tmp_path / out, jobs=jobs)

    folders = [tmp_path / "grid" / name / "seed-0" for name in ("fedavg", "fedprox")]
    process = os.fork()
    if not process:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            go("grid", 2)
        except KeyboardInterrupt:
            os._exit(130)
        os._exit(0)
    try:
        end = time.monotonic() + 200
        while not all(RunFolder(folder).read_metrics() for folder in folders):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert all(RunFolder(folder).is_locked for folder in folders)
    finally:
        os.kill(process, how)
        _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == (130 if how == signal.SIGINT else -9)
    end = time.monotonic() + 30
    while any(RunFolder(folder).is_locked for folder in folders):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert [read_run(folder).state for folder in folders] == ["stopped", "stopped"]
    go("grid", 2)
    go("whole", 1)
    assert models(tmp_path / "grid") == models(tmp_path / "whole") and len(models(tmp_path / "whole")) == 2


def test_second_compare_in_the_same_folder_names_the_first(tmp_path: Path, fedmll: Callable[..., Any]) -> None:
    def hold(folder: Path, pipe: int) -> None:
        with ComparisonFolder(folder).lock():
            os.write(pipe, b"x")
            time.sleep(60)

    words = ("compare", "--methods", "fedavg", "--seeds", "0", "--rounds", "1", "--workers", "0", "--out", "grid")
    reading, writing = os.pipe()
    process = fork_process(hold, tmp_path / "grid", writing)
    try:
        os.read(reading, 1)
        code, _, error = fedmll(*words)
        assert code == 2 and len(error.strip().splitlines()) == 1
        assert (
            f"Another `fedmll compare` is working in grid (process {process.pid} on {socket.gethostname()}, since 20"
            in error
        )
        assert [path.name for path in (tmp_path / "grid").iterdir()] == [".lock"]
    finally:
        process.kill()
        process.join()
        os.close(reading)
        os.close(writing)
    assert fedmll(*words)[0] == 0


# ---- show and runs --------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): checksum(path) for path in folder.rglob("*") if path.is_file()}


def test_show_finished_failed_and_stopped_runs(done: Path, tmp_path: Path, fedmll: Callable[..., Any]) -> None:
    out = tmp_path / "run"
    shutil.copytree(done / "fedavg" / "seed-0", out)
    code, said, _ = fedmll("show", str(out))
    assert code == 0 and "fedavg on ml-digits, seed 0: finished, round 1 of 1" in said and "macro_auc" in said
    summary = json.loads((out / "summary.json").read_text())
    assert f"{summary['metrics']['macro_auc']:.2f}" in said
    (out / "summary.json").unlink()
    before = contents(out)
    code, said, _ = fedmll("show", str(out))
    assert "stopped, round 1 of 1" in said and "after round 1" in said
    assert f"fedmll resume {out}" in " ".join(said.split())
    assert contents(out) == before
    (out / "failed.json").write_text(json.dumps({"error": "ClientError", "reason": "the loss became nan"}))
    assert "failed: " in fedmll("show", str(out))[1] and read_run(out).state == "failed"


def test_running_is_detected_without_taking_the_lock(tmp_path: Path) -> None:
    def hold(folder: Path, pipe: int) -> None:
        with RunFolder(folder).lock():
            os.write(pipe, b"x")
            time.sleep(60)

    assert not RunFolder(tmp_path).is_locked
    reading, writing = os.pipe()
    process = fork_process(hold, tmp_path, writing)
    try:
        os.read(reading, 1)
        assert RunFolder(tmp_path).is_locked
    finally:
        process.kill()
        process.join()
        os.close(reading)
        os.close(writing)
    assert not RunFolder(tmp_path).is_locked


def test_show_comparison_with_and_without_its_record(done: Path, tmp_path: Path, fedmll: Callable[..., Any]) -> None:
    out = tmp_path / "grid"
    shutil.copytree(done, out)
    code, said, _ = fedmll("show", str(out))
    assert code == 0 and "margin over fedavg" in said and "p (Holm)" in said and "5 of 5 started runs" in said
    (out / "fedprox" / "method.mu=0.1" / "seed-0" / "summary.json").unlink()
    said = fedmll("show", str(out))[1]
    assert "not finished" in said and "stopped" in said and "4 of 5 started runs" in said
    (out / "comparison.json").write_text("{ not JSON")
    said = fedmll("show", str(out))[1]
    assert "comparison.json is damaged" in said and "fedprox/method.mu=1.0" in said
    (out / "comparison.json").unlink()
    said = fedmll("show", str(out))[1]
    assert "comparison.json is missing" in said and "2 of 2" in said and "±" in said


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("comparison.json", "{"), ("comparison.json", "[" * 100_000), ("comparison.json", '{"rows": [{"label": 1}]}'),
        ("fedavg/seed-0/summary.json", "{}"), ("fedavg/seed-0/summary.json", '{"metrics": 1}'),
        ("fedavg/seed-0/metrics.jsonl", "x\n"), ("fedavg/seed-0/metrics.jsonl", "[1]\n"),
        ("fedavg/seed-0/experiment.toml", "seed = 0"), ("fedavg/seed-0/predictions.npz", "x"),
    ],
)  # fmt: skip
def test_damaged_files_are_named_by_show_and_report(
    done: Path, tmp_path: Path, fedmll: Callable[..., Any], file: str, content: str
) -> None:
    shutil.copytree(done, tmp_path / "grid")
    (tmp_path / "grid" / file).write_text(content)
    name = Path(file).name
    code, out, error = fedmll("show", "grid")
    assert code == 0 and (name in out + error or name in ("metrics.jsonl", "predictions.npz"))
    if file != "comparison.json":
        code, out, error = fedmll("show", Path("grid", file).parent)
        assert code == 0 and (name in out + error or name == "predictions.npz")
    code, out, error = fedmll("report", "grid")
    assert code == 0 and [line for line in error.splitlines() if name in line], error
    assert name in (tmp_path / "report.html").read_text()


def test_run_of_the_table_that_is_gone_is_named(done: Path, tmp_path: Path, fedmll: Callable[..., Any]) -> None:
    shutil.copytree(done, tmp_path / "grid")
    gone = tmp_path / "grid" / "fedavg" / "seed-1"
    (gone / "experiment.toml").unlink()
    for command in ("show", "runs"):
        code, out, _ = fedmll(command, "grid")
        assert code == 0 and "unreadable: grid/fedavg/seed-1: grid/fedavg/seed-1/experiment.toml is missing" in out
    shutil.rmtree(gone)
    code, out, _ = fedmll("show", "grid")
    assert code == 0 and "The run fedavg/seed-1 is in the table, but its folder is gone or has no experiment" in out
    code, _, error = fedmll("report", "grid")
    assert code == 0 and "fedavg/seed-1 unreadable: its folder is gone or has no experiment.toml" in error


def test_runs_lists_all_runs_and_names_unreadable_ones(done: Path, tmp_path: Path, fedmll: Callable[..., Any]) -> None:
    shutil.copytree(done / "fedavg", tmp_path / "runs" / "good")
    broken = {"toml": "seed = [", "values": 'seed = 0\n[data]\nname = "x"\n', "folder": "\x00"}
    for name, text in broken.items():
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "experiment.toml").write_text(text)
    foreign = tmp_path / "runs" / "thesis"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    cut = tmp_path / "runs" / "cut"
    shutil.copytree(done / "fedavg" / "seed-0", cut)
    (cut / "summary.json").write_text('{"metrics": {')
    before = contents(tmp_path)
    code, said, _ = fedmll("runs", str(tmp_path / "runs"))
    assert code == 0 and said.count("finished") == 2 and "good/seed-1" in said and "1 of 1" in said
    states = {run.folder.path.name: run.state for run in find_runs(tmp_path / "runs")}
    assert states == {"seed-0": "finished", "seed-1": "finished", **dict.fromkeys([*broken, "cut"], "unreadable")}
    for name in ("toml", "values", "cut"):
        assert f"unreadable: {tmp_path / 'runs' / name}: " in said
    assert contents(tmp_path) == before
    assert fedmll("show", str(cut))[0] == 0
    code, _, error = fedmll("show", str(foreign))
    assert code == 2 and "holds no run and no comparison" in error
    assert fedmll("show", str(tmp_path / "none"))[0] == fedmll("runs", str(tmp_path / "none"))[0] == 2
    assert "no runs below" in fedmll("runs", str(foreign))[1]


def test_run_of_a_missing_plugin_is_listed(done: Path, tmp_path: Path) -> None:
    shutil.copytree(done / "fedavg" / "seed-0", tmp_path / "run")
    file = tmp_path / "run" / "experiment.toml"
    file.write_text(file.read_text().replace('name = "fedavg"', 'name = "of-somebody"'))
    RunFolder(file.parent).write_summary(RunFolder(file.parent).read_summary())
    (found,) = find_runs(tmp_path)
    assert (found.method, found.state, found.rounds_done, found.rounds) == ("of-somebody", "finished", 1, 1)
    assert found.main_metric.startswith("macro_auc ") and found.last_written[:2] == "20"
    with pytest.raises(ConfigError, match="There is no folder"):
        list(find_runs(tmp_path / "nothing"))
