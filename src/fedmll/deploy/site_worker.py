"""A site at work: it holds its data, a model and its memory, and does what the server asks. It knows no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmll import files
from fedmll.client import Client, Task
from fedmll.data.digest import digest_of
from fedmll.data.images.cache import silent
from fedmll.deploy import site
from fedmll.deploy.site import Site
from fedmll.engines.learner import Learner, with_tokens
from fedmll.engines.local import choose_device
from fedmll.engines.memory import MemoryStore
from fedmll.errors import ClientError, ConfigError
from fedmll.evaluation import metrics
from fedmll.experiment import Experiment
from fedmll.message import Message
from fedmll.models.flat import frozen_sketch
from fedmll.models.weights import locate

SMALLEST_GROUP = 5  # images that a class's mean or sum must be of before it leaves the site
ME = 0  # a site's memory store has one client


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
        values = json.loads(text)
        classes = values.pop("classes")
        return cls(**values | {"classes": None if classes is None else tuple(classes), "shape": tuple(values["shape"])})


class SiteWorker:
    def __init__(self, where: Site, setup: Setup) -> None:
        experiment = Experiment.make(setup.experiment | {"plugins": ()})  # a site imports what its own user says
        if not setup.run.isalnum():
            raise ConfigError(f"The server calls its run '{setup.run}', which is no name for a folder.")
        weights = experiment.model.weights
        if weights is not None:
            try:
                locate(weights)
            except ConfigError as error:
                raise ConfigError(
                    f"This site does not have the weights that the experiment starts from. {error}"
                ) from None
        self.site, device = where, choose_device(where.device)
        torch.set_num_threads(1)  # as the local engine's workers: sums over several threads have other last bits
        share = float(experiment.partition.holdout)
        self.data = site.load(where, setup.classes, setup.shape, experiment.seed, share)
        classes = self.data.train.classes
        task = Task(experiment, classes, setup.shape, setup.clients, device, smallest_group=SMALLEST_GROUP)
        self.learner = Learner(task)
        self.digest = digest_of({"training": self.data.train, "held-out": self.data.held_out})
        parts = {"train": self.data.train, "held_out": self.data.held_out}
        self.data = replace(self.data, **with_tokens(task, self.learner.model.backbone, parts, silent))
        self.folder = where.memory / setup.run
        self.memory = MemoryStore(self.folder)

    def introduce(self) -> dict[str, Any]:
        """What the server learns of the site, and nobody else."""
        return {
            "name": self.site.name,
            "samples": len(self.data.train),
            "held_out": len(self.data.held_out),
            "classes": np.array(self.learner.task.classes)[self.data.annotated].tolist(),
            "digest": self.digest,
            "frozen": frozen_sketch(self.learner.model),
        }

    def train(self, message: Message, round: int, base: int | None, keep: Sequence[int] | None) -> tuple[Message, bool]:
        """One round, from the memory after round `base`; the reply, and whether there is a memory now. Memories that no
        checkpoint of the server needs (`keep`; None: it does not know) are deleted."""
        owned = torch.from_numpy(self.data.annotated)
        learner = self.learner
        client = Client(
            learner.method.task, self.site.name, round, self.data.train, owned, owned, learner.model, learner.weights
        )
        old = None if base is None else self.memory.path(ME, base)
        if old is not None and not old.exists():
            raise ClientError(
                f"{self.site.name} has lost its memory of round {base}, which the run goes on from. It can put the "
                "folder of --memory back, or a new run must be started."
            )
        if keep is not None:
            self.memory.keep_only({(ME, kept) for kept in (*keep, *(() if base is None else (base,)))})
        memory = self.memory.read(old)
        reply = learner.train(client, message, memory)
        self.memory.write(self.memory.path(ME, round), memory)
        return reply, bool(memory)

    def evaluate(self, message: Message) -> dict[str, float]:
        """Every metric of the global model on the site's own held-out data."""
        self.learner.receive(message)
        data = self.data.held_out
        scores = self.learner.predict(data, 0, len(data)).numpy()
        return metrics.evaluate(scores, data.labels, data.classes).values

    def forget(self) -> None:
        """The run is over."""
        self.memory.keep_only(set())


def remember_site(where: Site, path: Path) -> None:
    """Write a site down, for who takes it from a file (Flower's own runtimes)."""
    values = {name: str(value) if isinstance(value, Path) else value for name, value in where.__dict__.items()}
    files.write(path, json.dumps(values))


def recall_site(path: Path) -> Site:
    values = json.loads(path.read_text())
    paths = {name: Path(values[name]) for name in ("csv", "images", "memory")}
    lists: dict[str, Any] = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Site(**values | paths | lists)
