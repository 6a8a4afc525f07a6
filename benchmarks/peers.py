"""fedmll's local engine against pfl-research and Flower's simulation: the time of a round, all with two workers.

    python benchmarks/peers.py                       installs both, each in an environment of its own, the first time
    python benchmarks/peers.py --environments FOLDER --peers pfl --turns 5 --together 25

The work is the same for all: 100 clients with 320 vectors each, 10 steps of batches of 32, FedAvg, an MLP of 10,900
weights from the same initial ones, the same torch, its fused optimiser, one thread a process. Each library takes its
turn, again and again; the ratio of each turn is what counts, its median is shown: the machine may be busy with other
things; then the CPU time of all of a library's processes says more than the time on the wall. A round is what the user
waits for: from the end of one to the end of the next, without evaluation, the first one left out. What each has learned
is measured by the same code in the end. fedmll has two rows: as it is by default, and with `training.together`.

The peers' programs are in benchmarks/peer_programs/. A peer that cannot be installed has a row that says so.
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
from peer_programs.clock import DRIVER, now
from torch.nn import functional as F

from fedmll.data import federation
from fedmll.evaluation import metrics
from fedmll.experiment import Experiment
from fedmll.running.loop import run
from fedmll.running.observers import Observer

PROGRAMS = Path(__file__).parent / "peer_programs"
PACKAGES = {"pfl": "pfl[pytorch]", "flower": "flwr[simulation]"}
DISTRIBUTIONS = {"pfl": "pfl", "flower": "flwr"}
GOALS = {"pfl": 2.0, "flower": 5.0}
CLIENTS, STEPS, BATCH, FEATURES, HIDDEN, CLASSES, WORKERS = 100, 10, 32, 64, 128, 20, 2
TOGETHER = 25  # a quarter of the clients: two groups a worker
RATES = {"sgd": 0.1, "adamw": 1e-3}
WEIGHT_DECAY = 0.01
NAMES = ("w0", "b0", "w1", "b1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(tempfile.gettempdir()) / "fedmll-peers"
    parser.add_argument("--environments", type=Path, default=default, help="where the peers are installed")
    parser.add_argument("--peers", nargs="*", choices=list(PACKAGES), default=list(PACKAGES))
    parser.add_argument("--optimizers", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--together", type=int, default=TOGETHER, help="of fedmll's second row: clients at once")
    parser.add_argument("--fedmll", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fedmll:
        how, *files = options.fedmll
        fedmll_program(*map(Path, files), options.together if how == "together" else None)
        return
    pythons = {peer: installed(options.environments, peer) for peer in options.peers}
    header = (
        "optimiser", "library", "round, s", "its CPU, s", "fedmll is faster by", "in CPU time", "together: by",
        "in CPU time", "wanted", "test loss", "mAP, %",
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
    own = [sys.executable, __file__, "--together", str(options.together), "--fedmll"]
    commands = {"fedmll": [*own, "alone"], "together": [*own, "together"]}
    for peer, python in pythons.items():
        torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", str(WORKERS)] if peer == "pfl" else []
        if python is not None:
            commands[peer] = [str(python), *torchrun, str(PROGRAMS / f"{peer}_program.py")]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}  # on the wall, of the CPU
    learned: dict[str, tuple[float, float]] = {}
    for _ in range(options.turns):
        for name, command in commands.items():
            result = folder / f"{name}.npz"
            start([*command, str(work), str(setting), str(result)])
            found = np.load(result)
            times[name].append(tuple(np.median(found["seconds"][1:], axis=0)))
            learned[name] = judged(work, found)
    for name in ("fedmll", "together", *pythons):
        if name not in commands:
            print(f"| {optimizer} | {name} | does not install here | | | | | | {GOALS[name]:g}× | | |")
            continue
        wall, cpu = (statistics.median(turn[kind] for turn in times[name]) for kind in (0, 1))
        called = f"fedmll, together = {options.together}" if name == "together" else name
        cells = [optimizer, called, f"{wall:.3f}", f"{cpu:.3f}", "", "", "", "", ""]
        if name in pythons:
            pairs = [(kind, list(zip(times[name], times[ours], strict=True)))
                     for ours in ("fedmll", "together") for kind in (0, 1)]  # fmt: skip
            faster = [statistics.median(a[kind] / b[kind] for a, b in turns) for kind, turns in pairs]
            cells[1] += f" {version_of(pythons[name], name)}"
            cells[4:] = [*(f"{ratio:.2f}×" for ratio in faster), f"{GOALS[name]:g}×"]
        print("| " + " | ".join([*cells, f"{learned[name][0]:.4f}", f"{learned[name][1]:.1f}"]) + " |", flush=True)


def start(command: list[str]) -> None:
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    environment = os.environ | quiet | {"OMP_NUM_THREADS": "1", DRIVER: str(os.getpid())}
    if command[0] != sys.executable:
        environment["PYTHONPATH"] = str(PROGRAMS)  # the rest is in the peer's own environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")


# ---- the work


def write_work(file: Path, values: dict[str, Any]) -> None:
    """Vectors and labels; fedmll's division of them among the clients and its initial weights, for everybody."""
    rng, count = np.random.default_rng(0), CLIENTS * STEPS * BATCH
    latent = rng.normal(size=(count + 2000, 8))
    x = (latent @ rng.normal(size=(8, FEATURES)) + rng.normal(size=(count + 2000, FEATURES))).astype(np.float32) / 3
    y = (latent @ rng.normal(size=(8, CLASSES)) + rng.normal(size=(count + 2000, CLASSES)) > 3).astype(np.int8)
    np.savez(file, x_train=x[2000:], y_train=y[2000:], x_test=x[:2000], y_test=y[:2000])
    divided = federation.build(experiment_of(file, values | {"rounds": 1, "workers": 0}))
    from fedmll.engines.learner import Learner
    from fedmll.task import task_of

    model = Learner(task_of(divided)).model
    weights = dict(zip(NAMES, (p.detach().numpy() for p in model.parameters()), strict=True))
    shared = {"x": x[2000:], "y": y[2000:], "rows": np.stack(divided.samples)}
    np.savez(file, x_train=x[2000:], y_train=y[2000:], x_test=x[:2000], y_test=y[:2000], **shared, **weights)


def judged(work: Path, found: Any) -> tuple[float, float]:
    """Test loss and mean average precision of the weights that a library left."""
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


class Clock(Observer):
    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def started(self, *_: Any) -> None:
        self.times.append(now())

    def client_done(self, round: int, done: int, total: int) -> None:
        if done == total:  # not round_done: after the last round comes an evaluation, which the others do not have
            self.times.append(now())


def fedmll_program(work: Path, setting: Path, result: Path, together: int | None) -> None:
    clock, made = Clock(), experiment_of(work, json.loads(setting.read_text()))
    found = run(made.changed({"training.together": together}), observer=clock)
    final = dict(zip(NAMES, (tensor.numpy() for tensor in found.weights.values()), strict=True))
    np.savez(result, seconds=np.diff(clock.times, axis=0), **final)


# ---- environments


def installed(folder: Path, peer: str) -> Path | None:
    """The Python of the peer's own environment, made where it is not there; None: it does not install."""
    python = folder / peer / "bin" / "python"
    if (folder / peer / "ready").exists():
        return python
    print(f"installing {PACKAGES[peer]} in {folder / peer} …", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / peer)], check=True)
    wanted = [PACKAGES[peer], f"torch=={torch.__version__.partition('+')[0]}"]
    command = [str(python), "-m", "pip", "install", "--quiet", *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    (folder / peer / "ready").touch()
    return python


def version_of(python: Path | None, peer: str) -> str:
    code = f"from importlib.metadata import version; print(version('{DISTRIBUTIONS[peer]}'))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
