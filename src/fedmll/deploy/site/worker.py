"""A site at work. It has its data, a model and client state, and does what the server asks. It needs no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmll.config.experiment import Experiment
from fedmll.core import files, small_groups
from fedmll.core.message import Message, Tensors
from fedmll.core.small_groups import MIN_GROUP_SIZE
from fedmll.core.tensor_files import DamagedFile
from fedmll.core.text import confirm_always, confirm_at_terminal, printable
from fedmll.data.dataset import UNKNOWN, Dataset
from fedmll.data.fingerprint import compute_digest
from fedmll.data.images.cache import image_cache_in, no_progress
from fedmll.deploy import label_counts, model_delivery
from fedmll.deploy.error_codes import SiteError, SiteErrorCode
from fedmll.deploy.experiment_for_sites import StudySetup
from fedmll.deploy.file_references import resolve_files
from fedmll.deploy.site import approval, released_counts, site_data, site_folder
from fedmll.deploy.site.memory_estimate import GIGABYTE, estimate_memory, find_feature_width
from fedmll.deploy.site.site_config import Site
from fedmll.engines.client_state import ClientStateStore
from fedmll.engines.client_trainer import Trainer, with_tokens
from fedmll.engines.devices import choose_device
from fedmll.evaluation import metrics
from fedmll.evaluation.histograms import score_histograms
from fedmll.evaluation.metric_definitions import ON_VALIDATION
from fedmll.inference.model_file import SavedModel
from fedmll.methods import build_method
from fedmll.methods.framework.allowed_replies import all_finite
from fedmll.methods.framework.client_round import Client
from fedmll.methods.framework.task import Task
from fedmll.methods.parts.ridge_head import HeadFromSums
from fedmll.models.flat_weights import sketch_frozen_tensors

TEST_HISTOGRAMS, VALIDATION_HISTOGRAMS = "counts", "validation-counts"  # names of the histograms in a reply
CLIENT_INDEX = 0  # the client state store of a site has one client
MAX_ESTIMATES = 64  # that are kept: a server may send another setup every time
_estimates: dict[tuple[Any, ...], float] = {}  # measured once per process: (what, setup, site, images, limit) → number


class SiteWorker:
    """A site that takes part in one study. The study is approved before anything large is read or built.

    Raises:
        SiteError: the site does not take part.
        DataError: the site's data cannot be used.
    """

    def __init__(self, site: Site, setup: StudySetup, show: Callable[[str], None] = print) -> None:
        if site.approved_digest is not None:
            approval.check_approved_digest(site.approved_digest, setup.digest)  # before anything is read
        self.site, self.run, self.show, self.study_digest = site, setup.run, show, setup.digest
        self._showed_withheld = False  # the classes whose counts and metrics stay here are shown once
        self.folder = site_folder.run_state_folder(site.state_dir, setup.run)
        site_folder.make_private_folder(site.state_dir)
        site_folder.limit_runs(site.state_dir, setup.run)
        experiment = Experiment.make(resolve_files(setup.experiment, site.local_files) | {"data": {"name": "none"}})
        device, holdout = choose_device(site.device), float(experiment.partition.holdout)
        torch.set_num_threads(1)  # as in the local engine's workers: sums over several threads have other last bits
        classes = site_data.find_annotated_classes(site) if setup.classes is None else setup.classes
        task = Task(experiment, classes, setup.shape, setup.clients, device, min_group_size=MIN_GROUP_SIZE)
        self._check_participation(setup, task, holdout)
        with site_folder.private_files(), image_cache_in(site.state_dir / site_folder.CACHE):
            self.data = site_data.load_site_data(site, setup.classes, setup.shape, experiment.seed, holdout)
            if not site.validation_only:
                self._check_image_count(len(self.data.train))  # unreadable images may have been skipped
            self.trainer = Trainer(replace(task, classes=self.data.train.classes))
            parts = {"train": self.data.train, "held_out": self.data.held_out}
            self.digest = compute_digest(
                {"training": self.data.train, "held-out": self.data.held_out}, every_image=True
            )
            self.data = replace(self.data, **with_tokens(task, self.trainer.model, parts, no_progress))
        self.client_state = ClientStateStore(self.folder)

    def _check_participation(self, setup: StudySetup, task: Task, holdout: float) -> None:
        """Check the site's limits, then ask for approval."""
        site, limits = self.site, self.site.limits
        limits.check_settings(task.experiment)
        self._check_classes(setup.classes)
        training, held_out = site_data.count_images(site, task.seed, holdout)
        if not site.validation_only:
            self._check_image_count(training)
        limit = limits.max_memory * GIGABYTE
        key = (setup.to_json(), site.name, training, held_out, limits.max_memory)
        memory = _estimated(("memory", *key), lambda: estimate_memory(task, training or held_out, limit))
        rows = approval.describe_study(task, training, held_out, memory)
        if training and any(isinstance(part, HeadFromSums) for part in build_method(task).active_parts):
            width = _estimated(("width", *key), lambda: find_feature_width(task, limit))
            risk = small_groups.describe_membership_risk(training, int(width))
            rows += [("membership", risk)] if risk else []
        asks = site.needs_approval and site.approved_digest is None
        confirm = confirm_at_terminal if asks else confirm_always
        with site_folder.private_files():
            released_counts.warn_about_other_studies(site.state_dir, setup.digest, self.show)
            approval.request_approval(site.state_dir, setup.digest, rows, self.show, confirm)

    def _check_image_count(self, training: int) -> None:
        """Raise a SiteError below the site's own limit, or if all training images together are a small group."""
        self.site.limits.check_image_count(training)
        if training < MIN_GROUP_SIZE:
            raise SiteError(
                SiteErrorCode.LIMITS,
                f"{training} images would be left to train on, and sums or means of fewer than {MIN_GROUP_SIZE} images "
                "do not leave a site. Take part with more images, or validate only.",
            )

    def _check_classes(self, classes: Sequence[str] | None) -> None:
        """Compare the study's classes with the site's before a person is asked. Private label sets are not compared."""
        if classes is None:
            return
        table = site_data.read_site_labels(self.site)
        site_data.check_known_classes(self.site, table.classes, classes)
        missing = [name for name in classes if name not in table.classes]
        absent_if_not_listed = table.is_list_form and not self.site.reading.classes
        if missing and not absent_if_not_listed:
            self.show(f"not annotated here, so unknown: {', '.join(missing)}")

    def introduce(self) -> dict[str, Any]:
        """What the site tells the server, and nobody else, about itself."""
        classes = np.array(self.trainer.task.classes)[self.data.annotated].tolist()
        return {
            "name": self.site.name,
            "samples": len(self.data.train),
            "held_out": len(self.data.held_out),
            "validation": int(self.data.is_validation.sum()),
            "min_count": self.site.limits.min_count,
            "labels": self._label_counts(classes),
            "classes": classes,
            "digest": self.digest,
            "frozen": sketch_frozen_tensors(self.trainer.model),
        }

    def _label_counts(self, classes: Sequence[str]) -> label_counts.LabelCounts:
        def count() -> label_counts.LabelCounts:
            return label_counts.count_labels(self.data.train, self.data.annotated, self.site.limits.min_count)

        if self.site.validation_only:
            return count()  # there are no training images
        with site_folder.private_files():
            return released_counts.release_counts(
                self.site.state_dir,
                study=self.study_digest,
                run=self.run,
                data=self.digest,
                classes=classes,
                count=count,
                show=self.show,
            )

    def _check_message(self, message: Message) -> None:
        """Raise a SiteError if a tensor does not belong to the study's method, has a wrong shape, or is not finite.

        A tensor with fewer values than the model would be repeated when it is copied into it.
        """
        own = {"weights": self.trainer.weights.vector, "counters": self.trainer.weights.counters}
        parts = {part.name for part in self.trainer.method.active_parts}
        for name, tensor in message.tensors.items():
            shown = printable(name, 100)
            if name in own:
                wrong = tensor.shape != own[name].shape or tensor.dtype != own[name].dtype
                problem = f"{shown} does not fit the model" if wrong else None
            else:
                known = "/" in name and name.partition("/")[0] in parts
                problem = None if known else f"{shown} belongs to no part of the method"
            if problem is None and not all_finite(tensor):
                problem = f"{shown} has values that are not finite"
            if problem is not None:
                raise SiteError(SiteErrorCode.MESSAGE, f"The server's message is rejected: {problem}.")

    def train(self, message: Message, round: int, base: int | None, keep: Sequence[int] | None) -> tuple[Message, bool]:
        """Train for one round.

        Args:
            message: what the server sends.
            round: the number of the round.
            base: the round whose client state to continue from; None: none.
            keep: rounds whose client states a checkpoint of the server needs; the others are deleted. None: the server
                does not know, and all are kept.

        Returns:
            The reply, and whether the site has client state now.
        """
        if self.site.validation_only:
            raise SiteError(SiteErrorCode.VALIDATES, "The server asks this site to train, but it only validates.")
        self._check_message(message)
        owned = torch.from_numpy(self.data.annotated)
        trainer = self.trainer
        client = Client(
            task=trainer.method.task,
            name=self.site.name,
            round=round,
            data=self.data.train,
            annotated=owned,
            owned=owned,
            model=trainer.model,
            weights=trainer.weights,
        )
        old = None if base is None else self.client_state.path(CLIENT_INDEX, base)
        if old is not None and not old.exists():
            raise SiteError(
                SiteErrorCode.STATE,
                f"The client state of round {base}, from which the run continues, is not in {self.folder}. Restore the "
                "folder of --state-dir, or the server's operator must start a new run.",
            )
        if keep is not None:
            rounds = (*keep, *(() if base is None else (base,)))
            self.client_state.keep_only({(CLIENT_INDEX, number) for number in rounds})
        state = self._read_client_state(old)
        reply = trainer.train(client, message, state)
        with site_folder.private_files():
            self.client_state.write(self.client_state.path(CLIENT_INDEX, round), state)
        return reply, bool(state)

    def _read_client_state(self, path: Path | None) -> Tensors:
        try:
            return self.client_state.read(path)
        except DamagedFile as error:
            assert path is not None
            renamed = files.move_damaged_file(path).name
            raise SiteError(
                SiteErrorCode.STATE,
                f"The client state cannot be read: {error} It was renamed to {renamed}; nothing was deleted. "
                f"If you have a copy, restore it as {path.name} and take part again from the next round. Otherwise the "
                "server's operator must start a new run.",
            ) from None

    def evaluate(self, message: Message) -> Message:
        """Test the global model on the site's held-out data.

        Returns:
            Every metric, and for each class the histograms of scores, from which the server computes the metrics of all
            sites together. If the site has validation and test rows, thresholds get histograms of their own, from the
            validation rows. Classes with few images are left out of metrics and histograms.
        """
        self._check_message(message)
        self.trainer.receive(message)
        data, validation = self.data.held_out, self.data.is_validation
        scores = self.trainer.predict(data, 0, len(data)).numpy()
        labels = self._releasable_labels("tests", data.subset(np.flatnonzero(~validation)))
        values = metrics.evaluate(scores[~validation], labels, data.classes).values
        tensors = {TEST_HISTOGRAMS: _histograms(scores[~validation], labels)}
        if validation.any():
            labels = self._releasable_labels("thresholds", data.subset(np.flatnonzero(validation)))
            on_validation = metrics.evaluate(scores[validation], labels, data.classes).values
            values |= {f"val_{name}": on_validation[name] for name in ON_VALIDATION}
            tensors[VALIDATION_HISTOGRAMS] = _histograms(scores[validation], labels)
        self._showed_withheld = True
        return Message(tensors, values)

    def _releasable_labels(self, purpose: str, data: Dataset) -> NDArray[np.int8]:
        """The labels (N, C) for counts and metrics that leave; classes with few images become unknown."""
        min_count = self.site.limits.min_count
        small = small_groups.find_small_classes(data.labels, min_count)
        names = ", ".join(name for name, is_small in zip(data.classes, small, strict=True) if is_small)
        if names and not self._showed_withheld:
            self.show(f"{purpose}: nothing leaves about {names}: fewer than {min_count} positive or negative images")
        return np.where(small, UNKNOWN, data.labels).astype(np.int8)

    def receive_model(self, message: Message, digest: object) -> SavedModel:
        """Write the final model of the run to the site's disk."""
        with site_folder.private_files():
            return model_delivery.receive_model(
                message, digest=digest, trainer=self.trainer, window=self.data.window, folder=self.site.output_dir
            )


def _histograms(scores: NDArray[np.float32], labels: NDArray[np.int8]) -> Tensor:
    return torch.from_numpy(score_histograms(scores, labels).astype(np.int32))


def _estimated(key: tuple[Any, ...], estimate: Callable[[], float]) -> float:
    if key not in _estimates:
        if len(_estimates) >= MAX_ESTIMATES:
            _estimates.clear()
        _estimates[key] = estimate()
    return _estimates[key]


def delete_client_state(site: Site, run: str) -> None:
    """When a run is over: delete its client state, and the prepared images unless they are kept."""
    ClientStateStore(site_folder.run_state_folder(site.state_dir, run)).keep_only(set())
    if not site.keep_cache:
        site_folder.clear_cache(site.state_dir)
