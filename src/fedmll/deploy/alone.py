"""A site's own model: the experiment of the federation with nobody else in it. The same method, head, seed, rounds and
epochs, on the site's own training data; it is what the site could have had without joining. Nothing of it leaves."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedmll.data.dataset import Dataset
from fedmll.data.federation import Federation
from fedmll.data.images.cache import Progress, images_in
from fedmll.deploy import own_folder
from fedmll.deploy.site_worker import SiteWorker
from fedmll.errors import ConfigError
from fedmll.experiment import Experiment
from fedmll.running import loop
from fedmll.running.folder import PREDICTIONS, Row
from fedmll.running.observers import Observer
from fedmll.running.predictions import read_predictions
from fedmll.running.variants import parse_variant

PLAIN = "fedavg-pl"  # of one client: its known labels, and nothing else


class _Rounds(Observer):
    def __init__(self, rounds: int, progress: Progress) -> None:
        self.rounds, self.progress = rounds, progress

    def preparing(self, done: int, total: int, what: str) -> None:
        self.progress(done, total, what)

    def round_done(self, row: Row) -> None:
        self.progress(row["round"], self.rounds, "training your own model")


def trained_alone(
    worker: SiteWorker, validation: NDArray[np.int64], progress: Progress
) -> tuple[NDArray[np.float32], str | None]:
    """What the own model says of the held-out data, (N, the classes that the site annotates); and, where the method
    cannot work with one client, what was trained instead. `validation`: the held-out rows that a round may be chosen
    by, where the experiment keeps the best one."""
    task, where = worker.learner.task, worker.site
    own = np.flatnonzero(worker.data.annotated)
    train, held_out = worker.data.train.only(own), worker.data.held_out.only(own)
    experiment = task.experiment.changed(
        {
            "engine.workers": 0,
            "engine.device": where.device,
            "participation.fraction": 1.0,
            "participation.count": None,
        }
        | ({} if task.experiment.training.keep == "best" else {"engine.evaluate_every": max(1, task.rounds)})
    )
    data = _of_one(experiment, where.name, train, held_out, validation)
    threads = torch.get_num_threads()
    cache = images_in(where.memory / own_folder.CACHE)
    with own_folder.private(), cache, tempfile.TemporaryDirectory(dir=where.memory) as folder:
        try:
            return _predicted(data, Path(folder) / "run", progress), None
        except ConfigError as error:
            plain = data.of(experiment.changed(parse_variant(PLAIN).overrides))
            words = f"'{experiment.method.name}' does not work with one client ({error}), so it is '{PLAIN}' here"
            return _predicted(plain, Path(folder) / "plain", progress), words
        finally:
            torch.set_num_threads(threads)


def _predicted(data: Federation, out: Path, progress: Progress) -> NDArray[np.float32]:
    rounds = data.experiment.training.rounds
    loop.run(data.experiment, out, observer=_Rounds(rounds, progress), prepared=data)
    return read_predictions(out / PREDICTIONS, "test").probabilities


def _of_one(
    experiment: Experiment, name: str, train: Dataset, held_out: Dataset, validation: NDArray[np.int64]
) -> Federation:
    everything = np.ones((1, len(train.classes)), bool)
    return Federation(
        experiment,
        train=train,
        truth=train.labels,
        test=held_out,
        validation=held_out.subset(validation),
        held_out=held_out.subset(validation[:0]),
        held_out_owner=np.zeros(0, np.int64),
        names=(name,),
        samples=(np.arange(len(train)),),
        annotated=everything,
        allowed=everything,
        report={},
        server=None,
        source=train,
        pooled_rows=np.arange(len(train)),
        decided={},
    )
