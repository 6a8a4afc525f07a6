"""Both clocks of a program that benchmarks/peers.py starts: the wall's, and the CPU time of all its processes."""

import os
import time
from pathlib import Path

DRIVER = "FEDMLL_PEERS_DRIVER"  # the process that starts the programs, one at a time


def now():
    """Seconds on the wall; CPU seconds of every process below the driver, those that have ended included."""
    return time.perf_counter(), _below(int(os.environ[DRIVER]))


def _below(driver):
    parents, used = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        process = int(folder.name)
        parents[process] = int(fields[1])
        used[process] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    total, found = 0.0, [driver]
    while found:
        parent = found.pop()
        below = [process for process, its in parents.items() if its == parent]
        total += sum(used[process] for process in below)
        found += below
    return total
