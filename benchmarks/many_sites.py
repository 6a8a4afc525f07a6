"""A rehearsal with many sites on one machine: how long a round takes, and how much memory the server and a site need.

    python benchmarks/many_sites.py [--sites 20] [--rounds 5]

TLS and keys are used, as between machines. Each site has two processes, `fedmll join` and Flower's SuperNode. The
server has two as well, this one and Flower's SuperLink. Memory is the peak of each process (VmHWM); libraries that
processes share are counted in each. Seconds are the median of the rounds after the first. All sites train on the same
cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
from pathlib import Path
from statistics import mean, median
from typing import Any

from fedmll.config.experiment import Experiment
from fedmll.deploy.flower.child_processes import find_free_port
from fedmll.deploy.server.rehearsal import prepare_rehearsal, running_clients
from fedmll.deploy.server.serve import serve
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.training.callbacks import Callback


class RoundRecorder(Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_round_end(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(f"round {row['round']}: {row['clients']} clients, {row['seconds']:.1f} s", flush=True)


class PeakMemory:
    """The peak memory of this process and its descendants, by kind of process. It is read twice per second."""

    def __init__(self) -> None:
        self.peaks: dict[tuple[str, int], float] = {}  # (kind, process id) → MB
        self.stopped = threading.Event()

    def watch(self) -> None:
        while not self.stopped.wait(0.5):
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
                if self._is_descendant(number, parents):
                    self._record(kind, number)

    @staticmethod
    def _is_descendant(number: int, parents: dict[int, int]) -> bool:
        while number not in (0, 1, os.getpid()):
            number = parents.get(number, 0)
        return number == os.getpid()

    def _record(self, kind: str, number: int) -> None:
        try:
            lines = Path(f"/proc/{number}/status").read_text().splitlines()
        except OSError:
            return
        found = [int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM")]
        self.peaks[kind, number] = max([*found, self.peaks.get((kind, number), 0.0)])

    def megabytes(self, kind: str) -> float:
        return mean([value for (each, _), value in self.peaks.items() if each == kind] or [float("nan")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    values = {"partition": {"holdout": 0.0, "kind": "iid"}, "training": {"rounds": options.rounds}}
    experiment = Experiment.make(values)
    with tempfile.TemporaryDirectory(prefix="fedmll-many-") as folder:
        rehearsal = prepare_rehearsal(experiment, options.sites, Path(folder) / "sites")
        port, recorder, memory = find_free_port(), RoundRecorder(), PeakMemory()
        settings = ServerSettings(
            clients=rehearsal.names,
            host="127.0.0.1",
            port=port,
            keys=str(rehearsal.keys),
            min_clients=options.sites,
            round_timeout=600,
            join_timeout=1800,
        )
        threading.Thread(target=memory.watch, daemon=True).start()
        with running_clients(rehearsal, f"127.0.0.1:{port}", False):
            serve(rehearsal.experiment, settings, Path(folder) / "run", callback=recorder)
        memory.stopped.set()
    seconds = [row["seconds"] for row in recorder.rows]
    print(f"\n{options.sites} sites, {os.cpu_count()} cores, {rehearsal.experiment.method.name}\n")
    print("| sites | s per round | first round | server | its SuperLink | one site | its SuperNode |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    cells = [str(options.sites), f"{median(seconds[1:] or seconds):.1f}", f"{seconds[0]:.1f}"]
    cells += [f"{memory.megabytes(kind):.0f} MB" for kind in ("server", "superlink", "join", "supernode")]
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
