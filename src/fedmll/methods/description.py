"""A method described for people: its heads and parts, and each option with its meaning, range and default."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from fedmll.methods.base import Component
from fedmll.methods.method_config import MethodEntry

OptionRow = tuple[str, str, str, str]  # option, meaning, range, default
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def describe_options(method: type[MethodEntry]) -> list[tuple[str, list[OptionRow]]]:
    """Groups of options, each with a title: the method's own (without a title), then those of each head and part."""
    symbols = {option: f" ({symbol})" for symbol, option in method.symbols.items()}
    fields, groups, shown = method.Options.model_fields, [], set[str]()
    for component in method.every_component():
        own = component.Options.model_fields
        rows = [_row(name + symbols.get(name, ""), fields.get(name, field)) for name, field in own.items()]
        description = " ".join((component.__doc__ or "").split())
        groups.append((f"{_kind(component)} '{component.name}': {description}".rstrip(": "), rows))
        shown |= own.keys()
    left = [_row(name + symbols.get(name, ""), field) for name, field in fields.items() if name not in shown]
    return [("", left), *groups] if left else groups


def _kind(component: type[Component]) -> str:
    return "average" if "aggregation" in component.provides else component.kind


def _row(name: str, field: FieldInfo) -> OptionRow:
    return name, field.description or "", " or ".join(_range(field.annotation, field.metadata)), str(field.default)


def _range(kind: Any, metadata: Any = ()) -> list[str]:
    """The values that a type allows, in words."""
    if get_origin(kind) is Literal:
        return [", ".join(map(str, get_args(kind)))]
    if kind is bool:
        return ["true, false"]
    limits = " and ".join(f"{SIGNS[key]} {getattr(m, key):g}" for m in metadata for key in SIGNS if hasattr(m, key))
    if hasattr(kind, "__metadata__"):  # Annotated
        inner = [m for field in kind.__metadata__ for m in getattr(field, "metadata", [field])]
        return _range(kind.__origin__, inner)
    if get_args(kind) and get_origin(kind) is not tuple:  # a union
        return [text for one in get_args(kind) if one is not type(None) for text in _range(one, metadata)] + (
            ["none"] if type(None) in get_args(kind) else []
        )
    return [limits or getattr(kind, "__name__", str(kind)).lower()]
