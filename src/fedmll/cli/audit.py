"""The command for audit logs: verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmll.cli.output import console

audit_app = typer.Typer(help="Verify the audit log of a server or a site (audit.jsonl).", no_args_is_help=True)


@audit_app.callback()
def about() -> None: ...


@audit_app.command("verify")
def verify(
    path: Annotated[
        Path, typer.Argument(metavar="FILE_OR_FOLDER", help="audit.jsonl, or the folder that contains it.")
    ],
    last: Annotated[
        str | None,
        typer.Option("--last", metavar="HASH", help="The last hash, as it was printed: checks that the end is there."),
    ] = None,
) -> None:
    """Check that every line of an audit log fits the line before it.

    Exit code 0: all lines fit; 1: a line does not fit, and the first such line is shown. A missing end is only noticed
    with --last. The last hash is printed at the end of a run and sent to every site.

    Example:  [bold]fedmll audit verify study --last 5b1c…[/]
    """
    from fedmll.core.errors import ConfigError
    from fedmll.deploy.security import audit_log

    if last is not None and not audit_log.HASH.fullmatch(last):
        raise ConfigError(f"--last takes a hash of 64 hexadecimal digits; it got '{last}'.")
    file = path / audit_log.FILE if path.is_dir() else path
    result = audit_log.verify_audit_log(file)
    if result.first_bad_line is not None:
        _say(f"[red]line {result.first_bad_line} does not fit:[/] {result.reason}")
        raise typer.Exit(1)
    for number in result.incomplete:
        _say(
            f"line {number} reports an incomplete line before it. A killed process or a full disk causes this, and so "
            "does a change to the line that was the last one then"
        )
    if last is None:
        _say(f"ok: {result.lines} lines, the last hash is {result.last_hash}. To check the end, use --last HASH")
        return
    line = audit_log.find_line(file, last)
    if line is None:
        _say(f"[red]no line has the hash {last}:[/] the end is missing, or the whole file was rewritten")
        raise typer.Exit(1)
    _say(f"ok: {result.lines} lines; line {line} has that hash, and {result.lines - line} lines follow it")


def _say(text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)
