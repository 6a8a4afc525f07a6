"""The table of metrics: name, label, direction, unit, what a metric is averaged over, and where it is shown.

To add a metric, compute it in `metrics.py` and add one line here. (A plug-in registers it with `register("metric", …)`
and needs no line.) Every command, table, log line and report reads this table.

METRICS            metrics of a model, by name, in the order in which people see them
FEDERATED_METRICS  the same in a federation between machines, where the server has no samples
CLASS_METRICS      metrics of one class
COSTS, LOSS        what a round costs, and the training loss

A prefix says that a metric is computed on other data:

val_           on the validation data
client_mean_   the mean over the clients, each on the samples that it holds out
client_worst_  the lowest value of any client
sites_         the mean over the sites of a federation between machines
pooled_        the held-out samples of all sites together, from their histograms
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fedmll.core import registry

PERCENT, NUMBER = "percent", "number"  # units
MAX_PERCENT = 100  # the highest value of a metric in percent; the metrics of plug-ins are percent too

VALIDATION, CLIENT_MEAN, CLIENT_WORST, SITES, POOLED = "val_", "client_mean_", "client_worst_", "sites_", "pooled_"
ERROR = "_error"  # name + ERROR: the metric is at most this far from the exact value (histogram metrics)

# Places that show metrics
HEADLINE = "headline"  # the table after a run, and the model card
COMPARISON = "comparison"  # the columns of a comparison's tables, unless --metrics names others
REPORT = "report"  # the columns of the HTML report that are visible at first
LOG = "log"  # the line of log.txt for each round
PROGRESS = "progress"  # the display in a notebook during a run
ROUND_TABLE = "round table"  # the line in the terminal for each round
RUN_LIST = "run list"  # `fedmll runs`: the first of these that the run has
EXTERNAL = "external validation"  # `fedmll validate`

# What a metric is averaged over
CLASSES_WITH_BOTH, CLASSES_WITH_POSITIVE = "classes with a positive and a negative", "classes with a positive"
ALL_CLASSES = "all classes"  # a class without a positive counts as 0
ENTRIES, SAMPLES = "all pairs of a sample and a class", "samples"
# What the data must contain
_POSITIVE, _BOTH = "a class with a positive", "a class with a positive and a negative"
_HELD_OUT = "samples that the clients themselves hold out (partition.holdout)"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One line of the table.

    Attributes:
        name: The key in `metrics.jsonl`, `summary.json` and on the command line.
        label: The name for people.
        over: What the metric is averaged over.
        needs: What the test data must contain; without it the metric is undefined (NaN).
        lower_is_better: True for errors, losses and costs.
        unit: PERCENT or NUMBER.
        shown_in: The places that show the metric: HEADLINE, COMPARISON, …
        on_validation: The metric is also computed on the validation data (`val_…`).
        per_client: The metric is also computed for each client (`client_mean_…`, `client_worst_…`).
        from_sites: A site of a federation between machines reports it to the server.
    """

    name: str
    label: str
    over: str = ""
    needs: str = ""
    lower_is_better: bool = False
    unit: str = PERCENT
    shown_in: tuple[str, ...] = ()
    on_validation: bool = False
    per_client: bool = False
    from_sites: bool = True


_MAIN = (HEADLINE, COMPARISON, REPORT, LOG, ROUND_TABLE, EXTERNAL)
_COMPUTED = (
    Metric(
        name="macro_auc", label="macro AUC", over=CLASSES_WITH_BOTH, needs=_BOTH, on_validation=True,
        shown_in=(*_MAIN, PROGRESS, RUN_LIST),
    ),
    Metric(
        name="map", label="mAP", over=CLASSES_WITH_POSITIVE, needs=_POSITIVE, on_validation=True, per_client=True,
        shown_in=(*_MAIN, PROGRESS, RUN_LIST),
    ),
    Metric(
        name="macro_f1", label="macro F1", over=CLASSES_WITH_POSITIVE, needs=_POSITIVE, on_validation=True,
        per_client=True, shown_in=_MAIN,
    ),
    Metric(
        name="macro_f1_tuned", label="macro F1, tuned", over=CLASSES_WITH_POSITIVE, needs=_POSITIVE, from_sites=False,
        shown_in=(HEADLINE, COMPARISON, REPORT, EXTERNAL),
    ),
    Metric(name="micro_f1", label="micro F1", over=ENTRIES, needs=_POSITIVE, shown_in=(HEADLINE, EXTERNAL)),
    Metric(
        name="bacc", label="balanced accuracy", over=CLASSES_WITH_BOTH, needs=_BOTH,
        shown_in=(HEADLINE, COMPARISON, REPORT, EXTERNAL),
    ),
    Metric(
        name="accuracy", label="accuracy", over=SAMPLES, needs="test samples that all have exactly one label",
        from_sites=False, shown_in=(HEADLINE, REPORT, RUN_LIST),
    ),
    Metric(name="micro_auc", label="micro AUC", over=ENTRIES, needs=_BOTH, shown_in=(EXTERNAL,)),
    Metric(name="micro_f1_tuned", label="micro F1, tuned", over=ENTRIES, needs=_POSITIVE, from_sites=False),
    Metric(name="auc", label="AUC", over=CLASSES_WITH_BOTH, needs=_BOTH, per_client=True),
    Metric(name="c_ap", label="C-AP", over=CLASSES_WITH_POSITIVE, needs=_POSITIVE),
    Metric(name="c_p", label="C-P", over=CLASSES_WITH_POSITIVE, needs=_POSITIVE),
    Metric(name="c_r", label="C-R", over=CLASSES_WITH_POSITIVE, needs=_POSITIVE),
    Metric(name="c_f1", label="C-F1", over=CLASSES_WITH_POSITIVE, needs=_POSITIVE),
    Metric(name="c_p_all", label="C-P, all classes", over=ALL_CLASSES, needs=_POSITIVE),
    Metric(name="c_r_all", label="C-R, all classes", over=ALL_CLASSES, needs=_POSITIVE),
    Metric(name="c_f1_all", label="C-F1, all classes", over=ALL_CLASSES, needs=_POSITIVE),
    Metric(name="o_ap", label="O-AP", over=ENTRIES, needs=_POSITIVE),
    Metric(name="o_p", label="O-P", over=ENTRIES, needs=_POSITIVE),
    Metric(name="o_r", label="O-R", over=ENTRIES, needs=_POSITIVE),
    Metric(name="o_f1", label="O-F1", over=ENTRIES, needs=_POSITIVE),
    Metric(name="hamming", label="Hamming loss", over=ENTRIES, needs="a known target", lower_is_better=True),
)  # fmt: skip

_PREFIX_LABELS = {
    VALIDATION: "{}, validation data",
    CLIENT_MEAN: "{}, mean of the clients",
    CLIENT_WORST: "{}, worst client",
    SITES: "{}, mean of the sites",
    POOLED: "{}, all sites together",
}


def _on_other_data(metric: Metric, prefix: str, needs: str, *shown_in: str) -> Metric:
    return replace(
        metric,
        name=prefix + metric.name,
        label=_PREFIX_LABELS[prefix].format(metric.label),
        needs=needs,
        shown_in=shown_in,
    )


def _local_metrics() -> Iterator[Metric]:
    for metric in _COMPUTED:
        tuned = ", and validation data" if metric.name.endswith("_tuned") else ""
        where = "" if metric.over == SAMPLES else " in the test data"
        yield replace(metric, needs=metric.needs + where + tuned)
    for metric in _COMPUTED:
        if metric.on_validation:
            yield _on_other_data(metric, VALIDATION, f"{metric.needs} in the validation data")
    for metric in _COMPUTED:
        if metric.per_client:
            shown = (HEADLINE,) if metric.name == "auc" else ()
            for prefix in (CLIENT_MEAN, CLIENT_WORST):
                yield _on_other_data(metric, prefix, f"{metric.needs} in {_HELD_OUT}", *shown)


def _federated_metrics() -> Iterator[Metric]:
    """The figures of the sites: the first three metrics are shown, the others only recorded."""
    for prefix, shown in ((POOLED, (HEADLINE, REPORT)), (SITES, (HEADLINE, REPORT, ROUND_TABLE))):
        for metric in _COMPUTED:
            first = metric.name == "macro_auc"
            places = (*shown, *((LOG, RUN_LIST) if first else ())) if metric.on_validation else ()
            yield _on_other_data(metric, prefix, f"{metric.needs} in the samples that the sites hold out", *places)


def _by_name(metrics: Iterable[Metric]) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


METRICS = _by_name(_local_metrics())
FEDERATED_METRICS = _by_name(_federated_metrics())
LOSS = Metric(
    name="loss", label="training loss", lower_is_better=True, unit=NUMBER, shown_in=(LOG, ROUND_TABLE), from_sites=False
)
COSTS = _by_name(
    [
        Metric(name="s/round", label="seconds per round", lower_is_better=True, unit=NUMBER, shown_in=(REPORT,)),
        Metric(name="MB/round", label="MB per round", lower_is_better=True, unit=NUMBER, shown_in=(REPORT,)),
    ]
)
CLASS_METRICS = _by_name(
    [
        Metric(name="ap", label="average precision"),
        Metric(name="auc", label="AUC"),
        Metric(name="f1", label="F1"),
        Metric(name="precision", label="precision"),
        Metric(name="recall", label="recall"),
        Metric(name="bacc", label="balanced accuracy"),
        Metric(name="ece", label="calibration error", lower_is_better=True),
    ]
)
CLASS_COLUMNS = ("ap", "auc", "f1", "precision", "recall", "positives", "known")  # of a table with one row per class
COMPUTED = tuple(metric.name for metric in _COMPUTED)
ON_VALIDATION = tuple(metric.name for metric in _COMPUTED if metric.on_validation)

SELECTION = "val_macro_auc"  # training.keep = "best" and `compare --tune` take the highest
# A report names the method with the best value of the first of these metrics that its runs have
BEST_METHOD_BY = ("map", "macro_auc", "pooled_map", "sites_map", "pooled_macro_auc", "sites_macro_auc")

_ALL = {**{LOSS.name: LOSS}, **METRICS, **FEDERATED_METRICS, **COSTS}


def find_metric(name: str) -> Metric:
    """The line of the table for `name`. A name that is not in it (a plug-in's metric, a number that a method records)
    is its own label, and higher is better."""
    known = name in registry.find_added("metric")
    return _ALL.get(name) or Metric(name=name, label=name, unit=PERCENT if known else NUMBER)


def label_of(name: str) -> str:
    return find_metric(name).label


def lower_is_better(name: str) -> bool:
    return find_metric(name).lower_is_better


def metrics_in(place: str) -> tuple[str, ...]:
    """The names of the metrics that a place shows, in the order of the table; see HEADLINE and the others."""
    return tuple(name for name, metric in _ALL.items() if place in metric.shown_in)


def in_table_order(names: Iterable[str]) -> list[str]:
    """Names that the table has come first, in its order; the others follow as they are."""
    given = list(names)
    order = [name for name in (*METRICS, *_ALL) if name in given]
    return list(dict.fromkeys([*order, *given]))


def metrics_from_sites() -> frozenset[str]:
    """The metrics that a site may report of its own held-out samples. The server rejects any other."""
    names = {metric.name for metric in _COMPUTED if metric.from_sites}
    return frozenset(names | {VALIDATION + name for name in ON_VALIDATION} | registry.find_added("metric").keys())
