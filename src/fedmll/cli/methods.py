"""The command methods: what there is, and one in full."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedmll import registry
from fedmll.cli.options import Plugins, load_files
from fedmll.cli.tables import console, options_table, plain_table

NOTHING = "–"
HEADINGS = {
    "up": "up, beside the weights",
    "down": "down, beside the weights",
    "cost": "cost of a round, FedAvg's being 1",
}
NARROW, WIDE = 120, 190  # columns of a terminal: below the one and from the other on


@dataclass(frozen=True)
class About:
    """What a method says of itself, under the names that it has there."""

    name: str
    summary: str
    paper: str = ""
    setting: tuple[str, ...] = ("skew",)
    up: str = ""
    down: str = ""
    remembers: str = ""


def register(app: typer.Typer) -> None:
    app.command("methods")(methods)


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, in full.")] = None, plugins: Plugins = None
) -> None:
    """The methods; with a name: its paper, its options and the paper's training settings."""
    load_files(plugins)
    if name is not None:
        show(name)
        return
    known = built_in()
    if plugins or registry.installed():
        known |= {name: about(cls) for name, cls in registry.all_of("method").items()}
    width = console.width
    rows = [cells(known[name]) for name in sorted(known)]
    header = ["name", *(["what it does"] if not NARROW <= width < WIDE else [])]
    header += [
        key for key in rows[0] if key not in ("name", "what it does", "cost") and (key == "for" or width >= NARROW)
    ]
    table = plain_table(
        "methods", [*header, "cost"], [[row[key] for key in (*header, "cost")] for row in rows], words=True
    )
    told = ["for: label skew, partial annotation, private labels."]
    told += ["up, down: beside the weights."] if width >= NARROW else []
    told += ["cost: CPU time of a round relative to FedAvg's, measured by benchmarks/method_costs.py."]
    told += [] if width >= WIDE else ["More in a wider terminal, and of one with `fedmll methods NAME`."]
    table.caption = " ".join(told)
    table.caption_justify = "left"
    console.print(table)


def cells(method: About) -> dict[str, str]:
    """By heading."""
    cost = costs().get(method.name)
    found = {
        "name": method.name,
        "what it does": method.summary,
        "paper": method.paper,
        "for": "any" if len(method.setting) == 3 else ", ".join(word.split()[0] for word in method.setting),
        "up": method.up,
        "down": method.down,
        "a client keeps": method.remembers,
        "cost": "" if cost is None else f"{cost:.1f}",
    }
    return {heading: escape(text) or NOTHING for heading, text in found.items()}


def about(method: Any) -> About:
    return About(**{key: getattr(method, key) for key in About.__dataclass_fields__})


def folder() -> Path:
    spec = find_spec("fedmll.methods")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def costs() -> dict[str, float]:
    """Of a round, relative to FedAvg's, by method: measured, and not of plug-ins."""
    found: dict[str, float] = tomllib.loads((folder() / "costs.toml").read_text())["relative"]
    return found


def built_in() -> dict[str, About]:
    """Read from the source: importing the methods takes seconds, as they need torch."""
    found: dict[str, About] = {}
    for file in sorted(folder().glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                said = dict(literals(node))
                if said.get("name") and said.get("summary") and not said["name"].startswith("_"):
                    found[said["name"]] = About(**said)
    return found


def literals(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """`name = "text"` and the like, also with a type."""
    for line in node.body:
        if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None:
            target = line.targets[0] if isinstance(line, ast.Assign) else line.target
            if isinstance(target, ast.Name) and target.id in About.__dataclass_fields__:
                yield target.id, ast.literal_eval(line.value)


def show(name: str) -> None:
    from fedmll.methods.described import described

    method: Any = registry.find("method", name)
    console.print(escape((sys.modules[method.__module__].__doc__ or method.summary).strip()), highlight=False)
    for heading, text in (cells(about(method)) | {"for": ", ".join(method.setting)}).items():
        if heading != "name" and text != NOTHING:
            console.print(f"{HEADINGS.get(heading, heading)}: {text}", highlight=False)
    title = escape(f"[method] name = '{name}'")
    for group, options in described(method):
        console.print(escape(group), highlight=False) if group else None
        if options:
            rows = [[escape(cell) for cell in option] for option in options]
            console.print(
                plain_table("" if group else title, ("option", "what it is", "range", "default"), rows, words=True)
            )
    if method.published:
        console.print(options_table("as published (--as-published)", method.published | method.unpublished))
