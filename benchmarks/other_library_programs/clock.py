"""Elapsed time, and CPU time of all processes, for the programs that benchmarks/other_libraries.py starts."""

import os
import time
from pathlib import Path

DRIVER = "FEDMLL_BENCHMARK_DRIVER"  # the process that starts the programs, one at a time


def now() -> tuple[float, float]:
    """Elapsed seconds, and CPU seconds of every descendant of the driver, including processes that have ended."""
    return time.perf_counter(), _cpu_of_descendants(int(os.environ[DRIVER]))


def _cpu_of_descendants(driver: int) -> float:
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        process = int(folder.name)
        parents[process] = int(fields[1])
        used[process] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    total, open_processes = 0.0, [driver]
    while open_processes:
        parent = open_processes.pop()
        children = [process for process, its_parent in parents.items() if its_parent == parent]
        total += sum(used[process] for process in children)
        open_processes += children
    return total
