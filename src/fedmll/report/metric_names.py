"""What metrics are called where people read them; a name that is not here is its own."""

from __future__ import annotations

from fedmll.evaluation.pooled import POOLED, SITES
from fedmll.report.chart import NUMBER, PERCENT

NAMES = {
    "macro_auc": "macro AUC",
    "micro_auc": "micro AUC",
    "map": "mAP",
    "macro_f1": "macro F1",
    "micro_f1": "micro F1",
    "macro_f1_tuned": "macro F1, tuned",
    "micro_f1_tuned": "micro F1, tuned",
    "bacc": "balanced accuracy",
    "accuracy": "accuracy",
    "auc": "AUC",
    "hamming": "Hamming error",
    "loss": "training loss",
    "client_mean_auc": "clients' own AUC, mean",
    "client_worst_auc": "clients' own AUC, worst",
    "client_mean_map": "clients' own mAP, mean",
    "client_worst_map": "clients' own mAP, worst",
    "client_mean_macro_f1": "clients' own macro F1, mean",
    "client_worst_macro_f1": "clients' own macro F1, worst",
    "s/round": "s a round",
    "MB/round": "MB a round",
}
BEFORE = {"val_": "validation {}", SITES: "mean of the sites' {}", POOLED: "{} of all sites' data"}
LOWER_IS_BETTER = frozenset({"hamming", "loss"})
# The order in which metrics are offered; others follow as they come
FIRST = ("map", "macro_auc", "macro_f1", "macro_f1_tuned", "micro_f1", "bacc", "accuracy", "loss")


def called(metric: str) -> str:
    for start, text in BEFORE.items():
        if metric.startswith(start):
            return text.format(called(metric.removeprefix(start)))
    return NAMES.get(metric, metric)


def unit(metric: str, known: frozenset[str]) -> str:
    """Metrics of evaluations are percent; a loss, and what a method records, is a number of its own."""
    return PERCENT if metric in known else NUMBER


def ordered(metrics: list[str]) -> list[str]:
    return [name for name in FIRST if name in metrics] + [name for name in metrics if name not in FIRST]
