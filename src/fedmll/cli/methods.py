"""The command methods: what there is, and one in full."""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedmll import registry
from fedmll.cli.options import Plugins, load_files
from fedmll.cli.tables import console, options_table, plain_table


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
        known |= {name: cls.summary for name, cls in registry.all_of("method").items()}
    console.print(plain_table("methods", ("name", "what it does"), sorted(known.items()), words=True))


def built_in() -> dict[str, str]:
    """Name → summary, read from the source: importing the methods takes seconds, as they need torch."""
    found: dict[str, str] = {}
    spec = find_spec("fedmll.methods")
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.py")):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    said = dict(filter(None, map(_literal, node.body)))
                    if said.get("name") and said.get("summary") and not said["name"].startswith("_"):
                        found[said["name"]] = said["summary"]
    return found


def _literal(node: ast.stmt) -> tuple[str, str] | None:
    """`name = "text"`, also with a type."""
    target = (
        node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
    )
    value = getattr(node, "value", None)
    if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
        return target.id, value.value
    return None


def show(name: str) -> None:
    from fedmll.methods.described import described

    method: Any = registry.find("method", name)
    console.print(escape((sys.modules[method.__module__].__doc__ or method.summary).strip()), highlight=False)
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
