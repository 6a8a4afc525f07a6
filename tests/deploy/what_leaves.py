"""What leaves a site, method by method: the replies of the real ClientApp are recorded, and written as the rows of the
table in docs/reference/what-leaves-a-site.md. After a new method, or a change of what one sends:

    python tests/deploy/what_leaves.py            prints the rows
    python tests/deploy/what_leaves.py --write    puts them into docs/reference/what-leaves-a-site.md
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from consortium import CLASSES, NAMES, Consortium, write_consortium
from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.supercore.task_identity import TaskIdentity

from fedmll.config.experiment import Experiment
from fedmll.core import registry
from fedmll.core.message import Message
from fedmll.deploy.experiment_for_sites import StudySetup, resolve_for_sites, settings_for_sites
from fedmll.deploy.flower.client_app import EVALUATE, HELLO, TRAIN, app
from fedmll.deploy.flower.records import from_records, to_records
from fedmll.deploy.site.site_config import Site, write_site_file
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.client_round import ClientInfo
from fedmll.methods.framework.task import Task

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "what-leaves-a-site.md"
HEADER = "| method | when | tensors | numbers |"
RULE = "|---|---|---|---|"
SITE = "site-c"  # it annotates seven of the ten classes
ROUNDS, WIDTH = 3, 12
EVERY = "*every method*"

# What a method needs so that all of it happens in three rounds; the names of what is sent do not depend on it
SGD = {"training.optimizer": "sgd"}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedmlp": {"method.first_stage": 1, "method.positive_share": 0.3, "method.negative_share": 0.3},
    "fedlgt": {"method.encoder": "learned"},
    "fednova": SGD,
    "private-fedavg": {"method.loss": "sigmoid"},
    "private-fedprox": {"method.loss": "sigmoid"},
    "scaffold": SGD,
}
NOT_FEDERATED = ("centralized", "local-only")  # refused by `fedmll server`

Row = tuple[str, str, str, str]


def methods() -> list[str]:
    """Those that a federation between machines can have."""
    return [name for name in registry.all_of("method") if name not in (*NOT_FEDERATED, *registry.find_added("method"))]


def experiment_of(consortium: Consortium, name: str) -> Experiment:
    return consortium.server(
        training__rounds=ROUNDS, model__channels=[4, WIDTH], partition__holdout=0.2, training__augment="none"
    ).changed({"method.name": name} | OPTIONS.get(name, {}))


class Recorder:
    """One real site, asked by the server's half of a method; everything that the site says is kept."""

    def __init__(self, consortium: Consortium, folder: Path, name: str) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
        self.file = folder / "site.json"
        home = consortium.folder
        write_site_file(
            Site(
                name=SITE,
                csv=home / SITE / "labels.csv",
                images=home / "images",
                state_dir=folder / "memory",
                device="cpu",
            ),
            self.file,
        )
        experiment = resolve_for_sites(experiment_of(consortium, name), (1, 8, 8))
        task = Task(experiment, tuple(CLASSES), (1, 8, 8), len(NAMES), torch.device("cpu"))
        self.trainer = Trainer(task)
        self.method = self.trainer.method
        classes = None if self.method.has("private-labels") else task.classes
        self.setup = StudySetup(
            run="recorded",
            experiment=settings_for_sites(experiment),
            classes=classes,
            shape=task.sample_shape,
            clients=task.clients,
        ).to_json()

    def ask(self, kind: str, message: Message, **about: Any) -> tuple[Message, dict[str, Any]]:
        content = to_records(message, about | {"setup": self.setup})
        asked = FlowerMessage(content, 2, kind)
        asked.metadata.__dict__["_message_id"] = "1"
        reply = app(asked, Context(7, 2, {"site": str(self.file)}, RecordDict(), {}))
        said, told = from_records(reply.content)
        assert "error" not in told, told["error"]
        return said, told

    def record(self) -> dict[str, list[tuple[Message, dict[str, Any]]]]:
        """By when: joining, opening, a round, closing, a test."""
        method = self.method
        hello = self.ask(HELLO, Message())
        owned = torch.tensor([name in hello[1]["classes"] for name in CLASSES])
        peer = ClientInfo(2, SITE, owned)
        others = [ClientInfo(0, NAMES[0], torch.ones_like(owned)), ClientInfo(1, NAMES[1], torch.ones_like(owned))]
        method.validate_clients([*others, peer])
        state, base = method.initial_state(), None
        found: dict[str, list[tuple[Message, dict[str, Any]]]] = {"joining": [hello]}
        for number in range(
            0 if method.has_exchange("opening") else 1, method.task.rounds + 1 + method.has_exchange("closing")
        ):
            sent = method.send(state, peer, number)
            said, told = self.ask(TRAIN, sent, round=number, state_round=base, keep_rounds=None)
            assert method.find_problem(sent, said, number) is None
            base = number if told["has_state"] else base
            found.setdefault(method.exchange_in(number) or "a round", []).append((said, told))
            merging = method.aggregator(state, number)
            merging.add(peer, said)
            state = merging.result()[0]
        final = method.final_model(state)
        shown = method.send(final.tensors, peer, method.task.rounds) if method.has("private-labels") else final
        found["a test"] = [self.ask(EVALUATE, shown, round=method.task.rounds)]
        return found

    def symbols(self) -> dict[int, str]:
        """Sizes that mean something; no two are the same."""
        return {len(self.trainer.weights.vector): "P", len(CLASSES): "C", WIDTH: "D", WIDTH + 1: "D+1", 7: "K", 40: "N"}


def rows_of(consortium: Consortium, folder: Path, name: str) -> list[Row]:
    recorder = Recorder(consortium, folder, name)
    found = recorder.record()
    symbols = recorder.symbols()
    if recorder.method.has("private-labels"):  # it was sent its own rows only
        symbols = {len(said["weights"]): "P" for said, _ in found["a round"]} | symbols | {7: "C"}
    return in_rows(name, found, symbols)


def in_rows(name: str, found: dict[str, list[tuple[Message, dict[str, Any]]]], symbols: dict[int, str]) -> list[Row]:
    rows: list[Row] = []
    for when, replies in found.items():
        tensors = {k: described(t, symbols) for said, _ in replies for k, t in sorted(said.tensors.items())}
        told = {key for _, about in replies for key in about}
        numbers = {key for said, _ in replies for key in said.numbers}
        who = EVERY if when in ("joining", "a test") else name
        cells = ", ".join(f"`{key}` {text}" for key, text in sorted(tensors.items()))
        rows.append((who, when, cells or "–", ", ".join(sorted(numbers | told))))
    return rows


def described(tensor: torch.Tensor, symbols: dict[int, str]) -> str:
    shape = ", ".join(symbols.get(size, str(size)) for size in tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')} ({shape})"


def all_rows(consortium: Consortium, fresh: Callable[[str], Path]) -> list[Row]:
    rows = dict.fromkeys(row for name in methods() for row in rows_of(consortium, fresh(name), name))
    return sorted(rows, key=lambda row: (row[0] != EVERY, row[0], row[1]))


def table(rows: list[Row]) -> str:
    return "\n".join([HEADER, RULE, *(f"| {' | '.join(row)} |" for row in rows)])


def documented(text: str) -> list[Row]:
    """The rows of the table in the document."""
    lines = text.split(HEADER)[1].split("\n\n")[0].splitlines()[2:]
    found = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]
    return [(row[0], row[1], row[2], row[3]) for row in found]


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        consortium = write_consortium(Path(place) / "consortium", with_keys=False)
        with redirect_stdout(StringIO()):  # the sites talk
            made = table(all_rows(consortium, lambda name: Path(place) / name))
    print(made)
    if "--write" in sys.argv:
        text = DOCUMENT.read_text()
        before, _, rest = text.partition(HEADER)
        DOCUMENT.write_text(before + made + "\n\n" + rest.partition("\n\n")[2])


if __name__ == "__main__":
    main()
