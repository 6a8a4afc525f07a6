"""The average of a real federation: which one is used unless the experiment sets it, and what it tolerates.

A simulation averages as the papers do, by the weighted mean. Between machines any site may send a wrong reply, and one
such reply can destroy a mean. With three sites or more, methods that use the mean therefore use centered clipping
(methods/parts/averaging.py); benchmarks/attacks.py has the measurements. The choice is stored in the experiment of the
run, so a simulation with that experiment averages in the same way.
"""

from __future__ import annotations

from fedmll.config.experiment import Experiment
from fedmll.methods import config_of
from fedmll.methods.framework.base import Part
from fedmll.methods.framework.method_config import MethodConfig
from fedmll.methods.parts.averaging import CenteredClipping, ClippedMean, TrimmedMean, WeightedAverage

DEFAULT, MEAN = CenteredClipping.name, WeightedAverage.name
MIN_SITES = 3  # with two sites nobody can tell which one is faulty


def with_default_average(experiment: Experiment, sites: int) -> Experiment:
    """The experiment of a real federation with this many sites. An average that the experiment sets is kept."""
    # `compose` has a table of options for its average, which another average does not have
    is_set = experiment.is_set("method.average") or experiment.is_set(f"method.{MEAN}")
    if sites < MIN_SITES or is_set or not _can_choose(config_of(experiment)):
        return experiment
    return experiment.changed({"method.average": DEFAULT})


def _can_choose(config: MethodConfig) -> bool:
    """Whether the method uses the mean and can use the default instead."""
    choices = [choice for choice in config.method.choices() if choice.option == "average"]
    return config.values.get("average") == MEAN and all(DEFAULT in choice.parts for choice in choices)


def _average(config: MethodConfig) -> type[Part]:
    return next(part for part in config.recipe.parts if "aggregation" in part.provides)


def _trains(experiment: Experiment) -> bool:
    """Whether sites train. Otherwise they only send sums, which are added up."""
    return experiment.training.rounds > 0 and config_of(experiment).recipe.trains


def tolerated_sites(experiment: Experiment, sites: int) -> int:
    """How many faulty sites the average of an experiment tolerates."""
    config = config_of(experiment)
    average = _average(config)
    if sites < MIN_SITES or not _trains(experiment):
        return 0
    if issubclass(average, TrimmedMean):
        trim = config.options_of(average).trim
        return max(int(trim * sites), 1) if trim else 0
    return max(sites // 4, 1) if issubclass(average, CenteredClipping | ClippedMean) else 0


def describe_average(experiment: Experiment, sites: int) -> str:
    """For the operator: how the replies of the sites are averaged, and what that tolerates."""
    config, name = config_of(experiment), experiment.method.name
    average, tolerated = _average(config), tolerated_sites(experiment, sites)
    if tolerated:
        faulty, have = ("faulty site", "it has") if tolerated == 1 else ("faulty sites", "they have")
        return (
            f"average: {average.name}, which tolerates {tolerated} {faulty} of {sites}, unless {have} a large share of "
            "the images (--max-share limits the share of a site); no average detects backdoors"
        )
    if not _trains(experiment):
        return f"average: none, {name} adds up the sites' sums; a site that sends wrong sums is not tolerated"
    if sites < MIN_SITES:
        return f"average: {average.name}; with {sites} sites no average can tell which one is faulty"
    if _can_choose(config):
        return f"average: {average.name}, which tolerates no faulty site; method.average = '{DEFAULT}' does"
    return f"average: {average.name}, which belongs to {name} and tolerates no faulty site"
