"""The local baseline: the federation's experiment with this site as the only client.

It has the same method, head, seed, rounds and epochs, and uses the site's own training data. It is the model that the
site could have trained without joining. Nothing of it leaves the site.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedmll.comparison.plan import parse_variant
from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.data.dataset import Dataset
from fedmll.data.federation import Federation
from fedmll.data.images.cache import Progress, image_cache_in
from fedmll.deploy.site import site_folder
from fedmll.deploy.site.worker import SiteWorker
from fedmll.runs.run_folder import MetricsRow, RunFolder
from fedmll.training import round_loop
from fedmll.training.callbacks import Callback

FALLBACK_METHOD = "fedavg-pl"  # with one client: training on the known labels, and nothing else


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

    Args:
        worker: the site after the run.
        validation: rows of the held-out data that select the best round, if the experiment keeps the best one.
        progress: called after every round.

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
