"""The global model on data: predictions, and every metric of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedmll import metrics
from fedmll.client import EVALUATION_BATCH
from fedmll.data.dataset import Dataset
from fedmll.methods.base import Method

if TYPE_CHECKING:
    from fedmll.federation import Federation


@dataclass(frozen=True)
class Evaluation:
    values: dict[str, float]
    report: metrics.Report  # of the test data
    clients: metrics.ClientReport | None = None  # of the clients' own held-out data


def predict(method: Method, model: nn.Module, data: Dataset, start: int, stop: int) -> Tensor:
    """Probabilities of the samples from `start` to `stop`."""
    model.eval()
    task, scores = method.task, []
    with torch.inference_mode():
        for first in range(start, stop, EVALUATION_BATCH):
            raw = task.tensor(data.samples(slice(first, min(first + EVALUATION_BATCH, stop))))
            scores.append(method.predict(model, task.inputs(raw)).cpu())
    return torch.cat(scores)


def evaluate_pooled(data: Federation, test: NDArray[np.float32], validation: NDArray[np.float32]) -> Evaluation:
    """Every metric of the global model on the test data; F1 also at thresholds chosen on the validation data."""
    thresholds = metrics.best_thresholds(validation, data.validation.labels) if len(validation) else None
    report = metrics.evaluate(test, data.test.labels, data.test.classes, thresholds)
    values, clients = dict(report.values), None
    if bool(((data.test.labels == 1).sum(1) == 1).all()):
        values["accuracy"], report.per_class["accuracy"] = metrics.accuracy(test, data.test.labels)
    if len(validation):
        held_out = metrics.evaluate(validation, data.validation.labels, data.validation.classes).values
        values |= {f"val_{name}": held_out[name] for name in ("macro_auc", "map", "macro_f1")}
        if data.validation_owner is not None:
            owner = data.validation_owner
            clients = metrics.per_client(validation, data.validation.labels, owner, data.validation.classes)
            values |= clients.values
    return Evaluation(values, report, clients)
