"""CPU seconds from `fedmll run` to the end of its first training step, beyond what `import torch` takes.

    python benchmarks/startup.py

`fedmll run` is started as a user does, on the embedded data. A patched training step records the CPU time (user and
system) of the process since its start, and of the worker that begins a second step first. This includes everything
before: Python, the command line, methods, data, partition, model, processes. It takes turns with a Python process that
only imports torch; the median of the differences is shown. Compiled Python files exist, as after any installation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT = 1.5


def run_timed(report: Path, command: list[str]) -> None:
    """In a child process: run the command, and write its CPU seconds when the second step of a client begins."""
    from fedmll.cli.main import main
    from fedmll.engines.client_trainer import Trainer

    started, steps, loss = os.getpid(), [0], Trainer.loss

    def timed_loss(self: Trainer, step: Any) -> Any:
        steps[0] += 1
        if steps[0] == 2 and not report.exists():
            own = time.process_time()
            seconds = [own, 0.0] if os.getpid() == started else [cpu_of(started), own]
            loaded = sorted({name.partition(".")[0] for name in sys.modules} & HEAVY)
            written = report.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps({"seconds": seconds, "loaded": loaded}))
            written.rename(report)
        return loss(self, step)

    Trainer.loss = timed_loss  # type: ignore[method-assign]
    sys.argv = ["fedmll", *command]
    main()


HEAVY = {"sklearn", "pandas", "matplotlib", "sympy", "jinja2", "flwr", "ray", "mlflow", "transformers"}


def cpu_of(process: int) -> float:
    """CPU seconds of another process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def import_torch(environment: dict[str, str]) -> float:
    """CPU seconds of a process that only imports torch."""
    code = "import torch, time; print(time.process_time())"
    return float(subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True).stdout)


def first_step(folder: Path, workers: int, environment: dict[str, str]) -> dict[str, Any]:
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    run = ["run", "--rounds", "1", "--workers", str(workers), "--out", str(Path(tempfile.mkdtemp(dir=folder)) / "run")]
    run += ["--set", "data.limit=400"]  # what follows the first step is not measured
    command = [sys.executable, __file__, "--run-timed", str(report), *run]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def main() -> None:
    if sys.argv[1:2] == ["--run-timed"]:
        run_timed(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPYCACHEPREFIX": str(folder / "compiled"), "OMP_NUM_THREADS": "1"}
        rows: dict[int, list[tuple[float, float, float]]] = {0: [], 2: []}
        for turn in range(turns + 1):
            torch_alone = import_torch(environment)
            for workers, taken in rows.items():
                found = first_step(folder, workers, environment)
                if turn:  # the first turn compiles
                    taken.append((torch_alone, *found["seconds"]))
        print(f"CPU seconds to the end of the first step; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; "
              f"heavy libraries loaded by then: {', '.join(found['loaded']) or 'none'}\n")  # fmt: skip
        print(
            "| workers | import torch | `fedmll run`, its process | first worker | beyond torch |\n|---:|" + "---:|" * 4
        )
        worst = 0.0
        for workers, taken in rows.items():
            alone, own, worker = (statistics.median(column) for column in zip(*taken, strict=True))
            beyond = statistics.median(own + worker - alone for alone, own, worker in taken)
            worst = max(worst, beyond)
            print(f"| {workers} | {alone:.2f} | {own:.2f} | {worker:.2f} | {beyond:.2f} |")
        print(f"\ngoal: at most {LIMIT} s beyond torch: {'reached' if worst <= LIMIT else 'MISSED'}")


if __name__ == "__main__":
    main()
