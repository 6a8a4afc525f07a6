"""The rows of a comparison, and the settings that are tried for each: what --methods, --vary and --tune say."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from fedmll.errors import ConfigError, nearest
from fedmll.experiment import Experiment, parse_value
from fedmll.running.comparison import Variant

Choices = Mapping[str, Sequence[Any]]  # section.key → values; of one method alone: method:key → values


def parse_variant(text: str) -> Variant:
    """`fedprox`, or with options: of the method `fedprox:mu=0.1+weights=equal`, of a part `compose:proximal.mu=0.1`, of
    a section `fedavg:training.lr=0.1`."""
    name, _, options = text.partition(":")
    overrides: dict[str, Any] = {"method.name": name}
    for option in filter(None, options.split("+")):
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"'{text}' is not a method: after the colon come options like key=value, joined by +.")
        overrides = extended(text, overrides, {path_of(key): parse_value(value)})
    return Variant(text, overrides)


def path_of(key: str) -> str:
    """Of a row's option: a section's if it names one, else the method's own."""
    section, dot, _ = key.partition(".")
    return key if dot and section in Experiment.model_fields else f"method.{key}"


def crossed(variants: Sequence[Variant], vary: Choices) -> list[Variant]:
    """Every row at every value of every setting: `fedavg` → `fedavg:training.lr=0.1`, `fedavg:training.lr=0.2`."""
    rows = []
    for setting, variant in itertools.product(combinations(vary), variants):
        options = "+".join(f"{key}={value}" for key, value in setting.items())
        label = ("+" if ":" in variant.label else ":").join(filter(None, [variant.label, options]))
        rows.append(Variant(label, extended(label, variant.overrides, setting)))
    return rows


def combinations(choices: Choices) -> list[dict[str, Any]]:
    """The cross product: one value of each key, in all ways. Without a key that is one empty setting."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def extended(label: str, overrides: Mapping[str, Any], setting: Mapping[str, Any]) -> dict[str, Any]:
    """`overrides` and `setting`, if the setting does not take back what the row already says."""
    if twice := [key for key in setting if key in overrides]:
        raise ConfigError(f"The row '{label}' sets {twice[0]} twice. Say it once: in --methods, --vary or --tune.")
    return {**overrides, **setting}


def choices_of(variant: Variant, tune: Choices) -> dict[str, Sequence[Any]]:
    """What is tried for a row: settings that every row has, and those of its method alone (`fedprox:mu`)."""
    found: dict[str, Sequence[Any]] = {}
    for key, values in tune.items():
        method, colon, own = key.rpartition(":")
        if not colon or method == variant.overrides.get("method.name"):
            found = extended(variant.label, found, {path_of(own) if colon else key: values})
    return found


def check_tuned(variants: Sequence[Variant], tune: Choices) -> None:
    """A method that --tune names must be there."""
    known = sorted({str(variant.overrides.get("method.name")) for variant in variants})
    for key in tune:
        method, colon, _ = key.rpartition(":")
        if colon and method not in known:
            raise ConfigError(f"--tune {key}=… is for '{method}', which is no row here{nearest(method, known)}")
