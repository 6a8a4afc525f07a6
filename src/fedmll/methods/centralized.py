"""Centralized training: a method's own network and loss on all training data in one place, with every true label. The
upper bound of a table: `centralized:of=fednca-ml` bounds `fednca-ml`, with the same head.

It has what a federation has not: the samples that a partition drops or the server holds, and the labels that clients
do not annotate. A target that the source itself does not know is in no loss (with the default `of`). A "round" is
`local_epochs` passes over all data; the result is the best round on validation data (early stopping).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, create_model

from fedmll import methods
from fedmll.errors import ConfigError
from fedmll.methods.contract import Found, PartOptions, option
from fedmll.methods.method import Method

if TYPE_CHECKING:
    from fedmll.experiment import Experiment
    from fedmll.task import Task

DEFAULT = "fedavg-pl"
OF = option(DEFAULT, "the method that it bounds; the options of that method may follow")


class Centralized(Method):
    name = "centralized"
    summary = "all data and all labels in one place, best round on validation data: the upper bound of the method `of`"
    setting = ("skew", "partial annotation", "private labels")
    up = "all data, to one place"
    keep = "best"
    pooled = True

    class Options(PartOptions):
        of: str = OF

    @classmethod
    def options_class(cls, values: Mapping[str, Any]) -> type[BaseModel]:
        bounded = _bounded(str(values.get("of", DEFAULT)))
        return create_model("Options", __base__=bounded.options_class(_without_of(values)), of=(str, OF))

    @classmethod
    def named(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        return _bounded(str(options.get("of", DEFAULT))).named(options)

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> Found:
        return _bounded(options.of).resolve(options, experiment)

    @classmethod
    def opened(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"of": options["of"]} | _bounded(options["of"]).opened(_without_of(options))

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        _bounded(experiment.method.options["of"]).check(_inner(experiment))

    @classmethod
    def made(cls, task: Task) -> Method:
        """The bounded method itself, for one client that has everything."""
        method = methods.make(replace(task, experiment=_inner(task.experiment), clients=1))
        method.pooled = True
        return method


def _bounded(name: str) -> type[Method]:
    method = methods.find(name)
    if method.pooled:
        raise ConfigError("method.of names the method that `centralized` bounds, for example of=fednca-ml.")
    return method


def _without_of(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "of"}


def _inner(experiment: Experiment) -> Experiment:
    """The same experiment with the bounded method."""
    options = experiment.method.options
    section = type(experiment.method)(name=options["of"], **_without_of(options))
    return experiment.model_copy(update={"method": section})
