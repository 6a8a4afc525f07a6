"""The work of benchmarks/other_libraries.py written for Flower's simulation.

python flower_program.py WORK.npz SETTING.json RESULT.npz
"""

import functools
import json
import sys
from pathlib import Path

import numpy as np
import torch
from clock import now
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.nn import functional as F

NAMES = ("w0", "b0", "w1", "b1")


def make_model(work):
    hidden, features = work["w0"].shape
    mlp = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, len(work["w1"])))
    with torch.no_grad():
        for parameter, name in zip(mlp.parameters(), NAMES, strict=True):
            parameter.copy_(torch.from_numpy(work[name]))
    return mlp


@functools.cache
def load_work(work_file, setting_file):
    """The model, the data, the rows of the clients and the setting. They are loaded once per process."""
    torch.set_num_threads(1)
    work = np.load(work_file)
    data = torch.from_numpy(work["x"]), torch.from_numpy(work["y"]).float(), torch.from_numpy(work["rows"])
    return make_model(work), *data, json.loads(Path(setting_file).read_text())


def client_app(work_file, setting_file):
    app = ClientApp()

    @app.train()
    def train(message, context):
        mlp, x, y, clients, setting = load_work(work_file, setting_file)
        mlp.load_state_dict(message.content["arrays"].to_torch_state_dict())
        kind = torch.optim.SGD if setting["optimizer"] == "sgd" else torch.optim.AdamW
        optimizer = kind(mlp.parameters(), lr=setting["lr"], weight_decay=setting["weight_decay"], fused=True)
        own = clients[int(context.node_config["partition-id"])]
        for rows in own[torch.randperm(len(own))].split(setting["batch_size"]):
            F.binary_cross_entropy_with_logits(mlp(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
        records = {"arrays": ArrayRecord(mlp.state_dict()), "metrics": MetricRecord({"num-examples": len(own)})}
        return Message(content=RecordDict(records), reply_to=message)

    return app


class TimedFedAvg(FedAvg):
    times = None

    def configure_train(self, *arguments, **named):
        self.times = self.times or [now()]  # all nodes are connected
        return super().configure_train(*arguments, **named)

    def aggregate_train(self, *arguments, **named):
        found = super().aggregate_train(*arguments, **named)
        self.times.append(now())
        return found


def main(work_file, setting_file, result_file):
    work, setting, app = np.load(work_file), json.loads(Path(setting_file).read_text()), ServerApp()
    clients = len(work["rows"])

    @app.main()
    def serve(grid, context):
        strategy = TimedFedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        found = strategy.start(grid, ArrayRecord(make_model(work).state_dict()), num_rounds=setting["rounds"])
        final = (tensor.numpy() for tensor in found.arrays.to_torch_state_dict().values())
        np.savez(result_file, seconds=np.diff(strategy.times, axis=0), **dict(zip(NAMES, final, strict=True)))

    resources = {"init_args": {"num_cpus": setting["workers"]}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(app, client_app(work_file, setting_file), num_supernodes=clients, backend_config=resources)


if __name__ == "__main__":
    import flower_program  # not as __main__: a process of Ray then imports it once and keeps the result of `load_work`

    flower_program.main(*sys.argv[1:])
