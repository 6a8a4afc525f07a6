"""A method for a person: its list of parts, and each option with its meaning, range and default."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from fedmll import registry
from fedmll.methods.contract import Head, Part, Piece
from fedmll.methods.method import Method

Row = tuple[str, str, str, str]  # option, meaning, range, default
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def described(method: type[Method]) -> list[tuple[str, list[Row]]]:
    """Groups of options: the method's own choices, then each piece under its kind and name."""
    symbols = {option: f" ({symbol})" for symbol, option in method.symbols.items()}
    pieces: list[type[Piece]] = [method.head, *method.every_part()]
    if not method.every_part():  # whatever there is
        pieces = [*registry.all_of("head").values(), *registry.all_of("part").values()]
    fields, groups, shown = method.Options.model_fields, [], set[str]()
    for piece in pieces:
        own = piece.Options.model_fields
        rows = [_row(name + symbols.get(name, ""), fields.get(name, field)) for name, field in own.items()]
        about = " ".join((piece.__doc__ or "").split())
        groups.append((f"{_kind(piece)} '{piece.name}': {about}".rstrip(": "), rows))
        shown |= own.keys()
    left = [_row(name + symbols.get(name, ""), field) for name, field in fields.items() if name not in shown]
    return [("", left), *groups] if left else groups


def _kind(piece: type[Piece]) -> str:
    return "head" if issubclass(piece, Head) else "average" if "average" in getattr(piece, "jobs", ()) else Part.kind


def _row(name: str, field: FieldInfo) -> Row:
    return name, field.description or "", " or ".join(_range(field.annotation, field.metadata)), str(field.default)


def _range(kind: Any, metadata: Any = ()) -> list[str]:
    """What a type allows, in words."""
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
