"""Centralized training: the network and loss of a method on all training data in one place, with every true label. It
is the upper bound of a table: `centralized:of=fednca-ml` bounds `fednca-ml`, with the same head.

It has what a federation does not have: the samples that a partition drops or the server holds, and the labels that
clients do not annotate. A target that the data source itself does not know is in no loss (with the default `of`). A
"round" is `local_epochs` passes over all data; the result is the best round on validation data (early stopping).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, create_model

from fedmll import methods
from fedmll.core.errors import ConfigError
from fedmll.methods.base import PartOptions, Resolved, option
from fedmll.methods.method_config import MethodConfig, MethodEntry
from fedmll.methods.recipe import MethodRecipe

if TYPE_CHECKING:
    from fedmll.config.experiment import Experiment
    from fedmll.methods.method import Method
    from fedmll.methods.task import Task

DEFAULT = "fedavg-pl"
OF = option(DEFAULT, "the method that it bounds; the options of that method may follow")


class CentralizedConfig(MethodConfig):
    """Another method's configuration in the run mode `pooled`: one client has all data and all labels."""

    pooled = True

    @classmethod
    def rename_symbols(cls, entry: type[MethodEntry], values: Mapping[str, Any]) -> dict[str, Any]:
        bounded = _bounded_entry(values)
        return bounded.config_class.rename_symbols(bounded, values)

    @classmethod
    def schema(cls, entry: type[MethodEntry], values: Mapping[str, Any]) -> type[BaseModel]:
        bounded = _bounded_entry(values)
        return create_model("Options", __base__=bounded.config_class.schema(bounded, _without_of(values)), of=(str, OF))

    @cached_property
    def bounded(self) -> MethodConfig:
        return _bounded_entry(self.values).configure(_without_of(self.values))

    @cached_property
    def recipe(self) -> MethodRecipe:
        return self.bounded.recipe

    @property
    def fixed_rounds(self) -> int | None:
        return self.bounded.fixed_rounds

    def resolve(self, experiment: Experiment) -> Resolved:
        return self.bounded.resolve(experiment)

    def reopened(self) -> MethodConfig:
        return self.entry.configure({"of": self.options.of} | self.bounded.reopened().options.model_dump())

    def check(self, experiment: Experiment) -> None:
        self.bounded.check(self._bounded_experiment(experiment))

    def build(self, task: Task) -> Method:
        experiment = self._bounded_experiment(task.experiment)
        return self.bounded.method(replace(task, experiment=experiment, clients=1), self.bounded, pooled=True)

    def _bounded_experiment(self, experiment: Experiment) -> Experiment:
        """The same experiment with the bounded method."""
        section = type(experiment.method)(name=self.options.of, **_without_of(experiment.method.options))
        return experiment.model_copy(update={"method": section})


class Centralized(MethodEntry):
    name = "centralized"
    summary = "all data and all labels in one place, best round on validation data: the upper bound of the method `of`"
    setting = ("skew", "partial annotation", "private labels")
    up = "all data, to one place"
    keep = "best"
    config_class = CentralizedConfig

    class Options(PartOptions):
        of: str = OF


def _bounded_entry(values: Mapping[str, Any]) -> type[MethodEntry]:
    entry = methods.find(str(values.get("of", DEFAULT)))
    if entry.config_class.pooled:
        raise ConfigError("method.of names the method that `centralized` bounds, for example of=fednca-ml.")
    return entry


def _without_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "of"}
