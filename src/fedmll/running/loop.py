"""run(experiment): rounds, evaluation, the run's folder, checkpoints. What watches a run is an Observer."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from fedmll import files
from fedmll.data import federation
from fedmll.data.federation import Federation
from fedmll.engines.base import Engine, MakeEngine
from fedmll.engines.local import LocalEngine
from fedmll.errors import ConfigError, FedmllError
from fedmll.evaluation.pooled import Evaluation
from fedmll.experiment import Experiment
from fedmll.message import Message, Tensors
from fedmll.methods.contract import Records
from fedmll.running import checkpoint
from fedmll.running.checkpoint import Checkpoint
from fedmll.running.exchange import Losses, exchange
from fedmll.running.folder import (
    EXPERIMENT,
    MEMORY,
    METRICS,
    SUMMARY,
    Row,
    check_data,
    check_plugins,
    check_vacant,
    create,
    experiment_in,
    locked,
    logging_to,
    read_rows,
    to_json,
)
from fedmll.running.notebook import default_observer
from fedmll.running.observers import INTERRUPTED, Observer, Result
from fedmll.running.outcome import leave

SELECTION = "val_macro_auc"  # what "best on validation data" means, for early stopping and for tuning
BEST = "best/"  # prefix of the best round's tensors in a checkpoint


def run(
    experiment: Experiment,
    out: Path | str | None = None,
    *,
    observer: Observer | None = None,
    prepared: Federation | None = None,
) -> Result:
    """Run an experiment from round 1. With `out` it leaves a folder that `resume` can go on with; a start that fails
    (data that cannot be read, a model that cannot be built) leaves none."""
    observer = observer or default_observer()
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            return replace(run(experiment, Path(folder) / "run", observer=observer, prepared=prepared), folder=None)
    out = Path(out)
    check_vacant(out)
    data = _divided(experiment, prepared, observer)
    engine = LocalEngine(data, out / MEMORY, observer.preparing)
    with closing(engine):
        create(out, data.experiment)
        return _go(data, engine, out, observer)


def resume(
    out: Path | str, *, observer: Observer | None = None, engine: dict[str, Any] | None = None,
    rounds: int | None = None, data: dict[str, Any] | None = None, prepared: Federation | None = None,
    plugins: Sequence[Path | str] | None = None, make_engine: MakeEngine = LocalEngine,
) -> Result:  # fmt: skip
    """Go on with the run in a folder, from its last good checkpoint, to the same weights as if nothing had happened.

    engine        changes settings of that section, e.g. {"workers": 1}
    rounds        go on to this round instead, also from the end of a finished run
    data          where the data lies now: {"root": …} or {"name": …}; it must be the same data
    plugins       where its plug-in files lie now, all of them;  make_engine   who trains
    """
    out, observer = Path(out), observer or default_observer()
    moved: dict[str, Any] = {} if plugins is None else {"plugins": [str(Path(file).absolute()) for file in plugins]}
    before = experiment_in(out, moved)
    moved |= {f"data.{key}": value for key, value in (data or {}).items()}
    moved |= {} if rounds is None else {"training.rounds": rounds}
    experiment = experiment_in(out, {f"engine.{k}": v for k, v in (engine or {}).items()} | moved)
    if rounds not in (None, experiment.training.rounds):
        raise ConfigError(f"'{experiment.method.name}' has {experiment.training.rounds} rounds, whatever is asked for.")
    checkpoint.check_owner(out / "checkpoint", experiment.fingerprint())
    divided = _divided(experiment, prepared, observer)
    with closing(make_engine(divided, out / MEMORY, observer.preparing)) as worker:
        return _go(divided, worker, out, observer, before)


def _divided(experiment: Experiment, prepared: Federation | None, observer: Observer) -> Federation:
    return federation.build(experiment, observer.preparing) if prepared is None else prepared.of(experiment)


def _change(out: Path, before: Experiment, experiment: Experiment, observer: Observer) -> None:
    """Other rounds, or another place of the data, for a run that has begun."""
    if (before.training.rounds, before.data) == (experiment.training.rounds, experiment.data):
        return
    rounds, done = experiment.training.rounds, max((row["round"] for row in read_rows(out / METRICS)), default=0)
    if rounds < done:
        raise ConfigError(f"The run in {out} has done {done} rounds already; --rounds {rounds} is less than that.")
    for key, (value, then) in before.depends_on_rounds(rounds).items():
        observer.warning(
            f"{key} = {value} was set from {before.training.rounds} rounds and stays; a run of {rounds} rounds from "
            f"the start would have {then}, and another result."
        )
    if rounds != before.training.rounds:
        (out / SUMMARY).unlink(missing_ok=True)  # it is no longer the result; first, so that a kill leaves no wrong one
    files.write(out / EXPERIMENT, experiment.to_toml())


def _go(data: Federation, engine: Engine, out: Path, observer: Observer, before: Experiment | None = None) -> Result:
    with locked(out), logging_to(out) as log:
        for path in filter(files.is_leftover, out.rglob("*")):
            path.unlink()
        try:
            check_data(out, data.facts)
            for text in check_plugins(out, data.experiment):
                log.warning(text)
                observer.warning(text)
            if before is not None:
                _change(out, before, data.experiment, observer)
            result = _Run(data, engine, out, observer, log).go()
        except (FedmllError, KeyboardInterrupt) as error:
            log.error("stopped: %s", str(error) or INTERRUPTED)
            observer.stopped(str(error) or INTERRUPTED)
            raise
    observer.finished(result)
    return result


class _Run:
    def __init__(self, data: Federation, engine: Engine, out: Path, observer: Observer, log: logging.Logger) -> None:
        self.federation, self.engine, self.out, self.observer, self.log = data, engine, out, observer, log
        self.experiment, self.notes = data.experiment, (*data.notes, *data.experiment.notes)
        self.checkpoints, self.rows = out / "checkpoint", list[Row]()
        self.best: dict[str, float] = {}
        self.best_tensors: Tensors = {}
        self.evaluations: dict[int, Evaluation] = {}  # of the latest and the best round

    def go(self) -> Result:
        state, first = self._resumed()
        self.observer.started(self.experiment, self.federation, first)
        self.log.info("%s from round %d of %d", self.experiment.method.name, first, self.experiment.training.rounds)
        for text in self.notes:
            self.log.info(text)
            self.observer.note(text)
        if first == 1 and self.engine.learner.method.asks("opening"):
            state = self._round(state, 0)  # the opening exchange
        for number in range(first, self.experiment.training.rounds + 1):
            state = self._round(state, number)
        return self._finish(state)

    def _resumed(self) -> tuple[Tensors, int]:
        """The state to start from, and the round to start with."""
        found, warnings = checkpoint.load(self.checkpoints, self.experiment.fingerprint())
        for text in warnings:
            self.log.warning(text)
            self.observer.warning(text)
        state, last = self.engine.start(), 0
        if found is not None:
            last, self.best = found.round, found.best
            self.best_tensors = {k.removeprefix(BEST): t for k, t in found.state.items() if k.startswith(BEST)}
            state = {k: t for k, t in found.state.items() if not k.startswith(BEST)}
            self.engine.memory.latest = dict(found.memories)
        self.engine.memory.keep_only(checkpoint.memories(self.checkpoints))
        self.rows = [row for row in read_rows(self.out / METRICS) if row["round"] <= last and last]
        files.write(self.out / METRICS, "".join(to_json(row) + "\n" for row in self.rows))
        return state, last + 1

    def _round(self, state: Tensors, number: int) -> Tensors:
        begin = time.perf_counter()
        engine, method = self.engine, self.engine.learner.method
        state, records, losses = self._exchange(state, number)
        records |= engine.audit() if number else {}
        row: Row = {
            "round": number,
            "seconds": 0.0,
            "bytes_up": engine.bytes_up,
            "bytes_down": engine.bytes_down,
            "clients": len(losses),
        }
        if method.exchange(number) is None:
            row["loss"] = float(np.average([loss for loss, _ in losses], weights=[n for _, n in losses]))
        row |= {name: float(value) for name, value in records.items() if not isinstance(value, Tensor)}
        setting = self.experiment.engine
        last = number == self.experiment.training.rounds
        if last or (number % setting.evaluate_every == 0 and not method.mean.alone):  # as many models as clients
            evaluation = engine.evaluate(method.deploy(state))
            row |= evaluation.values
            self._remember_best(row, state)
            kept = int(self.best.get("round", 0))
            self.evaluations = {number: evaluation} | {r: e for r, e in self.evaluations.items() if r == kept}
        row["seconds"] = round(time.perf_counter() - begin, 4)
        self._write_down(row, {k: v for k, v in records.items() if isinstance(v, Tensor)})
        if number and (last or number % setting.checkpoint_every == 0):
            self._checkpoint(state, number)
        self.observer.round_done(row)
        return state

    def _exchange(self, state: Tensors, number: int) -> tuple[Tensors, Records, Losses]:
        total = len(self.engine.learner.participants(self.engine.gathered(number), number))
        return exchange(self.engine, state, number, total, self.observer, self.log)

    def _remember_best(self, row: Row, state: Tensors) -> None:
        if self.experiment.training.keep != "best":
            return
        value = row.get(SELECTION, math.nan)
        if not self.best or value > self.best["value"]:
            self.best = {"round": row["round"], "value": value if math.isfinite(value) else -1.0}
            self.best_tensors = {k: t.clone() for k, t in self.engine.learner.method.deploy(state).tensors.items()}

    def _write_down(self, row: Row, records: Tensors) -> None:
        self.rows.append(row)
        with (self.out / METRICS).open("a") as file:
            file.write(to_json(row) + "\n")
        if records:
            path = self.out / "records" / f"{row['round']:06d}.safetensors"
            with files.replacing(path) as temporary:
                save_file({name: t.contiguous() for name, t in records.items()}, temporary)
        shown = ("loss", "macro_auc", "map", "macro_f1", "pooled_macro_auc", "sites_macro_auc", "seconds")
        self.log.info("round %d: %s", row["round"], ", ".join(f"{k} {row[k]:.4g}" for k in shown if k in row))

    def _checkpoint(self, state: Tensors, number: int) -> None:
        memory = self.engine.memory
        tensors = state | {BEST + name: t for name, t in self.best_tensors.items()}
        fingerprint = self.experiment.fingerprint()
        memory.sync()
        checkpoint.save(self.checkpoints, Checkpoint(number, tensors, fingerprint, self.best, memory.latest))
        if number == self.experiment.training.rounds:
            memory.keep_only(checkpoint.memories(self.checkpoints))
        else:
            memory.checkpointed(lambda: checkpoint.memories(self.checkpoints))

    def _finish(self, state: Tensors) -> Result:
        engine, method = self.engine, self.engine.learner.method
        data = engine.gathered(self.experiment.training.rounds + 1)
        message = Message(self.best_tensors) if self.best_tensors else method.deploy(state)
        kept = int(self.best["round"]) if self.best_tensors else self.experiment.training.rounds
        if method.asks("closing"):
            state, _, _ = self._exchange(state | message.tensors, self.experiment.training.rounds + 1)
            message, self.evaluations = method.deploy(state), {}
        found = self.evaluations.get(kept) or engine.evaluate(message)  # not twice: between machines it is an exchange
        left = leave(self.out, data, engine.learner, message, found, kept, self.rows, self.notes)
        self.log.info("finished: %s", self.out / SUMMARY)
        return left
