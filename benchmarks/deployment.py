"""The overhead of a round in a real federation: fedmll compared with Flower's own FedAvg, written as in its quickstart.

    python benchmarks/deployment.py [--rounds 5] [--sites 3]

Both run on this machine, one after the other, with the same images, network, batches and seeds at the same sites.
Flower's federation consists of its standard programs (flower-superlink, flower-supernode, `flwr run`, the strategy
FedAvg, a state_dict as ArrayRecord), insecure and without evaluation. fedmll's federation uses TLS and node keys, and
its rounds include an evaluation on the server's test images. Overhead is the time of a round minus the longest training
in it. Bytes are those of the arrays and numbers.

Both must end with the same weights, otherwise the table is not printed. They train with SGD, because Flower sums
replies in float32 in the order of arrival: AdamW enlarges that rounding error (1e-7) to 1e-2 within five rounds, SGD
does not. Integer counters are not compared, because Flower averages them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from safetensors.torch import load_file

from fedmll.config.experiment import Experiment
from fedmll.deploy.experiment_for_sites import StudySetup
from fedmll.deploy.flower.child_processes import find_free_port, flower_environment
from fedmll.deploy.server.rehearsal import Rehearsal, prepare_rehearsal, running_clients
from fedmll.deploy.server.serve import serve
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.deploy.server.site_federation import load_server_data
from fedmll.deploy.site.site_config import Site, write_site_file
from fedmll.training.callbacks import Callback

BIN = Path(sys.executable).parent
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "quickstart"
version = "1.0.0"
description = ""
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "bench"
[tool.flwr.app.components]
serverapp = "quickstart.server_app:app"
clientapp = "quickstart.client_app:app"
[tool.flwr.app.config]
rounds = 3
sites = 3
setup = ""
result = ""
"""
CLIENT = '''
"""As in Flower's quickstart: load the global state_dict, train, send the state_dict back."""
import time
from pathlib import Path
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from fedmll.core.message import Message as FedmllMessage
from fedmll.deploy.site.site_config import read_site_file
from fedmll.deploy.site.worker import SiteWorker
from fedmll.deploy.experiment_for_sites import StudySetup

app = ClientApp()

@app.train()
def train(msg: Message, context: Context) -> Message:
    begin = time.perf_counter()
    site = read_site_file(Path(context.node_config["site"]))
    worker = SiteWorker(site, StudySetup.from_json(Path(context.run_config["setup"]).read_text()))
    trainer = worker.trainer
    trainer.model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    start = time.perf_counter()
    reply, _ = worker.train(FedmllMessage(trainer.weights.dump()), msg.content["config"]["server-round"], None, [])
    seconds = time.perf_counter() - start
    metrics = {"num-examples": len(worker.data.train), "seconds": seconds, "load": start - begin}
    content = {"arrays": ArrayRecord(trainer.model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(content=RecordDict(content), reply_to=msg)
'''
SERVER = """
import json
import time
from pathlib import Path
import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from fedmll.config.experiment import Experiment
from fedmll.deploy.experiment_for_sites import StudySetup
from fedmll.methods import build_method
from fedmll.methods.framework.task import Task
from safetensors.torch import save_file

app = ServerApp()

class Timed(FedAvg):
    rounds = []

    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self.begin = time.perf_counter()
        self.down = sum(sum(len(a.data) for a in m.content["arrays"].values()) for m in messages)
        return messages

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        seconds = time.perf_counter() - self.begin
        training = max(r.content["metrics"]["seconds"] for r in replies)
        up = sum(sum(len(a.data) for a in r.content["arrays"].values()) + 8 * 3 for r in replies)
        self.rounds.append({"seconds": seconds, "training": training, "up": up, "down": self.down})
        return super().aggregate_train(server_round, replies)

@app.main()
def main(grid: Grid, context: Context) -> None:
    setup = StudySetup.from_json(Path(context.run_config["setup"]).read_text())
    experiment = Experiment.make(setup.experiment)
    task = Task(experiment, setup.classes, setup.shape, setup.clients, torch.device("cpu"))
    model = build_method(task).build_model()
    count = int(context.run_config["sites"])
    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=int(context.run_config["rounds"]))
    folder = Path(context.run_config["result"])
    save_file({k: v.contiguous() for k, v in result.arrays.to_torch_state_dict().items()}, folder / "model.safetensors")
    (folder / "rounds.json").write_text(json.dumps(strategy.rounds))
"""


class RoundRecorder(Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_round_end(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


def run_fedmll(rehearsal: Rehearsal, folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """fedmll's federation: the times and bytes of its rounds, and its final weights."""
    port = find_free_port()
    settings = ServerSettings(
        clients=rehearsal.names,
        host="127.0.0.1",
        port=port,
        keys=str(rehearsal.keys),
        min_clients=len(rehearsal.names),
        round_timeout=120,
        join_timeout=120,
    )
    recorder = RoundRecorder()
    with running_clients(rehearsal, f"127.0.0.1:{port}", False):
        serve(rehearsal.experiment, settings, folder / "fedmll", callback=recorder)
    training: dict[int, float] = {}
    for name in rehearsal.names:
        for line in (rehearsal.folder / name / "join.log").read_text().splitlines():
            if line.startswith("round "):
                number, seconds = int(line.split()[1].strip(":")), float(line.split(", ")[-1].split()[0])
                training[number] = max(training.get(number, 0.0), seconds)
    rows = [
        {"seconds": r["seconds"], "training": training[r["round"]], "up": r["bytes_up"], "down": r["bytes_down"]}
        for r in recorder.rows
    ]
    return rows, load_file(folder / "fedmll" / "model.safetensors")


@contextlib.contextmanager
def running_programs(log: Path, environment: dict[str, str], commands: list[list[str]]) -> Iterator[None]:
    """Run the commands for the time of the block; their output goes to `log`."""
    processes = []
    with log.open("wb") as file:
        try:
            for command in commands:
                processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
                time.sleep(3)
            yield
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()


def run_flower(rehearsal: Rehearsal, folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Flower's federation: the times and bytes of its rounds, and its final weights."""
    project, result, home = folder / "quickstart", folder / "flower", folder / "home"
    for path in (project / "quickstart", result, home / "flwr"):
        path.mkdir(parents=True)
    (project / "pyproject.toml").write_text(PYPROJECT)
    (project / "quickstart" / "__init__.py").write_text("")
    (project / "quickstart" / "client_app.py").write_text(CLIENT)
    (project / "quickstart" / "server_app.py").write_text(SERVER)
    test = load_server_data(rehearsal.experiment, Callback()).test
    settings = json.loads(
        rehearsal.experiment.model_dump_json(exclude_none=True, exclude={"data": True, "study": True, "sites": True})
    )
    setup = StudySetup(
        run="bench",
        experiment=settings | {"data": {"name": "none"}},
        classes=test.classes,
        shape=test.sample_shape,
        clients=len(rehearsal.names),
    )
    (folder / "setup.json").write_text(setup.to_json())
    port = find_free_port()
    (home / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "bench"\n[superlink.bench]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    environment = os.environ | flower_environment(home) | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    link = ["--insecure", "--host", "127.0.0.1", "--port", str(port), "--disable-runtime-dependency-installation"]
    commands = [[str(BIN / "flower-superlink"), *link]]
    for name in rehearsal.names:
        data = rehearsal.folder / name
        file = folder / "sites" / f"{name}.json"
        write_site_file(
            Site(
                name=name,
                csv=data / "labels.csv",
                images=data / "images",
                state_dir=folder / "state" / name,
                device="cpu",
            ),
            file,
        )
        node = ["--insecure", "--superlink", f"127.0.0.1:{port}"]
        node += ["--host", "127.0.0.1", "--port", str(find_free_port())]
        commands.append([str(BIN / "flower-supernode"), *node, "--node-config", f'site="{file}"'])
    with running_programs(folder / "flower.log", environment, commands):
        config = f"rounds={rehearsal.experiment.training.rounds} sites={len(rehearsal.names)} "
        config += f'setup="{folder / "setup.json"}" result="{result}"'
        subprocess.run([BIN / "flwr", "run", project, "bench", "--run-config", config], env=environment, check=True)
        deadline = time.monotonic() + 600
        while not (result / "rounds.json").exists():
            if time.monotonic() > deadline:
                raise SystemExit(f"Flower's run did not end; see {folder / 'flower.log'}")
            time.sleep(0.5)
    return json.loads((result / "rounds.json").read_text()), load_file(result / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sites", type=int, default=3)
    options = parser.parse_args()
    values: dict[str, Any] = {
        "data": {"limit": 600},
        "partition": {"holdout": 0.0},
        "method": {"name": "fedavg", "average": "mean"},  # Flower's FedAvg averages so
        "training": {"rounds": options.rounds},
    }
    values["training"] |= {"optimizer": "sgd", "lr": 0.01}
    experiment = Experiment.make(values)
    folder = Path(tempfile.mkdtemp(prefix="fedmll-bench-"))
    rehearsal = prepare_rehearsal(experiment, options.sites, folder / "sites-data")
    print(f"{options.sites} sites, {options.rounds} rounds, {experiment.data.name}; logs in {folder}", flush=True)
    found = {
        "fedmll (TLS, keys)": run_fedmll(rehearsal, folder),
        "Flower FedAvg (insecure)": run_flower(rehearsal, folder),
    }
    (_, ours), (_, theirs) = found.values()
    floats = [name for name in ours if ours[name].is_floating_point()]
    gap = max(float((ours[name] - theirs[name]).abs().max()) for name in floats)
    if gap > 1e-4:
        raise SystemExit(f"the two federations do not train the same model: their weights differ by up to {gap:.2g}")
    print(f"weights agree to {gap:.1g}\n")
    print("| | s per round (median) | training | overhead (median) | first round | kB up | kB down |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, (rows, _) in found.items():
        seconds, overhead = [r["seconds"] for r in rows], [r["seconds"] - r["training"] for r in rows]
        cells = [f"{median(seconds):.2f}", f"{mean(r['training'] for r in rows):.2f}", f"{median(overhead):.2f}"]
        cells += [f"{seconds[0]:.2f}", f"{rows[0]['up'] / 1e3:.1f}", f"{rows[0]['down'] / 1e3:.1f}"]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
