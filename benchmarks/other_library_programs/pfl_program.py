"""The work of benchmarks/other_libraries.py written for pfl-research. torchrun starts one process per worker.

torchrun pfl_program.py WORK.npz SETTING.json RESULT.npz
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from clock import now
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn
from torch.nn import functional as F

NAMES = ("w0", "b0", "w1", "b1")

torch.set_num_threads(1)


class Mlp(nn.Sequential):
    def loss(self, x, y, eval=False):
        return F.binary_cross_entropy_with_logits(self(x), y)

    @torch.no_grad()
    def metrics(self, x, y, eval=False):
        return {"loss": Weighted(self.loss(x, y).item() * len(x), len(x))}


class Clock(TrainingProcessCallback):
    def __init__(self):
        self.times = [now()]

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.times.append(now())
        return False, Metrics()


def main(work_file, setting_file, result_file):
    work, setting = np.load(work_file), json.loads(Path(setting_file).read_text())
    hidden, features = work["w0"].shape
    mlp = Mlp(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, len(work["w1"])))
    with torch.no_grad():
        for parameter, name in zip(mlp.parameters(), NAMES, strict=True):
            parameter.copy_(torch.from_numpy(work[name]))
    optimizer = torch.optim.SGD if setting["optimizer"] == "sgd" else torch.optim.AdamW
    model = PyTorchModel(
        mlp,
        lambda parameters, lr: optimizer(parameters, lr=lr, weight_decay=setting["weight_decay"], fused=True),
        torch.optim.SGD(mlp.parameters(), 1.0),
    )
    x, y = torch.from_numpy(work["x"]), torch.from_numpy(work["y"]).float()
    users = [Dataset((x[rows], y[rows])) for rows in torch.from_numpy(work["rows"])]
    data = FederatedDataset(lambda user: users[user], get_user_sampler("minimize_reuse", range(len(users))))
    clock, rounds = Clock(), setting["rounds"]
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=rounds, train_cohort_size=len(users), val_cohort_size=0
        ),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=setting["lr"], local_batch_size=setting["batch_size"]
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
    )
    if get_framework_module().distributed.global_rank == 0:
        final = dict(zip(NAMES, (parameter.detach().numpy() for parameter in mlp.parameters()), strict=True))
        np.savez(result_file, seconds=np.diff(clock.times, axis=0), **final)


if __name__ == "__main__":
    main(*sys.argv[1:])
