"""Every file of a run's folder, damaged in many ways: each command names it, or answers as before."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from commands import Answer, ask, find_fault
from conftest import small
from mutations import MUTATIONS, SEED, damage
from PIL import Image
from safetensors.torch import load_file

from fedmll import Callback, run
from fedmll.runs.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDS = 3
COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # the words, and the files that the command writes
    "show": (("show", "run"), ()),
    "runs": (("runs", "."), ()),
    "plot": (("plot", "run", "--metric", "loss", "--out", "curve.csv"), ("curve.csv",)),
    "predict": (("predict", "run", "image.png", "--threshold", "tuned", "--out", "p.csv"), ("p.csv",)),
    "export": (("export", "run", "--to", "safetensors", "--out", "exported"), ("exported",)),
    "tune": (("tune", "run", "--calibrate", "platt"), ("run/model.safetensors",)),
    "resume": (("resume", "run"), ()),
}
REPORT = (("report", "run", "--out", "page.html"), ("page.html",))


class StopInLastRound(Callback):
    def on_client_end(self, round: int, done: int, total: int) -> None:
        if round == ROUNDS:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished and a stopped run of a method with client states and recorded tensors."""
    experiment = small(
        training__rounds=ROUNDS, data__limit=120, annotation__kind="missing", annotation__missing=5,
        method__name="fedmlp", method__t1=1, method__T0=0.2, method__T1=0.2, method__L=0.5, method__R=0.5,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("runs")
    run(experiment, folder / "finished")
    with pytest.raises(KeyboardInterrupt):
        run(experiment, folder / "stopped", callback=StopInLastRound())
    return {"finished": folder / "finished", "stopped": folder / "stopped"}


def files_of(folder: Path) -> list[str]:
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    return [name for name in files if name not in ("log.txt", ".lock", "metrics.csv")]  # no command reads these


class Tried:
    """Runs commands on copies of a run, and collects wrong answers."""

    def __init__(self, fedmll: Any, source: Path, seed: str) -> None:
        self.fedmll, self.source, self.draw = fedmll, source, Random(f"{SEED} {seed}")
        self.before: dict[tuple[str, ...], Answer] = {}
        self.faults: list[str] = []
        self.count = 0
        Image.effect_noise((20, 20), 80).save("image.png")

    def ask(self, words: tuple[str, ...], written: tuple[str, ...]) -> Answer:
        answer = ask(self.fedmll, words, written)
        return with_result(answer) if words[0] == "resume" and answer.said.code == 0 else answer

    def undamaged(self, words: tuple[str, ...], written: tuple[str, ...]) -> Answer:
        if words not in self.before:
            self._copy()
            self.before[words] = self.ask(words, written)
        return self.before[words]

    def try_damaged(
        self, name: str, mutation: Callable[..., bytes] | None, words: tuple[str, ...], written: tuple[str, ...]
    ) -> None:
        before = self.undamaged(words, written)
        self._copy()
        file = Path("run", name)
        if not damage(file, mutation, self.draw):
            return
        self.count += 1
        answer = self.ask(words, written)
        if fault := find_fault(answer, before, file):
            self.faults.append(f"{words[0]}, {name}, {mutation.__name__ if mutation else 'deleted'}: {fault}")

    def _copy(self) -> None:
        for name in ("run", "exported"):
            shutil.rmtree(name, ignore_errors=True)
        for name in ("curve.csv", "p.csv", "page.html"):
            Path(name).unlink(missing_ok=True)
        shutil.copytree(self.source, "run")

    def report(self) -> None:
        assert self.count, "nothing was damaged"
        assert not self.faults, f"{len(self.faults)} of {self.count}:\n" + "\n\n".join(self.faults)


def with_result(answer: Answer) -> Answer:
    """A resumed run: its weights, predictions and metrics must be those of the run without damage, not its seconds."""
    folder = RunFolder("run")
    weights = {name: tensor.numpy().tobytes() for name, tensor in load_file(folder.model_file).items()}
    files = {name: (folder.path / name).read_bytes() for name in ("predictions.npz", "per_class.csv", "per_client.csv")}
    metrics = {"metrics": repr(folder.read_summary()["metrics"]).encode()}
    rows = {"rounds": repr([(row["round"], row.get("loss"), row.get("map")) for row in folder.read_metrics()]).encode()}
    return Answer(answer.said._replace(out=""), weights | files | metrics | rows)


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_every_file_of_a_run(fedmll: Any, runs: dict[str, Path], state: str) -> None:
    tried = Tried(fedmll, runs[state], state)
    usable = [name for name in COMMANDS if state == "finished" or name in ("show", "runs", "plot", "resume")]
    for name in files_of(runs[state]):
        for mutation in (None, *MUTATIONS):
            tried.try_damaged(name, mutation, *COMMANDS[tried.draw.choice(usable)])
    tried.report()


def test_reports_about_damaged_runs(fedmll: Any, runs: dict[str, Path]) -> None:
    tried = Tried(fedmll, runs["finished"], "report")
    for name in files_of(runs["finished"]):
        if not name.startswith("checkpoint/"):
            tried.try_damaged(name, tried.draw.choice((None, *MUTATIONS)), *REPORT)
    tried.report()
