"""`preset:PAPER/TABLE`: the experiments of the papers' tables, in the package; `/small` finishes in minutes.

A paper is one file of fedmll/presets. Its sections [base] and [tables.N] make an experiment; of the small variant
[small] and the table's own `small` are put on top. An empty string takes a setting back.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

import typer

from fedmll.errors import ConfigError, nearest

PRESET = "preset:"
SMALL = "small"
WORDS = ("what", "rows", SMALL)  # of a table; the others are sections of an experiment


def papers() -> dict[str, dict[str, Any]]:
    found = (files("fedmll") / "presets").iterdir()
    return {file.name.removesuffix(".toml"): tomllib.loads(file.read_text("utf-8")) for file in sorted(found, key=str)}


def names() -> list[str]:
    return [f"{paper}/{table}" for paper, content in papers().items() for table in content["tables"]]


def table_of(name: str) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """The paper, the table, and whether the small variant is meant."""
    paper, _, rest = name.removeprefix(PRESET).partition("/")
    number, _, variant = rest.partition("/")
    content = papers().get(paper, {"tables": {}})
    if number not in content["tables"] or variant not in ("", SMALL):
        known = [PRESET + known + end for known in names() for end in ("", f"/{SMALL}")]
        raise ConfigError(f"There is no preset '{name}'{nearest(name, known)}")
    return content, content["tables"][number], variant == SMALL


def rows_of(name: str) -> list[str]:
    """The rows of the table, as `fedmll compare --methods` takes them."""
    _, table, small = table_of(name)
    rows = table.get(SMALL, {}).get("rows", table["rows"]) if small else table["rows"]
    return str(rows).split(",")


def preset(name: str) -> dict[str, Any]:
    """The values of an experiment, as a file would have them."""
    content, table, small = table_of(name)
    layers = [content["base"], {key: value for key, value in table.items() if key not in WORDS}]
    if small:
        own = {key: value for key, value in table.get(SMALL, {}).items() if key not in WORDS}
        layers += [content[SMALL], own]
    values: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, settings in layer.items():
            values[section] = values.get(section, {}) | settings
    return {section: {key: v for key, v in found.items() if v != ""} for section, found in values.items()}


def register(app: typer.Typer) -> None:
    app.command("presets")(list_presets)


def list_presets() -> None:
    """The experiments of the papers' tables, for `fedmll run` and `fedmll compare`; each also as NAME/small.

    Example:  [bold]fedmll run preset:fednca-ml/1/small --root DATA[/]
    """
    from fedmll.cli.tables import console, plain_table

    rows = [(PRESET + name, table_of(name)[1]["what"], table_of(name)[1]["rows"]) for name in names()]
    console.print(plain_table("presets", ("name", "what it is", "--methods of its table"), rows, words=True))
