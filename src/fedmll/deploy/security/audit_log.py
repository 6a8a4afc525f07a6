"""`audit.jsonl`: what happened at the server or at a site, one line per event.

Lines are only appended. Each line contains the SHA-256 of the previous line (`previous`) and of itself (`hash`), so a
line that was edited, removed, inserted or moved no longer fits. The file contains names, sizes and counts, but no key,
image, label or weight.

Whoever can write to the file can also rewrite all of it, or cut off its end. This is noticed by anybody who knows the
last hash from elsewhere: the server sends its last hash to every site at the end of a run, and both print theirs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fedmll.core.errors import ConfigError
from fedmll.core.files import file_lock
from fedmll.core.message import Message

FILE = "audit.jsonl"
NO_HASH = "0" * 64  # `previous` of the first line
INCOMPLETE = "incomplete line"  # the event that reports a line that was not written completely
FRAGMENT = "fragment"  # its SHA-256, in that event
HASH = re.compile("[0-9a-f]{64}")
ENTRY = re.compile(rb'(\{.*),"hash":"([0-9a-f]{64})"\}', re.DOTALL)
CHANGED = "it was changed after it was written"
MOVED = "it was not written after the line before it: a line was removed, inserted or moved"
OR_INCOMPLETE = "or not written completely (the next entry will report it)"
TAIL_BYTES = 64 * 1024


class AuditLog:
    """The audit log in a folder. Nothing is kept in memory: every new line continues from what is on the disk."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def write(self, event: str, **facts: Any) -> None:
        """Append a line. It is on the disk when this returns."""
        with file_lock(self.path, mode=0o600) as file:
            previous, fragment, ends_with_newline = _tail(file)
            text = b"" if ends_with_newline else b"\n"
            if fragment:  # the process was killed in the middle of a line, or the disk was full: report it
                line = _line(previous, INCOMPLETE, {"bytes": len(fragment), FRAGMENT: _digest(fragment)})
                text, previous = text + line + b"\n", _hash(line) or ""
            _write_all(file, text + _line(previous, event, facts) + b"\n")
            os.fsync(file.fileno())

    @property
    def last_hash(self) -> str:
        with self.path.open("rb") as file:
            return _tail(file)[0]


@dataclass(frozen=True, kw_only=True)
class AuditVerification:
    """The result of `verify_audit_log`."""

    lines: int  # the number of lines that were read
    incomplete: tuple[int, ...]  # numbers of the entries that report an incomplete line before them
    last_hash: str  # the hash of the last line that fits
    first_bad_line: int | None = None  # the number of the first line that does not fit; None: all fit
    reason: str = ""  # what is wrong with it


def verify_audit_log(path: Path) -> AuditVerification:
    """Read a file from its beginning, up to the first line that does not fit."""
    previous, fragments, number, incomplete = NO_HASH, list[bytes](), 0, list[int]()

    def result(bad: int | None = None, reason: str = "") -> AuditVerification:
        return AuditVerification(
            lines=number, incomplete=tuple(incomplete), last_hash=previous, first_bad_line=bad, reason=reason
        )

    for number, line in enumerate(_lines(path), 1):
        own_hash = _hash(line.removesuffix(b"\n"))
        if own_hash is None:
            fragments.append(line)
            continue
        entry = json.loads(line)
        reported = entry.get(FRAGMENT) if entry["event"] == INCOMPLETE else None
        if fragments and reported != _digest(b"".join(fragments)):
            return result(number - len(fragments), CHANGED)
        if entry["previous"] != previous or (reported is not None and not fragments):
            return result(number, MOVED)
        incomplete += [number] if fragments else []
        previous, fragments = own_hash, []
    if fragments:
        return result(number - len(fragments) + 1, f"{CHANGED}, {OR_INCOMPLETE}")
    return result()


def find_line(path: Path, hash: str) -> int | None:
    """The number of the line with this hash, or None."""
    found = (number for number, line in enumerate(_lines(path), 1) if _hash(line.removesuffix(b"\n")) == hash)
    return next(found, None)


def describe_message(message: Message) -> dict[str, Any]:
    """The names, shapes and sizes in a message; no value."""
    tensors = {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in message.tensors.items()
    }
    return {"tensors": tensors, "numbers": sorted(message.numbers), "bytes": message.nbytes}


def _lines(path: Path) -> Iterator[bytes]:
    if not path.is_file():
        raise ConfigError(
            f"There is no {path}. An audit log is the file {FILE} in the folder of a server's run or in a site's "
            "--state-dir."
        )
    with path.open("rb") as file:
        yield from file


def _line(previous: str, event: str, facts: dict[str, Any]) -> bytes:
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    values = {"time": when, "event": event, **facts, "previous": previous}
    body = json.dumps(values, separators=(",", ":"), ensure_ascii=True).encode()
    return body[:-1] + f',"hash":"{hashlib.sha256(body).hexdigest()}"}}'.encode()


def _hash(line: bytes) -> str | None:
    """The hash of a line; None: the line is not as it was written."""
    found = ENTRY.fullmatch(line)
    if found is None or hashlib.sha256(found[1] + b"}").hexdigest() != found[2].decode():
        return None
    return found[2].decode()


def _digest(fragment: bytes) -> str:
    return hashlib.sha256(fragment.removesuffix(b"\n")).hexdigest()


def _tail(file: BinaryIO) -> tuple[str, bytes, bool]:
    """The hash of the last entry, the bytes after it that are no entry, and whether the file ends with a newline."""
    size = file.seek(0, os.SEEK_END)
    wanted = TAIL_BYTES
    while True:
        start = max(0, size - wanted)
        file.seek(start)
        text = file.read(size - start)
        lines, ends_with_newline = text.split(b"\n"), not text or text.endswith(b"\n")
        for place in reversed(range(len(lines))):
            own_hash = _hash(lines[place])
            if own_hash is not None:
                return own_hash, b"\n".join(lines[place + 1 :]), ends_with_newline
        if start == 0:
            return NO_HASH, text, ends_with_newline
        wanted *= 2


def _write_all(file: BinaryIO, text: bytes) -> None:
    while text:
        text = text[file.write(text) :]
