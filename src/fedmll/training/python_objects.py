"""Experiments with Python objects: data, a model, a loss and metrics that have no name and no file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedmll.config.experiment import Experiment
from fedmll.config.settings import DataSettings
from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.data.objects import register_data
from fedmll.methods.losses import register_loss
from fedmll.models.objects import register_model

MetricFunction = Callable[[Any, Any], float]


def make_experiment(
    experiment: Experiment | None = None,
    *,
    data: Any = None,
    model: Any = None,
    loss: Any = None,
    metrics: Mapping[str, MetricFunction] | None = None,
    method: str | Mapping[str, Any] | None = None,
    rounds: int | None = None,
    clients: int | None = None,
    seed: int | None = None,
    classes: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Experiment:
    """An experiment from Python objects and a few settings.

    Args:
        experiment: the settings to start from; by default the defaults.
        data: the data: (x, y) arrays with −1 or NaN for unknown labels; a dict of the arrays x, y, clients, groups,
            split and classes; a pandas or Polars data frame; a torch or Hugging Face dataset; a dict of them by split;
            a list with one of them per client; or the name of a data source.
        model: a torch module, a function that builds one, or the name of a backbone.
        loss: a function (logits, targets) → (batch, classes), or the name of a loss.
        metrics: name → function (scores, targets) → number, in addition to the metrics of every run.
        method: the name of the method, or {"name": …} with its options.
        rounds: the number of rounds.
        clients: the number of clients.
        seed: the seed.
        classes: the names of the classes, if the data does not have them.
        settings: other settings, `section.key` → value.
    """
    names_data = isinstance(data, str) or (isinstance(data, Mapping) and _is_section(data))
    given_data = None if names_data else data
    overrides: dict[str, Any] = {}
    if names_data:
        overrides = {f"data.{key}": value for key, value in ({"name": data} if isinstance(data, str) else data).items()}
    overrides |= register_objects(data=given_data, model=model, loss=loss, metrics=metrics, classes=classes)
    if method is not None:
        options = {"name": method} if isinstance(method, str) else method
        overrides |= {f"method.{key}": value for key, value in options.items()}
    given = {"training.rounds": rounds, "partition.clients": clients, "seed": seed}
    overrides |= {key: value for key, value in given.items() if value is not None} | dict(settings or {})
    base = Experiment() if experiment is None else experiment
    return base.changed(overrides) if overrides else base


def _is_section(data: Mapping[str, Any]) -> bool:
    """Whether these are settings of the section [data], such as a name and a root, and not arrays."""
    return bool(data) and "x" not in data and data.keys() <= DataSettings.model_fields.keys()


def register_objects(
    *, data: Any = None, model: Any = None, loss: Any = None, metrics: Mapping[str, MetricFunction] | None = None,
    classes: Sequence[str] | None = None,
) -> dict[str, str]:  # fmt: skip
    """Register Python objects; returns the settings that name them, `section.key` → name."""
    names, count = {}, None
    if data is not None:
        names["data.name"] = name = register_data(data, classes)
        count = len(registry.find("source", name).load(None).train.classes)
    if model is not None:
        names["model.backbone"] = model if isinstance(model, str) else register_model(model, count)
    if loss is not None:
        names["training.loss"] = loss if isinstance(loss, str) else register_loss(loss)
    for name, metric in (metrics or {}).items():
        _register_metric(name, metric)
    return names


def _register_metric(name: str, metric: MetricFunction) -> None:
    """The metric is tried on four samples of three classes."""

    def compute(scores: Any, targets: Any) -> float:
        try:
            return float(metric(scores, targets))
        except Exception as error:
            raise ConfigError(
                f"The metric '{name}' fails with {type(error).__name__}: {error}. It must be a function (scores, "
                "targets) of two arrays (samples, classes) that returns one number; targets are 1, 0 or -1 (unknown)."
            ) from error

    compute(np.linspace(0.1, 0.9, 12).reshape(4, 3), np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1]], np.int8))
    compute.__module__ = "the user"  # not built in, so every run computes it
    registry.register("metric", name)(compute)
