"""Centralized training: the network and loss of a method on all training data in one place, with every true label. It
is the upper bound in a table: `centralized:of=fednca-ml` is the upper bound for `fednca-ml`, with the same head.

It also uses the samples that a partition drops or the server holds, and the labels that clients do not annotate. With
the default `of`, a target that is unknown in the data source itself is not part of the loss. A "round" is
`local_epochs` passes over all data. The result is the best round on validation data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from pydantic import BaseModel, create_model

from fedmll import methods
from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.methods.framework.base import PartOptions, Resolved, option
from fedmll.methods.framework.method import Method
from fedmll.methods.framework.method_config import MethodConfig, MethodEntry
from fedmll.methods.framework.recipe import MethodRecipe
from fedmll.methods.framework.task import Task


class CentralizedConfig(MethodConfig):
    pooled = True

    @cached_property
    def inner(self) -> MethodConfig:
        values = self.values
        return _inner_entry(values).configure({name: value for name, value in values.items() if name != "of"})

    @cached_property
    def recipe(self) -> MethodRecipe:
        return self.inner.recipe

    @property
    def method(self) -> type[Method]:
        return self.inner.method

    def resolve(self, experiment: Experiment) -> Resolved:
        return self.inner.resolve(experiment)

    def reopened(self) -> MethodConfig:
        return self.entry.configure({"of": self.options.of} | self.inner.reopened().values)

    def check(self, experiment: Experiment) -> None:
        self.inner.check(self._with_inner(experiment))

    def build(self, task: Task) -> Method:
        task = replace(task, experiment=self._with_inner(task.experiment), clients=1)
        return self.method(task, self.inner, pooled=True)

    def _with_inner(self, experiment: Experiment) -> Experiment:
        section = type(experiment.method)(name=self.options.of, **self.inner.values)
        return experiment.model_copy(update={"method": section})


class Centralized(MethodEntry):
    name = "centralized"
    summary = "all data and all labels in one place, best round on validation data: the upper bound for the method `of`"
    setting = ("skew", "partial annotation", "private labels")
    up = "all data, to one place"
    keep = "best"
    config_class = CentralizedConfig

    class Options(PartOptions):
        of: str = option("fedavg-pl", "the method that is trained on all data; its own options may follow")

    @classmethod
    def canonical_options(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return _inner_entry(values).canonical_options(values)

    @classmethod
    def schema(cls, values: Mapping[str, Any]) -> type[BaseModel]:
        return create_model("Options", __base__=(cls.Options, _inner_entry(values).schema(values)))


def _inner_entry(values: Mapping[str, Any]) -> type[MethodEntry]:
    entry = methods.find(str(values.get("of", Centralized.Options().of)))
    if entry is Centralized:
        raise ConfigError("method.of is the method that `centralized` trains on all data, for example of=fednca-ml.")
    return entry
