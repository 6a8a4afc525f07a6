"""The overhead of the local engine: a FedAvg round compared with a plain PyTorch loop of the same steps.

    python benchmarks/overhead.py               three tables, about half an hour on two cores: CPU time of one worker,
                                                time with one and two workers, and peak memory
    python benchmarks/overhead.py --quick       fewer repetitions
    python benchmarks/overhead.py --cpu         only the first table
    python benchmarks/overhead.py --memory      only the third table
    python benchmarks/overhead.py --vectorized  another table: several clients trained at once
                                                (training.clients_per_batch) compared with one after the other, also for
                                                models that fedmll rejects because they become slower

The plain loop is what one would write by hand for one process: one torch thread, one model object, the fused optimizer,
data in memory as tensors (in the first table gathered once per client), an average of state dictionaries. Loop and
engine take turns in one process. Because the machine may be busy with other things, the tables show the median of the
ratios of the turns. CPU seconds are those of this process and its worker.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from fedmll.cli.output import plain_table
from fedmll.config.experiment import Experiment
from fedmll.core.message import Tensors
from fedmll.data import federation
from fedmll.engines.local import LocalEngine
from fedmll.methods.fedctran import random_known
from fedmll.methods.fednca_ml import contrast, log_rejection
from fedmll.testing import aggregate

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
    """One round of the engine; seconds."""
    begin = time.perf_counter()
    aggregate(engine.method, state, engine.collect_replies(state, number), number)
    return time.perf_counter() - begin


def plain_loop(engine: LocalEngine) -> float:
    """The same round as a plain loop; seconds."""
    data, model = engine.federation, engine.method.build_model()
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


def print_speed(console: Console, repetitions: int) -> None:
    rows = []
    for backbone in ("convnet", "resnet18"):
        data = federation.build(experiment(backbone, CLIENTS, 1))
        engines = {
            workers: LocalEngine(
                replace(data, experiment=experiment(backbone, CLIENTS, workers)), Path(tempfile.mkdtemp())
            )
            for workers in (1, 2)
        }
        state = engines[1].initial_state()
        count = repetitions if backbone == "convnet" else max(2, repetitions // 3)
        times: dict[str, list[float]] = {"loop": [], "1": [], "2": []}
        for turn in range(count + 1):
            seconds = {
                "loop": plain_loop(engines[1]),
                "1": engine_round(engines[1], state, turn + 1),
                "2": engine_round(engines[2], state, turn + 1),
            }
            if turn:  # the first turn warms up
                for name, value in seconds.items():
                    times[name].append(value)
        for engine in engines.values():
            engine.close()
        one = statistics.median(a / b for a, b in zip(times["1"], times["loop"], strict=True))
        two = statistics.median(a / b for a, b in zip(times["1"], times["2"], strict=True))
        medians = [f"{statistics.median(times[name]):.2f} s" for name in ("loop", "1", "2")]
        rows.append([backbone, *medians, f"{one:.3f}×", f"{two:.2f}×"])
    header = ("backbone, 32 px", "raw loop", "1 worker", "2 workers", "1 worker / loop", "speed-up of 2 workers")
    console.print(plain_table(f"one FedAvg round, {CLIENTS} clients, {data.sizes.sum()} images", header, rows))


# ---- CPU time of one worker

Loss = Callable[[Any, Tensor, Tensor], Tensor]  # (network, inputs, targets: 1.0 present, 0.0 absent) → loss


def bce(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(inputs), targets)


def nca_loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """The three terms of FedNCA-ML with its default weights."""
    features = model.features(inputs)
    similarity = features @ model.prototypes.T
    loss = F.binary_cross_entropy_with_logits(model.logits(features), targets)
    loss = loss + 0.01 * log_rejection(similarity, targets == 0, 0.3)
    return loss + contrast(features, model.prototypes, targets == 1, None)


def label_mask_loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """Label mask training of C-Tran."""
    samples, classes = targets.shape
    known = random_known(samples, classes, 0.75, torch.default_generator)
    states = targets.masked_fill(~known, -1).to(torch.int8)
    return (F.binary_cross_entropy_with_logits(model(inputs, states), targets, reduction="none") * (states < 0)).sum()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the first table or of the table of vectorized clients."""

    title: str
    goal: float = 0.0  # the largest ratio of the engine's CPU time to that of the loop
    clients: int
    samples: int | None = None  # feature vectors per client; None: composites of digits
    optimizer: str = "adamw"
    model: dict[str, Any] = field(default_factory=dict)
    method: str = "fedavg"
    loss: Loss = bce
    limit: int | None = None  # the number of composites
    clients_per_batch: tuple[int, ...] = ()  # the columns of the table of vectorized clients

    def experiment(self, folder: Path) -> Experiment:
        data: dict[str, Any] = {"name": "ml-digits", "size": 16, "limit": self.limit}
        if self.samples is not None:
            data = {"name": f"features:{write_vectors(folder, self.clients * self.samples)}"}
        return Experiment.make(
            {
                "data": {name: value for name, value in data.items() if value is not None},
                "partition": {"kind": "iid", "clients": self.clients, "holdout": 0.0, "minimum": 1},
                "model": self.model,
                "method": {"name": self.method},
                "training": {"optimizer": self.optimizer, "lr": 0.01 if self.optimizer == "sgd" else 1e-3},
                "engine": {"workers": 1},
            }
        )


MLP, FROZEN = {"channels": [128]}, {"freeze": "backbone"}
NECK = FROZEN | {"norm": "group", "width": 64}
SIZES, SMALL_SIZES = (4, 8, 16, 25, 50), (5, 10)  # clients at once
CASES = (
    Case(
        title="MLP of 11k weights, SGD", goal=1.10, clients=100, samples=320, optimizer="sgd", model=MLP,
        clients_per_batch=SIZES,
    ),
    Case(title="MLP of 11k weights, AdamW", goal=1.10, clients=100, samples=320, model=MLP, clients_per_batch=SIZES),
    Case(
        title="the same, clients of 10 samples", goal=1.25, clients=2000, samples=10, model=MLP,
        clients_per_batch=SIZES,
    ),
    Case(
        title="linear head on cached tokens", goal=1.10, clients=CLIENTS, model=FROZEN, clients_per_batch=SMALL_SIZES
    ),
    Case(
        title="ETF and LADM on cached tokens", goal=1.10, clients=CLIENTS, model=FROZEN, method="fednca-ml",
        loss=nca_loss,
    ),
    Case(
        title="C-Tran on cached tokens", goal=1.10, clients=CLIENTS, model=FROZEN, method="fedctran",
        loss=label_mask_loss,
    ),
    Case(title="convnet, 32 px", goal=1.03, clients=CLIENTS, model={"backbone": "convnet"}),
    Case(title="ResNet-18, 32 px", goal=1.03, clients=2, model={"backbone": "resnet18"}, limit=128),
)  # fmt: skip
ONLY_VECTORIZED = (  # large models, which are in the table of vectorized clients only
    Case(
        title="MLP of 87k weights", clients=20, samples=320, model={"channels": [1024]}, clients_per_batch=SMALL_SIZES
    ),
    Case(
        title="MLP of 1.1 million weights", clients=20, samples=320, model={"channels": [1024, 1024]},
        clients_per_batch=SMALL_SIZES,
    ),
    Case(
        title="neck and linear head on cached tokens", clients=CLIENTS, model=NECK, clients_per_batch=SMALL_SIZES
    ),
)  # fmt: skip


def write_vectors(folder: Path, samples: int) -> Path:
    """Write random feature vectors with labels of 20 classes."""
    generator, path = np.random.default_rng(0), folder / "data.npz"
    features = generator.normal(size=(samples, 64)).astype(np.float32)
    labels = (generator.random((samples, 20)) < 0.2).astype(np.int8)
    np.savez(path, x_train=features, y_train=labels, x_test=features[:50], y_test=labels[:50])
    return path


def cpu_of(engine: LocalEngine) -> float:
    """CPU seconds of this process and the workers of the engine so far."""
    assert engine.pool is not None
    clocks = [(~worker.process.pid) << 3 | 2 for worker in engine.pool.workers]  # type: ignore[operator]
    return time.process_time() + sum(map(time.clock_gettime, clocks))


def plain_round(case: Case, engine: LocalEngine) -> float:
    """The same round as a plain loop; CPU seconds."""
    data, model = engine.federation.train, engine.method.build_model()
    if case.samples is not None:
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 20))  # type: ignore[assignment]
    else:
        model.backbone.stores_means = engine.trainer.model.backbone.stores_means  # the same inputs
    store = data.store if data.tokens is None else data.tokens[0]
    clients = [(torch.from_numpy(store[data.rows[rows]]), torch.from_numpy(data.labels[rows]).float())
               for rows in engine.federation.samples]  # fmt: skip
    start = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total, average = sum(len(targets) for _, targets in clients), Tensors()
    torch.set_num_threads(1)
    begin = time.process_time()
    for samples, targets in clients:
        model.load_state_dict(start)
        model.train()
        if case.optimizer == "sgd":
            optimizer: Any = torch.optim.SGD(parameters, 0.01, weight_decay=0.01, fused=True)
        else:
            optimizer = torch.optim.AdamW(parameters, 1e-3, weight_decay=0.01, fused=True)
        for batch in torch.randperm(len(targets)).split(32):
            inputs = samples[batch]
            if inputs.dtype == torch.uint8:
                inputs = inputs.float().div_(255).sub_(0.5).div_(0.5)
            case.loss(model, inputs, targets[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, value in model.state_dict().items():
            part = value * (len(targets) / total)
            average[name] = average[name] + part if name in average else part
    return time.process_time() - begin


def cpu_ratio(case: Case, repetitions: int) -> tuple[float, float, float]:
    """CPU seconds of the loop and of the engine, and their ratio: medians over the turns."""
    with tempfile.TemporaryDirectory() as folder:
        engine = LocalEngine(federation.build(case.experiment(Path(folder))), Path(folder) / "client_state")
        state, turns = engine.initial_state(), list[tuple[float, float]]()
        for turn in range(repetitions + 1):
            loop, begin = plain_round(case, engine), cpu_of(engine)
            aggregate(engine.method, state, engine.collect_replies(state, turn + 1), turn + 1)
            turns.append((loop, cpu_of(engine) - begin))
        engine.close()
    measured = turns[1:]  # the first turn warms up
    loops, engines = zip(*measured, strict=True)
    return statistics.median(loops), statistics.median(engines), statistics.median(b / a for a, b in measured)


def print_cpu(console: Console, repetitions: int, only: str) -> None:
    rows = []
    for case in CASES:
        if only in case.title:
            loop, engine, ratio = cpu_ratio(case, max(2, repetitions // 2) if case.limit else repetitions)
            rows.append([case.title, f"{case.clients:,}", f"{loop:.2f} s", f"{engine:.2f} s", f"{ratio:.3f}×",
                         f"{case.goal:.2f}×"])  # fmt: skip
    header = ("what trains", "clients", "raw loop", "1 worker and server", "ratio", "goal")
    load = f"load {os.getloadavg()[1]:.1f} on {len(os.sched_getaffinity(0))} cores"
    console.print(plain_table(f"CPU time of a round, one worker; {load}", header, rows))


# ---- several clients at once


def print_vectorized(console: Console, repetitions: int, only: str) -> None:
    rows = []
    for case in (*CASES, *ONLY_VECTORIZED):
        if only not in case.title or not case.clients_per_batch:
            continue
        with tempfile.TemporaryDirectory() as folder, patch("fedmll.engines.local.check_vectorizable"):
            data = federation.build(case.experiment(Path(folder)))
            engines = {
                size: LocalEngine(
                    data.with_experiment(data.experiment.changed({"training.clients_per_batch": size})), Path(folder)
                )
                for size in (None, *case.clients_per_batch)
            }
            state, turns = engines[None].initial_state(), list[dict[int | None, float]]()
            for _ in range(repetitions + 1):
                turns.append({})
                for size, engine in engines.items():
                    begin = cpu_of(engine)
                    aggregate(engine.method, state, engine.collect_replies(state, 1), 1)
                    turns[-1][size] = cpu_of(engine) - begin
            for engine in engines.values():
                engine.close()
        measured = turns[1:]  # the first turn warms up
        faster = (
            f"{n}: {statistics.median(turn[None] / turn[n] for turn in measured):.2f}×" for n in case.clients_per_batch
        )
        sequential = statistics.median(turn[None] for turn in measured)
        rows.append([case.title, f"{case.clients:,}", f"{sequential:.2f} s", ", ".join(faster)])
    load = f"load {os.getloadavg()[1]:.1f} on {len(os.sched_getaffinity(0))} cores"
    header = ("what trains", "clients", "one after the other", "speed-up with n clients at once")
    console.print(plain_table(f"CPU time of a round, several clients at once; {load}", header, rows))


# ---- memory


def measure_memory(clients: int) -> None:
    """In a child process: run one round, then print the peak memory of this process and of its worker in MB."""
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
        engine = LocalEngine(federation.build(setting), Path(folder) / "client_state")
        state = engine.initial_state()
        engine_round(engine, state, 1)
        engine.close()
    # ru_maxrss of this process would begin with the peak of its parent process
    status = Path("/proc/self/status").read_text()
    own = int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1])
    print(json.dumps([own / 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024]))


def print_memory(console: Console) -> None:
    peaks = {}
    for clients in (20, 2_000):
        answer = subprocess.run(
            [sys.executable, __file__, "--memory-of", str(clients)], capture_output=True, text=True, check=True
        )
        peaks[clients] = json.loads(answer.stdout.splitlines()[-1])
    rows = [[f"{clients:,}", f"{main:.0f} MB", f"{worker:.0f} MB"] for clients, (main, worker) in peaks.items()]
    rows.append(["ratio", *(f"{many / few:.3f}×" for few, many in zip(peaks[20], peaks[2_000], strict=True))])
    title = "peak memory of a round, 20,000 samples in all, MLP of 1.1 million weights"
    console.print(plain_table(title, ("clients per round", "server process", "worker"), rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--cpu", action="store_true", help="only the first table")
    parser.add_argument("--vectorized", action="store_true", help="only the table of several clients at once")
    parser.add_argument(
        "--only", default="", help="with --cpu or --vectorized: only rows whose title contains this text"
    )
    parser.add_argument("--memory", action="store_true", help="only the last table")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        measure_memory(arguments.memory_of)
        return
    console = Console(width=120)
    if arguments.vectorized:
        print_vectorized(console, 3 if arguments.quick else 7, arguments.only)
        return
    if not arguments.memory:
        print_cpu(console, 3 if arguments.quick else 12, arguments.only)
    if arguments.cpu:
        return
    if not arguments.memory:
        print_speed(console, 3 if arguments.quick else 12)
    print_memory(console)


if __name__ == "__main__":
    main()
