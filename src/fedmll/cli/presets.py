"""`fedmll presets`: list the experiments of papers' tables."""

from __future__ import annotations

import typer

from fedmll.config.presets import PREFIX, find_table, preset_names


def register(app: typer.Typer) -> None:
    app.command("presets")(list_presets)


def list_presets() -> None:
    """List the experiments of papers' tables, for `fedmll run` and `fedmll compare`. NAME/small is a short variant.

    Example:  [bold]fedmll run preset:fednca-ml/1/small --root DATA[/]
    """
    from fedmll.cli.output import console, plain_table

    rows = [(PREFIX + name, find_table(name)[1]["what"], find_table(name)[1]["rows"]) for name in preset_names()]
    console.print(plain_table("presets", ("name", "description", "methods of its table"), rows, words=True))
