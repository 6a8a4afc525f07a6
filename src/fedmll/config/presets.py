"""Presets: the experiments of papers' tables, `preset:PAPER/TABLE`; `preset:PAPER/TABLE/small` finishes in minutes.

Each paper is one file in `config/papers`. Its sections [base] and [tables.N] form an experiment; for the small variant,
[small] and the table's own `small` are applied on top. An empty string removes a setting.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

from fedmll.core.errors import ConfigError
from fedmll.core.text import suggest

PREFIX = "preset:"
SMALL = "small"
TABLE_KEYS = ("what", "rows", SMALL)  # keys of a table that are not sections of an experiment


def read_papers() -> dict[str, dict[str, Any]]:
    """Paper → the contents of its file."""
    found = (files("fedmll.config") / "papers").iterdir()
    return {file.name.removesuffix(".toml"): tomllib.loads(file.read_text("utf-8")) for file in sorted(found, key=str)}


def preset_names() -> list[str]:
    """All presets as `PAPER/TABLE`."""
    return [f"{paper}/{table}" for paper, content in read_papers().items() for table in content["tables"]]


def find_table(name: str) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """The paper, the table, and whether the name is that of the small variant."""
    paper, _, rest = name.removeprefix(PREFIX).partition("/")
    number, _, variant = rest.partition("/")
    content = read_papers().get(paper, {"tables": {}})
    if number not in content["tables"] or variant not in ("", SMALL):
        known = [PREFIX + known + end for known in preset_names() for end in ("", f"/{SMALL}")]
        raise ConfigError(f"There is no preset '{name}'{suggest(name, known)}")
    return content, content["tables"][number], variant == SMALL


def preset_methods(name: str) -> list[str]:
    """The methods of the table, in the form of `fedmll compare --methods`."""
    _, table, small = find_table(name)
    rows = table.get(SMALL, {}).get("rows", table["rows"]) if small else table["rows"]
    return str(rows).split(",")


def load_preset(name: str) -> dict[str, Any]:
    """The values of a preset's experiment, as in an experiment file."""
    content, table, small = find_table(name)
    layers = [content["base"], {key: value for key, value in table.items() if key not in TABLE_KEYS}]
    if small:
        own = {key: value for key, value in table.get(SMALL, {}).items() if key not in TABLE_KEYS}
        layers += [content[SMALL], own]
    values: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, settings in layer.items():
            values[section] = values.get(section, {}) | settings
    return {section: {key: v for key, v in found.items() if v != ""} for section, found in values.items()}
