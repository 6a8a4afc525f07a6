"""What `fedmll methods` shows: the table of the methods, and one method with all its options.

The table is read from `catalog.toml`, because importing the methods imports torch, which is slow. The file is generated
from the classes: `python -m fedmll.methods.catalog` writes it, and a test compares the two.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from fedmll.methods.framework.method_config import MethodEntry

FILE = Path(__file__).with_name("catalog.toml")
COSTS = Path(__file__).with_name("costs.toml")
OptionRow = tuple[str, str, str, str]  # option, meaning, range, default
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass(frozen=True, kw_only=True)
class MethodSummary:
    """What the table says about a method; the fields are those of `MethodEntry`."""

    name: str
    summary: str
    paper: str = ""
    setting: tuple[str, ...] = ("skew",)
    up: str = ""
    down: str = ""
    remembers: str = ""

    @classmethod
    def of(cls, method: Any) -> MethodSummary:
        return cls(**{field: getattr(method, field) for field in cls.__dataclass_fields__})


def read_catalog() -> dict[str, MethodSummary]:
    """The built-in methods by name."""
    rows = tomllib.loads(FILE.read_text())
    return {name: MethodSummary(name=name, **row | {"setting": tuple(row["setting"])}) for name, row in rows.items()}


def read_costs() -> dict[str, float]:
    """The measured cost of a round relative to FedAvg, by method."""
    costs: dict[str, float] = tomllib.loads(COSTS.read_text())["relative"]
    return costs


def built_in_methods() -> dict[str, MethodSummary]:
    """The same from the classes."""
    from fedmll.core import registry

    added = registry.find_added("method")
    return {name: MethodSummary.of(m) for name, m in registry.all_of("method").items() if name not in added}


def describe_options(method: type[MethodEntry]) -> list[tuple[str, list[OptionRow]]]:
    """Groups of options, each with a title: the method's own (without a title), then those of each head and part."""
    symbols = {option: f" ({symbol})" for symbol, option in method.symbols.items()}
    fields, groups, shown = method.Options.model_fields, [], set[str]()
    for component in method.every_component():
        own = component.Options.model_fields
        rows = [_row(name + symbols.get(name, ""), fields.get(name, field)) for name, field in own.items()]
        description = " ".join((component.__doc__ or "").split())
        kind = "average" if "aggregation" in component.provides else component.kind
        groups.append((f"{kind} '{component.name}': {description}".rstrip(": "), rows))
        shown |= own.keys()
    left = [_row(name + symbols.get(name, ""), field) for name, field in fields.items() if name not in shown]
    return [("", left), *groups] if left else groups


def _row(name: str, field: FieldInfo) -> OptionRow:
    default = ", ".join(field.default) if isinstance(field.default, tuple) else str(field.default)
    if field.default is None or isinstance(field.default, bool):
        default = default.lower()  # as in TOML, not as in Python
    return name, field.description or "", " or ".join(_range(field.annotation, field.metadata)), default


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
    name = getattr(kind, "__name__", str(kind)).lower()
    return [limits or {"str": "text", "tuple": "names"}.get(name, name)]


def main() -> None:
    import tomli_w

    rows = {}
    for name, method in built_in_methods().items():
        row = asdict(method)
        rows[name] = {key: value for key, value in row.items() if key != "name" and value != ""}
    FILE.write_text(tomli_w.dumps(rows))


if __name__ == "__main__":
    main()
