"""Damage to files: what disks, interrupted copies and editors do to them, drawn from a seed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

SEED = int(os.environ.get("FEDMLL_FUZZ_SEED", "0"))  # other seeds damage other places
VALUE = re.compile(rb'(?<=[:=\[,{]) ?("[^"\n]*"|-?\d[\d.eE+-]*|true|false|null)')
OTHER_VALUES = (
    b"NaN", b"nan", b"-inf", b"Infinity", b"1e999", b"-1", b"0", b"1.5", b"9" * 30, b"9" * 5000, b"null", b"true",
    b"[]", b"{}", b'""', b'"x"', b'"\\u0000"', b"[" * 2000,
)  # fmt: skip


def flip_bit(content: bytes, draw: Random) -> bytes:
    changed = bytearray(content)
    if changed:
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def overwrite_block(content: bytes, draw: Random) -> bytes:
    """Zeros, as after a power cut, or other bytes."""
    start = draw.randrange(len(content) + 1)
    size = min(draw.choice((1, 8, 64, 512)), len(content) - start)
    return content[:start] + draw.choice((bytes(size), draw.randbytes(size))) + content[start + size :]


def cut(content: bytes, draw: Random) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def empty(content: bytes, draw: Random) -> bytes:
    return b""


def double_line(content: bytes, draw: Random) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    place = draw.randrange(len(lines))
    return b"".join([*lines[: place + 1], *lines[place:]])


def remove_line(content: bytes, draw: Random) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    place = draw.randrange(len(lines))
    return b"".join([*lines[:place], *lines[place + 1 :]])


def change_digit(content: bytes, draw: Random) -> bytes:
    places = [place for place, byte in enumerate(content) if byte in b"0123456789"]
    if not places:
        return content
    place = draw.choice(places)
    digit = str((int(chr(content[place])) + draw.randrange(1, 10)) % 10).encode()
    return content[:place] + digit + content[place + 1 :]


def replace_value(content: bytes, draw: Random) -> bytes:
    """Another JSON or TOML value: another type, not a number, a huge number."""
    found = list(VALUE.finditer(content))
    if not found:
        return content
    place = draw.choice(found)
    return content[: place.start(1)] + draw.choice(OTHER_VALUES) + content[place.end(1) :]


MUTATIONS: tuple[Callable[[bytes, Random], bytes], ...] = (
    flip_bit, overwrite_block, cut, empty, double_line, remove_line, change_digit, replace_value
)  # fmt: skip


def damage(file: Path, mutation: Callable[[bytes, Random], bytes] | None, draw: Random) -> bool:
    """Damage a file; None deletes it. The time of its last change stays. Returns whether the content has changed."""
    if mutation is None:
        file.unlink()
        return True
    before, times = file.read_bytes(), file.stat()
    after = mutation(before, draw)
    file.write_bytes(after)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return after != before
