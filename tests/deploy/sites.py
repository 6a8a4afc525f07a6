"""A consortium of three for the tests: scikit-learn's digits as PNG files and CSVs. Site c misses three classes.

`python sites.py fedmll …` is the command line with the test methods below known to it, for servers and clients that are
processes of their own."""

from __future__ import annotations

import csv
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from sklearn.datasets import load_digits

from fedmll.client import Step, Work
from fedmll.data import federation
from fedmll.deploy import keys
from fedmll.engines.local import LocalEngine
from fedmll.experiment import Experiment
from fedmll.message import Message, Tensors
from fedmll.methods.contract import Like, Part, Sum, option
from fedmll.methods.method import Method
from fedmll.methods.parts.basic import Mean

CLASSES = [f"digit-{number}" for number in range(10)]
NAMES = ("site-a", "site-b", "site-c")
SIZES = {"site-a": 90, "site-b": 70, "site-c": 50, "test": 120}
NOT_ANNOTATED = {"site-c": (2, 5, 7)}
SETTINGS: dict[str, Any] = {
    "seed": 3,
    "partition": {"kind": "natural", "holdout": 0.0},
    "model": {"channels": [4, 8]},
    "training": {"rounds": 2, "batch_size": 16, "lr": 0.005},
    "engine": {"workers": 0},
}


@dataclass(frozen=True)
class Consortium:
    """FOLDER/site-a/labels.csv, …, FOLDER/test/labels.csv, FOLDER/all.csv, FOLDER/images, FOLDER/keys."""

    folder: Path

    def experiment(self, source: str, **changes: Any) -> Experiment:
        values = SETTINGS | {"data": {"name": source, "root": str(self.folder / "images")}}
        return Experiment.make(values).changed({key.replace("__", "."): value for key, value in changes.items()})

    def local(self, **changes: Any) -> Experiment:
        """The same federation on one machine: one CSV with a column that says whose an image is."""
        return self.experiment(f"folder:{self.folder / 'all.csv'}", **changes)

    def server(self, **changes: Any) -> Experiment:
        return self.experiment(f"folder:{self.folder / 'test' / 'labels.csv'}", **changes)

    @property
    def keys(self) -> Path:
        return self.folder / "keys"


def write_consortium(folder: Path, with_keys: bool = True) -> Consortium:
    digits = load_digits()
    (folder / "images").mkdir(parents=True)
    every, start = [], 0
    for name, count in SIZES.items():
        rows = []
        for place in range(start, start + count):
            image = f"{place:05d}.png"
            Image.fromarray((digits.images[place] * 15.9).astype("uint8")).save(folder / "images" / image)
            cells = ["1" if digits.target[place] == number else "0" for number in range(10)]
            for number in NOT_ANNOTATED.get(name, ()):
                cells[number] = ""
            rows.append([image, *cells])
        start += count
        hidden = NOT_ANNOTATED.get(name, ())
        kept = [0, *(number + 1 for number in range(10) if number not in hidden)]  # the column is not even there
        write_csv(folder / name / "labels.csv", [[row[k] for k in kept] for row in [["image", *CLASSES], *rows]])
        every += [[*row, *(("test", "") if name == "test" else ("train", name))] for row in rows]
    write_csv(folder / "all.csv", [["image", *CLASSES, "split", "client"], *every])
    if with_keys:
        keys.init(folder / "keys", [])
        for name in (*NAMES, "stranger"):
            keys.new_node(folder / "keys", name)
            known = [label for number, label in enumerate(CLASSES) if number not in NOT_ANNOTATED.get(name, ())]
            (folder / "keys" / f"{name}.labels").write_text("\n".join(known) + "\n")
    return Consortium(folder)


def write_csv(path: Path, rows: list[list[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def replayed(consortium: Consortium, folder: Path, takes_part: Callable[[str, int], bool], **changes: Any) -> Tensors:
    """The rounds one after the other on one machine, with whoever takes part: nothing of the server's is used."""
    data = federation.build(consortium.local(**changes))
    engine = LocalEngine(data, folder / "replayed")
    method, state = engine.learner.method, engine.start()
    memories: dict[int, Tensors] = {peer.index: {} for peer in engine.peers}
    for number in range(1, data.experiment.training.rounds + 1):
        merger = method.merger(state, number)
        here = [peer for peer in engine.peers if takes_part(peer.name, number)]
        for peer in sorted(here, key=lambda peer: -data.sizes[peer.index]):
            client = engine.learner.client(data, peer, number)
            merger.add(peer, engine.learner.train(client, method.send(state, peer, number), memories[peer.index]))
        state, _ = merger.result()
    engine.close()
    return engine.learner.named(method.deploy(state))


class DriftingMean(Mean):
    """Has a client memory that matters for the weights; takes its time, so that something can happen in a round."""

    name: ClassVar[str] = "test-drifting-slowly-mean"

    class Options(Mean.Options):
        seconds: float = option(0.0, "how long it takes")

    def finish(self, work: Work, mine: None) -> Tensors:
        time.sleep(self.options.seconds)
        reply, memory = super().finish(work, mine), work.memory(self.name)
        memory["drift"] = 0.5 * memory.get("drift", torch.zeros_like(reply["weights"])) + reply["weights"]
        return reply | {"weights": 0.5 * reply["weights"] + 0.25 * memory["drift"]}


class Drifting(Method):
    name: ClassVar[str] = "test-drifting-slowly"
    average = DriftingMean


class Surveyed(Part):
    """Asks every site before round 1 and after the last; what it learns first is in every step's images."""

    name: ClassVar[str] = "test-surveyed-part"
    exchanges = frozenset({"opening", "closing"})
    sends = ("sums",)

    def start(self) -> Tensors:
        return {"sums": torch.zeros(2)}

    def survey(self, work: Work) -> Tensors:
        return {"sum": sum(batch.raw.double().mean() for batch in work.client.scan()) / 255 * torch.ones(1)}

    def expects(self, sent: Tensors, round: int) -> dict[str, Like]:
        asked = round == 0 or round > self.task.rounds
        return {"sum": Like((1,), low=0, high=100)} if asked else {}

    def merger(self, state: Tensors, round: int, beside: Any) -> Sum | None:
        if 0 < round <= self.task.rounds:
            return None
        now = torch.tensor([1.0, 0.0] if round == 0 else [0.0, 1.0])
        return Sum("sum", lambda total: {"sums": state["sums"] + (total * now).float()})

    def shape(self, step: Step, mine: None) -> None:
        step.images = step.images + step.work.received(self.name)["sums"][0]

    def deploy(self, state: Tensors, message: Message) -> None:
        message.tensors[f"{self.name}/sums"] = state["sums"]


class Surveying(Method):
    name: ClassVar[str] = "test-surveyed"
    parts = (*Method.parts, Surveyed)


FUSION = {  # FedNCA-ML's head, FedMLP's loss, tags and consistency, FedHarmony's alignment: as configuration
    "method": {
        "name": "compose", "head": "etf-ladm", "average": "by-agreement",
        "parts": ["tags", "prior-adjusted", "consistency", "rejection", "contrast", "alignment"],
        "tags": {"first_stage": 1, "positive_share": 0.3, "negative_share": 0.3}, "prior-adjusted": {"first_stage": 1},
        "consistency": {"first_stage": 1},
    },
    "training__rounds": 3, "model__channels": [4, 12],
}  # fmt: skip


class EvilMean(Mean):
    """site-b replies something else every round."""

    name: ClassVar[str] = "test-evil-mean"

    def finish(self, work: Work, mine: None) -> Tensors:
        reply = super().finish(work, mine)
        if work.client.name != "site-b":
            return reply
        weights = reply["weights"]
        if work.round == 1:
            weights[3] = torch.nan
        elif work.round == 2:
            reply["weights"] = weights[:-1]
        elif work.round == 3:
            reply["backdoor"] = weights
        elif work.round == 4:
            weights.mul_(100)
        return reply


class Evil(Method):
    name: ClassVar[str] = "test-evil"
    average = EvilMean


if __name__ == "__main__":
    from fedmll.cli.main import main
    from fedmll.deploy import serving

    serving.RETURN_SECONDS = float(os.environ.get("RETURN_SECONDS", serving.RETURN_SECONDS))
    sys.argv = sys.argv[1:]
    main()
