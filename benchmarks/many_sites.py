"""Many sites on one machine, as a rehearsal is: what a round takes, and how much memory a server and a site need.

    python benchmarks/many_sites.py [--sites 20] [--rounds 5]

TLS and keys as between machines. Each site is a `fedmll join` and Flower's SuperNode, the server this process and
Flower's SuperLink. Memory is the most that each process had (VmHWM); what processes share (the libraries) counts in
each. Seconds are the median of the rounds after the first, with all sites training on the same cores."""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
from pathlib import Path
from statistics import mean, median
from typing import Any

from fedmll.deploy import rehearsal, serving
from fedmll.deploy.flower.processes import free_port
from fedmll.experiment import Experiment
from fedmll.running.observers import Observer


class Watch(Observer):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def round_done(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(f"round {row['round']}: {row['clients']} clients, {row['seconds']:.1f} s", flush=True)


class Memory:
    """The most that this process's descendants had, by kind, looked at twice a second."""

    def __init__(self) -> None:
        self.most: dict[tuple[str, int], float] = {}
        self.over = threading.Event()

    def watch(self) -> None:
        while not self.over.wait(0.5):
            parents, kinds = {}, {os.getpid(): "server"}
            for path in Path("/proc").glob("[0-9]*"):
                try:
                    parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                    words = (path / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                kind = next((k for k in ("superlink", "supernode", "join") if k.encode() in words), "")
                if kind:
                    kinds[int(path.name)] = kind
            for number, kind in kinds.items():
                if self._is_mine(number, parents):
                    self._note(kind, number)

    @staticmethod
    def _is_mine(number: int, parents: dict[int, int]) -> bool:
        while number not in (0, 1, os.getpid()):
            number = parents.get(number, 0)
        return number == os.getpid()

    def _note(self, kind: str, number: int) -> None:
        try:
            lines = Path(f"/proc/{number}/status").read_text().splitlines()
        except OSError:
            return
        found = [int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM")]
        self.most[kind, number] = max([*found, self.most.get((kind, number), 0.0)])

    def megabytes(self, kind: str) -> float:
        return mean([value for (each, _), value in self.most.items() if each == kind] or [float("nan")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    values = {"partition": {"holdout": 0.0, "kind": "iid"}, "training": {"rounds": options.rounds}}
    experiment = Experiment.make(values)
    with tempfile.TemporaryDirectory(prefix="fedmll-many-") as folder:
        played = rehearsal.prepare(experiment, options.sites, Path(folder) / "sites")
        port, watch, memory = free_port(), Watch(), Memory()
        server = serving.Server(played.names, "127.0.0.1", port, str(played.keys), options.sites, 600, 1800)
        threading.Thread(target=memory.watch, daemon=True).start()
        with rehearsal.joined(played, f"127.0.0.1:{port}", False):
            serving.serve(played.experiment, server, Path(folder) / "run", watch)
        memory.over.set()
    seconds = [row["seconds"] for row in watch.rows]
    print(f"\n{options.sites} sites, {os.cpu_count()} cores, {played.experiment.method.name}\n")
    print("| sites | s a round | first round | server | its SuperLink | a site | its SuperNode |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    cells = [str(options.sites), f"{median(seconds[1:] or seconds):.1f}", f"{seconds[0]:.1f}"]
    cells += [f"{memory.megabytes(kind):.0f} MB" for kind in ("server", "superlink", "join", "supernode")]
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
