"""What the [method] section of an experiment means: a method, its options, and so its head and parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel

from fedmll.config.experiment import Experiment
from fedmll.core import registry
from fedmll.methods.framework.base import AUTO, Component, PartOptions, Resolved, ServerOnlyPart
from fedmll.methods.framework.recipe import MethodRecipe
from fedmll.methods.framework.task import Task

if TYPE_CHECKING:
    from fedmll.methods.framework.method import Method

Validate = Callable[[type[BaseModel], Mapping[str, Any]], BaseModel]


@dataclass(frozen=True)
class MethodConfig:
    """A method with its options. The options of all components are in one table, [method]."""

    entry: type[MethodEntry]
    options: Any
    pooled: ClassVar[bool] = False  # a run mode: one client has all data and all labels

    @property
    def values(self) -> dict[str, Any]:
        """All options with their values, as they are in [method]."""
        found: dict[str, Any] = self.options.model_dump(exclude_none=True)
        return found

    @cached_property
    def recipe(self) -> MethodRecipe:
        """The head and the parts that these options select."""
        return self.method.recipe(self.options)

    @property
    def method(self) -> type[Method]:
        """The class that trains."""
        from fedmll.methods.framework.method import Method

        return self.entry if issubclass(self.entry, Method) else Method

    @property
    def fixed_rounds(self) -> int | None:
        """The number of rounds, where the method decides it and not the experiment."""
        return self.method.fixed_rounds(self.options)

    @property
    def components(self) -> list[tuple[type[Component], Any]]:
        """The head and the parts, each with its own options."""
        return [(component, self.options_of(component)) for component in self.recipe.components]

    def options_of(self, component: type[Component]) -> Any:
        return component.Options(**{name: getattr(self.options, name) for name in component.Options.model_fields})

    def prefix(self, component: type[Component]) -> str:
        """Where the options of a component are in an experiment."""
        return "method."

    def resolve(self, experiment: Experiment) -> Resolved:
        """The values of the options that are "auto". Of components that share an option the first decides."""
        found: Resolved = {}
        for component, options in self.components:
            prefix = self.prefix(component).removeprefix("method.")
            decided = component.resolve(options, experiment)
            found = {prefix + name: decision for name, decision in decided.items()} | found
        return found

    def reopened(self) -> MethodConfig:
        """The same method with every option that a rule can decide back at "auto"."""
        fields = type(self.options).model_fields
        return self.entry.configure({k: v for k, v in self.values.items() if fields[k].default != AUTO})

    def check(self, experiment: Experiment) -> None:
        """Raise a ConfigError if the method cannot work with the settings of the experiment."""
        seen = experiment
        if not self.recipe.trains:
            seen = experiment.model_copy(update={"training": experiment.training.model_copy(update={"rounds": 0})})
        self.recipe.check(seen.training)
        for component, options in self.components:
            component.check(options, seen, self.prefix(component))
        self.method.check(experiment)

    def values_for_sites(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of [method] that sites receive: without those of parts that only the server runs."""
        hidden = {name for part in self.method.every_part() if _server_only(part) for name in part.Options.model_fields}
        hidden |= {choice.option for choice in self.method.choices() if any(map(_server_only, choice.parts.values()))}
        return {name: value for name, value in values.items() if name not in hidden}

    def build(self, task: Task) -> Method:
        """The method for a task."""
        return self.method(task, self)


def _server_only(part: type[Component] | None) -> bool:
    return part is not None and issubclass(part, ServerOnlyPart)


class MethodEntry:
    """What can be the name of a method in an experiment, and how it is described in tables. A class with a `name` is
    registered."""

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""  # authors, venue, year
    setting: ClassVar[tuple[str, ...]] = ("skew",)  # what it is for: skew, partial annotation, private labels
    up: ClassVar[str] = ""  # what a client sends in addition to the weights …
    down: ClassVar[str] = ""  # … what it receives in addition to them …
    remembers: ClassVar[str] = ""  # … and what it keeps between its rounds
    published: ClassVar[dict[str, Any]] = {}  # the settings of the paper, used by `--as-published`
    unpublished: ClassVar[dict[str, str]] = {}  # settings of the paper that only the user can give → what they are
    symbols: ClassVar[dict[str, str]] = {}  # the paper's symbol of an option, accepted too → its name here
    keep: ClassVar[Literal["last", "best"]] = "last"  # which round's model is the result

    Options: ClassVar[type[BaseModel]] = PartOptions
    config_class: ClassVar[type[MethodConfig]] = MethodConfig

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__dict__.get("name"):
            registry.register("method", cls.name)(cls)

    @classmethod
    def canonical_options(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The options under their names here. If an option is given under both names, the later one counts."""
        return {cls.symbols.get(name, name): value for name, value in values.items()}

    @classmethod
    def schema(cls, values: Mapping[str, Any]) -> type[BaseModel]:
        """The model that validates these options."""
        return cls.Options

    @classmethod
    def configure(cls, values: Mapping[str, Any], validate: Validate = lambda kind, own: kind(**own)) -> MethodConfig:
        """The method with these options.

        Args:
            values: The options as they are in [method]; missing ones have their defaults.
            validate: Makes a pydantic model of the options. An experiment passes one with its own error messages.
        """
        values = cls.canonical_options(values)
        return cls.config_class(cls, validate(cls.schema(values), values))

    @classmethod
    def every_component(cls) -> list[type[Component]]:
        """All heads and parts that its options can select."""
        return []

    @classmethod
    def default_recipe(cls) -> MethodRecipe | None:
        """The recipe with the default options; None if there is none of its own."""
        return None


registry.require_subclass("method", MethodEntry)
