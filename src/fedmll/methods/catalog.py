"""The table of built-in methods for `fedmll methods`, without importing the methods, which need torch.

`catalog.toml` is generated from the classes: `python -m fedmll.methods.catalog` writes it, and a test compares the two.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("catalog.toml")
COSTS = Path(__file__).with_name("costs.toml")


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


def main() -> None:
    import tomli_w

    rows = {}
    for name, method in built_in_methods().items():
        row = asdict(method)
        rows[name] = {key: value for key, value in row.items() if key != "name" and value != ""}
    FILE.write_text(tomli_w.dumps(rows))


if __name__ == "__main__":
    main()
