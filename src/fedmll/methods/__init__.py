"""Methods by name. A new method is a new file in this package or in a plug-in; nothing else changes.

fedavg, …       one file per method, with the equations of its paper
parts/          parts that several methods share
heads, losses   heads and losses by name
framework/      what methods are written with: Part, Head, Aggregator, Method, and the checks of replies
catalog         what `fedmll methods` shows
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmll.core import registry

if TYPE_CHECKING:
    from fedmll.config.experiment import Experiment
    from fedmll.methods.framework.method import Method
    from fedmll.methods.framework.method_config import MethodConfig, MethodEntry
    from fedmll.methods.framework.task import Task


def find(name: str) -> type[MethodEntry]:
    """The registered method of that name; a ConfigError if there is none."""
    entry: type[MethodEntry] = registry.find("method", name)
    return entry


def config_of(experiment: Experiment) -> MethodConfig:
    """The method of an experiment with its options."""
    return find(experiment.method.name).configure(experiment.method.options)


def build_method(task: Task) -> Method:
    """The method of the task's experiment, ready to train."""
    return config_of(task.experiment).build(task)
