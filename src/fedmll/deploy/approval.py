"""A site decides what it takes part in: limits of its own, and a person's approval of every experiment, which is shown,
asked for once and remembered by its digest."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmll import files
from fedmll.deploy.audit import Audit
from fedmll.deploy.estimate import GIGABYTE
from fedmll.deploy.own_folder import set_aside
from fedmll.deploy.sentences import Refused, plain
from fedmll.errors import ConfigError
from fedmll.experiment import Experiment
from fedmll.methods import make
from fedmll.methods.contract import Part
from fedmll.task import Task

FILE = "approved.json"
MOST_APPROVED = 100  # that are remembered: the latest
SMALL_BATCH, LARGE_SHARE = 8, 0.5  # beyond these a person is told that it is unusual


@dataclass(frozen=True)
class Limits:
    """What a site does not do, whatever a server asks for."""

    max_rounds: int = 1000
    min_images: int = 10  # to train on: what is learnt from few images says much of each
    max_memory: float = 4.0  # GB, of the model and a batch
    methods: tuple[str, ...] = ()  # the only ones; empty: all
    min_count: int = 10  # positives, and negatives, of a class: counts of fewer stay at the site

    def __post_init__(self) -> None:
        if min(self.max_rounds, self.min_images, self.min_count) < 1 or not self.max_memory > 0:
            raise ConfigError(
                "--max-rounds, --min-images and --min-count are 1 or more, and --max-memory is more than 0 GB."
            )

    def check_settings(self, experiment: Experiment) -> None:
        name, rounds = experiment.method.name, experiment.training.rounds
        if self.methods and name not in self.methods:
            raise Refused("limits", f"The method is '{name}', and you allow {', '.join(self.methods)} (--methods).")
        if rounds > self.max_rounds:
            raise Refused("limits", f"There are {rounds} rounds, and you allow {self.max_rounds} (--max-rounds).")

    def check_images(self, training: int) -> None:
        if training < self.min_images:
            raise Refused(
                "limits",
                f"{training} images would be left to train on (the others are held out for tests), and you want at "
                f"least {self.min_images} (--min-images).",
            )


def digest_of(asked: dict[str, Any]) -> str:
    """Of everything that the server asks for, but the name of its run."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def described(task: Task, training: int, held_out: int, memory: float) -> list[tuple[str, str]]:
    """What a person approves: the settings that say how much is learnt of the images, and what leaves."""
    experiment = task.experiment
    batch, epochs = experiment.training.batch_size, experiment.training.local_epochs
    method = make(task)
    more = [part.name for part in method.list if part is not method.mean and _replies(part)]
    unusual = " (unusually many)" if training and held_out > LARGE_SHARE * (training + held_out) else ""
    return [
        ("method", experiment.method.name),
        (
            "rounds",
            f"{experiment.training.rounds}, each {epochs} × over {'your images' if training else 'others’ images'}",
        ),
        ("batch", f"{batch}{' (unusually small)' if batch < SMALL_BATCH else ''}"),
        ("your images", f"{training} to train on, {held_out} held out for tests{unusual}"),
        ("image size", " × ".join(map(str, task.sample_shape))),
        ("model", f"{experiment.model.backbone}; with a batch about {memory / GIGABYTE:.2g} GB of memory"),
        ("clients", str(task.clients)),
        (
            "leaves once",
            "your name, numbers of images, the names of the classes you annotate and how many training images have "
            "each, do not, or are not known to (none of fewer than --min-count), a digest of the data, a few numbers "
            "of what is frozen in the model",
        ),
        (
            "leaves a round",
            "the trained weights, loss, number of images and steps" + _listed("; of the parts: ", more)
            if training
            else "nothing: you only validate",
        ),
        (
            "leaves a test",
            "metrics of the common model on your held-out images, and for each class how many of them have which score"
            if held_out
            else "nothing",
        ),
    ]


def approve(
    memory: Path, asked: dict[str, Any], rows: list[tuple[str, str]], show: Callable[[str], None],
    confirm: Callable[[], bool],
) -> None:  # fmt: skip
    """Show it and ask, unless it was approved before. Refused: nobody approved."""
    digest = digest_of(asked)
    approved = _read(memory / FILE, show)
    if digest in approved:
        return
    show("The server asks for this experiment:")
    for name, value in rows:
        show(f"  {name:<15} {plain(value, 300)}")
    show(f"  {'digest':<15} {digest[:16]}")
    if not confirm():
        raise Refused("approval", "The experiment was not approved. Nothing was sent but this refusal.")
    approved[digest] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    approved = dict(list(approved.items())[-MOST_APPROVED:])
    files.write(memory / FILE, json.dumps(approved, indent=2) + "\n")
    Audit(memory).write("approved", digest=digest, asked=confirm is at_terminal)


def at_terminal() -> bool:
    """A person's word. Where nobody sits, there is none."""
    if not sys.stdin.isatty():
        print("Nobody can be asked here: join once at a terminal, or say --yes to approve what was shown.", flush=True)
        return False
    return input("Take part? [y/N] ").strip().lower() in ("y", "yes")


def beforehand() -> bool:
    """With --yes, and where the sites are one's own (a simulation)."""
    return True


def _read(path: Path, show: Callable[[str], None]) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError):
        show(f"{path} cannot be read; it is set aside as {set_aside(path).name}, and you are asked again.")
        return {}


def _replies(part: Part) -> bool:
    return bool(part.returns) or type(part).expects is not Part.expects


def _listed(before: str, names: list[str]) -> str:
    return before + ", ".join(names) if names else ""
