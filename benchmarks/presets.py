"""Every small preset, one after the other, as a user runs it: CPU seconds, seconds, and the metrics of its paper.

    python benchmarks/presets.py --root DATA --weights DATA/mobilenet_v2_imagenet.safetensors
    python benchmarks/presets.py --root DATA --weights FILE --only fedlgt/1,fedlgt/A7

Tables that differ only in the rows of their comparison are one experiment: it runs once. The cache is a folder of its
own, empty at first: the first preset that shows some images also pays for their features. Exit code 1: a preset
failed, or took longer than it may.
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

from fedmll.cli.presets import PRESET, SMALL, names, preset

LIMIT = 180  # CPU seconds
METRICS = ("map", "macro_auc", "macro_f1_tuned")


@dataclass(frozen=True)
class Ran:
    cpu: float
    seconds: float
    code: int
    said: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="the folder with the packed files")
    parser.add_argument("--weights", help="MobileNetV2's file; default: as `fedmll weights get` leaves it")
    parser.add_argument("--only", help="presets, comma-separated")
    given = parser.parse_args()
    chosen = given.only.split(",") if given.only else names()
    print(f"| preset:…/small | data | CPU s | s | {' | '.join(METRICS)} |")
    print(f"| --- | --- |{' ---: |' * (2 + len(METRICS))}")
    with tempfile.TemporaryDirectory() as folder:
        good = [shown(alike, Path(folder), given) for alike in experiments(chosen)]
    sys.exit(0 if all(good) else 1)


def experiments(chosen: list[str]) -> list[list[str]]:
    """The names of every different experiment."""
    found: dict[str, list[str]] = {}
    for name in chosen:
        found.setdefault(repr(preset(f"{PRESET}{name}/{SMALL}")), []).append(name)
    return list(found.values())


def shown(alike: list[str], folder: Path, given: argparse.Namespace) -> bool:
    """Run a preset and print its line of the table."""
    out = folder / alike[0].replace("/", "-")
    command = [sys.executable, "-m", "fedmll", "run", f"{PRESET}{alike[0]}/{SMALL}", "--root", str(given.root)]
    command += ["--workers", "1"]
    command += ["--out", str(out)] + (["--set", f"model.weights={given.weights}"] if given.weights else [])
    ran = timed(command, folder / "cache")
    if ran.code:
        print(f"| {', '.join(alike)} | failed: {ran.said.strip()} |", flush=True)
        return False
    summary = json.loads((out / "summary.json").read_text())
    found = " | ".join(f"{summary['metrics'][metric]:.2f}" for metric in METRICS)
    source = f"{summary['data']}, {len(summary['classes'])} classes"
    print(f"| {', '.join(alike)} | {source} | {ran.cpu:.0f} | {ran.seconds:.0f} | {found} |", flush=True)
    return ran.cpu <= LIMIT


def timed(command: list[str], cache: Path) -> Ran:
    environment = os.environ | {"FEDMLL_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    before, begin = children(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return Ran(children() - before, time.perf_counter() - begin, done.returncode, done.stderr)


def children() -> float:
    """CPU seconds of all processes that were started from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
