"""Run every small preset as a user does, one after the other: CPU seconds, seconds and metrics.

    python benchmarks/presets.py --root DATA --weights DATA/mobilenet_v2_imagenet.safetensors
    python benchmarks/presets.py --root DATA --weights FILE --only fedlgt/1,fedlgt/A7

Tables that differ only in the rows of their comparison have the same experiment, which runs once. The cache is a new,
empty folder, so the time of the first preset that uses some images includes computing their features. The exit code is
1 if a preset failed or exceeded the time limit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fedmll.config.presets import PREFIX, SMALL, load_preset, preset_names

LIMIT = 180  # CPU seconds
METRICS = ("map", "macro_auc", "macro_f1_tuned")


@dataclass(frozen=True, kw_only=True)
class FinishedCommand:
    cpu: float
    seconds: float
    exit_code: int
    errors: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="the folder with the packed files")
    parser.add_argument(
        "--weights", help="the weights of MobileNetV2; default: those that `fedmll weights get` downloaded"
    )
    parser.add_argument("--only", help="only these presets, separated by commas")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else preset_names()
    print(f"| preset:…/small | data | CPU s | s | {' | '.join(METRICS)} |")
    print(f"| --- | --- |{' ---: |' * (2 + len(METRICS))}")
    with tempfile.TemporaryDirectory() as folder:
        within_limits = [run_preset(alike, Path(folder), options) for alike in group_by_experiment(chosen)]
    sys.exit(0 if all(within_limits) else 1)


def group_by_experiment(chosen: list[str]) -> list[list[str]]:
    """The names of the presets, grouped by experiment."""
    found: dict[str, list[str]] = {}
    for name in chosen:
        found.setdefault(repr(load_preset(f"{PREFIX}{name}/{SMALL}")), []).append(name)
    return list(found.values())


def run_preset(alike: list[str], folder: Path, options: argparse.Namespace) -> bool:
    """Run a preset and print its row of the table. Returns whether it succeeded within the time limit."""
    out = folder / alike[0].replace("/", "-")
    command = [sys.executable, "-m", "fedmll", "run", f"{PREFIX}{alike[0]}/{SMALL}", "--root", str(options.root)]
    command += ["--workers", "1"]
    command += ["--out", str(out)] + (["--set", f"model.weights={options.weights}"] if options.weights else [])
    ran = timed(command, folder / "cache")
    if ran.exit_code:
        print(f"| {', '.join(alike)} | failed: {ran.errors.strip()} |", flush=True)
        return False
    summary = json.loads((out / "summary.json").read_text())
    found = " | ".join(f"{summary['metrics'][metric]:.2f}" for metric in METRICS)
    source = f"{summary['data']}, {len(summary['classes'])} classes"
    print(f"| {', '.join(alike)} | {source} | {ran.cpu:.0f} | {ran.seconds:.0f} | {found} |", flush=True)
    return ran.cpu <= LIMIT


def timed(command: list[str], cache: Path) -> FinishedCommand:
    environment = os.environ | {"FEDMLL_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    before, begin = cpu_of_children(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return FinishedCommand(
        cpu=cpu_of_children() - before,
        seconds=time.perf_counter() - begin,
        exit_code=done.returncode,
        errors=done.stderr,
    )


def cpu_of_children() -> float:
    """CPU seconds of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
