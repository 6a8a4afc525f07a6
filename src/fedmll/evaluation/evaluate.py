"""All metrics of a trained model on the data of a federation: test, validation and each client's held-out samples."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedmll.evaluation import metrics
from fedmll.evaluation.histogram_metrics import FederatedHistograms
from fedmll.evaluation.metric_definitions import ON_VALIDATION, VALIDATION
from fedmll.evaluation.thresholds import best_thresholds

if TYPE_CHECKING:
    from fedmll.data.federation import Federation

Scores = Mapping[str, NDArray[np.float32]]  # by "test", "validation" and "held-out" (see Federation.evaluation_sets)


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one model, or of one model per client.

    Attributes:
        values: Percent, by metric name (see `metric_definitions`).
        report: On the test data; without test data on the held-out samples of all sites together.
        clients: Each client on the samples that it holds out.
        scores: The probabilities of the global model.
        histograms: What the sites of a federation between machines sent.
    """

    values: dict[str, float]
    report: metrics.ClassificationReport
    clients: metrics.ClientReport | None = None
    scores: Scores = field(default_factory=dict)
    histograms: FederatedHistograms | None = None


def evaluate_global_model(data: Federation, scores: Scores) -> Evaluation:
    """Evaluate one model: all metrics on the test data, F1 also with thresholds that are chosen on the validation data,
    and the metrics of each client on the samples that it holds out."""
    test = scores["test"]
    validation = scores.get("validation", test[:0])
    thresholds = best_thresholds(validation, data.validation.labels) if len(validation) else None
    report = metrics.evaluate(test, data.test.labels, data.test.classes, thresholds)
    values, clients = dict(report.values), None
    if bool(((data.test.labels == 1).sum(1) == 1).all()):
        values["accuracy"], report.per_class["accuracy"] = metrics.accuracy(test, data.test.labels)
    if len(validation):
        found = metrics.evaluate(validation, data.validation.labels, data.validation.classes).values
        values |= {VALIDATION + name: found[name] for name in ON_VALIDATION}
    held_out = scores.get("held-out", validation)
    if len(held_out) and len(data.held_out):
        clients = metrics.evaluate_per_client(
            held_out, data.held_out.labels, data.held_out_owners, data.held_out.classes
        )
        values |= clients.values
    return Evaluation(values, report, clients, scores)


def evaluate_local_models(data: Federation, scores: Mapping[int, Scores]) -> Evaluation:
    """Evaluate one model per client. On the test and validation data the metrics are means over the clients, also those
    of each class. On the held-out samples each client is evaluated with its own model.

    Args:
        data: The federation.
        scores: The probabilities of each client's model, by client.
    """
    without_held_out = replace(data, held_out=data.held_out.subset(np.arange(0)))  # not by another client's model
    single = [evaluate_global_model(without_held_out, of_client) for of_client in scores.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a mean of nothing is NaN
        values = {name: float(np.nanmean([e.values[name] for e in single])) for name in single[0].values}
        per_class = {
            name: np.nanmean([e.report.per_class[name] for e in single], axis=0) for name in single[0].report.per_class
        }
    report, clients = metrics.ClassificationReport(values, per_class, single[0].report.left_out), None
    name = "held-out" if "held-out" in next(iter(scores.values())) else "validation"
    evaluated = np.isin(data.held_out_owners, list(scores))
    if evaluated.any() and len(data.held_out):
        by_own_model = np.stack(
            [scores[client][name][row] for row, client in enumerate(data.held_out_owners) if client in scores]
        )
        held_out = data.held_out.subset(np.flatnonzero(evaluated))
        clients = metrics.evaluate_per_client(
            by_own_model, held_out.labels, data.held_out_owners[evaluated], held_out.classes
        )
        values |= clients.values
    return Evaluation(values, report, clients)
