"""Attacks on a federation of five sites, for each average: what is left of the model, and what the server notices.

    python benchmarks/attacks.py [--seeds 3] [--csv attacks.csv] [--attacks TEXT] [--averages NAME,NAME]
    python benchmarks/attacks.py --cost

The server is the real one: its checks of every reply, the comparison of the replies, rollback and aggregation. Only the
network is missing: the sites train in this process. The data are composite digits (ml-digits, several labels per
image), divided by a Dirichlet distribution (β = 0.5). Faulty sites know the replies of the honest sites. The table has
the macro AUC in % after ten rounds (fed-ridge: after its only exchange), as the mean over the seeds. A run that is in
the CSV file is not repeated.

The column "no defences" is the plain mean without any check. --cost measures the processor time of a round, of the
server and its five sites together, with all defences (checks, comparison, centered clipping) and without.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from flwr.app import Message as FlowerMessage
from flwr.supercore.task_identity import TaskIdentity

from fedmll.config.experiment import Experiment
from fedmll.core.message import Message, Tensors
from fedmll.core.text import confirm_always
from fedmll.data import federation
from fedmll.data.dataset import Dataset
from fedmll.data.federation import Federation
from fedmll.deploy.experiment_for_sites import resolve_for_sites
from fedmll.deploy.flower import reply_checks
from fedmll.deploy.flower.client_app import HELLO, TRAIN
from fedmll.deploy.flower.outliers import ReplyComparison
from fedmll.deploy.flower.records import from_records, to_records
from fedmll.deploy.server.serve import run_federation
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.task import task_of
from fedmll.models.flat_weights import sketch_frozen_tensors
from fedmll.runs.run_folder import RunFolder
from fedmll.training.callbacks import Callback

ROUNDS = 10
LENGTH = 4.9  # of a faulty update, times the honest median; more than 5 is rejected
TRIGGER_CLASS = 0
NO_DEFENCES = "no defences"
AVERAGES: dict[str, dict[str, Any]] = {
    NO_DEFENCES: {"average": "mean"},
    "mean": {"average": "mean"},
    "clipped-mean": {"average": "clipped-mean"},
    "trimmed-mean": {"average": "trimmed-mean"},
    "median": {"average": "trimmed-mean", "trim": 0.49},  # only the middle values of a coordinate are left
    "centered-clipping": {"average": "centered-clipping"},
}
NOTICED = {"rejected": "rejects it", "rolled back": "rolls back", "named": "names it", "–": "does not notice"}
COLUMNS = ("attack", "sites", "faulty", "average", "seed", "macro_auc", "triggered", "noticed")


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a faulty site knows when it replies."""

    sent: Message
    own: Message  # its reply if it were honest
    honest: list[Message]  # the replies of the honest sites in this round
    first: Message  # its own honest reply of round 1
    parameters: int  # the weights after these are running statistics


ChangeReply = Callable[[Situation], Tensors]
ChangeData = Callable[[Dataset], Dataset]


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What the faulty sites do. By default these are the sites in the middle, when sites are ordered by size."""

    name: str
    faulty: int = 1
    largest: bool = False  # the largest sites are faulty
    reply: ChangeReply | None = None
    data: ChangeData | None = None
    method: str = "fedavg"
    dominating: bool = False  # the first site has more than half of the images

    @property
    def label(self) -> str:
        return f"fed-ridge: {self.name}" if self.method == "fed-ridge" else self.name


def opposite(situation: Situation, direction: torch.Tensor) -> Tensors:
    """An update against a direction, just below the limit on lengths."""
    start, end = situation.sent["weights"], situation.parameters
    length = median(float((reply["weights"] - start)[:end].norm()) for reply in situation.honest)
    weights = situation.own["weights"].clone()
    weights[:end] = start[:end] - LENGTH * length * direction / direction.norm()
    return {"weights": weights}


def flip_own(situation: Situation) -> Tensors:
    end = situation.parameters
    return opposite(situation, (situation.own["weights"] - situation.sent["weights"])[:end])


def flip_mean(situation: Situation) -> Tensors:
    end, start = situation.parameters, situation.sent["weights"]
    return opposite(situation, sum(reply["weights"] - start for reply in situation.honest)[:end])  # type: ignore[index]


def scale_statistics(factor: float) -> ChangeReply:
    def change(situation: Situation) -> Tensors:
        weights = situation.own["weights"].clone()
        weights[situation.parameters :] *= factor
        return {"weights": weights}

    return change


def lengthen(situation: Situation) -> Tensors:
    """Its own update, just below the limit on lengths, so that it outweighs the others."""
    return opposite(situation, (situation.sent["weights"] - situation.own["weights"])[: situation.parameters])


def return_unchanged(situation: Situation) -> Tensors:
    return {"weights": situation.sent["weights"]}


def replay(situation: Situation) -> Tensors:
    return {"weights": situation.first["weights"]}


def scaled_sums(factor: float) -> ChangeReply:
    """The sums of features that are scaled, with opposite labels."""

    def change(situation: Situation) -> Tensors:
        own = situation.own
        scale = torch.full((own["ridge/gram"].shape[-1],), factor, dtype=torch.float64)
        scale[-1] = 1  # of the constant
        opposite_labels = own["ridge/gram"][0, -1] - own["ridge/cross"]
        powers = torch.tensor([[1.0], [factor], [factor**2]], dtype=torch.float64)
        return {
            "ridge/gram": own["ridge/gram"] * scale * scale[:, None],
            "ridge/cross": opposite_labels * scale,
            "ridge/all": own["ridge/all"] * powers,
        }

    return change


def flip_labels(data: Dataset) -> Dataset:
    return replace(data, labels=(1 - data.labels).astype(np.int8))


def stamp(images: np.ndarray) -> np.ndarray:
    """The trigger: a bright line at the left edge."""
    stamped = np.array(images)
    stamped[..., :2] = 255
    return stamped


def add_backdoor(data: Dataset) -> Dataset:
    """Half of the images get the trigger and the target class, and no other class."""
    images, labels = np.array(data.samples(np.arange(len(data)))), data.labels.copy()
    images[::2] = stamp(images[::2])
    labels[::2] = 0
    labels[::2, TRIGGER_CLASS] = 1
    return Dataset(images, labels, data.classes)


ATTACKS = (
    Attack(name="none", faulty=0),
    Attack(name="none, one site has most images", faulty=0, dominating=True),
    Attack(name="sign flip, 4.9 × the median length", reply=flip_own),
    Attack(name="sign flip, 4.9 × the median length", reply=flip_own, faulty=2),
    Attack(name="the same by the largest site", reply=flip_own, largest=True),
    Attack(name="opposite of the honest mean, 4.9 × the median length", reply=flip_mean),
    Attack(name="opposite of the honest mean, 4.9 × the median length", reply=flip_mean, faulty=2),
    Attack(name="running statistics × 4.5", reply=scale_statistics(4.5)),
    Attack(name="running statistics × 2.9", reply=scale_statistics(2.9)),
    Attack(name="flipped labels", data=flip_labels),
    Attack(name="flipped labels", data=flip_labels, faulty=2),
    Attack(name="backdoor", data=add_backdoor),
    Attack(name="backdoor, 4.9 × the median length", data=add_backdoor, reply=lengthen),
    Attack(name="backdoor, 4.9 × the median length", data=add_backdoor, reply=lengthen, faulty=2),
    Attack(name="free-rider", reply=return_unchanged),
    Attack(name="replayed reply", reply=replay),
)
RIDGE_ATTACKS = (
    Attack(name="none", faulty=0, method="fed-ridge"),
    Attack(name="features × 10, flipped labels", reply=scaled_sums(10), method="fed-ridge"),
    Attack(name="features × 2, flipped labels", reply=scaled_sums(2), method="fed-ridge"),
    Attack(name="flipped labels", reply=scaled_sums(1), method="fed-ridge"),
)


def find_faulty(sizes: np.ndarray, attack: Attack) -> list[int]:
    """The indices of the faulty sites."""
    order = np.argsort(-sizes, kind="stable")
    first = 0 if attack.largest else len(order) // 2
    return [int(index) for index in order[first : first + attack.faulty]]


class SitesInProcess:
    """Flower's Grid. All sites train in this process; faulty ones change their data or their replies."""

    def __init__(self, data: Federation, attack: Attack) -> None:
        torch.set_num_threads(1)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # usually set by the SuperLink
        self.attack, self.trainer = attack, Trainer(task_of(data))
        self.data = self.trainer.with_frozen_features(data)
        self.infos = self.trainer.client_infos(self.data)
        self.nodes = [
            SimpleNamespace(node_id=index + 1, name="", status="online", last_activated_at="first")
            for index in range(len(self.infos))
        ]
        self.faulty = find_faulty(data.sizes, attack)
        self.numbers, self.waiting = itertools.count(1), dict[str, FlowerMessage]()
        self.trained: dict[tuple[int, int], Message] = {}  # (site, round) → its reply if it were honest
        self.first: dict[int, Message] = {}

    def get_nodes(self) -> list[SimpleNamespace]:
        return self.nodes

    def push_messages(self, messages: list[FlowerMessage]) -> list[str]:
        return [self._answer(message) for message in messages]

    def pull_messages(self, message_ids: list[str]) -> Iterator[FlowerMessage]:
        return iter([self.waiting.pop(key) for key in message_ids if key in self.waiting])

    def _answer(self, message: FlowerMessage) -> str:
        message_id, index = str(next(self.numbers)), message.metadata.dst_node_id - 1
        message.metadata.__dict__["_message_id"] = message_id
        content, info = from_records(message.content)
        reply, more = Message(), dict[str, Any]()
        if message.metadata.message_type == HELLO:
            more = self._introduction(index)
        elif message.metadata.message_type == TRAIN:
            reply = self._reply(index, info["round"], content)
        records = to_records(reply, more | {"name": self.infos[index].name})
        self.waiting[message_id] = FlowerMessage(records, reply_to=message)
        return message_id

    def _introduction(self, index: int) -> dict[str, Any]:
        data = self.data
        return {
            "samples": len(data.samples[index]),
            "held_out": 0,
            "classes": list(data.train.classes),
            "digest": f"{index:032x}",
            "frozen": sketch_frozen_tensors(self.trainer.model),
        }

    def _train(self, index: int, round: int, sent: Message) -> Message:
        if (index, round) not in self.trained:
            client = self.trainer.client_in_round(self.data, self.infos[index], round)
            if index in self.faulty and self.attack.data is not None:
                client = replace(client, data=self.attack.data(client.data))
            reply = self.trainer.train(client, sent, {})
            self.trained[index, round] = Message({k: t.clone() for k, t in reply.tensors.items()}, reply.numbers)
            self.first.setdefault(index, self.trained[index, round])
        return self.trained[index, round]

    def _reply(self, index: int, round: int, sent: Message) -> Message:
        self.trained = {key: reply for key, reply in self.trained.items() if key[1] == round}
        own = self._train(index, round, sent)
        if index not in self.faulty or self.attack.reply is None:
            return own
        honest = [other for other in range(len(self.infos)) if other not in self.faulty]
        situation = Situation(
            sent=sent,
            own=own,
            honest=[self._train(other, round, sent) for other in honest],
            first=self.first[index],
            parameters=self.trainer.weights.parameter_end,
        )
        return Message(own.tensors | self.attack.reply(situation), own.numbers)


class Recorder(Callback):
    """What the server says, and the processor time at the end of each round."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.ends: list[float] = []

    def on_warning(self, text: str) -> None:
        self.said.append(text)

    def on_round_end(self, row: dict[str, Any]) -> None:
        self.ends.append(time.process_time())

    def noticed(self, names: list[str]) -> str:
        """What the server did about some sites."""
        for word, result in (("is rejected", "rejected"), ("tried again", "rolled back"), ("is unusual", "named")):
            if any(word in text and any(name in text for name in names) for text in self.said):
                return result
        return "–"


@contextlib.contextmanager
def without_defences() -> Iterator[None]:
    """Replies are decoded and aggregated, and nothing else."""
    with (
        mock.patch.object(reply_checks, "find_reply_problem", lambda specs, reply: None),
        mock.patch.object(reply_checks, "find_class_problem", lambda specs, reply, owned: None),
        mock.patch.object(ReplyComparison, "add", lambda self, *args, **more: None),
    ):
        yield


def make_experiment(attack: Attack, average: str, seed: int, rounds: int = ROUNDS) -> Experiment:
    values: dict[str, Any] = {
        "seed": seed,
        "data": {"name": "ml-digits", "size": 16, "limit": 2000},
        "model": {"channels": [16, 32, 32]},
        "partition": {"holdout": 0.0},
    }
    if attack.method == "fed-ridge":
        values["model"] |= {"freeze": "backbone", "weights": "random"}
        values["method"] = {"name": "fed-ridge"}
    else:
        values["method"] = {"name": "fedavg"} | AVERAGES[average]
        values["training"] = {"rounds": rounds, "local_epochs": 2, "batch_size": 16, "lr": 0.003}
    return Experiment.make(values)


def divide(experiment: Experiment, sites: int, dominating: bool) -> Federation:
    """The data of the sites."""
    kind = {"partition.kind": "dirichlet", "partition.clients": sites, "partition.beta": 0.5}
    found = federation.build(experiment.changed(kind))
    if dominating:
        most = len(found.samples[0]) // 6
        found = replace(found, samples=(found.samples[0], *(rows[:most] for rows in found.samples[1:])))
    return found


def run_attack(attack: Attack, sites: int, average: str, seed: int) -> dict[str, Any]:
    """One run: the values of a line of the CSV file."""
    experiment = make_experiment(attack, average, seed)
    data = divide(experiment, sites, attack.dominating)
    grid, recorder = SitesInProcess(data, attack), Recorder()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if average == NO_DEFENCES:
            stack.enter_context(without_defences())
        result = run_server(experiment, grid, Path(folder) / "run", recorder)
    trainer = grid.trainer
    trainer.load(result.weights)
    test = grid.data.test
    without_target = test.subset(np.flatnonzero(test.labels[:, TRIGGER_CLASS] == 0))
    triggered = 0.0
    if attack.data is add_backdoor:
        stamped = Dataset(
            stamp(without_target.samples(np.arange(len(without_target)))), without_target.labels, test.classes
        )
        scores = trainer.predict(stamped, 0, len(stamped))[:, TRIGGER_CLASS]
        triggered = 100 * float((scores > 0.5).float().mean())
    return {
        "attack": attack.label,
        "sites": sites,
        "faulty": attack.faulty,
        "average": average,
        "seed": seed,
        "macro_auc": result.metrics["macro_auc"],
        "triggered": triggered,
        "noticed": recorder.noticed([grid.infos[index].name for index in grid.faulty or range(sites)]),
    }


def run_server(experiment: Experiment, grid: SitesInProcess, out: Path, recorder: Recorder) -> Any:
    resolved = resolve_for_sites(experiment, grid.data.test.sample_shape)
    RunFolder(out).create(resolved)
    names = tuple(info.name for info in grid.infos)
    settings = ServerSettings(clients=names, keys=None, min_clients=2, run="attack")
    return run_federation(grid, resolved, settings, out, callback=recorder, confirm=confirm_always)


def read_rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open())) if path.exists() else []


def run_missing(path: Path, sites: int, seeds: int, attacks: str, averages: list[str]) -> None:
    """Run what is not in the file yet; every run is written at once."""
    done = {tuple(row[name] for name in COLUMNS[:5]) for row in read_rows(path)}
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        for attack in (*ATTACKS, *RIDGE_ATTACKS):
            for average, seed in itertools.product(averages, range(seeds)):
                if attack.method == "fed-ridge" and average not in (NO_DEFENCES, "mean"):
                    continue  # sums are added up
                key = (attack.label, str(sites), str(attack.faulty), average, str(seed))
                if key not in done and attacks in attack.label:
                    row = run_attack(attack, sites, average, seed)
                    writer.writerow(row)
                    file.flush()
                    print(
                        ", ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
                    )


def print_table(rows: list[dict[str, str]], sites: int) -> None:
    """One row per attack and one column per average: the macro AUC, and for backdoors the share of triggered images."""
    own = [row for row in rows if row["sites"] == str(sites)]
    averages = [name for name in AVERAGES if any(row["average"] == name for row in own)]
    print(f"\n| attack | faulty of {sites} | {' | '.join(averages)} | with defences the server |")
    print(f"|---|---:|{'---:|' * len(averages)}---|")
    for attack, faulty in dict.fromkeys((row["attack"], row["faulty"]) for row in own):
        cells, noticed = [], set[str]()
        for average in averages:
            found = [r for r in own if (r["attack"], r["faulty"], r["average"]) == (attack, faulty, average)]
            if average != NO_DEFENCES:
                noticed |= {row["noticed"] for row in found}
            triggered = mean([float(row["triggered"]) for row in found] or [0.0])
            text = f"{mean(float(row['macro_auc']) for row in found):.1f}" if found else "–"
            cells.append(f"{text} ({triggered:.0f} %)" if attack.startswith("backdoor") else text)
        words = [NOTICED[word] for word in NOTICED if word in noticed]
        print(f"| {attack} | {faulty} | {' | '.join(cells)} | {words[0] if faulty != '0' else '–'} |")


def measure_cost(rounds: int) -> None:
    """Processor time per round with all defences and without, in turns."""
    seconds: dict[str, list[float]] = {"centered-clipping": [], NO_DEFENCES: []}
    attack = ATTACKS[0]
    for _ in range(3):
        for average, found in seconds.items():
            values = {"model.channels": [64, 128, 256, 256], "training.local_epochs": 2, "training.rounds": rounds}
            experiment = make_experiment(attack, average, 0).changed(values)
            grid, recorder = SitesInProcess(divide(experiment, 5, False), attack), Recorder()
            with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
                if average == NO_DEFENCES:
                    stack.enter_context(without_defences())
                run_server(experiment, grid, Path(folder) / "run", recorder)
            found += [after - before for before, after in itertools.pairwise(recorder.ends)]
    with_all, without = (median(found) for found in seconds.values())
    weights = grid.trainer.weights
    print(f"five sites, {len(weights.vector):,} weights, {os.cpu_count()} cores, median of {len(found)} rounds")
    print("\n| | processor seconds per round |\n|---|---:|")
    print(f"| all defences, centered clipping | {with_all:.3f} |\n| no defences, mean | {without:.3f} |")
    print(f"| ratio | {with_all / without:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--csv", type=Path, default=Path("attacks.csv"))
    parser.add_argument("--attacks", default="", help="only attacks whose name contains this text")
    parser.add_argument("--averages", default=",".join(AVERAGES), help="comma-separated")
    parser.add_argument("--cost", action="store_true", help="measure the time of a round instead")
    parser.add_argument("--rounds", type=int, default=4, help="of a run of --cost")
    options = parser.parse_args()
    if options.cost:
        measure_cost(options.rounds)
        return
    run_missing(options.csv, options.sites, options.seeds, options.attacks, options.averages.split(","))
    print_table(read_rows(options.csv), options.sites)


if __name__ == "__main__":
    main()
