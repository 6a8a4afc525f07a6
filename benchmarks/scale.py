"""Many clients: what a round costs against how many there are, and against how many of them take part.

    python benchmarks/scale.py                           20 to 51,414 clients (as FLAIR has), 50 a round
    python benchmarks/scale.py --method scaffold --set training.optimizer=sgd
    python benchmarks/scale.py --shares 0.25 0.5 0.75 --clients 2000 --method fedharmony
                                                         participation as in FedHarmony's Fig. 5

Feature vectors with correlated labels, a small network, a whole run with its evaluations, records and checkpoints, each
in a process of its own with one worker, so that each has its own peak. Every client has as many samples, so a round of
50 is the same work however many there are; the data grows with the clients, and is in `before`. Memory in MB: the
server's process before round 1, what the rounds add to it at most, the worker's peak (it shares the data with the
server), and what holding every reply would take. Time is CPU time.
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
PEAK = "VmHWM"  # not ru_maxrss: that begins with the peak of the process that started this one


def write_data(file: Path, samples: int, classes: int) -> None:
    rng = np.random.default_rng(0)
    count = samples + TEST
    latent = rng.normal(size=(count, 4))
    vectors = (latent @ rng.normal(size=(4, FEATURES)) + rng.normal(size=(count, FEATURES))).astype(np.float32)
    labels = (latent @ rng.normal(size=(4, classes)) + rng.normal(size=(count, classes)) > 1).astype(np.int8)
    np.savez(file, x_train=vectors[TEST:], y_train=labels[TEST:], x_test=vectors[:TEST], y_test=labels[:TEST])


def in_memory(what: str) -> float:
    """MB of this process: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) / 1024


def workers_cpu() -> float:
    """CPU seconds of this process's children so far."""
    found = 0.0
    for process in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def measure(file: Path, options: argparse.Namespace, clients: int, taking_part: float) -> dict[str, Any]:
    """In this process: a run. `taking_part` is a share below 1, or a number."""
    from fedmll.cli.options import parse_settings
    from fedmll.experiment import Experiment, merged
    from fedmll.running.loop import run
    from fedmll.running.observers import Observer

    part = {"fraction": taking_part} if taking_part < 1 else {"count": int(min(taking_part, clients))}
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

    class Clock(Observer):
        def started(self, *_: Any) -> None:
            self.round_done({"clients": 0})

        def round_done(self, row: Any) -> None:
            now = {"server": time.process_time(), "worker": workers_cpu(), "clients": row["clients"]}
            rows.append(now | {"now": in_memory("VmRSS"), "peak": in_memory(PEAK)})

    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment.make(merged({}, settings | parse_settings(options.set)))
        result = run(experiment, Path(folder) / "run", observer=Clock())
    before, *rounds = rows
    count = int(rounds[0]["clients"])
    later = list(itertools.pairwise(rounds))  # the first round has things to load
    return {
        "participants": count,
        "start": before["server"],
        "server": statistics.median(b["server"] - a["server"] for a, b in later),
        "worker": (rounds[-1]["worker"] - rounds[0]["worker"]) / len(later) / count,
        "before": before["now"],
        # later rounds only where the first made room: torch's and the evaluation's own buffers are nobody's growth
        "rounds": rounds[-1]["peak"] - before["now"],
        "worker peak": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
        "model": sum(tensor.numel() for tensor in result.weights.values()) * 4 / 1e6,
    }


HEADER = (
    "clients", "a round", "to round 1, s", "server, ms a round", "worker, ms a client", "server before", "rounds add",
    "worker", "all replies",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 200, 2_000, 51_414])
    parser.add_argument("--count", type=int, default=50, help="clients a round")
    parser.add_argument("--shares", type=float, nargs="+", help="shares of the clients that take part, instead")
    parser.add_argument("--samples", type=int, default=8, help="a client")
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--set", action="append", metavar="section.key=value", help="any setting of the experiment")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        file, clients, taking_part = options.one
        print(json.dumps(measure(Path(file), options, int(clients), float(taking_part))))
        return
    print(f"{options.method}, {options.classes} classes, {options.samples} samples a client; "
          f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")  # fmt: skip
    print("| " + " | ".join(HEADER) + " |\n|" + "---:|" * len(HEADER))
    found = []
    for clients in options.clients:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "data.npz"
            write_data(file, clients * options.samples, options.classes)
            for taking_part in options.shares or [options.count]:
                command = [sys.executable, __file__, *sys.argv[1:], "--one", str(file), str(clients), str(taking_part)]
                said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                found.append(json.loads(said.splitlines()[-1]))
                show(clients, found[-1])
    equal = [row for row in found if row["participants"] == found[-1]["participants"]]
    if len(equal) > 1:
        show_growth(equal[0], equal[-1])


def show(clients: int, row: dict[str, Any]) -> None:
    count = row["participants"]
    cells = [f"{clients:,}", f"{count:,}", f"{row['start']:.1f}", f"{1e3 * row['server']:.0f}"]
    cells += [f"{1e3 * row['worker']:.1f}", *(f"{row[key]:.0f}" for key in ("before", "rounds", "worker peak"))]
    print("| " + " | ".join([*cells, f"{row['model'] * count:.0f}"]) + " |", flush=True)


def show_growth(first: dict[str, Any], last: dict[str, Any]) -> None:
    """Of rows with as many participants."""
    keys = ("start", "server", "worker", "before", "rounds", "worker peak")
    cells = [f"{last[key] / first[key]:.2f}×" if first[key] else "" for key in keys]
    print("| " + " | ".join(["growth", "", *cells, ""]) + " |")


if __name__ == "__main__":
    main()
