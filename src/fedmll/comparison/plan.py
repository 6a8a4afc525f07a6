"""The rows of a comparison, and the settings that are tried for each: what --methods, --vary and --tune say."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedmll.config.experiment import Experiment
from fedmll.config.toml_values import parse_value
from fedmll.core.errors import ConfigError
from fedmll.core.text import suggest

SettingChoices = Mapping[str, Sequence[Any]]  # section.key → values; for one method only: method:key → values


@dataclass(frozen=True)
class Variant:
    """A row of the table: a method with changed settings, e.g. `fedavg:weighting=equal`."""

    label: str
    overrides: dict[str, Any]


def parse_variant(text: str) -> Variant:
    """`fedprox`, or with options: of the method `fedprox:mu=0.1+weighting=equal`, of a part
    `compose:proximal.mu=0.1`, of a section `fedavg:training.lr=0.1`."""
    name, _, options = text.partition(":")
    overrides: dict[str, Any] = {"method.name": name}
    for option in filter(None, options.split("+")):
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(
                f"'{text}' is not a method: the options after the colon are written as key=value, joined by +."
            )
        overrides = merge_settings(text, overrides, {setting_path(key): parse_value(value)})
    return Variant(text, overrides)


def setting_path(key: str) -> str:
    """The setting that an option of a row changes: section.key as it is, any other key in the section `method`."""
    section, dot, _ = key.partition(".")
    return key if dot and section in Experiment.model_fields else f"method.{key}"


def cross_variants(variants: Sequence[Variant], vary: SettingChoices) -> list[Variant]:
    """Every row at every value of every setting: `fedavg` → `fedavg:training.lr=0.1`, `fedavg:training.lr=0.2`."""
    rows = []
    for setting, variant in itertools.product(setting_combinations(vary), variants):
        options = "+".join(f"{key}={value}" for key, value in setting.items())
        label = ("+" if ":" in variant.label else ":").join(filter(None, [variant.label, options]))
        rows.append(Variant(label, merge_settings(label, variant.overrides, setting)))
    return rows


def setting_combinations(choices: SettingChoices) -> list[dict[str, Any]]:
    """All combinations of one value for each key. Without keys: one empty setting."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def merge_settings(label: str, overrides: Mapping[str, Any], setting: Mapping[str, Any]) -> dict[str, Any]:
    """Both together; ConfigError if a key is in both."""
    if repeated := [key for key in setting if key in overrides]:
        raise ConfigError(f"The row '{label}' sets {repeated[0]} twice. Set it once: in --methods, --vary or --tune.")
    return {**overrides, **setting}


def choices_for(variant: Variant, tune: SettingChoices) -> dict[str, Sequence[Any]]:
    """What --tune tries for a row: the settings for all rows, and those for its method only (`fedprox:mu`)."""
    choices: dict[str, Sequence[Any]] = {}
    for key, values in tune.items():
        method, colon, option = key.rpartition(":")
        if not colon or method == variant.overrides.get("method.name"):
            choices = merge_settings(variant.label, choices, {setting_path(option) if colon else key: values})
    return choices


def check_tuned_methods(variants: Sequence[Variant], tune: SettingChoices) -> None:
    """Raise ConfigError if --tune names a method that has no row."""
    known = sorted({str(variant.overrides.get("method.name")) for variant in variants})
    for key in tune:
        method, colon, _ = key.rpartition(":")
        if colon and method not in known:
            raise ConfigError(f"--tune {key}=… is for '{method}', which is not a row here{suggest(method, known)}")
