"""audit.jsonl: every line fits the one before; what does not is found, and what a kill leaves is owned up to."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedmll.deploy import audit
from fedmll.deploy.audit import FILE, FIRST, Audit, verify
from fedmll.errors import ConfigError
from fedmll.message import Message


@pytest.fixture
def written(tmp_path: Path) -> Path:
    log = Audit(tmp_path)
    for number in range(5):
        log.write("round", round=number, clients=["a", "ß"])
    return tmp_path / FILE


def test_each_line_has_the_hash_of_the_one_before(written: Path) -> None:
    before = FIRST
    for line in written.read_text().splitlines():
        body, _, rest = line.rpartition(',"hash":"')
        entry = json.loads(line)
        assert entry["before"] == before
        assert rest == f'{entry["hash"]}"}}'
        before = hashlib.sha256(f"{body}}}".encode()).hexdigest()  # worked out without the module
        assert entry["hash"] == before
    assert verify(written) == audit.Verified(5, (), before)
    assert Audit(written.parent).last == before
    assert json.loads(line)["clients"] == ["a", "ß"]
    assert stat.S_IMODE(written.stat().st_mode) == 0o600


CHANGES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int]] = {
    "edited": (lambda x: [*x[:2], x[2].replace(b'"round":2', b'"round":7'), *x[3:]], 3),
    "first edited": (lambda x: [x[0].replace(b"round", b"Round"), *x[1:]], 1),
    "last edited": (lambda x: [*x[:4], x[4].replace(b'"round":4', b'"round":5')], 5),
    "removed": (lambda x: [*x[:2], *x[3:]], 3),
    "first removed": (lambda x: x[1:], 1),
    "swapped": (lambda x: [x[0], x[2], x[1], *x[3:]], 2),
    "twice": (lambda x: [*x[:3], x[2], *x[3:]], 4),
    "put in": (lambda x: [*x[:3], b'{"event":"nothing"}\n', *x[3:]], 4),
    "hash edited": (lambda x: [*x[:1], x[1][:-4] + b'x"}\n', *x[2:]], 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_first_line_that_does_not_fit_is_named(written: Path, change: str) -> None:
    make, wrong = CHANGES[change]
    written.write_bytes(b"".join(make(written.read_bytes().splitlines(keepends=True))))
    assert verify(written).wrong == wrong


def test_an_edited_line_that_was_signed_anew_is_found_at_the_next(written: Path) -> None:
    lines = written.read_bytes().splitlines()
    entry = json.loads(lines[1]) | {"round": 9}
    forged = audit._line(entry.pop("before"), entry.pop("event"), {"round": 9})
    written.write_bytes(b"\n".join([lines[0], forged, *lines[2:]]) + b"\n")
    assert verify(written).wrong == 3


def test_a_missing_end_is_found_by_who_knows_the_last_hash(written: Path) -> None:
    """The chain alone cannot know it."""
    last, lines = Audit(written.parent).last, written.read_bytes().splitlines(keepends=True)
    assert audit.place_of(written, last) == 5
    written.write_bytes(b"".join(lines[:4]))
    assert verify(written).wrong is None
    assert audit.place_of(written, last) is None


@pytest.mark.parametrize("bytes_left", [1, 40, -80, -2])
def test_a_torn_line_stays_and_is_owned_up_to(written: Path, bytes_left: int) -> None:
    whole = written.read_bytes()
    lines = whole.splitlines(keepends=True)
    piece = lines[-1][:bytes_left]
    written.write_bytes(b"".join(lines[:-1]) + piece)
    assert verify(written).wrong == 5  # nobody has owned up to it yet
    Audit(written.parent).write("start")
    now = written.read_bytes().splitlines()
    assert now[4] == piece
    assert json.loads(now[5])["bytes"] == len(piece)
    assert [json.loads(line)["event"] for line in now[5:]] == ["torn", "start"]
    assert verify(written) == audit.Verified(7, (6,), Audit(written.parent).last)
    written.write_bytes(b"\n".join([*now[:4], now[4] + b"x", *now[5:]]) + b"\n")  # not the piece it was
    assert verify(written).wrong == 5
    written.write_bytes(b"\n".join([*now[:4], *now[5:]]) + b"\n")
    assert verify(written).wrong == 5


def test_only_a_missing_line_break_is_nothing(written: Path) -> None:
    written.write_bytes(written.read_bytes()[:-1])
    Audit(written.parent).write("start")
    found = verify(written)
    assert (found.lines, found.torn, found.wrong) == (6, (), None)


def test_torn_twice_and_from_the_beginning(tmp_path: Path) -> None:
    """A kill while owning up to a kill; and one in the very first line."""
    (tmp_path / FILE).write_bytes(b'{"time"')
    Audit(tmp_path).write("start")
    text = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(text[: text.index(b"torn") + 9])
    Audit(tmp_path).write("start")
    found = verify(tmp_path / FILE)
    assert (found.lines, found.torn, found.wrong) == (4, (3,), None)
    assert (tmp_path / FILE).read_bytes().startswith(b'{"time"\n{"time"')


def test_long_lines_are_found_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "TAIL_BYTES", 16)
    for number in range(3):
        Audit(tmp_path).write("long", text="x" * 100 * number)
    assert verify(tmp_path / FILE).wrong is None
    assert verify(tmp_path / FILE).lines == 3


def test_a_full_disk_leaves_a_piece_and_the_next_line_says_so(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: object, text: bytes) -> None:
        os.write(file.fileno(), text[:20])  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(audit, "_write_all", full)
        Audit(written.parent).write("start")
    Audit(written.parent).write("start")
    assert verify(written).torn == (7,)


def test_what_is_described_has_no_value_in_it() -> None:
    message = Message({"weights": torch.full((2, 3), 0.123), "counts": torch.tensor([987])}, {"loss": 0.456})
    assert audit.described(message) == {
        "tensors": {"weights": "float32 (2, 3)", "counts": "int64 (1,)"}, "numbers": ["loss"], "bytes": 24 + 8 + 8,
    }  # fmt: skip


def test_where_there_is_none_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no .*audit\.jsonl"):
        verify(tmp_path / FILE)
