"""A site at work: it holds its data, a model and its memory, and does what the server asks. It knows no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from fedmll import files
from fedmll.client import Client
from fedmll.data.dataset import Dataset
from fedmll.data.digest import digest_of
from fedmll.data.images.cache import images_in, silent
from fedmll.deploy import approval, handing, label_counts, own_folder, site
from fedmll.deploy.approval import Limits
from fedmll.deploy.estimate import GIGABYTE, bytes_needed
from fedmll.deploy.sentences import Refused
from fedmll.deploy.site import Site
from fedmll.deploy.telling import with_own_files
from fedmll.engines.learner import Learner, with_tokens
from fedmll.engines.local import choose_device
from fedmll.engines.memory import MemoryStore
from fedmll.evaluation import metrics
from fedmll.evaluation.histograms import few, histograms
from fedmll.evaluation.pooled import VALIDATED
from fedmll.experiment import Experiment
from fedmll.message import Message, Tensors
from fedmll.models.flat import frozen_sketch
from fedmll.running.model import SavedModel
from fedmll.task import Task

SMALLEST_GROUP = 5  # images that a class's mean or sum must be of before it leaves the site
COUNTS, FOR_THRESHOLDS = "counts", "validation-counts"  # the histograms' names in a reply
ME = 0  # a site's memory store has one client
MOST_ESTIMATES = 64  # that are kept: a server may say something else every time
_estimates: dict[tuple[Any, ...], float] = {}  # found once in a process: setup, site, images, limit → bytes


@dataclass(frozen=True)
class Setup:
    """What the server tells every site with every message: it may have been started anew meanwhile."""

    run: str  # of its own folder: another run must not find this one's memory
    experiment: dict[str, Any]
    classes: tuple[str, ...] | None  # None: label sets are private, a site knows its own classes only
    shape: tuple[int, ...]
    clients: int

    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: str) -> Setup:
        """Refused: it is none."""
        try:
            values = json.loads(text)
            classes = values["classes"]
            found = cls(
                **values | {"classes": None if classes is None else tuple(classes), "shape": tuple(values["shape"])}
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise Refused("message", f"What the server says of its experiment cannot be read ({error}).") from None
        names, sides = found.classes or (), found.shape
        if not all(isinstance(name, str) for name in names) or not isinstance(found.clients, int):
            raise Refused("message", "What the server says of its classes and clients cannot be read.")
        if len(sides) != 3 or not all(type(side) is int and side > 0 for side in sides):
            raise Refused("message", "What the server says of the images' size cannot be read.")
        return found


class SiteWorker:
    """Approved before anything large is read or built."""

    def __init__(self, where: Site, setup: Setup, show: Callable[[str], None] = print) -> None:
        self.site, self.run, self.show = where, setup.run, show
        self.told = False  # which classes' histograms stay here: it is said once
        self.folder = own_folder.folder_of_run(where.memory, setup.run)
        own_folder.make_private(where.memory)
        own_folder.make_room(where.memory, setup.run)
        experiment = Experiment.make(with_own_files(setup.experiment, where.files) | {"data": {"name": "none"}})
        device, share = choose_device(where.device), float(experiment.partition.holdout)
        torch.set_num_threads(1)  # as the local engine's workers: sums over several threads have other last bits
        classes = site.own_classes(where) if setup.classes is None else setup.classes
        task = Task(experiment, classes, setup.shape, setup.clients, device, smallest_group=SMALLEST_GROUP)
        self._agree(setup, task, share, show)
        with own_folder.private(), images_in(where.memory / own_folder.CACHE):
            self.data = site.load(where, setup.classes, setup.shape, experiment.seed, share)
            if not where.validates:
                where.limits.check_images(len(self.data.train))  # without what had to be left out
            self.learner = Learner(replace(task, classes=self.data.train.classes))
            parts = {"train": self.data.train, "held_out": self.data.held_out}
            self.digest = digest_of({"training": self.data.train, "held-out": self.data.held_out}, every_image=True)
            self.data = replace(self.data, **with_tokens(task, self.learner.model, parts, silent))
        self.memory = MemoryStore(self.folder)

    def _agree(self, setup: Setup, task: Task, share: float, show: Callable[[str], None]) -> None:
        """Whether the site takes part: its limits, then a person."""
        where, limits = self.site, self.site.limits
        limits.check_settings(task.experiment)
        self._name_classes(setup.classes)
        training, held_out = site.sizes(where, task.seed, share)
        if not where.validates:
            limits.check_images(training)
        key = (setup.to_json(), self.site.name, training, held_out, limits.max_memory)
        if key not in _estimates:
            if len(_estimates) >= MOST_ESTIMATES:
                _estimates.clear()
            _estimates[key] = bytes_needed(task, training or held_out, limits.max_memory * GIGABYTE)
        asked = {name: value for name, value in setup.__dict__.items() if name != "run"}
        rows = approval.described(task, training, held_out, _estimates[key])
        confirm = approval.at_terminal if where.asks else approval.beforehand
        with own_folder.private():
            approval.approve(where.memory, asked, rows, show, confirm)

    def _name_classes(self, classes: Sequence[str] | None) -> None:
        """The study's beside the site's own, before a person is asked. Private label sets are compared with nothing."""
        table = site.labels_of(self.site)
        if classes is not None:
            site.refuse_strangers(self.site, table.classes, classes)
            lacking = [name for name in classes if name not in table.classes]
            if lacking and not (table.listed and not self.site.classes):  # what a list does not name is absent
                self.show(f"not annotated here, so unknown: {', '.join(lacking)}")

    def introduce(self) -> dict[str, Any]:
        """What the server learns of the site, and nobody else."""
        return {
            "name": self.site.name,
            "samples": len(self.data.train),
            "held_out": len(self.data.held_out),
            "validation": int(self.data.validation.sum()),
            "min_count": self.site.limits.min_count,
            "labels": label_counts.of_site(self.data.train, self.data.annotated, self.site.limits.min_count),
            "classes": np.array(self.learner.task.classes)[self.data.annotated].tolist(),
            "digest": self.digest,
            "frozen": frozen_sketch(self.learner.model),
        }

    def train(self, message: Message, round: int, base: int | None, keep: Sequence[int] | None) -> tuple[Message, bool]:
        """One round, from the memory after round `base`; the reply, and whether there is a memory now. Memories that no
        checkpoint of the server needs (`keep`; None: it does not know) are deleted."""
        if self.site.validates:
            raise Refused("validates", "The server asks this site to train, and it only validates.")
        owned = torch.from_numpy(self.data.annotated)
        learner = self.learner
        client = Client(
            learner.method.task, self.site.name, round, self.data.train, owned, owned, learner.model, learner.weights
        )
        old = None if base is None else self.memory.path(ME, base)
        if old is not None and not old.exists():
            raise Refused(
                "memory",
                f"The memory of round {base}, which the run goes on from, is not in {self.folder}. Put the folder of "
                "--memory back, or the server's operator must start a new run.",
            )
        if keep is not None:
            self.memory.keep_only({(ME, kept) for kept in (*keep, *(() if base is None else (base,)))})
        memory = self._remembered(old)
        reply = learner.train(client, message, memory)
        with own_folder.private():
            self.memory.write(self.memory.path(ME, round), memory)
        return reply, bool(memory)

    def _remembered(self, path: Path | None) -> Tensors:
        try:
            return self.memory.read(path)
        except (SafetensorError, OSError) as error:
            assert path is not None
            raise Refused(
                "memory",
                f"The memory {path} cannot be read ({error}). It is set aside as {own_folder.set_aside(path).name}; "
                f"nothing was deleted. If you have a copy, put it back as {path.name} and take part again from the "
                "next round; otherwise the server's operator must start a new run.",
            ) from None

    def evaluate(self, message: Message) -> Message:
        """The global model on the site's own held-out data: every metric, and for each class the histograms that
        metrics of all sites' data together follow from; where it has validation and test rows, those of the validation
        rows apart, for thresholds. Those of few images stay here, and are named."""
        self.learner.receive(message)
        data, apart = self.data.held_out, self.data.validation
        scores = self.learner.predict(data, 0, len(data)).numpy()
        values = metrics.evaluate(scores[~apart], data.labels[~apart], data.classes).values
        tensors = {COUNTS: self._counts("tests", scores[~apart], data.subset(np.flatnonzero(~apart)))}
        if apart.any():
            found = metrics.evaluate(scores[apart], data.labels[apart], data.classes).values
            values |= {f"val_{name}": found[name] for name in VALIDATED}
            tensors[FOR_THRESHOLDS] = self._counts("thresholds", scores[apart], data.subset(np.flatnonzero(apart)))
        self.told = True
        return Message(tensors, values)

    def _counts(self, purpose: str, scores: NDArray[np.float32], data: Dataset) -> Tensor:
        counts, smallest = histograms(scores, data.labels), self.site.limits.min_count
        kept = few(counts, smallest)
        names = ", ".join(name for name, keep in zip(data.classes, kept, strict=True) if keep)
        if names and not self.told:
            self.show(f"{purpose}: no counts leave of {names}: fewer than {smallest} images with, or without, them")
        counts[:, kept] = 0
        return torch.from_numpy(counts.astype(np.int32))

    def take(self, message: Message, digest: object) -> SavedModel:
        """The common model, when the run is over."""
        folder = self.site.out or self.site.memory
        with own_folder.private():
            return handing.taken(message, digest, self.learner, self.data.window, folder)


def forget(where: Site, run: str) -> None:
    """The run is over."""
    MemoryStore(own_folder.folder_of_run(where.memory, run)).keep_only(set())
    if not where.keep_cache:
        own_folder.clear_cache(where.memory)


def remember_site(where: Site, path: Path) -> None:
    """Write a site down, for who takes it from a file (Flower's own runtimes)."""
    files.write(path, json.dumps(asdict(where), default=str))


def recall_site(path: Path) -> Site:
    values = json.loads(path.read_text())
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    values |= {name: Path(values[name]) for name in ("csv", "images", "memory")}
    values["out"] = None if values.get("out") is None else Path(values["out"])
    values["files"] = tuple(map(Path, values.get("files", ())))
    values["rename"] = tuple((own, theirs) for own, theirs in values.get("rename", ()))
    limits = values.get("limits", {})
    values["limits"] = Limits(**limits | {"methods": tuple(limits.get("methods", ()))})
    return Site(**values)
