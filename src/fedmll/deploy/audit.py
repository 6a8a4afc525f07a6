"""`audit.jsonl`: what happened, a line each, at the server and at every site. Lines are only ever added. Each one has
the SHA-256 of the line before it (`before`) and of itself (`hash`), so that a line that was edited, removed, put in or
moved does not fit any more. There are names, sizes and counts in it; no key, no image, no label and no weight.

Who can write to the file can make all of it anew, or leave its end away: that is noticed by who knows the last hash
from elsewhere. It is told to every site with the farewell, and printed at the end."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fedmll.errors import ConfigError
from fedmll.message import Message

FILE = "audit.jsonl"
FIRST = "0" * 64  # before the first line
TORN = "torn"  # the event that owns up to a line that was not written to its end
HASH = re.compile("[0-9a-f]{64}")
SIGNED = re.compile(rb'(\{.*),"hash":"([0-9a-f]{64})"\}', re.DOTALL)
CHANGED = "it was changed after it was written"
MOVED = "it was not written after the line that stands before it: one was removed, put in or moved"
OR_TORN = "or not written to its end (the next entry will say so)"
TAIL_BYTES = 64 * 1024


class Audit:
    """The file in a folder. Nothing is kept in memory: whoever adds a line goes on from what is on the disk."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def write(self, event: str, **facts: Any) -> None:
        """Add a line; on the disk when this returns."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            before, junk, broken = _tail(file)
            text = b"" if broken else b"\n"
            if junk:  # killed in the middle of a line, or the disk was full: it stays, and is owned up to
                line = _line(before, TORN, {"bytes": len(junk), TORN: _digest(junk)})
                text, before = text + line + b"\n", _mark(line) or ""
            _write_all(file, text + _line(before, event, facts) + b"\n")
            os.fsync(file.fileno())

    @property
    def last(self) -> str:
        """The hash of the last line."""
        with self.path.open("rb") as file:
            return _tail(file)[0]


@dataclass(frozen=True)
class Verified:
    lines: int
    torn: tuple[int, ...]  # entries that own up to a piece that is no entry
    last: str  # hash
    wrong: int | None = None  # the first line that does not fit
    why: str = ""


def verify(path: Path) -> Verified:
    """Read a file from its beginning; the first line that does not fit is named."""
    before, junk, number, torn = FIRST, list[bytes](), 0, list[int]()
    for number, line in enumerate(_lines(path), 1):
        mark = _mark(line.removesuffix(b"\n"))
        if mark is None:
            junk.append(line)
            continue
        entry = json.loads(line)
        owned = entry.get(TORN) if entry["event"] == TORN else None
        if junk and owned != _digest(b"".join(junk)):
            return Verified(number, tuple(torn), before, number - len(junk), CHANGED)
        if entry["before"] != before or (owned is not None and not junk):
            return Verified(number, tuple(torn), before, number, MOVED)
        torn += [number] if junk else []
        before, junk = mark, []
    if junk:
        return Verified(number, tuple(torn), before, number - len(junk) + 1, f"{CHANGED}, {OR_TORN}")
    return Verified(number, tuple(torn), before)


def place_of(path: Path, mark: str) -> int | None:
    """The number of the line with this hash."""
    found = (number for number, line in enumerate(_lines(path), 1) if _mark(line.removesuffix(b"\n")) == mark)
    return next(found, None)


def described(message: Message) -> dict[str, Any]:
    """What a message holds: names, shapes, bytes; no value."""
    tensors = {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in message.tensors.items()
    }
    return {"tensors": tensors, "numbers": sorted(message.numbers), "bytes": message.nbytes}


def _lines(path: Path) -> Iterator[bytes]:
    if not path.is_file():
        raise ConfigError(f"There is no {path}. An audit is the file {FILE} of a server's run or a site's --memory.")
    with path.open("rb") as file:
        yield from file


def _line(before: str, event: str, facts: dict[str, Any]) -> bytes:
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    values = {"time": when, "event": event, **facts, "before": before}
    body = json.dumps(values, separators=(",", ":"), ensure_ascii=True).encode()
    return body[:-1] + f',"hash":"{hashlib.sha256(body).hexdigest()}"}}'.encode()


def _mark(line: bytes) -> str | None:
    """A line's hash; None: it is not as it was written."""
    found = SIGNED.fullmatch(line)
    if found is None or hashlib.sha256(found[1] + b"}").hexdigest() != found[2].decode():
        return None
    return found[2].decode()


def _digest(junk: bytes) -> str:
    return hashlib.sha256(junk.removesuffix(b"\n")).hexdigest()


def _tail(file: BinaryIO) -> tuple[str, bytes, bool]:
    """The hash of the last entry, what stands after it that is none, and whether the file ends with a line break."""
    size = file.seek(0, os.SEEK_END)
    wanted = TAIL_BYTES
    while True:
        start = max(0, size - wanted)
        file.seek(start)
        text = file.read(size - start)
        lines, broken = text.split(b"\n"), not text or text.endswith(b"\n")
        for place in reversed(range(len(lines))):
            mark = _mark(lines[place])
            if mark is not None:
                return mark, b"\n".join(lines[place + 1 :]), broken
        if start == 0:
            return FIRST, text, broken
        wanted *= 2


def _write_all(file: BinaryIO, text: bytes) -> None:
    while text:
        text = text[file.write(text) :]
