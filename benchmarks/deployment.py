"""What a round costs beside the training: fedmll's federation against Flower's own FedAvg, as its quickstart does it.

    python benchmarks/deployment.py [--rounds 5] [--sites 3]

The same images, network, batches and seeds at the same sites on this machine, one after the other. Flower's side is its
stock parts (flower-superlink, flower-supernode, `flwr run`, strategy FedAvg, a state_dict as ArrayRecord), insecure and
without evaluation; ours has TLS and node keys on. Overhead is a round's time less the longest training in it. Bytes are
those of the arrays and numbers. Our round includes an evaluation on the server's test images, Flower's none.
Both sides must end with the same weights, or the table is not printed. SGD, because Flower sums replies in float32 in
the order they come: AdamW makes 1e-2 of that rounding (1e-7) within five rounds, SGD leaves it as it is. Integer
counters are not compared: Flower averages them."""

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

from fedmll.deploy import rehearsal, serving
from fedmll.deploy.flower.processes import free_port, quiet_flower
from fedmll.deploy.site import Site
from fedmll.deploy.site_worker import Setup, remember_site
from fedmll.experiment import Experiment
from fedmll.running.observers import Observer

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
from fedmll.deploy.site_worker import Setup, SiteWorker, recall_site
from fedmll.message import Message as Plain

app = ClientApp()

@app.train()
def train(msg: Message, context: Context) -> Message:
    begin = time.perf_counter()
    site = recall_site(Path(context.node_config["site"]))
    worker = SiteWorker(site, Setup.from_json(Path(context.run_config["setup"]).read_text()))
    learner = worker.learner
    learner.model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    start = time.perf_counter()
    reply, _ = worker.train(Plain(learner.weights.dump()), msg.content["config"]["server-round"], None, [])
    seconds = time.perf_counter() - start
    metrics = {"num-examples": len(worker.data.train), "seconds": seconds, "load": start - begin}
    content = {"arrays": ArrayRecord(learner.model.state_dict()), "metrics": MetricRecord(metrics)}
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
from fedmll.task import Task
from fedmll.deploy.site_worker import Setup
from fedmll.experiment import Experiment
from fedmll.methods import find
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
    setup = Setup.from_json(Path(context.run_config["setup"]).read_text())
    experiment = Experiment.make(setup.experiment)
    task = Task(experiment, setup.classes, setup.shape, setup.clients, torch.device("cpu"))
    model = find(experiment.method.name)(task).model()
    count = int(context.run_config["sites"])
    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=int(context.run_config["rounds"]))
    folder = Path(context.run_config["result"])
    save_file({k: v.contiguous() for k, v in result.arrays.to_torch_state_dict().items()}, folder / "model.safetensors")
    (folder / "rounds.json").write_text(json.dumps(strategy.rounds))
"""


class Watch(Observer):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def round_done(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


def ours(played: rehearsal.Rehearsal, folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    port = free_port()
    server = serving.Server(played.names, "127.0.0.1", port, str(played.keys), len(played.names), 120, 120)
    watch = Watch()
    with rehearsal.joined(played, f"127.0.0.1:{port}", False):
        serving.serve(played.experiment, server, folder / "ours", watch)
    training: dict[int, float] = {}
    for name in played.names:
        for line in (played.folder / name / "join.log").read_text().splitlines():
            if line.startswith("round "):
                number, seconds = int(line.split()[1].strip(":")), float(line.split(", ")[-1].split()[0])
                training[number] = max(training.get(number, 0.0), seconds)
    rows = [
        {"seconds": r["seconds"], "training": training[r["round"]], "up": r["bytes_up"], "down": r["bytes_down"]}
        for r in watch.rows
    ]
    return rows, load_file(folder / "ours" / "model.safetensors")


@contextlib.contextmanager
def started(log: Path, environment: dict[str, str], commands: list[list[str]]) -> Iterator[None]:
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


def flowers(played: rehearsal.Rehearsal, folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    project, result, home = folder / "quickstart", folder / "theirs", folder / "home"
    for path in (project / "quickstart", result, home / "flwr"):
        path.mkdir(parents=True)
    (project / "pyproject.toml").write_text(PYPROJECT)
    (project / "quickstart" / "__init__.py").write_text("")
    (project / "quickstart" / "client_app.py").write_text(CLIENT)
    (project / "quickstart" / "server_app.py").write_text(SERVER)
    test = serving.own_data(played.experiment, Observer()).test
    told = json.loads(played.experiment.model_dump_json(exclude_none=True, exclude={"data": True, "sites": True}))
    setup = Setup("bench", told | {"data": {"name": "none"}}, test.classes, test.sample_shape, len(played.names))
    (folder / "setup.json").write_text(setup.to_json())
    port = free_port()
    (home / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "bench"\n[superlink.bench]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    environment = os.environ | quiet_flower(home) | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    link = ["--insecure", "--host", "127.0.0.1", "--port", str(port), "--disable-runtime-dependency-installation"]
    commands = [[str(BIN / "flower-superlink"), *link]]
    for name in played.names:
        place = played.folder / name
        file = folder / "sites" / f"{name}.json"
        remember_site(Site(name, place / "labels.csv", place / "images", folder / "memory" / name, device="cpu"), file)
        node = ["--insecure", "--superlink", f"127.0.0.1:{port}", "--host", "127.0.0.1", "--port", str(free_port())]
        commands.append([str(BIN / "flower-supernode"), *node, "--node-config", f'site="{file}"'])
    with started(folder / "flower.log", environment, commands):
        config = f"rounds={played.experiment.training.rounds} sites={len(played.names)} "
        config += f'setup="{folder / "setup.json"}" result="{result}"'
        subprocess.run([BIN / "flwr", "run", project, "bench", "--run-config", config], env=environment, check=True)
        deadline = time.monotonic() + 600
        while not (result / "rounds.json").exists():
            if time.monotonic() > deadline:
                raise SystemExit(f"Flower's run did not end; see {folder / 'flower.log'}")
            time.sleep(0.5)
    return json.loads((result / "rounds.json").read_text()), load_file(result / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sites", type=int, default=3)
    options = parser.parse_args()
    values: dict[str, Any] = {
        "data": {"limit": 600},
        "partition": {"holdout": 0.0},
        "training": {"rounds": options.rounds},
    }
    values["training"] |= {"optimizer": "sgd", "lr": 0.01}
    experiment = Experiment.make(values)
    folder = Path(tempfile.mkdtemp(prefix="fedmll-bench-"))
    played = rehearsal.prepare(experiment, options.sites, folder / "sites-data")
    print(f"{options.sites} sites, {options.rounds} rounds, {experiment.data.name}; logs in {folder}", flush=True)
    found = {"fedmll (TLS, keys)": ours(played, folder), "Flower FedAvg (insecure)": flowers(played, folder)}
    (_, mine), (_, theirs) = found.values()
    floats = [name for name in mine if mine[name].is_floating_point()]
    gap = max(float((mine[name] - theirs[name]).abs().max()) for name in floats)
    if gap > 1e-4:
        raise SystemExit(f"the two do not train the same: weights differ by {gap:.2g}")
    print(f"weights agree to {gap:.1g}\n")
    print("| | s a round (median) | training | overhead (median) | first round | kB up | kB down |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, (rows, _) in found.items():
        seconds, overhead = [r["seconds"] for r in rows], [r["seconds"] - r["training"] for r in rows]
        cells = [f"{median(seconds):.2f}", f"{mean(r['training'] for r in rows):.2f}", f"{median(overhead):.2f}"]
        cells += [f"{seconds[0]:.2f}", f"{rows[0]['up'] / 1e3:.1f}", f"{rows[0]['down'] / 1e3:.1f}"]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
