"""run(experiment): rounds, evaluation, the run's folder, checkpoints. What watches a run is an Observer."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import logging
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from fedmll import checkpoint, federation, files
from fedmll.checkpoint import Checkpoint
from fedmll.engines.base import Engine, MakeEngine
from fedmll.engines.local import LocalEngine
from fedmll.errors import ConfigError, FedmllError, TooFewReplies
from fedmll.experiment import Experiment
from fedmll.federation import Federation
from fedmll.message import Message, Tensors
from fedmll.methods.base import Reply

SELECTION = "val_macro_auc"  # what "best on validation data" means, for early stopping and for tuning
BEST = "best/"  # prefix of the best round's tensors in a checkpoint

Row = dict[str, Any]


class Observer:
    """Is told what happens; changes nothing. Override what you want to see."""

    def preparing(self, done: int, total: int, what: str) -> None: ...

    def started(self, experiment: Experiment, federation: Federation, first_round: int) -> None: ...

    def client_done(self, round: int, done: int, total: int) -> None: ...

    def round_done(self, row: Row) -> None: ...

    def warning(self, text: str) -> None: ...

    def finished(self, result: Result) -> None: ...


@dataclass(frozen=True)
class Result:
    experiment: Experiment
    folder: Path | None
    rows: list[Row]  # one a round
    summary: dict[str, Any]
    weights: Tensors  # the resulting model, under its own names
    per_class: dict[str, NDArray[Any]] = field(repr=False, default_factory=dict)
    per_client: dict[str, NDArray[Any]] = field(repr=False, default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = self.summary["metrics"]
        return values


def run(
    experiment: Experiment,
    out: Path | str | None = None,
    *,
    observer: Observer | None = None,
    prepared: Federation | None = None,
) -> Result:
    """Run an experiment from round 1. With `out` it leaves a folder that `resume` can go on with."""
    observer = observer or Observer()
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            return replace(_run(experiment, Path(folder), observer, prepared), folder=None)
    create(Path(out), experiment)
    return _run(experiment, Path(out), observer, prepared)


def create(out: Path, experiment: Experiment) -> None:
    """A new run's folder, which `resume` can start."""
    if out.exists() and (not out.is_dir() or any(not files.is_leftover(path) for path in out.iterdir())):
        raise ConfigError(
            f"{out} is not empty; nothing was changed. Choose another --out, or go on with the run that is there by "
            f"`fedmll resume {out}`."
        )
    out.mkdir(parents=True, exist_ok=True)
    files.write(out / "experiment.toml", experiment.to_toml())


def resume(
    out: Path | str, *, observer: Observer | None = None, engine: dict[str, Any] | None = None,
    prepared: Federation | None = None, make_engine: MakeEngine = LocalEngine,
) -> Result:  # fmt: skip
    """Go on with the run in a folder, from its last good checkpoint, to the same weights as if nothing had happened.
    `engine` changes settings of that section, e.g. {"workers": 1}; `make_engine` is who trains."""
    out = Path(out)
    experiment = experiment_in(out, {f"engine.{key}": value for key, value in (engine or {}).items()})
    return _run(experiment, out, observer or Observer(), prepared, make_engine)


def experiment_in(out: Path, overrides: dict[str, Any] | None = None) -> Experiment:
    """The experiment of a run's folder."""
    file = out / "experiment.toml"
    if not file.is_file():
        raise ConfigError(f"{out} holds no run: it has no experiment.toml. Start one by `fedmll run --out {out}`.")
    return Experiment.load(file, overrides)


def _run(
    experiment: Experiment,
    out: Path,
    observer: Observer,
    prepared: Federation | None,
    make_engine: MakeEngine = LocalEngine,
) -> Result:
    with _locked(out), _logging(out) as log:
        for path in filter(files.is_leftover, out.rglob("*")):
            path.unlink()
        try:
            result = _Run(experiment, out, observer, log, prepared).go(make_engine)
        except (FedmllError, KeyboardInterrupt) as error:
            log.error("stopped: %s", str(error) or "interrupted")
            raise
    observer.finished(result)
    return result


class _Run:
    def __init__(
        self, experiment: Experiment, out: Path, observer: Observer, log: logging.Logger, prepared: Federation | None
    ) -> None:
        self.experiment, self.out, self.observer, self.log = experiment, out, observer, log
        if prepared is None:
            prepared = federation.build(experiment, observer.preparing)
        self.federation = replace(prepared, experiment=experiment)
        self.checkpoints = out / "checkpoint"
        self.rows: list[Row] = []
        self.best: dict[str, float] = {}
        self.best_tensors: Tensors = {}

    def go(self, make_engine: MakeEngine) -> Result:
        self.engine: Engine = make_engine(self.federation, self.checkpoints / "memory")
        try:
            state, first = self._resumed()
            self.observer.started(self.experiment, self.federation, first)
            self.log.info("%s from round %d of %d", self.experiment.method.name, first, self.experiment.training.rounds)
            for number in range(first, self.experiment.training.rounds + 1):
                state = self._round(state, number)
            return self._finish(state)
        finally:
            self.engine.close()

    def _resumed(self) -> tuple[Tensors, int]:
        """The state to start from, and the round to start with."""
        found, warnings = checkpoint.load(self.checkpoints, self.experiment.fingerprint())
        for text in warnings:
            self.log.warning(text)
            self.observer.warning(text)
        state = self.engine.start()
        last = 0
        if found is not None:
            last, self.best = found.round, found.best
            self.best_tensors = {k.removeprefix(BEST): t for k, t in found.state.items() if k.startswith(BEST)}
            state = {k: t for k, t in found.state.items() if not k.startswith(BEST)}
            self.engine.memory.latest = dict(found.memories)
        self.engine.memory.keep_only(checkpoint.memories(self.checkpoints))
        self.rows = [row for row in read_rows(self.out / "metrics.jsonl") if row["round"] <= last]
        files.write(self.out / "metrics.jsonl", "".join(to_json(row) + "\n" for row in self.rows))
        return state, last + 1

    def _round(self, state: Tensors, number: int) -> Tensors:
        begin = time.perf_counter()
        engine, method = self.engine, self.engine.method
        losses: list[tuple[float, float]] = []
        total = 1 if method.pooled else len(self.federation.participants(number))

        def watched() -> Iterator[Reply]:
            self.observer.client_done(number, 0, total)
            for peer, reply in engine.round(state, number):
                losses.append((reply.numbers["loss"], reply.numbers["samples"]))
                yield peer, reply
                self.observer.client_done(number, len(losses), total)

        for attempt in range(engine.tries):
            try:
                method.records = {}
                losses.clear()
                merged = method.merge(state, watched(), number)
                break
            except TooFewReplies as error:
                if attempt + 1 == engine.tries:
                    raise
                self.log.warning("round %d is tried again: %s", number, error)
                self.observer.warning(f"Round {number} is tried again: {error}")
        state = merged
        method.records |= engine.audit()
        row: Row = {
            "round": number,
            "seconds": 0.0,
            "bytes_up": engine.bytes_up,
            "bytes_down": engine.bytes_down,
            "clients": len(losses),
            "loss": float(np.average([loss for loss, _ in losses], weights=[n for _, n in losses])),
        }
        row |= {name: float(value) for name, value in method.records.items() if not isinstance(value, Tensor)}
        setting = self.experiment.engine
        last = number == self.experiment.training.rounds
        if last or number % setting.evaluate_every == 0:
            row |= engine.evaluate(method.deploy(state)).values
            self._remember_best(row, state)
        row["seconds"] = round(time.perf_counter() - begin, 4)
        self._write_down(row, {k: v for k, v in method.records.items() if isinstance(v, Tensor)})
        if last or number % setting.checkpoint_every == 0:
            self._checkpoint(state, number)
        self.observer.round_done(row)
        return state

    def _remember_best(self, row: Row, state: Tensors) -> None:
        if self.experiment.training.keep != "best":
            return
        value = row.get(SELECTION, math.nan)
        if not self.best or value > self.best["value"]:
            self.best = {"round": row["round"], "value": value if math.isfinite(value) else -1.0}
            self.best_tensors = {k: t.clone() for k, t in self.engine.method.deploy(state).tensors.items()}

    def _write_down(self, row: Row, records: Tensors) -> None:
        self.rows.append(row)
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(to_json(row) + "\n")
        if records:
            path = self.out / "records" / f"{row['round']:06d}.safetensors"
            with files.replacing(path) as temporary:
                save_file({name: t.contiguous() for name, t in records.items()}, temporary)
        shown = ("loss", "macro_auc", "map", "macro_f1", "seconds")
        self.log.info("round %d: %s", row["round"], ", ".join(f"{k} {row[k]:.4g}" for k in shown if k in row))

    def _checkpoint(self, state: Tensors, number: int) -> None:
        memory = self.engine.memory
        tensors = state | {BEST + name: t for name, t in self.best_tensors.items()}
        fingerprint = self.experiment.fingerprint()
        checkpoint.save(self.checkpoints, Checkpoint(number, tensors, fingerprint, self.best, memory.latest))
        memory.keep_only(checkpoint.memories(self.checkpoints))

    def _finish(self, state: Tensors) -> Result:
        engine, data = self.engine, self.federation
        message = Message(self.best_tensors) if self.best_tensors else engine.method.deploy(state)
        kept = int(self.best["round"]) if self.best_tensors else self.experiment.training.rounds
        found = engine.evaluate(message)
        report, clients = found.report, found.clients
        weights = engine.weights.named(message.tensors)
        with files.replacing(self.out / "model.safetensors") as temporary:
            save_file({k: t.contiguous() for k, t in weights.items()}, temporary)
        summary = {
            "method": self.experiment.method.name,
            "data": self.experiment.data.name,
            "seed": self.experiment.seed,
            "round": kept,
            "rounds": self.experiment.training.rounds,
            "clients": len(data.names),
            "classes": list(data.train.classes),
            "samples": {"train": int(data.sizes.sum()), "validation": len(data.validation), "test": len(data.test)},
            "partition": data.report,
            "parameters": engine.weights.parameter_end,
            "seconds": round(sum(row["seconds"] for row in self.rows), 3),
            "bytes_up": sum(row["bytes_up"] for row in self.rows),
            "bytes_down": sum(row["bytes_down"] for row in self.rows),
            "metrics": found.values,
            "left_out": report.left_out,
        }
        files.write(self.out / "summary.json", to_json(summary, indent=2) + "\n")
        per_class = {"class": np.array(data.test.classes), **report.per_class}
        _write_csv(self.out / "per_class.csv", per_class)
        per_client: dict[str, NDArray[Any]] = {}
        if clients is not None:
            per_client = {**clients.table, "client": np.array(data.names)[clients.table["client"]]}
            _write_csv(self.out / "per_client.csv", per_client)
        self.log.info("finished: %s", self.out / "summary.json")
        return Result(self.experiment, self.out, self.rows, summary, weights, per_class, per_client)


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl; a last line that was cut off by a kill is left out."""
    rows: list[Row] = []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: an undefined metric is null."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(inner) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return [plain(inner) for inner in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(plain(value), indent=indent, allow_nan=False)


def _write_csv(path: Path, columns: dict[str, NDArray[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for values in zip(*columns.values(), strict=True):
        writer.writerow([f"{v:.4f}" if isinstance(v, np.floating) else v for v in values])
    files.write(path, text.getvalue())


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One process a run's folder. The lock goes with the process, however it ends; its workers do not inherit it
    (a record lock: with flock, a worker that outlives a killed parent by a moment would still hold it)."""
    with (out / ".lock").open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"Another process is running the experiment in {out}; wait for it or stop it first."
            ) from None
        yield


@contextmanager
def _logging(out: Path) -> Iterator[logging.Logger]:
    log = logging.getLogger(f"fedmll.run.{out.resolve()}")
    log.setLevel(logging.INFO)
    log.propagate = False
    handler = logging.FileHandler(out / "log.txt")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    try:
        yield log
    finally:
        log.removeHandler(handler)
        handler.close()
