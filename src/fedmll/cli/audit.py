"""The command about audits: verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmll.cli.tables import console

audit_app = typer.Typer(help="What a server or a site did: its audit.jsonl.", no_args_is_help=True)


@audit_app.callback()
def about() -> None: ...


@audit_app.command("verify")
def verify(
    path: Annotated[Path, typer.Argument(metavar="FILE_OR_FOLDER", help="audit.jsonl, or the folder that has it.")],
    last: Annotated[
        str | None, typer.Option("--last", metavar="HASH", help="The last hash, as it was told: nothing is missing.")
    ] = None,
) -> None:
    """Whether every line fits the one before. Exit code 0: yes; 1: no, with the first line that does not.

    A missing end is only noticed with --last: it is printed at the end of a run, and told to every site.
    Example:  [bold]fedmll audit verify study --last 5b1c…[/]
    """
    from fedmll.deploy import audit
    from fedmll.errors import ConfigError

    if last is not None and not audit.HASH.fullmatch(last):
        raise ConfigError(f"--last takes a hash of 64 hexadecimal digits; it got '{last}'.")
    file = path / audit.FILE if path.is_dir() else path
    found = audit.verify(file)
    if found.wrong is not None:
        _say(f"[red]line {found.wrong} does not fit:[/] {found.why}")
        raise typer.Exit(1)
    for number in found.torn:
        _say(
            f"line {number} owns up to a piece before it that is no entry: a kill or a full disk leaves one, and so "
            "does a change to what was the last line then"
        )
    if last is None:
        _say(f"ok: {found.lines} lines, the last hash is {found.last}. Whether the end is missing: --last HASH")
        return
    place = audit.place_of(file, last)
    if place is None:
        _say(f"[red]no line has the hash {last}:[/] the end is missing, or all of it was made anew")
        raise typer.Exit(1)
    _say(f"ok: {found.lines} lines; line {place} has that hash, {found.lines - place} came after it")


def _say(text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)
