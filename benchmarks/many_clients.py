"""Many clients: the cost of a round against the number of clients, and against the number of participants.

    python benchmarks/many_clients.py                           20 to 51,414 clients (as in FLAIR), 50 per round
    python benchmarks/many_clients.py --method scaffold --set training.optimizer=sgd
    python benchmarks/many_clients.py --shares 0.25 0.5 0.75 --clients 2000 --method fedharmony
                                                         participation as in FedHarmony's Fig. 5

The data is feature vectors with correlated labels; the network is small. Each row of the table is a whole run with its
evaluations, records and checkpoints, in its own process with one worker, so that each run has its own peak memory.
Every client has the same number of samples, so a round of 50 clients is the same work however many clients there are.
The data grows with the number of clients; it is part of `server before`. Memory is in MB: the server process before
round 1, the most that the rounds add to it, the peak of the worker (which shares the data with the server), and what
keeping all replies of a round would need. Times are CPU times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

FEATURES, TEST = 16, 500
PEAK = "VmHWM"  # ru_maxrss would begin with the peak of the parent process


def write_data(file: Path, samples: int, classes: int) -> None:
    rng = np.random.default_rng(0)
    count = samples + TEST
    latent = rng.normal(size=(count, 4))
    vectors = (latent @ rng.normal(size=(4, FEATURES)) + rng.normal(size=(count, FEATURES))).astype(np.float32)
    labels = (latent @ rng.normal(size=(4, classes)) + rng.normal(size=(count, classes)) > 1).astype(np.int8)
    np.savez(file, x_train=vectors[TEST:], y_train=labels[TEST:], x_test=vectors[:TEST], y_test=labels[:TEST])


def memory_of_process(field: str) -> float:
    """Memory of this process in MB: VmRSS is the current value, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def workers_cpu() -> float:
    """CPU seconds of the child processes so far."""
    total = 0.0
    for process in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def measure(file: Path, options: argparse.Namespace, clients: int, participants: float) -> dict[str, Any]:
    """One run in this process. `participants` is a share of the clients if it is below 1, else a number per round."""
    from fedmll.cli.options import parse_settings
    from fedmll.config.experiment import Experiment
    from fedmll.config.toml_values import merge_overrides
    from fedmll.training.callbacks import Callback
    from fedmll.training.round_loop import run

    part = {"fraction": participants} if participants < 1 else {"count": int(min(participants, clients))}
    settings = {
        "data.name": f"features:{file}",
        "method.name": options.method,
        "partition.kind": "iid",
        "partition.clients": clients,
        "partition.holdout": 0.0,
        "model.channels": (256, 256),
        "training.rounds": options.rounds,
        "training.batch_size": 16,
        "engine.workers": 1,
    } | {f"participation.{key}": value for key, value in part.items()}
    rows: list[dict[str, float]] = []

    class Clock(Callback):
        def on_run_start(self, *_: Any) -> None:
            self.on_round_end({"clients": 0})

        def on_round_end(self, row: Any) -> None:
            now = {"server": time.process_time(), "worker": workers_cpu(), "clients": row["clients"]}
            rows.append(now | {"now": memory_of_process("VmRSS"), "peak": memory_of_process(PEAK)})

    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment.make(merge_overrides({}, settings | parse_settings(options.set)))
        result = run(experiment, Path(folder) / "run", callback=Clock())
    before, *rounds = rows
    count = int(rounds[0]["clients"])
    later = list(itertools.pairwise(rounds))  # the first round also loads things
    return {
        "participants": count,
        "start": before["server"],
        "server": statistics.median(b["server"] - a["server"] for a, b in later),
        "worker": (rounds[-1]["worker"] - rounds[0]["worker"]) / len(later) / count,
        "before": before["now"],
        "rounds": rounds[-1]["peak"] - before["now"],
        "worker peak": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
        "model": sum(tensor.numel() for tensor in result.weights.values()) * 4 / 1e6,
    }


HEADER = (
    "clients", "per round", "to round 1, s", "server, ms per round", "worker, ms per client", "server before",
    "rounds add", "worker", "all replies",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 200, 2_000, 51_414])
    parser.add_argument("--count", type=int, default=50, help="clients per round")
    parser.add_argument(
        "--shares", type=float, nargs="+", help="instead of --count: shares of the clients that take part"
    )
    parser.add_argument("--samples", type=int, default=8, help="samples per client")
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--set", action="append", metavar="section.key=value", help="any setting of the experiment")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # in a child process: one row
    options = parser.parse_args()
    if options.one:
        file, clients, participants = options.one
        print(json.dumps(measure(Path(file), options, int(clients), float(participants))))
        return
    print(f"{options.method}, {options.classes} classes, {options.samples} samples per client; "
          f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")  # fmt: skip
    print("| " + " | ".join(HEADER) + " |\n|" + "---:|" * len(HEADER))
    found = []
    for clients in options.clients:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "data.npz"
            write_data(file, clients * options.samples, options.classes)
            for participants in options.shares or [options.count]:
                command = [sys.executable, __file__, *sys.argv[1:], "--one", str(file), str(clients), str(participants)]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                found.append(json.loads(output.splitlines()[-1]))
                print_row(clients, found[-1])
    equal = [row for row in found if row["participants"] == found[-1]["participants"]]
    if len(equal) > 1:
        print_growth(equal[0], equal[-1])


def print_row(clients: int, row: dict[str, Any]) -> None:
    count = row["participants"]
    cells = [f"{clients:,}", f"{count:,}", f"{row['start']:.1f}", f"{1e3 * row['server']:.0f}"]
    cells += [f"{1e3 * row['worker']:.1f}", *(f"{row[key]:.0f}" for key in ("before", "rounds", "worker peak"))]
    print("| " + " | ".join([*cells, f"{row['model'] * count:.0f}"]) + " |", flush=True)


def print_growth(first: dict[str, Any], last: dict[str, Any]) -> None:
    """Print how much larger the values of the last row are. Both rows have the same number of participants."""
    keys = ("start", "server", "worker", "before", "rounds", "worker peak")
    cells = [f"{last[key] / first[key]:.2f}×" if first[key] else "" for key in keys]
    print("| " + " | ".join(["growth", "", *cells, ""]) + " |")


if __name__ == "__main__":
    main()
