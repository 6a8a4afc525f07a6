"""What the engine costs: a FedAvg round against a raw PyTorch loop of the same steps, and memory against clients.

    python benchmarks/overhead.py            both tables, about fifteen minutes on two cores
    python benchmarks/overhead.py --quick    fewer repetitions, five minutes

The loop is what one would write by hand for one process: one torch thread, one model object, fused AdamW, uint8 images
in memory, batches of 32, an average of state dictionaries. Loop and engine take turns in one process, and the ratio of
each turn is what counts (its median is shown): the machine may be busy with other things.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch.nn import functional as F

from fedmll.cli.tables import plain_table
from fedmll.data import federation
from fedmll.engines.local import LocalEngine
from fedmll.experiment import Experiment
from fedmll.message import Tensors
from fedmll.testing import merge

CLIENTS = 10


def experiment(backbone: str, clients: int, workers: int) -> Experiment:
    return Experiment.make(
        {
            "data": {"name": "ml-digits", "size": 16},
            "partition": {"kind": "iid", "clients": clients, "holdout": 0.0},
            "model": {"backbone": backbone},
            "engine": {"workers": workers},
        }
    )


def engine_round(engine: LocalEngine, state: Tensors, number: int) -> float:
    begin = time.perf_counter()
    merge(engine.method, state, engine.round(state, number), number)
    return time.perf_counter() - begin


def raw_loop(engine: LocalEngine, state: Tensors) -> float:
    """The same round by hand."""
    data, model = engine.federation, engine.method.model()
    images = torch.from_numpy(data.train.store)
    targets = torch.from_numpy(data.train.labels).float()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    clients = [torch.from_numpy(rows) for rows in data.samples]
    torch.set_num_threads(1)
    begin = time.perf_counter()
    average: Tensors = {}
    total = sum(len(rows) for rows in clients)
    for rows in clients:
        model.load_state_dict(start)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01, fused=True)
        for batch in rows[torch.randperm(len(rows))].split(32):
            x = images[batch].float().div_(255).sub_(0.5).div_(0.5)
            F.binary_cross_entropy_with_logits(model(x), targets[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, value in model.state_dict().items():
            part = value * (len(rows) / total)
            average[name] = average[name] + part if name in average else part
    return time.perf_counter() - begin


def speed(console: Console, repetitions: int) -> None:
    rows = []
    for backbone in ("convnet", "resnet18"):
        data = federation.build(experiment(backbone, CLIENTS, 1))
        engines = {
            workers: LocalEngine(
                replace(data, experiment=experiment(backbone, CLIENTS, workers)), Path(tempfile.mkdtemp())
            )
            for workers in (1, 2)
        }
        state = engines[1].start()
        count = repetitions if backbone == "convnet" else max(2, repetitions // 3)
        times: dict[str, list[float]] = {"loop": [], "1": [], "2": []}
        for turn in range(count + 1):
            taken = {
                "loop": raw_loop(engines[1], state),
                "1": engine_round(engines[1], state, turn + 1),
                "2": engine_round(engines[2], state, turn + 1),
            }
            if turn:  # the first turn warms up
                for name, seconds in taken.items():
                    times[name].append(seconds)
        for engine in engines.values():
            engine.close()
        one = statistics.median(a / b for a, b in zip(times["1"], times["loop"], strict=True))
        two = statistics.median(a / b for a, b in zip(times["1"], times["2"], strict=True))
        medians = [f"{statistics.median(times[name]):.2f} s" for name in ("loop", "1", "2")]
        rows.append([backbone, *medians, f"{one:.3f}×", f"{two:.2f}×"])
    header = ("backbone, 32 px", "raw loop", "1 worker", "2 workers", "1 worker / loop", "speed-up of 2 workers")
    console.print(plain_table(f"a FedAvg round, {CLIENTS} clients, {data.sizes.sum()} images", header, rows))


def memory_of(clients: int) -> None:
    """In a process of its own: one round, then its peak memory and its worker's, in MB, on standard output."""
    generator = np.random.default_rng(0)
    features = generator.normal(size=(20_000, 64)).astype(np.float32)
    labels = (generator.random((20_000, 10)) < 0.2).astype(np.int8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npz"
        np.savez(path, x_train=features, y_train=labels, x_test=features[:500], y_test=labels[:500])
        setting = Experiment.make(
            {
                "data": {"name": f"features:{path}"},
                "partition": {"kind": "iid", "clients": clients, "holdout": 0.0},
                "model": {"channels": [1024, 1024]},
                "engine": {"workers": 1},
            }
        )
        engine = LocalEngine(federation.build(setting), Path(folder) / "memory")
        state = engine.start()
        engine_round(engine, state, 1)
        engine.close()
    # not ru_maxrss of this process: it starts with the peak of the process that started it
    status = Path("/proc/self/status").read_text()
    own = int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1])
    print(json.dumps([own / 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024]))


def memory(console: Console) -> None:
    peaks = {}
    for clients in (20, 2_000):
        answer = subprocess.run(
            [sys.executable, __file__, "--memory-of", str(clients)], capture_output=True, text=True, check=True
        )
        peaks[clients] = json.loads(answer.stdout.splitlines()[-1])
    rows = [[f"{clients:,}", f"{main:.0f} MB", f"{worker:.0f} MB"] for clients, (main, worker) in peaks.items()]
    rows.append(["ratio", *(f"{many / few:.3f}×" for few, many in zip(peaks[20], peaks[2_000], strict=True))])
    title = "peak memory of a round, 20,000 samples in all, an MLP of 1.1 million weights"
    console.print(plain_table(title, ("clients a round", "server process", "worker"), rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--memory", action="store_true", help="only the second table")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        memory_of(arguments.memory_of)
        return
    console = Console(width=120)
    if not arguments.memory:
        speed(console, 3 if arguments.quick else 12)
    memory(console)


if __name__ == "__main__":
    main()
