"""Methods by name. A new method is a new file in this package or in a plug-in; nothing else changes.

base            the contract: Part, Head, Aggregator (start here)
client_round    what a part sees on a client: Client, ClientRound, TrainStep, Batch
allowed_replies which tensors and bounds are allowed in a reply, and why one is rejected
method          Method: a name, a paper and a list of parts; one round on the server
recipe          which head and parts a method has, and whether they can work together
method_config   the [method] section of an experiment: a method with its options
catalog         what `fedmll methods` shows
heads, losses   heads and losses by name
parts/          parts that several methods share
fedavg, …       one file per method, with the equations of its paper
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmll.core import registry

if TYPE_CHECKING:
    from fedmll.config.experiment import Experiment
    from fedmll.methods.method import Method
    from fedmll.methods.method_config import MethodConfig, MethodEntry
    from fedmll.methods.task import Task


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
