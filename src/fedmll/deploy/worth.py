"""Was it worth joining? When the run is over a site trains a model of its own (alone.py) and compares it with the
common one on its own test data: `site-report.html`. Nothing of it leaves the site."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll import files
from fedmll.data.federation import split_off
from fedmll.data.images.cache import Progress, silent
from fedmll.deploy import own_folder
from fedmll.deploy.alone import trained_alone
from fedmll.deploy.site_worker import SiteWorker
from fedmll.errors import FedmllError
from fedmll.evaluation import cuts
from fedmll.evaluation.beside import FEW, Beside, Told
from fedmll.evaluation.histograms import histograms
from fedmll.report.site_page import ALONE, ALONE_OWN, COMMON, COMMON_OWN, Worth, site_page, verdict
from fedmll.running.folder import MODEL
from fedmll.running.model import SavedModel, load_model, recalibrated, write_model
from fedmll.running.thresholds import Choice, choose

FILE, OWN_MODEL = "site-report.html", "model-own.safetensors"
HALF = 0.5

Scores = NDArray[np.floating]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Division:
    """Of the held-out rows: where thresholds are chosen, and what the figures are of."""

    tuning: Rows
    test: Rows
    words: str


def divided(worker: SiteWorker) -> Division:
    """By the file's own split where it has validation and test rows; else two halves by the seed, patients whole."""
    data, seed = worker.data, worker.learner.task.seed
    rows = np.arange(len(data.held_out))
    if data.validation.any():
        tuning, test = np.flatnonzero(data.validation), np.flatnonzero(~data.validation)
        how = "as your file marks them (split = validation and test)"
    else:
        test, tuning = split_off(rows, HALF, seed, f"{worker.site.name}, report", data.held_out.patients)
        how = "two halves of what was held out, drawn by the experiment's seed, because there is only one kind of it"
    words = f"{len(test)} images are the test data, and models were tuned on {len(tuning)} others"
    return Division(tuning, test, f"{words}: {how}. {len(data.train)} were trained on.")


def write_site_report(
    worker: SiteWorker, model: SavedModel, show: Callable[[str], None], progress: Progress = silent
) -> Path:
    """The report, beside the model; and, where there are figures, the model with the site's own thresholds."""
    folder = model.file.parent
    worth, own = found_out(worker, model, progress)
    with own_folder.private():
        files.write(folder / FILE, site_page(worth))
        if own is not None:
            write_model(folder / OWN_MODEL, model.weights, model.description | own.described)
    show(verdict(worth))
    show(f"the report is in {folder / FILE}")
    if own is not None:
        show(f"the common model with your own thresholds and calibration is in {folder / OWN_MODEL}")
    return folder / FILE


def found_out(worker: SiteWorker, model: SavedModel, progress: Progress = silent) -> tuple[Worth, Choice | None]:
    """All that the page says; and the site's own thresholds and calibration, for all classes of the model."""
    data, task, division = worker.data, worker.learner.task, divided(worker)
    columns = np.flatnonzero(data.annotated)
    classes, held_out = tuple(np.array(task.classes)[columns].tolist()), data.held_out.only(columns)
    targets = held_out.labels[division.test]
    experiment = task.experiment
    study = f"{experiment.method.name}, {experiment.training.rounds} rounds, {task.clients} clients"
    groups = None if held_out.patients is None else held_out.patients[division.test]
    if not _enough(targets).any():
        return Worth(worker.site.name, study, classes, {}, targets, division.words), None
    worker.learner.load(model.weights)
    raw = worker.learner.predict(data.held_out, 0, len(data.held_out)).numpy().astype(np.float64)
    usual = _usual(model)
    own = _own(raw, data.held_out.labels, division.tuning, usual)
    told = {
        COMMON: Told(raw, usual.thresholds) if model.calibration is None else _told(raw, usual),
        COMMON_OWN: _told(raw, own),
    }
    told = {name: Told(one.probabilities[:, columns], one.thresholds[columns]) for name, one in told.items()}
    notes = [_own_words(held_out.labels[division.tuning], classes)]
    if not worker.site.validates:
        alone, note = _alone(worker, held_out.labels, division, progress)
        told, notes = alone | told, [note, *notes]
    told = {name: Told(one.probabilities[division.test], one.thresholds) for name, one in told.items()}
    beside = Beside(told, targets, task.seed, groups)
    notes = [note for note in notes if note]
    return Worth(worker.site.name, study, classes, told, targets, division.words, notes, task.seed, groups, beside), own


def _usual(model: SavedModel) -> Choice:
    """As the model's file has it, where it has something."""
    count = len(model.classes)
    cut = np.full(count, cuts.USUAL) if model.tuned_thresholds is None else model.tuned_thresholds
    by = np.tile([1.0, 0.0], (count, 1)) if model.calibration is None else model.calibration
    return Choice("f1", cut, cut, by)


def _own(raw: Scores, labels: NDArray[np.int8], tuning: Rows, usual: Choice) -> Choice:
    """Chosen on these rows; a class with few of them keeps what it has."""
    chosen = choose(histograms(raw[tuning], labels[tuning]), "f1", "platt")
    return chosen.where(_enough(labels[tuning]), usual)


def _told(raw: Scores, choice: Choice) -> Told:
    assert choice.by is not None
    return Told(recalibrated(raw, choice.by), choice.thresholds)


def _alone(
    worker: SiteWorker, labels: NDArray[np.int8], division: Division, progress: Progress
) -> tuple[dict[str, Told], str]:
    """What the own model says of all held-out rows, and a note on how it was made, or why there is none."""
    training = worker.learner.task.experiment.training
    try:
        scores, instead = trained_alone(worker, division.tuning, progress)
    except FedmllError as error:
        return {}, f"There is no model of your own to compare with; it could not be trained: {error}"
    raw = scores.astype(np.float64)
    cut = np.full(raw.shape[1], cuts.USUAL)
    usual = Choice("f1", cut, cut, np.tile([1.0, 0.0], (raw.shape[1], 1)))
    words = (
        f"Your own model was trained here on your images alone, with the same experiment: {training.rounds} rounds of "
        f"{training.local_epochs} × over them, the same network, seed and settings; it knows the classes that you "
        "annotate."
    )
    if instead is not None:
        words += f" {instead}."
    return {ALONE: Told(raw, cut), ALONE_OWN: _told(raw, _own(raw, labels, division.tuning, usual))}, words


def _own_words(labels: NDArray[np.int8], classes: tuple[str, ...]) -> str:
    few = [name for name, enough in zip(classes, _enough(labels), strict=True) if not enough]
    said = "Own thresholds have the highest F1, and own calibration is Platt's, of each class."
    return f"{said} Too few images to choose them, so left as they are: {', '.join(few)}." if few else said


def _enough(labels: NDArray[np.int8]) -> NDArray[np.bool_]:
    return np.minimum((labels == 1).sum(axis=0), (labels == 0).sum(axis=0)) >= FEW


def report_at_the_end(worker: SiteWorker, show: Callable[[str], None], progress: Progress = silent) -> None:
    """After the run. Whatever keeps it from being written does not touch the model, which is there."""
    model = load_model((worker.site.out or worker.site.memory) / MODEL)
    if not len(worker.data.held_out):
        show("no report: none of your images is held out, so nothing is known of the model here")
        return
    show("a report for your site is being made; Ctrl-C leaves it out (--no-report), the model is there already")
    try:
        write_site_report(worker, model, show, progress)
    except KeyboardInterrupt:
        show("no report: it was stopped; the model is there")
