"""Did the site benefit from joining? `site-report.html` compares the federated model with a local baseline.

After the run the site trains the local baseline: the federation's experiment with this site as the only client, with
the same method, head, seed, rounds and epochs. Both models are tested on the site's own test data. Nothing of it leaves
the site.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedmll.comparison.plan import parse_variant
from fedmll.config.experiment import Experiment
from fedmll.core import files
from fedmll.core.errors import ConfigError, FedmllError
from fedmll.data.dataset import Dataset
from fedmll.data.federation import Federation, split_holdout
from fedmll.data.images.cache import Progress, image_cache_in, no_progress
from fedmll.deploy.site import site_folder
from fedmll.deploy.site.worker import SiteWorker
from fedmll.evaluation.bootstrap import ModelOutput, PairedComparison, has_enough_samples
from fedmll.evaluation.calibration import apply_calibration, no_calibration
from fedmll.evaluation.histograms import score_histograms
from fedmll.evaluation.thresholds import DEFAULT_THRESHOLD, ThresholdChoice, choose_thresholds
from fedmll.inference.model_file import SavedModel, load_model, write_model
from fedmll.reports.site_report import (
    FEDERATED,
    FEDERATED_TUNED,
    LOCAL,
    LOCAL_TUNED,
    SiteComparison,
    describe_verdict,
    render_site_report,
)
from fedmll.runs.run_folder import MODEL_FILE, MetricsRow, RunFolder
from fedmll.training import round_loop
from fedmll.training.callbacks import Callback

REPORT_FILE = "site-report.html"
TUNED_MODEL_FILE = "model-tuned.safetensors"  # the federated model with the site's own thresholds and calibration
HALF = 0.5
FALLBACK_METHOD = "fedavg-pl"  # with one client: training on the known labels, and nothing else

Scores = NDArray[np.floating]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class HoldoutSplit:
    """The held-out rows for choosing thresholds (`tuning`) and for metrics (`test`), with a sentence about them."""

    tuning: Rows
    test: Rows
    description: str


def split_held_out_rows(worker: SiteWorker) -> HoldoutSplit:
    """Use the split of the labels file if it has validation and test rows; otherwise draw two halves by the seed.

    A patient's images stay in the same half.
    """
    data, seed = worker.data, worker.trainer.task.seed
    rows = np.arange(len(data.held_out))
    if data.is_validation.any():
        tuning, test = np.flatnonzero(data.is_validation), np.flatnonzero(~data.is_validation)
        source = "as your file marks them (split = validation and test)"
    else:
        test, tuning = split_holdout(rows, HALF, seed, f"{worker.site.name}, report", data.held_out.patients)
        source = "two halves of the held-out images, drawn by the experiment's seed, because they have no split"
    text = f"{len(test)} images are the test data, and models were tuned on {len(tuning)} others"
    return HoldoutSplit(tuning, test, f"{text}: {source}. {len(data.train)} were trained on.")


def report_after_run(worker: SiteWorker, show: Callable[[str], None], progress: Progress = no_progress) -> None:
    """Write the report after the run. A problem with the report does not affect the model, which is already there."""
    model = load_model(worker.site.output_dir / MODEL_FILE)
    if not len(worker.data.held_out):
        show("no report: none of your images is held out, so the model cannot be tested here")
        return
    show("writing a report for your site; Ctrl-C skips it (--no-report). The model is already there")
    try:
        write_site_report(worker, model, show, progress)
    except KeyboardInterrupt:
        show("no report: it was stopped. The model is there")


def write_site_report(
    worker: SiteWorker, model: SavedModel, show: Callable[[str], None], progress: Progress = no_progress
) -> Path:
    """Write the report next to the model and, if there are enough test images, the model with tuned thresholds."""
    folder = model.file.parent
    comparison, tuned = compare_models(worker, model, progress)
    with site_folder.private_files():
        files.write_atomic(folder / REPORT_FILE, render_site_report(comparison))
        if tuned is not None:
            write_model(folder / TUNED_MODEL_FILE, model.weights, model.description | tuned.description)
    show(describe_verdict(comparison))
    show(f"the report is in {folder / REPORT_FILE}")
    if tuned is not None:
        show(f"the federated model with your own thresholds and calibration is in {folder / TUNED_MODEL_FILE}")
    return folder / REPORT_FILE


def compare_models(
    worker: SiteWorker, model: SavedModel, progress: Progress = no_progress
) -> tuple[SiteComparison, ThresholdChoice | None]:
    """Compare the federated model with a local one.

    Returns:
        What the report shows; and the site's own thresholds and calibration for all classes of the model, or None if
        there are too few test images.
    """
    data, task, split = worker.data, worker.trainer.task, split_held_out_rows(worker)
    columns = np.flatnonzero(data.annotated)
    classes, held_out = tuple(np.array(task.classes)[columns].tolist()), data.held_out.select_classes(columns)
    targets = held_out.labels[split.test]
    experiment = task.experiment
    study = f"{experiment.method.name}, {experiment.training.rounds} rounds, {task.clients} clients"
    if not has_enough_samples(targets).any():
        return SiteComparison(
            site=worker.site.name, experiment=study, classes=classes, outputs={}, targets=targets,
            split=split.description,
        ), None  # fmt: skip
    worker.trainer.load(model.weights)
    raw = worker.trainer.predict(data.held_out, 0, len(data.held_out)).numpy().astype(np.float64)
    original = _original_choice(model)
    tuned = _tune(raw, data.held_out.labels, split.tuning, original)
    outputs = {
        FEDERATED: ModelOutput(raw, original.thresholds) if model.calibration is None else _calibrated(raw, original),
        FEDERATED_TUNED: _calibrated(raw, tuned),
    }
    outputs = {
        name: ModelOutput(output.probabilities[:, columns], output.thresholds[columns])
        for name, output in outputs.items()
    }
    notes = [_tuning_note(held_out.labels[split.tuning], classes)]
    if not worker.site.validation_only:
        local_outputs, note = _local_outputs(worker, held_out.labels, split, progress)
        outputs, notes = local_outputs | outputs, [note, *notes]
    outputs = {
        name: ModelOutput(output.probabilities[split.test], output.thresholds) for name, output in outputs.items()
    }
    patients = None if held_out.patients is None else held_out.patients[split.test]
    comparison = SiteComparison(
        site=worker.site.name,
        experiment=study,
        classes=classes,
        outputs=outputs,
        targets=targets,
        split=split.description,
        notes=notes,
        comparison=PairedComparison(outputs, targets, task.seed, patients),
    )
    return comparison, tuned


def _original_choice(model: SavedModel) -> ThresholdChoice:
    """The thresholds and calibration in the model file; the defaults if it has none."""
    count = len(model.classes)
    thresholds = np.full(count, DEFAULT_THRESHOLD) if model.tuned_thresholds is None else model.tuned_thresholds
    calibration = no_calibration(count) if model.calibration is None else model.calibration
    return ThresholdChoice(goal="f1", raw_thresholds=thresholds, thresholds=thresholds, calibration=calibration)


def _tune(raw: Scores, labels: NDArray[np.int8], rows: Rows, original: ThresholdChoice) -> ThresholdChoice:
    """Choose thresholds and calibration on these rows; a class with few samples keeps the original ones."""
    chosen = choose_thresholds(score_histograms(raw[rows], labels[rows]), "f1", "platt")
    return chosen.where(has_enough_samples(labels[rows]), original)


def _calibrated(raw: Scores, choice: ThresholdChoice) -> ModelOutput:
    assert choice.calibration is not None
    return ModelOutput(apply_calibration(raw, choice.calibration), choice.thresholds)


def _local_outputs(
    worker: SiteWorker, labels: NDArray[np.int8], split: HoldoutSplit, progress: Progress
) -> tuple[dict[str, ModelOutput], str]:
    """The local model's predictions for all held-out rows, and a note on how it was trained or why there is none."""
    training = worker.trainer.task.experiment.training
    try:
        scores, replacement = train_local_baseline(worker, split.tuning, progress)
    except FedmllError as error:
        return {}, f"There is no local model to compare with, because it could not be trained: {error}"
    raw = scores.astype(np.float64)
    thresholds = np.full(raw.shape[1], DEFAULT_THRESHOLD)
    default = ThresholdChoice(
        goal="f1", raw_thresholds=thresholds, thresholds=thresholds, calibration=no_calibration(raw.shape[1])
    )
    note = (
        f"Your local model was trained on your images only, with the same experiment: {training.rounds} rounds "
        f"with {training.local_epochs} pass{'es' if training.local_epochs > 1 else ''} over them, the same network, "
        "seed and settings. It knows the classes that you annotate."
    )
    if replacement is not None:
        note += f" {replacement}."
    tuned = _tune(raw, labels, split.tuning, default)
    return {LOCAL: ModelOutput(raw, thresholds), LOCAL_TUNED: _calibrated(raw, tuned)}, note


def _tuning_note(labels: NDArray[np.int8], classes: tuple[str, ...]) -> str:
    few = [name for name, enough in zip(classes, has_enough_samples(labels), strict=True) if not enough]
    text = "Tuned models have the thresholds with the highest F1 and Platt calibration, for each class."
    return f"{text} Not tuned, because there are too few images: {', '.join(few)}." if few else text


class _RoundProgress(Callback):
    def __init__(self, rounds: int, progress: Progress) -> None:
        self.rounds, self.progress = rounds, progress

    def on_setup_progress(self, done: int, total: int, what: str) -> None:
        self.progress(done, total, what)

    def on_round_end(self, row: MetricsRow) -> None:
        self.progress(row["round"], self.rounds, "training your local model")


def train_local_baseline(
    worker: SiteWorker, validation: NDArray[np.int64], progress: Progress
) -> tuple[NDArray[np.float32], str | None]:
    """Train a model on the site's own data.

    If the experiment keeps the best round, `validation` (rows of the held-out data) selects it.

    Returns:
        The predictions for the held-out data, (N, number of classes that the site annotates); and, if the method does
        not work with one client, a sentence on what was trained instead.
    """
    task, site = worker.trainer.task, worker.site
    columns = np.flatnonzero(worker.data.annotated)
    train, held_out = worker.data.train.select_classes(columns), worker.data.held_out.select_classes(columns)
    experiment = task.experiment.changed(
        {
            "engine.workers": 0,
            "engine.device": site.device,
            "participation.fraction": 1.0,
            "participation.count": None,
        }
        | ({} if task.experiment.training.keep == "best" else {"engine.evaluate_every": max(1, task.rounds)})
    )
    data = _single_client_federation(experiment, site.name, train, held_out, validation)
    threads = torch.get_num_threads()
    cache = image_cache_in(site.state_dir / site_folder.CACHE)
    with site_folder.private_files(), cache, tempfile.TemporaryDirectory(dir=site.state_dir) as folder:
        try:
            return _train_and_predict(data, Path(folder) / "run", progress), None
        except ConfigError as error:
            fallback = data.with_experiment(experiment.changed(parse_variant(FALLBACK_METHOD).overrides))
            note = (
                f"'{experiment.method.name}' does not work with one client ({error}), so '{FALLBACK_METHOD}' was used"
            )
            return _train_and_predict(fallback, Path(folder) / "fallback", progress), note
        finally:
            torch.set_num_threads(threads)


def _train_and_predict(data: Federation, out: Path, progress: Progress) -> NDArray[np.float32]:
    rounds = data.experiment.training.rounds
    round_loop.run(data.experiment, out, callback=_RoundProgress(rounds, progress), prepared=data)
    return RunFolder(out).read_predictions("test").probabilities


def _single_client_federation(
    experiment: Experiment, name: str, train: Dataset, held_out: Dataset, validation: NDArray[np.int64]
) -> Federation:
    all_classes = np.ones((1, len(train.classes)), bool)
    return Federation(
        experiment=experiment,
        train=train,
        true_labels=train.labels,
        test=held_out,
        validation=held_out.subset(validation),
        held_out=held_out.subset(validation[:0]),
        held_out_owners=np.zeros(0, np.int64),
        names=(name,),
        samples=(np.arange(len(train)),),
        annotated=all_classes,
        allowed=all_classes,
        report={},
        server=None,
        source=train,
        pooled_rows=np.arange(len(train)),
        derived_settings={},
    )
