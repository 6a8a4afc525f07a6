"""The cost of a round of each method relative to FedAvg: the figures of `fedmll methods`.

    python benchmarks/method_costs.py             measure and write src/fedmll/methods/costs.toml, some minutes
    python benchmarks/method_costs.py --dry-run   measure and write nothing

The cost is the CPU time of a round, clients and server, in one process: 600 composite digits of 16 × 16 pixels, six
clients that each lack the labels of four of ten classes, a small convolutional network, SGD, batches of 32. The methods
take turns, round by round. Because the machine may be busy with other things, the median of the ratios to FedAvg in the
same turn is written. With a larger network the relative costs are smaller. `compose` is not measured: its cost depends
on its parts.
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

from fedmll.cli.output import plain_table
from fedmll.config.experiment import Experiment
from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.data import federation
from fedmll.engines.local import LocalEngine
from fedmll.testing import aggregate

FILE = Path(__file__).parents[1] / "src" / "fedmll" / "methods" / "costs.toml"
SETTING: dict[str, Any] = {
    "data": {"name": "ml-digits", "size": 16, "limit": 600},
    "partition": {"kind": "iid", "clients": 6, "holdout": 0.0},
    "annotation": {"kind": "missing", "missing": 4},
    "training": {"rounds": 10, "optimizer": "sgd", "momentum": 0.0, "lr": 0.01},
    "engine": {"workers": 0},
}
# Settings that some methods require.
REQUIRED_SETTINGS: dict[str, dict[str, Any]] = {
    "fedlgt": {"method.encoder": "learned"},
    "private-fedavg": {"method.loss": "sigmoid"},
    "private-fedprox": {"method.loss": "sigmoid"},
}
LEFT_OUT = ("compose",)


class MethodRounds:
    """Runs the rounds of one method, one at a time."""

    def __init__(self, name: str, data: federation.Federation, folder: Path) -> None:
        experiment = Experiment.make(SETTING).changed({"method.name": name} | REQUIRED_SETTINGS.get(name, {}))
        self.engine = LocalEngine(replace(data, experiment=experiment), folder / name)
        self.state, self.number = self.engine.initial_state(), 0 if self.engine.method.has_exchange("opening") else 1
        self.only_opening = experiment.training.rounds == 0

    def run_next(self) -> float:
        """Run the next round. Returns its CPU seconds."""
        begin = time.process_time()
        replies = self.engine.collect_replies(self.state, self.number)
        state, _ = aggregate(self.engine.method, self.state, replies, self.number)
        spent = time.process_time() - begin
        if not self.only_opening:
            self.state, self.number = state, self.number + 1
        return spent


def measure(turns: int) -> dict[str, list[float]]:
    """By method: the CPU time relative to FedAvg in each turn. The first two turns, with opening exchanges, warm up."""
    found: dict[str, list[float]] = {}
    data = federation.build(Experiment.make(SETTING))
    with tempfile.TemporaryDirectory() as folder:
        methods: dict[str, MethodRounds] = {}
        for name in registry.all_of("method"):
            if name not in LEFT_OUT:
                try:
                    methods[name] = MethodRounds(name, data, Path(folder))
                except ConfigError as error:
                    raise SystemExit(
                        f"{name} does not work with these settings; add what it needs to REQUIRED_SETTINGS: {error}"
                    ) from None
        for turn in range(turns + 2):
            spent = {name: rounds.run_next() for name, rounds in methods.items()}
            if turn >= 2:
                for name, seconds in spent.items():
                    found.setdefault(name, []).append(seconds / spent["fedavg"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7, help="measured rounds; at most 8")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    options = parser.parse_args()
    found = measure(options.turns)
    medians = {name: round(statistics.median(ratios), 2) for name, ratios in found.items()}
    rows = [(name, f"{medians[name]:.2f}", f"{min(ratios):.2f} – {max(ratios):.2f}") for name, ratios in found.items()]
    Console().print(plain_table("CPU time of a round, FedAvg = 1", ("method", "median", "range over turns"), rows))
    if not options.dry_run:
        lines = [
            f"# Written by `python benchmarks/method_costs.py` on {date.today()}; its docstring explains the figures.",
            "[relative]",
            *(f"{name} = {value}" for name, value in medians.items()),
        ]
        FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
