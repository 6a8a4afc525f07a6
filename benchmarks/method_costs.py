"""What a round of each method costs, relative to FedAvg: the figures of `fedmll methods`.

    python benchmarks/method_costs.py             measure and write src/fedmll/methods/costs.toml, some minutes
    python benchmarks/method_costs.py --look      measure, write nothing

CPU time of a round of one worker, clients and server together: 600 composite digits of 16 × 16 pixels, six clients that
each miss four of ten classes, a small convolutional network, SGD, batches of 32. Methods take turns, round by round, in
one process, and a turn's ratio to FedAvg is what counts (its median is written): the machine may be busy with other
things. Beside a larger network the parts cost less than here. `compose` is what its parts are.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from fedmll import registry
from fedmll.cli.tables import plain_table
from fedmll.data import federation
from fedmll.engines.local import LocalEngine
from fedmll.errors import ConfigError
from fedmll.experiment import Experiment
from fedmll.testing import merge

FILE = Path(__file__).parents[1] / "src" / "fedmll" / "methods" / "costs.toml"
SETTING: dict[str, Any] = {
    "data": {"name": "ml-digits", "size": 16, "limit": 600},
    "partition": {"kind": "iid", "clients": 6, "holdout": 0.0},
    "annotation": {"kind": "missing", "missing": 4},
    "training": {"rounds": 10, "optimizer": "sgd", "momentum": 0.0, "lr": 0.01},
    "engine": {"workers": 0},
}
# What a method needs in that setting, and what makes all of it act within ten rounds.
NEEDED: dict[str, dict[str, Any]] = {
    "fedlgt": {"method.encoder": "learned"},
    "private-fedavg": {"method.loss": "sigmoid"},
    "private-fedprox": {"method.loss": "sigmoid"},
}
LEFT_OUT = ("compose",)


class Turns:
    """A method that does its next round when it is its turn."""

    def __init__(self, name: str, data: federation.Federation, folder: Path) -> None:
        experiment = Experiment.make(SETTING).changed({"method.name": name} | NEEDED.get(name, {}))
        self.engine = LocalEngine(replace(data, experiment=experiment), folder / name)
        self.state, self.number = self.engine.start(), 0 if self.engine.method.asks("opening") else 1
        self.only_opens = experiment.training.rounds == 0

    def next(self) -> float:
        """CPU seconds."""
        begin = time.process_time()
        replies = self.engine.round(self.state, self.number)
        state, _ = merge(self.engine.method, self.state, replies, self.number)
        spent = time.process_time() - begin
        if not self.only_opens:
            self.state, self.number = state, self.number + 1
        return spent


def measure(turns: int) -> dict[str, list[float]]:
    """By method: each turn's CPU time over FedAvg's. The first rounds are for warming up, and for openings."""
    found: dict[str, list[float]] = {}
    data = federation.build(Experiment.make(SETTING))
    with tempfile.TemporaryDirectory() as folder:
        players: dict[str, Turns] = {}
        for name in registry.all_of("method"):
            if name not in LEFT_OUT:
                try:
                    players[name] = Turns(name, data, Path(folder))
                except ConfigError as error:
                    raise SystemExit(
                        f"{name} cannot work in this setting; add what it needs to NEEDED: {error}"
                    ) from None
        for turn in range(turns + 2):
            spent = {name: player.next() for name, player in players.items()}
            if turn >= 2:
                for name, seconds in spent.items():
                    found.setdefault(name, []).append(seconds / spent["fedavg"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7, help="measured rounds; at most 8")
    parser.add_argument("--look", action="store_true", help="write nothing")
    words = parser.parse_args()
    found = measure(words.turns)
    medians = {name: round(statistics.median(ratios), 2) for name, ratios in found.items()}
    rows = [(name, f"{medians[name]:.2f}", f"{min(ratios):.2f} – {max(ratios):.2f}") for name, ratios in found.items()]
    Console().print(plain_table("CPU time of a round, FedAvg = 1", ("method", "median", "of all turns"), rows))
    if not words.look:
        lines = [
            f"# Written by `python benchmarks/method_costs.py` on {date.today()}; what it measures is said there.",
            "[relative]",
            *(f"{name} = {value}" for name, value in medians.items()),
        ]
        FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
