"""`fedmll weights`: published weights to start from."""

from __future__ import annotations

from typing import Annotated

import typer

from fedmll.cli.tables import console, plain_table, say

weights_app = typer.Typer(help="Published weights to start from (model.weights).", no_args_is_help=True)


@weights_app.command("list")
def list_weights() -> None:
    """The weights that can be downloaded, for which backbone, and whether they are here."""
    from fedmll.models.weights import PUBLISHED

    rows = [
        (known.name, known.backbone, f"{known.megabytes:g} MB", "yes" if known.path.is_file() else "no", known.url)
        for known in PUBLISHED.values()
    ]
    header = ("name", "model.backbone", "size", "downloaded", "from")
    console.print(plain_table("weights, trained on ImageNet", header, rows, words=True))


@weights_app.command("get")
def get_weights(name: Annotated[str, typer.Argument(help="A name of `fedmll weights list`.")]) -> None:
    """Download weights from their publisher; goes on where it was cut, and checks the published hash.

    Example:  [bold]fedmll weights get resnet18-imagenet1k-v1[/]
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from fedmll.models.download import fetch
    from fedmll.models.weights import published

    known = published(name)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(known.file, total=None)
        fetched = fetch(
            known.url,
            known.path,
            known.sha256,
            lambda done, total: progress.update(bar, completed=done, total=total),
        )
    say(f"{known.file} {'is downloaded' if fetched else 'was here already'}, with the published hash: {known.path}")
    say(f"use it with --backbone {known.backbone} --set model.weights={name}")
