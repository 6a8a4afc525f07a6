"""The command methods: what can be run."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedmll.cli.options import Plugins, load_plugin_files
from fedmll.cli.output import console, plain_table, print_table
from fedmll.core import registry
from fedmll.methods.catalog import MethodSummary, read_catalog, read_costs

NOTHING = "–"
HEADINGS = {
    "up": "sent in addition to the weights",
    "down": "received in addition to the weights",
    "cost": "cost of a round relative to FedAvg",
}
NARROW, WIDE = 120, 190  # columns of a terminal: fewer columns of the table below, all from the second on


def register(app: typer.Typer) -> None:
    app.command()(methods)


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, in full.")] = None, plugins: Plugins = None
) -> None:
    """List the methods. With a name: its paper, its options and the training settings of the paper."""
    load_plugin_files(plugins)
    if name is not None:
        show_method(name)
        return
    summaries = read_catalog()
    if plugins or registry.installed_plugins():
        summaries |= {name: MethodSummary.of(method) for name, method in registry.all_of("method").items()}
    width = console.width
    rows = [table_cells(summaries[name]) for name in sorted(summaries)]
    header = ["name", *(["what it does"] if not NARROW <= width < WIDE else [])]
    header += [
        key for key in rows[0] if key not in ("name", "what it does", "cost") and (key == "for" or width >= NARROW)
    ]
    table = plain_table(
        "methods", [*header, "cost"], [[row[key] for key in (*header, "cost")] for row in rows], words=True
    )
    notes = ["for: label skew, partial annotation, private labels."]
    notes += ["up, down: what is sent in addition to the weights."] if width >= NARROW else []
    notes += ["cost: CPU time of a round relative to FedAvg, measured by benchmarks/method_costs.py."]
    notes += [] if width >= WIDE else ["A wider terminal shows more columns; `fedmll methods NAME` shows one method."]
    table.caption = " ".join(notes)
    table.caption_justify = "left"
    console.print(table)


def table_cells(method: MethodSummary) -> dict[str, str]:
    """The cells of a row, by heading."""
    cost = read_costs().get(method.name)
    cells = {
        "name": method.name,
        "what it does": method.summary,
        "paper": method.paper,
        "for": "any" if len(method.setting) == 3 else ", ".join(word.split()[0] for word in method.setting),
        "up": method.up,
        "down": method.down,
        "a client keeps": method.remembers,
        "cost": "" if cost is None else f"{cost:.1f}",
    }
    return {heading: text or NOTHING for heading, text in cells.items()}


def show_method(name: str) -> None:
    from fedmll.methods.catalog import describe_options

    method: Any = registry.find("method", name)
    console.print(escape((sys.modules[method.__module__].__doc__ or method.summary).strip()), highlight=False)
    cells = table_cells(MethodSummary.of(method)) | {"for": ", ".join(method.setting)}
    for heading, text in cells.items():
        if heading != "name" and text != NOTHING:
            console.print(escape(f"{HEADINGS.get(heading, heading)}: {text}"), highlight=False)
    for group, options in describe_options(method):
        if group:
            console.print(escape(group), highlight=False)
        if options:
            title = "" if group else f"[method] name = '{name}'"
            print_table(title, ("option", "description", "range", "default"), options, words=True)
    if method.published:
        published = [(key, str(value)) for key, value in (method.published | method.unpublished).items()]
        print_table("as published (--as-published)", ("option", "default"), published)
