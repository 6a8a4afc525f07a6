"""`compose`: a head, parts and an average by name, each with its options in its own table.

[method]
name = "compose"
head = "etf-ladm"
parts = ["prior-adjusted", "contrast", "alignment"]
average = "mean"
contrast.lambda_pos = 0.5

An error names parts that cannot work together. A part that another one depends on is added before it: `alignment` adds
`correlation`. `fedmll methods compose` lists all heads and parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import BaseModel, create_model

from fedmll.config.experiment import Experiment
from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.methods.framework.base import AUTO, Component, PartOptions, Resolved, ServerOnlyPart, option
from fedmll.methods.framework.method_config import MethodConfig, MethodEntry
from fedmll.methods.framework.recipe import MethodRecipe


class ComposedConfig(MethodConfig):
    """Head, parts and average by name. Each component has its own table of options, [method.NAME]."""

    @cached_property
    def recipe(self) -> MethodRecipe:
        average = registry.find("part", self.options.average)
        if "aggregation" not in average.provides:
            raise ConfigError(
                f"method.average = '{self.options.average}' is a part that does not average; move it to method.parts."
            )
        parts = [registry.find("part", name) for name in self.options.parts]
        return MethodRecipe.of(registry.find("head", self.options.head), parts, average)

    def options_of(self, component: type[Component]) -> Any:
        return getattr(self.options, component.name) if component.Options.model_fields else component.Options()

    def prefix(self, component: type[Component]) -> str:
        return f"method.{component.name}."

    def resolve(self, experiment: Experiment) -> Resolved:
        """A shared option has one value: a value that is given for one part holds for all."""
        given: dict[str, dict[str, Any]] = {}  # shared option → part → value
        for component, options in self.components:
            for name in component.shared_options():
                given.setdefault(name, {})[component.name] = getattr(options, name)
        found = super().resolve(experiment)
        for name, by_part in given.items():
            values = sorted(set(by_part.values()) - {AUTO})
            if len(values) > 1:
                keys = ", ".join(f"method.{part}.{name}" for part in by_part)
                raise ConfigError(f"{keys} are one setting and have the values {values}; use one value.")
            if values:
                found |= {f"{part}.{name}": (values[0], "") for part, value in by_part.items() if value == AUTO}
        return found

    def reopened(self) -> MethodConfig:
        left = self.values
        for name, table in self.values.items():
            if isinstance(table, Mapping):
                default = type(self.options).model_fields[name].default
                left[name] = {key: value for key, value in table.items() if getattr(default, key) != AUTO}
        return self.entry.configure(left)

    def values_for_sites(self, values: Mapping[str, Any]) -> dict[str, Any]:
        hidden = {part.name for part in self.recipe.parts if issubclass(part, ServerOnlyPart)}
        left = {name: value for name, value in values.items() if name not in hidden}
        return left | {"parts": [name for name in values["parts"] if name not in hidden]}


class Compose(MethodEntry):
    name = "compose"
    summary = "your own combination of a head, parts and an average, each by its name"
    setting = ("skew", "partial annotation", "private labels")
    up = "what the clients' side of its parts sends"
    down = "what the server's side of its parts sends"
    remembers = "what its parts keep"
    config_class = ComposedConfig

    class Options(PartOptions):
        head: str = option("linear", "the name of the head")
        parts: tuple[str, ...] = option(("unknown-as-negative",), "the names of the parts, in the order of their hooks")
        average: str = option("mean", "the name of the part that averages the weights on the server")

    @classmethod
    def schema(cls, values: Mapping[str, Any]) -> type[BaseModel]:
        names = cls.Options(**{name: values[name] for name in cls.Options.model_fields if name in values})
        components = ComposedConfig(cls, names).recipe.components
        if len({component.name for component in components}) < len(components):
            raise ConfigError(f"A head and a part are both called '{components[0].name}'; one must get another name.")
        tables: dict[str, Any] = {c.name: (c.Options, c.Options()) for c in components if c.Options.model_fields}
        return create_model("Options", __base__=cls.Options, **tables)

    @classmethod
    def every_component(cls) -> list[type[Component]]:
        return [*registry.all_of("head").values(), *registry.all_of("part").values()]
