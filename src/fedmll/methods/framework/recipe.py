"""A recipe: the head and the parts of a method, and whether they can work together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedmll.config.settings import TrainingSettings
from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.methods import losses
from fedmll.methods.framework.base import CAPABILITIES, Component, Head, Part, TargetLoss, missing_vectorized, option


@dataclass(frozen=True)
class PartChoice:
    """An option of a method that selects one of several parts, or none; for example the switches of an ablation."""

    option: str
    parts: Mapping[Any, type[Part] | None]  # value of the option → part; the first is the default
    meaning: str

    @property
    def field(self) -> tuple[Any, Any]:
        """The type and the pydantic field of the option."""
        values = tuple(self.parts)
        kind = bool if isinstance(values[0], bool) else Literal[values]
        return kind, option(values[0], self.meaning)


def switch(name: str, part: type[Part], meaning: str, otherwise: type[Part] | None = None) -> PartChoice:
    """An option that turns a part on (the default) or off, or replaces it by `otherwise`."""
    return PartChoice(name, {True: part, False: otherwise}, meaning)


def with_dependencies(part: type[Part]) -> list[type[Part]]:
    """The parts that it depends on, and the part itself as the last."""
    return [*dict.fromkeys(deeper for needed in part.depends_on for deeper in with_dependencies(needed)), part]


def check_option_names(method: str, components: Iterable[type[Component]]) -> None:
    """Components of a method may share an option. Two different options of the same name would hide each other."""
    seen: dict[str, tuple[type[Component], str]] = {}
    for component in components:
        for name, field in component.Options.model_fields.items():
            other, definition = seen.setdefault(name, (component, repr(field)))
            if definition != repr(field):
                raise ConfigError(
                    f"In '{method}' both '{other.name}' and '{component.name}' have an option '{name}', and the two "
                    "options differ. Combine them with `compose`, where each component has its own table of options."
                )


@dataclass(frozen=True)
class MethodRecipe:
    """A head and a list of parts that can work together. The part that aggregates the weights is the last."""

    head: type[Head]
    parts: tuple[type[Part], ...]

    @property
    def components(self) -> tuple[type[Component], ...]:
        return (self.head, *self.parts)

    @classmethod
    def of(cls, head: type[Head], parts: Iterable[type[Part]], average: type[Part]) -> MethodRecipe:
        """The recipe of these parts and their dependencies. A dependency stands before the first part that needs it."""
        listed, found = [*parts, average], list[type[Part]]()
        for part in listed:
            if listed.count(part) > 1:
                raise ConfigError(f"The part '{part.name}' is in the method twice.")
            found += [needed for needed in with_dependencies(part) if needed not in found]
        return cls(head, tuple(found))

    def __post_init__(self) -> None:
        """Check what the components provide, require and conflict with."""
        providers: dict[str, list[type[Component]]] = {}
        for component in self.components:
            for capability in component.provides:
                providers.setdefault(capability, []).append(component)
        for capability, several in sorted(providers.items()):
            if len(several) > 1:
                names = " and ".join(repr(component.name) for component in several)
                raise ConfigError(
                    f"The parts {names} cannot work together: each of them decides {_described(capability)}, and a "
                    "method needs one decision. Leave one of them out."
                )
        for part in self.parts:
            for capability in sorted(part.conflicts & providers.keys()):
                other = providers[capability][0]
                raise ConfigError(
                    f"The parts '{other.name}' and '{part.name}' cannot work together: '{other.name}' means that "
                    f"{CAPABILITIES.get(capability, capability)}, and '{part.name}' does not support that. Leave one "
                    "of them out."
                )
            for capability in sorted(part.requires - providers.keys()):
                raise ConfigError(
                    f"The part '{part.name}' requires {_described(capability)}, which neither the head "
                    f"'{self.head.name}' nor another part provides. Provided by: {_all_providers(capability)}."
                )
        if not any(issubclass(part, TargetLoss) for part in self.parts):
            raise ConfigError(f"No part has a loss for the known targets; add one of {_all_providers('target-loss')}.")

    def check(self, training: TrainingSettings) -> None:
        """Raise a ConfigError if the parts cannot work with these training settings."""
        self._check_loss(training)
        if training.clients_per_batch is not None:
            self._check_clients_per_batch(training)

    def _check_loss(self, training: TrainingSettings) -> None:
        target_loss = next(part for part in self.parts if issubclass(part, TargetLoss))
        losses.check_loss(training.loss)
        setting = f"training.loss = '{training.loss}'"
        if training.loss != "bce" and target_loss.accepts == "none":
            raise ConfigError(
                f"{setting} would change nothing: the part '{target_loss.name}' has its own loss. Leave it out."
            )
        if not losses.is_for_missing_labels(training.loss):
            return
        other: type[Part] | None = target_loss
        if target_loss.accepts == "all":
            other = next((part for part in self.parts if "unknown-targets" in part.provides), None)
        if other is not None:
            raise ConfigError(
                f"{setting} defines the loss of unknown targets, and so does the part '{other.name}'; they cannot work "
                "together. Use another loss (bce, weighted, asl), or a method without that part, for example fedavg."
            )
        if losses.split_options(training.loss)[0] == "splc" and training.rounds == 1:
            raise ConfigError(f"{setting} finds missing labels from round 2 on, and training.rounds is 1. Raise it.")

    def _check_clients_per_batch(self, training: TrainingSettings) -> None:
        setting = f"training.clients_per_batch = {training.clients_per_batch}"
        if training.optimizer_state == "kept":
            raise ConfigError(f"{setting} needs training.optimizer_state = 'fresh'; leave one of them out.")
        single = next(iter(self.not_vectorized), None)
        if single is not None:
            recipes = {name: entry.default_recipe() for name, entry in registry.all_of("method").items()}
            able = [name for name, recipe in recipes.items() if recipe is not None and not recipe.not_vectorized]
            raise ConfigError(
                f"{setting}: the part '{single}' can train only one client at a time. Leave the setting out, or use a "
                f"method without that part. Methods that can train several clients at once: {', '.join(sorted(able))}."
            )

    @property
    def not_vectorized(self) -> list[str]:
        """The names of the parts that can train only one client at a time."""
        return missing_vectorized(self.parts)

    @property
    def trains(self) -> bool:
        """Whether clients train in the rounds, or only send statistics."""
        return not any("rounds" in part.exchanges for part in self.parts)


def _described(capability: str) -> str:
    meaning = CAPABILITIES.get(capability)
    return f"'{capability}'" if meaning is None else f"{meaning} ('{capability}')"


def _all_providers(capability: str) -> str:
    """The names of all registered heads and parts that provide it."""
    everything = registry.all_of("head").items() | registry.all_of("part").items()
    return ", ".join(sorted(name for name, component in everything if capability in component.provides))
