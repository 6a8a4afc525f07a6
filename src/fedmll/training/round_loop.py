"""`run(experiment)` and `resume(folder)`: rounds, evaluation, checkpoints and the run's folder."""

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
from numpy.typing import NDArray
from torch import Tensor

from fedmll.config.experiment import Experiment
from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.core.text import printable
from fedmll.data import federation
from fedmll.data.federation import Federation
from fedmll.engines.base import Engine, RoundResult
from fedmll.engines.simulation import SimulationEngine
from fedmll.engines.start import prepare_engine, start_engine
from fedmll.evaluation.evaluate import Evaluation
from fedmll.evaluation.metric_definitions import LOG, SELECTION, metrics_in
from fedmll.evaluation.site_metrics import evaluate_by_site
from fedmll.evaluation.thresholds import best_thresholds
from fedmll.inference.model_file import describe_model, write_model
from fedmll.runs.run_folder import CLOSING, PER_CLASS_FILE, PER_CLIENT_FILE, SUMMARY_FILE, MetricsRow, RunFolder
from fedmll.training import federated_evaluation
from fedmll.training.callbacks import INTERRUPTED, Callback, Result, default_callback
from fedmll.training.checkpoint import (
    BEST_PREFIX,
    Checkpoint,
    check_fingerprint,
    discard_checkpoints,
    load_checkpoint,
    referenced_client_states,
    save_checkpoint,
    without_best_model,
)
from fedmll.training.python_objects import make_experiment, register_objects


def run(
    experiment: Experiment | None = None,
    out: Path | str | None = None,
    *,
    callback: Callback | None = None,
    prepared: Federation | None = None,
    **changes: Any,
) -> Result:
    """Run an experiment from round 1.

    For example `run(data=(x, y), model=net, method="fedprox", rounds=5)`.

    Args:
        experiment: what to run; None: the defaults.
        out: the run's folder, which `resume` can continue; it must be empty or not exist. A start that fails (data that
            cannot be read, a model that cannot be built) creates no folder. None: nothing is kept on disk.
        callback: watches the run; by default a progress bar in a notebook.
        prepared: the data, if it has been loaded and divided before.
        changes: Python objects and settings: data, model, loss, metrics, method, rounds, clients, seed, classes and
            settings, as in `make_experiment`.
    """
    if changes or experiment is None:
        experiment = make_experiment(experiment, **changes)
    callback = callback or default_callback()
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            return replace(run(experiment, Path(folder) / "run", callback=callback, prepared=prepared), folder=None)
    run_folder = RunFolder(out)
    run_folder.check_vacant()
    prepare_engine(experiment.engine)
    data = _build_federation(experiment, prepared, callback)
    with closing(start_engine(data, run_folder.client_state_folder, callback.on_setup_progress)) as engine:
        run_folder.create(data.experiment)
        return train(data, engine, run_folder, callback)


def resume(
    out: Path | str, *, callback: Callback | None = None, engine: dict[str, Any] | None = None,
    rounds: int | None = None, data: Any = None, prepared: Federation | None = None,
    plugins: Sequence[Path | str] | None = None, **objects: Any,
) -> Result:  # fmt: skip
    """Continue the run in a folder from its last valid checkpoint, to the same weights as without the interruption.

    Args:
        out: the run's folder.
        callback: watches the run; by default a progress bar in a notebook.
        engine: changed settings of the section `engine`, e.g. {"workers": 1}.
        rounds: continue to this round instead; a finished run can be extended.
        data: where the data is now: {"root": …} or {"name": …}; or the Python object that the run was started with. It
            must be the same data.
        prepared: the data, if it has been loaded and divided before.
        plugins: where all of the run's plug-in files are now.
        objects: the model, loss, metrics and class names that the run was started with, if they are Python objects.
    """
    if data is not None and not (isinstance(data, dict) and data.keys() <= {"root", "name"}):
        objects, data = {**objects, "data": data}, None
    names = register_objects(**objects)
    folder, callback = RunFolder(out), callback or default_callback()
    overrides: dict[str, Any] = {} if plugins is None else {"plugins": [str(Path(file).absolute()) for file in plugins]}
    before = folder.load_experiment(overrides)
    overrides |= {f"data.{key}": value for key, value in (data or {}).items()}
    overrides |= {} if rounds is None else {"training.rounds": rounds}
    experiment = folder.load_experiment({f"engine.{k}": v for k, v in (engine or {}).items()} | overrides)
    if rounds not in (None, experiment.training.rounds):
        raise ConfigError(
            f"'{experiment.method.name}' always has {experiment.training.rounds} rounds; --rounds cannot change that."
        )
    given = {"data.name": experiment.data.name, "model.backbone": experiment.model.backbone}
    for key, name in (given | {"training.loss": experiment.training.loss}).items():
        if names.get(key, name) != name:
            raise ConfigError(
                f"The run in {folder} began with {key} = '{name}', and the object that was given is '{names[key]}': "
                "it is another one. Pass the object that the run was started with."
            )
    if experiment.training.loss.startswith(registry.OBJECT_PREFIX):
        registry.find("loss", experiment.training.loss)  # refused before anything starts
    check_fingerprint(folder.checkpoint_folder, experiment.fingerprint())
    prepare_engine(experiment.engine)
    divided = _build_federation(experiment, prepared, callback)
    with closing(start_engine(divided, folder.client_state_folder, callback.on_setup_progress)) as running:
        return train(divided, running, folder, callback, before)


def return_to_round(out: Path | str, number: int) -> None:
    """Make the run in a folder continue with this round, from the checkpoint before it."""
    folder = RunFolder(out)
    with folder.lock():
        discard_checkpoints(folder.checkpoint_folder, number)
        folder.remove_summary()


def _build_federation(experiment: Experiment, prepared: Federation | None, callback: Callback) -> Federation:
    if prepared is not None:
        return prepared.with_experiment(experiment)
    return federation.build(experiment, callback.on_setup_progress)


def train(
    data: Federation, engine: Engine, folder: RunFolder, callback: Callback, before: Experiment | None = None
) -> Result:
    """Run the rounds of an experiment that remain, and write the results to the run's folder.

    `before` is the experiment of a resumed run as it was, if settings may have changed.
    """
    with folder.lock(), folder.open_log() as log:
        folder.remove_partial_files()
        try:
            folder.check_data(data.fingerprints)
            for text in [*folder.check_plugins(data.experiment), *folder.check_records()]:
                log.warning(text)
                callback.on_warning(text)
            if before is not None:
                _save_changed_experiment(folder, before, data.experiment, callback)
            result = _TrainingLoop(data, engine, folder, callback, log).train()
        except (Exception, KeyboardInterrupt) as error:
            without_text = INTERRUPTED if isinstance(error, KeyboardInterrupt) else type(error).__name__
            log.error("stopped: %s", printable(str(error) or without_text, 1000))
            callback.on_run_error(error)
            raise
    callback.on_run_end(result)
    return result


def _save_changed_experiment(folder: RunFolder, before: Experiment, experiment: Experiment, callback: Callback) -> None:
    """Store another number of rounds, or another place of the data, of a run that has begun."""
    if (before.training.rounds, before.data) == (experiment.training.rounds, experiment.data):
        return
    rounds, done = experiment.training.rounds, folder.rounds_done
    if rounds < done:
        raise ConfigError(f"The run in {folder} has done {done} rounds already; --rounds {rounds} is less than that.")
    for key, (value, from_start) in before.depends_on_rounds(rounds).items():
        callback.on_warning(
            f"{key} = {value} was set from {before.training.rounds} rounds and stays; a run of {rounds} rounds from "
            f"the start would have {from_start}, and another result."
        )
    folder.remove_summary()  # first: a kill must not leave a finished run with another experiment
    folder.write_experiment(experiment)


class _TrainingLoop:
    """The rounds of one run."""

    def __init__(
        self, data: Federation, engine: Engine, folder: RunFolder, callback: Callback, log: logging.Logger
    ) -> None:
        self.federation, self.engine, self.folder, self.callback, self.log = data, engine, folder, callback, log
        self.experiment, self.notes = data.experiment, (*data.notes, *data.experiment.notes)
        if isinstance(engine, SimulationEngine):
            engine.on_warning = self._warn
        self.rows: list[MetricsRow] = []
        self.best: dict[str, float] = {}  # round and value of the best validation so far
        self.best_tensors: Tensors = {}
        self.evaluations: dict[int, Evaluation] = {}  # of the latest and the best round

    def train(self) -> Result:
        state, first = self._load_state()
        self.callback.on_run_start(self.experiment, self.federation, first)
        self.log.info("%s from round %d of %d", self.experiment.method.name, first, self.experiment.training.rounds)
        for text in self.notes:
            self.log.info(text)
            self.callback.on_note(text)
        if first == 1 and self.engine.trainer.method.has_exchange("opening"):
            state = self._run_round(state, 0)  # the opening exchange
        for number in range(first, self.experiment.training.rounds + 1):
            state = self._run_round(state, number)
        return self._finish(state)

    def _load_state(self) -> tuple[Tensors, int]:
        """The state of the last checkpoint, or the initial one; and the next round."""
        checkpoint, warnings = load_checkpoint(
            self.folder.checkpoint_folder,
            self.experiment.fingerprint(),
            self.engine.client_states.set_aside_if_damaged,
        )
        for text in warnings:
            self._warn(text)
        state, last, checksum = self.engine.initial_state(), 0, ""
        if checkpoint is not None:
            last, self.best, saved = checkpoint.round, checkpoint.best, checkpoint.state
            checksum = checkpoint.metrics_checksum
            self.best_tensors = {k.removeprefix(BEST_PREFIX): t for k, t in saved.items() if k.startswith(BEST_PREFIX)}
            state = without_best_model(saved)
            self.engine.client_states.latest = dict(checkpoint.client_states)
        self.engine.client_states.keep_only(self._referenced_client_states())
        self.rows, warning = self.folder.recover_metrics(last, checksum)
        if warning is not None:
            self._warn(warning)
        return state, last + 1

    def _warn(self, text: str) -> None:
        self.log.warning(text)
        self.callback.on_warning(text)

    def _run_round(self, state: Tensors, number: int) -> Tensors:
        start = time.perf_counter()
        engine, method = self.engine, self.engine.trainer.method
        result = self._exchange(state, number) if number else self._exchanges(state, "opening")
        state, losses = result.state, result.losses
        records = result.records | (engine.audit_records() if number else {})
        row = self._row(number, result)
        if method.exchange_in(number) is None:
            row["loss"] = float(np.average([loss for loss, _ in losses], weights=[n for _, n in losses]))
        row |= {name: float(value) for name, value in records.items() if not isinstance(value, Tensor)}
        settings = self.experiment.engine
        is_last = number == self.experiment.training.rounds
        # with one model per client (`alone`) only the last round is evaluated
        is_due = number % settings.evaluate_every == 0 and (number > 0 or method.starts_with_a_head)
        if is_last or (is_due and not method.has("local-models")):
            evaluation = engine.evaluate(method.final_model(state))
            row |= evaluation.values
            self._keep_if_best(row, state)
            best_round = int(self.best.get("round", 0))
            self.evaluations = {number: evaluation} | {r: e for r, e in self.evaluations.items() if r == best_round}
        row["seconds"] = round(time.perf_counter() - start, 4)
        self._record_round(row, {k: v for k, v in records.items() if isinstance(v, Tensor)})
        if number and (is_last or number % settings.checkpoint_every == 0):
            self._save_checkpoint(state, number)
        self.callback.on_round_end(row)
        return state

    def _row(self, number: int, result: RoundResult) -> MetricsRow:
        return {
            "round": number,
            "seconds": 0.0,
            "bytes_up": result.bytes_up,
            "bytes_down": result.bytes_down,
            "clients": len(result.losses),
        }

    def _exchange(self, state: Tensors, number: int) -> RoundResult:
        total = len(self.engine.trainer.participants(self.engine.federation_in(number), number))
        shown = min(max(number, 0), self.experiment.training.rounds + 1)
        return self.engine.run_round(state, number, lambda done: self.callback.on_client_end(shown, done, total))

    def _exchanges(self, state: Tensors, exchange: str) -> RoundResult:
        """All opening or all closing exchanges: the bytes of all of them, and the last result."""
        up = down = 0
        for number in self.engine.trainer.method.exchange_rounds(exchange):
            result = self._exchange(state, number)
            state, up, down = result.state, up + result.bytes_up, down + result.bytes_down
        return replace(result, bytes_up=up, bytes_down=down)

    def _keep_if_best(self, row: MetricsRow, state: Tensors) -> None:
        if self.experiment.training.keep != "best":
            return
        value = row.get(SELECTION, math.nan)
        if not self.best or value > self.best["value"]:
            self.best = {"round": row["round"], "value": value if math.isfinite(value) else -1.0}
            self.best_tensors = {k: t.clone() for k, t in self.engine.trainer.method.final_model(state).tensors.items()}

    def _record_round(self, row: MetricsRow, records: Tensors) -> None:
        self.rows.append(row)
        self.folder.append_metrics(row)
        if records:
            self.folder.write_records(row["round"], records)
        metrics = ", ".join(f"{name} {row[name]:.4g}" for name in (*metrics_in(LOG), "seconds") if name in row)
        self.log.info("round %d: %s", row["round"], metrics)

    def _save_checkpoint(self, state: Tensors, number: int) -> None:
        client_states = self.engine.client_states
        client_states.sync()
        checkpoint = Checkpoint(
            round=number,
            state=state | {BEST_PREFIX + name: t for name, t in self.best_tensors.items()},
            fingerprint=self.experiment.fingerprint(),
            best=self.best,
            client_states=client_states.latest,
            metrics_checksum=self.folder.metrics_checksum(),
        )
        save_checkpoint(self.folder.checkpoint_folder, checkpoint)
        if number == self.experiment.training.rounds:
            client_states.keep_only(self._referenced_client_states())
        else:
            client_states.checkpointed(self._referenced_client_states)

    def _referenced_client_states(self) -> set[tuple[int, int]] | None:
        return referenced_client_states(self.folder.checkpoint_folder)

    def _finish(self, state: Tensors) -> Result:
        engine, method, rounds = self.engine, self.engine.trainer.method, self.experiment.training.rounds
        data = engine.federation_in(rounds + 1)
        message = Message(self.best_tensors) if self.best_tensors else method.final_model(state)
        model_round = int(self.best["round"]) if self.best_tensors else rounds
        if method.has_exchange("closing"):
            message, evaluation = self._close(state | message.tensors)
        else:
            # a round's evaluation is used again: between machines an evaluation costs an exchange
            evaluation = self.evaluations.get(model_round) or engine.evaluate(message)
        result = self._write_result(data, message, evaluation, model_round)
        self.log.info("finished: %s", self.folder.path / SUMMARY_FILE)
        return result

    def _close(self, state: Tensors) -> tuple[Message, Evaluation]:
        """The closing exchanges: their row has the number after the last round and the metrics of the final model."""
        start, rounds = time.perf_counter(), self.experiment.training.rounds
        result = self._exchanges(state, "closing")
        message = self.engine.trainer.method.final_model(result.state)
        evaluation = self.engine.evaluate(message)
        row = self._row(rounds + 1, result) | {CLOSING: 1}
        row |= {name: float(value) for name, value in result.records.items() if not isinstance(value, Tensor)}
        row |= evaluation.values
        row["seconds"] = round(time.perf_counter() - start, 4)
        self._record_round(row, {})
        return message, evaluation

    def _write_result(self, data: Federation, message: Message, evaluation: Evaluation, model_round: int) -> Result:
        """Write the model, its predictions, tables and the summary. A run with a summary is finished."""
        folder, trainer, experiment = self.folder, self.engine.trainer, data.experiment
        folder.remove_summary()  # of a finished run: its checksums are those of the old files
        weights = trainer.named(message)
        if not trainer.method.has("local-models"):
            scores = evaluation.scores.get("validation")
            thresholds = None
            if scores is not None and len(scores):
                thresholds = best_thresholds(scores, data.validation.labels)
            description = describe_model(experiment, trainer, thresholds, model_round)
            choice = federated_evaluation.choose_common_thresholds(evaluation.histograms)
            description |= {} if choice is None else choice.description
            write_model(folder.model_file, weights | trainer.frozen(), description)
        if evaluation.scores:
            folder.write_predictions(data, evaluation.scores)
        if evaluation.histograms is not None:
            federated_evaluation.write_site_metrics(folder, evaluation.histograms, experiment.seed)
        folder.write_metrics_csv(self.rows)
        folder.write_client_labels(data)
        per_class = {"class": np.array(data.test.classes), **evaluation.report.per_class}
        folder.write_table(PER_CLASS_FILE, per_class)
        per_client: dict[str, NDArray[Any]] = {}
        if evaluation.clients is not None:
            table = evaluation.clients.table
            per_client = table | {"client": np.array(data.names)[table["client"]]}
            folder.write_table(PER_CLIENT_FILE, per_client)
        summary = self._build_summary(data, evaluation, model_round)
        folder.write_summary(summary)
        return Result(
            experiment=experiment,
            folder=folder.path,
            rows=self.rows,
            summary=summary,
            weights=weights,
            per_class=per_class,
            per_client=per_client,
        )

    def _build_summary(self, data: Federation, evaluation: Evaluation, model_round: int) -> dict[str, Any]:
        experiment, trainer, rows = data.experiment, self.engine.trainer, self.rows
        annotating_clients = data.annotated.sum(0).tolist()
        return {
            "method": experiment.method.name,
            "data": experiment.data.label,
            "seed": experiment.seed,
            "round": model_round,
            "rounds": experiment.training.rounds,
            "clients": len(data.names),
            "classes": list(data.train.classes),
            "sample_shape": list(data.train.sample_shape),
            "samples": {
                "train": len(data.pooled_rows) if trainer.method.pooled else int(data.sizes.sum()),
                "validation": len(data.validation),
                "test": len(data.test),
            },
            "annotating_clients": dict(zip(data.train.classes, annotating_clients, strict=True)),
            "notes": list(self.notes),
            "partition": data.report,
            "parameters": trainer.weights.parameter_end,
            "seconds": round(sum(row["seconds"] for row in rows), 3),
            **{name: sum(row[name] for row in rows) for name in ("bytes_up", "bytes_down")},
            "metrics": evaluation.values,
            "left_out": evaluation.report.left_out,
            **_by_site(data, evaluation),
        }


def _by_site(data: Federation, evaluation: Evaluation) -> dict[str, Any]:
    """The metrics of each site, if the data comes from several (`[[sites]]`) and there is one model for all."""
    scores, test = evaluation.scores.get("test"), data.test
    if scores is None or test.sites is None:
        return {}
    return {"by_site": evaluate_by_site(scores, test.labels, test.sites, test.classes, data.annotated_by_site)}
