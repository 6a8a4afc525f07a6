"""A consortium of three for the tests: scikit-learn's digits as PNG files and CSVs. Site c misses three classes.

`python consortium.py fedmll …` is the command line with the test methods below, for servers and clients that are
processes of their own."""

from __future__ import annotations

import csv
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from sklearn.datasets import load_digits

from fedmll.config.experiment import Experiment
from fedmll.core.message import Message, Tensors
from fedmll.data import federation
from fedmll.deploy.security import certificates
from fedmll.deploy.security import client_keys as keys
from fedmll.engines.local import LocalEngine
from fedmll.methods.framework.base import Aggregator, Part, Records, TensorSpec, option
from fedmll.methods.framework.client_round import ClientRound, TrainStep
from fedmll.methods.framework.method import Method
from fedmll.methods.parts.averaging import WeightedAverage

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
        certificates.create_server_certificate(folder / "keys", [])
        for name in (*NAMES, "stranger"):
            keys.create_client_key(folder / "keys", name)
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
    method, state = engine.trainer.method, engine.initial_state()
    memories: dict[int, Tensors] = {peer.index: {} for peer in engine.clients}
    for number in range(1, data.experiment.training.rounds + 1):
        merger = method.aggregator(state, number)
        here = [peer for peer in engine.clients if takes_part(peer.name, number)]
        for peer in sorted(here, key=lambda peer: -data.sizes[peer.index]):
            client = engine.trainer.client_in_round(data, peer, number)
            merger.add(peer, engine.trainer.train(client, method.send(state, peer, number), memories[peer.index]))
        state, _ = merger.result()
    engine.close()
    return engine.trainer.named(method.final_model(state))


class DriftingMean(WeightedAverage):
    """Has a client memory that matters for the weights; takes its time, so that something can happen in a round."""

    name: ClassVar[str] = "test-drifting-slowly-mean"

    class Options(WeightedAverage.Options):
        seconds: float = option(0.0, "how long it takes")

    def on_round_end(self, client_round: ClientRound, round_state: None) -> Tensors:
        time.sleep(self.options.seconds)
        reply, memory = super().on_round_end(client_round, round_state), self.client_state(client_round)
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
    sums = ("sum",)

    def initial_state(self) -> Tensors:
        return {"sums": torch.zeros(2)}

    def collect_statistics(self, client_round: ClientRound) -> Tensors:
        return {
            "sum": sum(batch.raw.double().mean() for batch in client_round.client.evaluation_batches())
            / 255
            * torch.ones(1)
        }

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        asked = round == 0 or round > self.task.rounds
        return {"sum": TensorSpec((1,), low=0, high=100)} if asked else {}

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator | None:
        return None if 0 < round <= self.task.rounds else super().aggregator(state, round, earlier)

    def update_state(self, state: Tensors, sums: Tensors, round: int) -> tuple[Tensors, Records]:
        exchange = torch.tensor([1.0, 0.0] if round == 0 else [0.0, 1.0])
        return {"sums": state["sums"] + (sums["sum"] * exchange).float()}, {}

    def transform_batch(self, step: TrainStep, round_state: None) -> None:
        step.images = step.images + self.received(step.client_round)["sums"][0]

    def finalize_model(self, state: Tensors, message: Message) -> None:
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


class EvilMean(WeightedAverage):
    """site-b replies something else every round."""

    name: ClassVar[str] = "test-evil-mean"

    def on_round_end(self, client_round: ClientRound, round_state: None) -> Tensors:
        reply = super().on_round_end(client_round, round_state)
        if client_round.client.name != "site-b":
            return reply
        weights = reply["weights"]
        if client_round.number == 1:
            weights[3] = torch.nan
        elif client_round.number == 2:
            reply["weights"] = weights[:-1]
        elif client_round.number == 3:
            reply["backdoor"] = weights
        elif client_round.number == 4:
            weights.mul_(100)
        return reply


class Evil(Method):
    name: ClassVar[str] = "test-evil"
    average = EvilMean


if __name__ == "__main__":
    from fedmll.cli.main import main
    from fedmll.deploy.server import serve

    serve.RETURN_SECONDS = float(os.environ.get("RETURN_SECONDS", serve.RETURN_SECONDS))  # type: ignore[assignment]
    sys.argv = sys.argv[1:]
    main()
