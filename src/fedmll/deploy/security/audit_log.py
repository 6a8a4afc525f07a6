"""`audit.jsonl`: what happened at the server or at a site, one line per event.

Lines are only appended. Each line contains the SHA-256 of the previous line (`previous`) and of itself (`hash`), so a
line that was edited, removed, inserted or moved no longer fits. The file contains names, sizes and counts, but no key,
image, label or weight.

Whoever can write to the file can also rewrite all of it, or cut off its end. This is noticed by anybody who knows an
earlier hash from elsewhere: at the end of each round the server signs the hash of its last line (the head of the
chain), and every site keeps it (`AuditHead`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from fedmll.core.errors import ConfigError
from fedmll.core.files import file_lock
from fedmll.core.message import Message
from fedmll.deploy.security.private_keys import InvalidSignature, ec, hashes, x509

FILE = "audit.jsonl"
NO_HASH = "0" * 64  # `previous` of the first line
LOST_HASH = "f" * 64  # `previous` of the first line, if there were lines before it and they are missing
INCOMPLETE = "incomplete line"  # the event that reports a line that was not written completely
FRAGMENT = "fragment"  # its SHA-256, in that event
HASH = re.compile("[0-9a-f]{64}")
ENTRY = re.compile(rb'(\{.*),"hash":"([0-9a-f]{64})"\}', re.DOTALL)
CHANGED = "it was changed after it was written"
NOT_JSON = "it is no entry of an audit log"
SERVER_HEAD = "server_head"  # in a site's log: the head of the server's log
MOVED = "it was not written after the line before it: a line was removed, inserted or moved"
OR_INCOMPLETE = "or not written completely (the next entry will report it)"
EMPTY = "the file is empty, and an audit log has at least one line: its lines were removed"
TAIL_BYTES = 64 * 1024

_last_written: dict[Path, str] = {}  # the hash of the last line that this process wrote to a file


class AuditLog:
    """The audit log in a folder. Every new line continues from what is on the disk.

    Args:
        folder: the folder of a server's run, or a site's --state-dir.
        has_begun: lines were written before. If they are missing, the log does not pass the verification any more.
    """

    def __init__(self, folder: Path, has_begun: bool = False) -> None:
        self.path, self.has_begun = folder / FILE, has_begun

    @property
    def is_lost(self) -> bool:
        """Whether lines were written before, and all of them are missing."""
        return self.has_begun and not (self.path.is_file() and self.path.stat().st_size)

    def write(self, event: str, **facts: Any) -> None:
        """Append a line. It is on the disk when this returns."""
        key = self.path.absolute()
        with file_lock(self.path, mode=0o600) as file:
            previous, fragment, ends_with_newline = _tail(file)
            if previous == NO_HASH and not fragment:  # the file is new, or all lines were removed
                previous = _last_written.get(key, LOST_HASH if self.has_begun else NO_HASH)
            text = b"" if ends_with_newline else b"\n"
            # Only a line without its end is incomplete: the process was killed, or the disk was full. It is reported.
            # Any other line that is no entry was changed, which the verification finds.
            if fragment and not ends_with_newline:
                line = _line(previous, INCOMPLETE, {"bytes": len(fragment), FRAGMENT: _digest(fragment)})
                text, previous = text + line + b"\n", _hash(line) or ""
            line = _line(previous, event, facts)
            _write_all(file, text + line + b"\n")
            os.fsync(file.fileno())
        _last_written[key] = _hash(line) or ""

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
        entry = _parse(line)
        if entry is None:
            return result(number, NOT_JSON)
        reported = entry.get(FRAGMENT) if entry["event"] == INCOMPLETE else None
        if fragments and reported != _digest(b"".join(fragments)):
            return result(number - len(fragments), CHANGED)
        if entry["previous"] != previous or (reported is not None and not fragments):
            return result(number, MOVED)
        incomplete += [number] if fragments else []
        previous, fragments = own_hash, []
    if fragments:
        is_complete = fragments[-1].endswith(b"\n")
        return result(number - len(fragments) + 1, CHANGED if is_complete else f"{CHANGED}, {OR_INCOMPLETE}")
    return result() if number else result(1, EMPTY)


@dataclass(frozen=True, kw_only=True)
class AuditHead:
    """The head of the server's chain of lines at the end of a round, signed with the key of its certificate."""

    run: str  # the name of the run
    round: int
    hash: str  # of the last line
    signature: str = ""  # hexadecimal; empty without keys (--insecure)

    @classmethod
    def from_json(cls, values: object) -> AuditHead | None:
        """A head as it arrived, or None if it is none."""
        try:
            head = cls(**values)  # type: ignore[arg-type]
        except TypeError:
            return None
        texts = all(isinstance(text, str) and len(text) <= 400 for text in (head.run, head.hash, head.signature))
        return head if texts and type(head.round) is int and HASH.fullmatch(head.hash) else None

    @property
    def signed_text(self) -> bytes:
        return json.dumps(["fedmll audit head", self.run, self.round, self.hash]).encode()

    def sign(self, key: ec.EllipticCurvePrivateKey) -> AuditHead:
        return replace(self, signature=key.sign(self.signed_text, ec.ECDSA(hashes.SHA256())).hex())

    def is_signed_by(self, certificate: bytes) -> bool:
        """Whether the key of a certificate (PEM) signed this head."""
        try:
            key = x509.load_pem_x509_certificate(certificate).public_key()
            assert isinstance(key, ec.EllipticCurvePublicKey)
            key.verify(bytes.fromhex(self.signature), self.signed_text, ec.ECDSA(hashes.SHA256()))
        except (ValueError, AssertionError, InvalidSignature):
            return False
        return True


def read_heads(path: Path) -> list[AuditHead]:
    """The heads of a server's log that a site has kept in its own log, oldest first."""
    entries = (_parse(line) or {} for line in _lines(path))
    heads = (AuditHead.from_json(entry.get(SERVER_HEAD)) for entry in entries if SERVER_HEAD in entry)
    return list(dict.fromkeys(head for head in heads if head is not None))


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
            "--state-dir. If it was there before, it was deleted."
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


def _parse(line: bytes) -> dict[str, Any] | None:
    """The content of a line; None: it is no entry."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_entry = isinstance(entry, dict) and isinstance(entry.get("event"), str) and "previous" in entry
    return entry if is_entry else None


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
