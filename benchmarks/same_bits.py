"""Do two versions of fedmll compute the same numbers? Every method trains small federations, and the exact bits of its
weights, losses and metrics become one checksum per run.

    python benchmarks/same_bits.py --out before.json            # with the old code on PYTHONPATH
    python benchmarks/same_bits.py --out after.json --compare before.json

The table has one row per method. A cell says how many runs have the same checksum: 2 seeds for each of complete and
partial annotation, on a trained backbone and, for methods that can use them, on frozen features.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from fedmll import Experiment, FedmllError, run

SGD = {"training.optimizer": "sgd", "training.momentum": 0.0, "training.lr": 0.05}
PER_METHOD: dict[str, dict[str, Any]] = {
    "fedlgt": {"method.encoder": "learned"},
    "fedmlp": {"method.t1": 1, "method.T0": 0.2, "method.T1": 0.3},
    "fednova": SGD,
    "scaffold": SGD,
    "private-fedavg": {"method.loss": "sigmoid"},
    "private-fedprox": {"method.loss": "sigmoid"},
}
METHODS = (
    "cbafed", "centralized", "compose", "condist", "fed-logistic", "fed-ridge", "fedavg", "fedavg-pl", "fedctran",
    "fedcurv", "fedfixmatch", "fedharmony", "fedirm", "fedlgt", "fedlsr", "fedmlp", "fednca-ml", "fednoro", "fednova",
    "fedprox", "fedrdn", "fedvls", "local-only", "private-fedavg", "private-fedprox", "rscfed", "scaffold", "spherefed",
    "surgical",
)  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "complete": {},
    "partial": {"annotation.kind": "missing", "annotation.missing": 4},
    "complete, frozen": {"model.freeze": "backbone", "model.weights": "random"},
    "partial, frozen": {
        "annotation.kind": "missing",
        "annotation.missing": 4,
        "model.freeze": "backbone",
        "model.weights": "random",
    },
}
SEEDS = (0, 1)
COMMON: dict[str, Any] = {
    "data.limit": 240,
    "partition.clients": 12,
    "participation.fraction": 0.5,
    "model.channels": (4, 12),
    "training.rounds": 2,
    "training.batch_size": 16,
    "engine.workers": 0,
}
NUMBERS = ("loss", "macro_auc", "map", "macro_f1")  # of each round


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """{"training.lr": 1} → {"training": {"lr": 1}}"""
    values: dict[str, Any] = {}
    for key, value in flat.items():
        section, _, name = key.rpartition(".")
        (values.setdefault(section, {}) if section else values)[name] = value
    return values


def checksum(method: str, setting: str, seed: int) -> str:
    """The checksum of one run, or "refused" if the method does not work with these settings."""
    flat = COMMON | SETTINGS[setting] | {"seed": seed, "method.name": method} | PER_METHOD.get(method, {})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        try:
            run(Experiment.make(nested(flat)), out=out)
        except FedmllError:
            return "refused"
        digest = hashlib.sha256()
        for file in sorted(out.rglob("*.safetensors")):
            tensors = load_file(file)
            for one in sorted(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values()):
                digest.update(one)  # not the names: they may change
        for line in (out / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            digest.update(repr([row.get(name) for name in NUMBERS]).encode())
    return digest.hexdigest()


def table(before: dict[str, str], after: dict[str, str]) -> str:
    """One row per method, one column per setting."""
    lines = ["| method | " + " | ".join(SETTINGS) + " |", "|---|" + "---|" * len(SETTINGS)]
    for method in METHODS:
        cells = []
        for setting in SETTINGS:
            keys = [f"{method} | {setting} | {seed}" for seed in SEEDS]
            same = sum(before[key] == after[key] for key in keys)
            refused = all(after[key] == before[key] == "refused" for key in keys)
            cells.append("refused" if refused else f"{same} of {len(keys)} the same")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the checksums of this version, as JSON")
    parser.add_argument("--compare", type=Path, help="the checksums of another version")
    parser.add_argument("--methods", help="only these, separated by commas")
    options = parser.parse_args()
    chosen = options.methods.split(",") if options.methods else METHODS
    found: dict[str, str] = {}
    for method in chosen:
        for setting in SETTINGS:
            for seed in SEEDS:
                found[f"{method} | {setting} | {seed}"] = checksum(method, setting, seed)
        print(f"{method}: done", flush=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    if options.compare:
        before = json.loads(options.compare.read_text())
        if len(chosen) == len(METHODS):
            print(table(before, found))
        different = sorted(key for key, value in found.items() if before.get(key) != value)
        print(f"{len(found) - len(different)} of {len(found)} runs have the same checksum")
        if different:
            print("different:", *different, sep="\n  ")
            raise SystemExit(1)


if __name__ == "__main__":
    main()
