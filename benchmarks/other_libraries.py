"""The time of a round of fedmll's local engine, compared with pfl-research and Flower's simulation.

    python benchmarks/other_libraries.py      installs both libraries, each in its own environment, the first time
    python benchmarks/other_libraries.py --environments FOLDER --libraries pfl --turns 5 --clients-per-batch 25

The work is the same for all: 100 clients with 320 vectors each, 10 steps with batches of 32, FedAvg, an MLP of 10,900
weights with the same initial values, the same version of torch, its fused optimizer, two workers with one thread each.
The libraries take turns. Because the machine may be busy with other things, the table shows the median of the ratios of
the turns; on a busy machine the CPU time of all processes of a library says more than the elapsed time. The time of a
round is what the user waits for: from the end of one round to the end of the next, without evaluation and without the
first round. The same code evaluates the final weights of all libraries. fedmll has two rows: with its defaults, and
with `training.clients_per_batch`.

The programs of the other libraries are in benchmarks/other_library_programs/. A library that cannot be installed has a
row that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from other_library_programs.clock import DRIVER, now
from torch.nn import functional as F

from fedmll.config.experiment import Experiment
from fedmll.data import federation
from fedmll.engines.client_trainer import Trainer
from fedmll.evaluation import metrics
from fedmll.methods.framework.task import task_of
from fedmll.training.callbacks import Callback
from fedmll.training.round_loop import run

PROGRAMS = Path(__file__).parent / "other_library_programs"
PACKAGES = {"pfl": "pfl[pytorch]", "flower": "flwr[simulation]"}
DISTRIBUTIONS = {"pfl": "pfl", "flower": "flwr"}
GOALS = {"pfl": 2.0, "flower": 5.0}
CLIENTS, STEPS, BATCH, FEATURES, HIDDEN, CLASSES, WORKERS = 100, 10, 32, 64, 128, 20, 2
CLIENTS_PER_BATCH = 25  # a quarter of the clients: two groups per worker
RATES = {"sgd": 0.1, "adamw": 1e-3}
WEIGHT_DECAY = 0.01
NAMES = ("w0", "b0", "w1", "b1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(tempfile.gettempdir()) / "fedmll-other-libraries"
    parser.add_argument(
        "--environments", type=Path, default=default, help="the folder in which the libraries are installed"
    )
    parser.add_argument("--libraries", nargs="*", choices=list(PACKAGES), default=list(PACKAGES))
    parser.add_argument("--optimizers", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--clients-per-batch", type=int, default=CLIENTS_PER_BATCH, help="in fedmll's second row")
    parser.add_argument("--fedmll", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fedmll:
        variant, *files = options.fedmll
        work, setting, result = map(Path, files)
        fedmll_program(work, setting, result, options.clients_per_batch if variant == "vectorized" else None)
        return
    pythons = {library: install(options.environments, library) for library in options.libraries}
    header = (
        "optimizer", "library", "round, s", "its CPU, s", "fedmll is faster by", "in CPU time", "clients at once: by",
        "in CPU time", "goal", "test loss", "mAP, %",
    )  # fmt: skip
    print(f"{CLIENTS} clients × {STEPS} steps, {WORKERS} workers, {options.turns} turns of {options.rounds} rounds; "
          f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")  # fmt: skip
    print("| " + " | ".join(header) + " |\n|---|---|" + "---:|" * (len(header) - 2), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for optimizer in options.optimizers:
            compare(Path(folder), optimizer, pythons, options)


def compare(folder: Path, optimizer: str, pythons: dict[str, Path | None], options: argparse.Namespace) -> None:
    work, setting = folder / "work.npz", folder / "setting.json"
    values = {"optimizer": optimizer, "lr": RATES[optimizer], "weight_decay": WEIGHT_DECAY, "batch_size": BATCH}
    setting.write_text(json.dumps(values | {"rounds": options.rounds, "workers": WORKERS}))
    write_work(work, values)
    fedmll = [sys.executable, __file__, "--clients-per-batch", str(options.clients_per_batch), "--fedmll"]
    commands = {"fedmll": [*fedmll, "default"], "vectorized": [*fedmll, "vectorized"]}
    for library, python in pythons.items():
        torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", str(WORKERS)] if library == "pfl" else []
        if python is not None:
            commands[library] = [str(python), *torchrun, str(PROGRAMS / f"{library}_program.py")]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}  # elapsed, CPU
    quality: dict[str, tuple[float, float]] = {}
    for _ in range(options.turns):
        for name, command in commands.items():
            result = folder / f"{name}.npz"
            run_program([*command, str(work), str(setting), str(result)])
            found = np.load(result)
            times[name].append(tuple(np.median(found["seconds"][1:], axis=0)))
            quality[name] = evaluate_weights(work, found)
    for name in ("fedmll", "vectorized", *pythons):
        if name not in commands:
            print(f"| {optimizer} | {name} | cannot be installed here | | | | | | {GOALS[name]:g}× | | |")
            continue
        wall, cpu = (statistics.median(turn[kind] for turn in times[name]) for kind in (0, 1))
        label = f"fedmll, clients_per_batch = {options.clients_per_batch}" if name == "vectorized" else name
        cells = [optimizer, label, f"{wall:.3f}", f"{cpu:.3f}", "", "", "", "", ""]
        if name in pythons:
            pairs = [(kind, list(zip(times[name], times[ours], strict=True)))
                     for ours in ("fedmll", "vectorized") for kind in (0, 1)]  # fmt: skip
            faster = [statistics.median(a[kind] / b[kind] for a, b in turns) for kind, turns in pairs]
            cells[1] += f" {version_of(pythons[name], name)}"
            cells[4:] = [*(f"{ratio:.2f}×" for ratio in faster), f"{GOALS[name]:g}×"]
        print("| " + " | ".join([*cells, f"{quality[name][0]:.4f}", f"{quality[name][1]:.1f}"]) + " |", flush=True)


def run_program(command: list[str]) -> None:
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    environment = os.environ | quiet | {"OMP_NUM_THREADS": "1", DRIVER: str(os.getpid())}
    if command[0] != sys.executable:
        environment["PYTHONPATH"] = str(PROGRAMS)  # everything else is in the environment of the library
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")


# ---- the work


def write_work(file: Path, values: dict[str, Any]) -> None:
    """Write vectors and labels, how fedmll divides them over the clients, and its initial weights. All libraries use
    them."""
    rng, count = np.random.default_rng(0), CLIENTS * STEPS * BATCH
    latent = rng.normal(size=(count + 2000, 8))
    x = (latent @ rng.normal(size=(8, FEATURES)) + rng.normal(size=(count + 2000, FEATURES))).astype(np.float32) / 3
    y = (latent @ rng.normal(size=(8, CLASSES)) + rng.normal(size=(count + 2000, CLASSES)) > 3).astype(np.int8)
    np.savez(file, x_train=x[2000:], y_train=y[2000:], x_test=x[:2000], y_test=y[:2000])
    divided = federation.build(experiment_of(file, values | {"rounds": 1, "workers": 0}))
    model = Trainer(task_of(divided)).model
    weights: dict[str, Any] = dict(zip(NAMES, (p.detach().numpy() for p in model.parameters()), strict=True))
    shared: dict[str, Any] = {"x": x[2000:], "y": y[2000:], "rows": np.stack(divided.samples)}
    np.savez(file, x_train=x[2000:], y_train=y[2000:], x_test=x[:2000], y_test=y[:2000], **shared, **weights)


def evaluate_weights(work: Path, found: Any) -> tuple[float, float]:
    """Test loss and mean average precision of the final weights of a library."""
    data = np.load(work)
    w0, b0, w1, b1 = (torch.from_numpy(found[name]) for name in NAMES)
    logits = F.linear(F.relu(F.linear(torch.from_numpy(data["x_test"]), w0, b0)), w1, b1)
    loss = F.binary_cross_entropy_with_logits(logits, torch.from_numpy(data["y_test"]).float()).item()
    names = tuple(f"class {number}" for number in range(CLASSES))
    scores = torch.sigmoid(logits).numpy()
    return loss, metrics.evaluate(scores, data["y_test"], names).values["map"]


# ---- fedmll


def experiment_of(file: Path, values: dict[str, Any]) -> Experiment:
    rounds = values["rounds"]
    return Experiment().changed(
        {
            "data.name": f"features:{file}",
            "partition.kind": "iid",
            "partition.clients": CLIENTS,
            "partition.holdout": 0.0,
            "model.channels": (HIDDEN,),
            "training.rounds": rounds,
            "training.batch_size": values["batch_size"],
            "training.optimizer": values["optimizer"],
            "training.momentum": 0.0,
            "training.lr": values["lr"],
            "training.weight_decay": values["weight_decay"],
            "engine.workers": values["workers"],
            "engine.evaluate_every": rounds,
            "engine.checkpoint_every": rounds,
        }
    )


class Clock(Callback):
    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def on_run_start(self, *_: Any) -> None:
        self.times.append(now())

    def on_client_end(self, round: int, done: int, total: int) -> None:
        if done == total:  # on_round_end comes after an evaluation, which the other libraries do not have
            self.times.append(now())


def fedmll_program(work: Path, setting: Path, result: Path, clients_per_batch: int | None) -> None:
    clock, made = Clock(), experiment_of(work, json.loads(setting.read_text()))
    found = run(made.changed({"training.clients_per_batch": clients_per_batch}), callback=clock)
    final: dict[str, Any] = dict(zip(NAMES, (tensor.numpy() for tensor in found.weights.values()), strict=True))
    np.savez(result, seconds=np.diff(clock.times, axis=0), **final)


# ---- environments


def install(folder: Path, library: str) -> Path | None:
    """The Python of the library's own environment, which is created if it is missing. None: it cannot be installed."""
    python = folder / library / "bin" / "python"
    if (folder / library / "ready").exists():
        return python
    print(f"installing {PACKAGES[library]} in {folder / library} …", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / library)], check=True)
    packages = [PACKAGES[library], f"torch=={torch.__version__.partition('+')[0]}"]
    command = [str(python), "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    (folder / library / "ready").touch()
    return python


def version_of(python: Path | None, library: str) -> str:
    code = f"from importlib.metadata import version; print(version('{DISTRIBUTIONS[library]}'))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
