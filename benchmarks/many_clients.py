"""Thousands of clients: memory and time a round against participation (as in FedHarmony's Fig. 5).

    python benchmarks/many_clients.py                          2,000 clients; 25, 50 and 75 % of them take part
    python benchmarks/many_clients.py --set method.clustering=once
    python benchmarks/many_clients.py --method fedavg

Feature vectors with correlated labels, a small network, every part in a process of its own (so that each has its own
peak). `rounds` is the peak beyond what data, model and libraries take before round 1; `state` is what the server keeps
between rounds: FedHarmony keeps C² numbers for each participant of the last round beside the model; `all models` is
what holding every reply would take.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def write_data(file: Path, samples: int, features: int, classes: int) -> None:
    rng = np.random.default_rng(0)
    latent = rng.normal(size=(samples + 500, 4))
    vectors = (latent @ rng.normal(size=(4, features)) + rng.normal(size=(samples + 500, features))).astype(np.float32)
    labels = (latent @ rng.normal(size=(4, classes)) + rng.normal(size=(samples + 500, classes)) > 1).astype(np.int8)
    arrays = {"x_train": vectors[500:], "y_train": labels[500:], "x_test": vectors[:500], "y_test": labels[:500]}
    np.savez(file, **arrays)


def peak() -> float:
    """MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(
    file: Path, method: str, clients: int, fraction: float, rounds: int, changes: list[str] | None
) -> dict[str, float]:
    """In this process: a federation of so many clients, some rounds."""
    import torch

    from fedmll.cli.options import parse_settings
    from fedmll.data import federation
    from fedmll.engines.local import LocalEngine
    from fedmll.experiment import Experiment, merged
    from fedmll.methods.parts.correlation import spectral_blocks
    from fedmll.testing import merge

    settings = merged(
        {},
        {
            "data.name": f"features:{file}",
            "method.name": method,
            "partition.kind": "iid",
            "partition.clients": clients,
            "partition.holdout": 0.0,
            "participation.fraction": fraction,
            "model.channels": (256, 256),
            "training.rounds": rounds,
            "training.batch_size": 16,
            "engine.workers": 0,
        }
        | parse_settings(changes),
    )
    experiment = Experiment.make(settings)
    with tempfile.TemporaryDirectory() as folder:
        engine = LocalEngine(federation.build(experiment), Path(folder))
        state = engine.start()
        # one client's step before the count begins: torch's own buffers are not the method's
        message = engine.method.send(state, engine.peers[0], 1)
        engine.learner.train(engine.learner.client(engine.federation, engine.peers[0], 1), message, {})
        spectral_blocks(torch.rand(20, 20), 5, seed=0)  # loads SciPy and scikit-learn
        before, times = peak(), []
        for number in range(1, rounds + 1):
            begin = time.process_time()
            state, _ = merge(engine.method, state, engine.round(state, number), number)
            times.append(time.process_time() - begin)
    model = engine.learner.weights.vector.numel() * 4 / 1e6
    kept = sum(t.numel() * t.element_size() for t in state.values() if isinstance(t, torch.Tensor)) / 1e6
    participants = len(engine.federation.participants(1))
    # the first round has no consensus yet
    return {
        "participants": participants,
        "seconds": float(np.median(times[1:])),
        "before": before,
        "rounds": peak() - before,
        "state": kept,
        "model": model,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--method", default="fedharmony")
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=16, help="a client")
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--set", action="append", metavar="section.key=value", help="any setting of the experiment")
    parser.add_argument("--one", nargs=2, metavar=("FILE", "SHARE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        found = measure(
            Path(options.one[0]), options.method, options.clients, float(options.one[1]), options.rounds, options.set
        )
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.npz"
        write_data(file, options.clients * options.samples, 64, options.classes)
        print(f"{options.method}, {options.clients:,} clients, {options.classes} classes; memory in MB\n")
        header = ("part", "clients", "CPU s a round", "ms a client", "before", "rounds", "state", "all models")
        print("| " + " | ".join(header) + " |\n|" + "---:|" * len(header))
        for share in (0.25, 0.5, 0.75):
            command = [sys.executable, __file__, "--one", str(file), str(share), *sys.argv[1:]]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            count, seconds = int(found["participants"]), found["seconds"]
            cells = [f"{share:.0%}", f"{count:,}", f"{seconds:.1f}", f"{1000 * seconds / count:.1f}"]
            cells += [f"{found['before']:.0f}", f"{found['rounds']:.1f}", f"{found['state']:.1f}"]
            print("| " + " | ".join([*cells, f"{found['model'] * count:.0f}"]) + " |", flush=True)


if __name__ == "__main__":
    main()
