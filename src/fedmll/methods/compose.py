"""A fusion is configuration: a head, parts and an average by name, each with options in a table of its own.

[method]
name = "compose"
head = "etf-ladm"
parts = ["prior-adjusted", "contrast", "alignment"]
average = "mean"
contrast.lambda_pos = 0.5

Parts that cannot work together are refused by name. What a part stands on is put in before it: `alignment` needs
`correlation`. `fedmll methods compose` lists all heads and parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, create_model

from fedmll import registry
from fedmll.errors import ConfigError
from fedmll.methods.contract import AUTO, Found, Part, PartOptions, Piece, option
from fedmll.methods.method import Method
from fedmll.methods.recipe import Choice, Recipe

if TYPE_CHECKING:
    from fedmll.experiment import Experiment


class Compose(Method):
    name = "compose"
    summary = "a head, parts and an average of your choice, by name"
    setting = ("skew", "partial annotation", "private labels")
    up = "what its parts send"
    down = "what its parts send"
    remembers = "what its parts keep"

    class Options(PartOptions):
        head: str = option("linear", "a head")
        parts: tuple[str, ...] = option(("absent",), "loss terms, gradient rules and targets, in order")
        average: str = option("mean", "how the server averages")

    @classmethod
    def entries(cls) -> tuple[type[Part] | Choice, ...]:
        return ()  # none is certain

    @classmethod
    def recipe(cls, options: Any) -> Recipe:
        average = registry.find("part", options.average)
        if "average" not in average.jobs:
            raise ConfigError(
                f"method.average = '{options.average}' is a part that does not average; write it in parts."
            )
        return Recipe.of(
            registry.find("head", options.head), [registry.find("part", name) for name in options.parts], average
        )

    @classmethod
    def options_class(cls, values: Mapping[str, Any]) -> type[BaseModel]:
        """A table for each piece that has options."""
        plain = {name: values[name] for name in cls.Options.model_fields if name in values}
        recipe = cls.recipe(cls.Options(**plain))
        names = [piece.name for piece in recipe.pieces]
        if len(set(names)) < len(names):
            raise ConfigError(f"A head and a part are both called '{recipe.head.name}'; one must get another name.")
        fields: dict[str, Any] = {
            piece.name: (piece.Options, piece.Options()) for piece in recipe.pieces if piece.Options.model_fields
        }
        return create_model("Options", __base__=cls.Options, **fields)

    @classmethod
    def options_of(cls, piece: type[Piece], options: Any) -> Any:
        return getattr(options, piece.name) if piece.Options.model_fields else piece.Options()

    @classmethod
    def where(cls, piece: type[Piece]) -> str:
        return f"method.{piece.name}."

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> Found:
        """An option that parts share has one value: what was said of one is said of all."""
        pieces, said = cls.pieces(options), dict[str, set[Any]]()
        for piece, own in pieces:
            for name in piece.shared:
                said.setdefault(name, set()).update({getattr(own, name)} - {AUTO})
        for name, values in said.items():
            if len(values) > 1:
                who = ", ".join(f"method.{piece.name}.{name}" for piece, _ in pieces if name in piece.shared)
                raise ConfigError(f"{who} are one setting and have the values {sorted(values)}; give them one.")
        found = super().resolve(options, experiment)
        for piece, own in pieces:
            for name in piece.shared:
                if said[name] and getattr(own, name) == AUTO:
                    found[f"{piece.name}.{name}"] = (next(iter(said[name])), "")
        return found

    @classmethod
    def opened(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        fields = cls.options_class(options).model_fields
        left = dict(options)
        for name, table in options.items():
            if isinstance(table, Mapping):
                default = fields[name].default
                left[name] = {key: value for key, value in table.items() if getattr(default, key) != AUTO}
        return left

    @classmethod
    def told(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        own = {name for name in options["parts"] if registry.find("part", name).server_only}
        left = {name: value for name, value in options.items() if name not in own}
        return left | {"parts": [name for name in options["parts"] if name not in own]}
