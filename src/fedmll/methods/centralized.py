"""Centralized training: the same model and loss on the pooled, fully annotated data. The upper bound of every table.

A "round" is `local_epochs` passes over all data; the result is the best round on validation data (early stopping).
"""

from fedmll.methods.base import Method


class Centralized(Method):
    name = "centralized"
    summary = "the pooled data in one place, best round on validation data: the upper bound"
    keep = "best"
    pooled = True
