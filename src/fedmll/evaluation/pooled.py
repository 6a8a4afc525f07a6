"""The global model on data: every metric of its predictions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedmll import registry
from fedmll.evaluation import metrics
from fedmll.evaluation.counted import Counted

if TYPE_CHECKING:
    from fedmll.data.federation import Federation

VALIDATED = ("macro_auc", "map", "macro_f1")  # also on validation data, as val_…
_POSITIVE, _BOTH = "a class with a positive", "a class with a positive and a negative"
_HELD_OUT = "in samples that the clients themselves hold out (partition.holdout)"

# Every metric that `evaluate_pooled` can give, and what it needs: without that it is undefined.
METRICS: dict[str, str] = {
    **dict.fromkeys(("macro_auc", "micro_auc", "auc", "bacc"), f"{_BOTH} in the test data"),
    **dict.fromkeys(("macro_f1", "micro_f1", "map", "c_ap", "o_ap"), f"{_POSITIVE} in the test data"),
    **dict.fromkeys(("c_p", "c_r", "c_f1", "o_p", "o_r", "o_f1"), f"{_POSITIVE} in the test data"),
    "hamming": "a known target in the test data",
    **dict.fromkeys(("macro_f1_tuned", "micro_f1_tuned"), f"{_POSITIVE} in the test data, and validation data"),
    "accuracy": "test samples that all have exactly one label",
    "val_macro_auc": f"{_BOTH} in the validation data",
    **dict.fromkeys(("val_map", "val_macro_f1"), f"{_POSITIVE} in the validation data"),
    **dict.fromkeys(("client_mean_auc", "client_worst_auc"), f"{_BOTH} {_HELD_OUT}"),
    **dict.fromkeys(("client_mean_map", "client_worst_map"), f"{_POSITIVE} {_HELD_OUT}"),
    **dict.fromkeys(("client_mean_macro_f1", "client_worst_macro_f1"), f"{_POSITIVE} {_HELD_OUT}"),
}

HIGHEST = 100  # of every metric: they are percent, and so are those of plug-ins
SITES = "sites_"  # before a metric that is an average over the sites' own
POOLED = "pooled_"  # before one of the sites' data together, from their counts


def of_a_site() -> frozenset[str]:
    """The metrics that a site may say of its own held-out data; everything else is not believed."""
    elsewhere = ("val_", "client_")
    own = {name for name in METRICS if not name.startswith(elsewhere) and not name.endswith("_tuned")}
    return frozenset(own - {"accuracy"}) | {f"val_{name}" for name in VALIDATED} | registry.added("metric").keys()


@dataclass(frozen=True)
class Evaluation:
    values: dict[str, float]
    report: metrics.Report  # of the test data; of the sites' held-out data together where there is none
    clients: metrics.ClientReport | None = None  # of the clients' own held-out data
    scores: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # of a common model
    counted: Counted | None = None  # what the sites of a federation between machines counted


def evaluate_alone(data: Federation, scores: Mapping[int, Mapping[str, NDArray[np.float32]]]) -> Evaluation:
    """Of a model a client (`scores` by client, then as above): on the test and validation data means over the clients,
    by class too; and every client's own metrics on what it holds out itself."""
    nobody = replace(data, held_out=data.held_out.subset(np.arange(0)))  # not by another client's model
    single = [evaluate_pooled(nobody, own) for own in scores.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a mean of nothing is NaN
        values = {name: float(np.nanmean([e.values[name] for e in single])) for name in single[0].values}
        per_class = {
            name: np.nanmean([e.report.per_class[name] for e in single], axis=0) for name in single[0].report.per_class
        }
    report, clients = metrics.Report(values, per_class, single[0].report.left_out), None
    name = "held-out" if "held-out" in next(iter(scores.values())) else "validation"
    mine = np.isin(data.held_out_owner, list(scores))
    if mine.any() and len(data.held_out):
        own = np.stack(
            [scores[client][name][row] for row, client in enumerate(data.held_out_owner) if client in scores]
        )
        held_out = data.held_out.subset(np.flatnonzero(mine))
        clients = metrics.per_client(own, held_out.labels, data.held_out_owner[mine], held_out.classes)
        values |= clients.values
    return Evaluation(values, report, clients)


def evaluate_pooled(data: Federation, scores: Mapping[str, NDArray[np.float32]]) -> Evaluation:
    """Every metric of the global model on the test data; F1 also at thresholds chosen on the validation data; each
    client's own on what it holds out. `scores` by the names of `Federation.evaluated`."""
    test = scores["test"]
    validation = scores.get("validation", test[:0])
    thresholds = metrics.best_thresholds(validation, data.validation.labels) if len(validation) else None
    report = metrics.evaluate(test, data.test.labels, data.test.classes, thresholds)
    values, clients = dict(report.values), None
    if bool(((data.test.labels == 1).sum(1) == 1).all()):
        values["accuracy"], report.per_class["accuracy"] = metrics.accuracy(test, data.test.labels)
    if len(validation):
        found = metrics.evaluate(validation, data.validation.labels, data.validation.classes).values
        values |= {f"val_{name}": found[name] for name in VALIDATED}
    held_out = scores.get("held-out", validation)
    if len(held_out) and len(data.held_out):
        clients = metrics.per_client(held_out, data.held_out.labels, data.held_out_owner, data.held_out.classes)
        values |= clients.values
    return Evaluation(values, report, clients, scores)
