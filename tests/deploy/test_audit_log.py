"""audit.jsonl: every line fits the previous one, changes are found, and incomplete lines are reported."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedmll.core.errors import ConfigError
from fedmll.core.message import Message
from fedmll.deploy.security import audit_log
from fedmll.deploy.security.audit_log import FILE, NO_HASH, AuditLog, verify_audit_log


@pytest.fixture
def written(tmp_path: Path) -> Path:
    log = AuditLog(tmp_path)
    for number in range(5):
        log.write("round", round=number, clients=["a", "ß"])
    return tmp_path / FILE


def test_each_line_has_the_hash_of_the_previous_line(written: Path) -> None:
    before = NO_HASH
    for line in written.read_text().splitlines():
        body, _, rest = line.rpartition(',"hash":"')
        entry = json.loads(line)
        assert entry["previous"] == before
        assert rest == f'{entry["hash"]}"}}'
        before = hashlib.sha256(f"{body}}}".encode()).hexdigest()  # worked out without the module
        assert entry["hash"] == before
    assert verify_audit_log(written) == audit_log.AuditVerification(lines=5, incomplete=(), last_hash=before)
    assert AuditLog(written.parent).last_hash == before
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
def test_first_line_that_does_not_fit_is_reported(written: Path, change: str) -> None:
    make, wrong = CHANGES[change]
    written.write_bytes(b"".join(make(written.read_bytes().splitlines(keepends=True))))
    assert verify_audit_log(written).first_bad_line == wrong


def test_edited_line_with_a_new_hash_is_found_at_the_next_line(written: Path) -> None:
    lines = written.read_bytes().splitlines()
    entry = json.loads(lines[1]) | {"round": 9}
    forged = audit_log._line(entry.pop("previous"), entry.pop("event"), {"round": 9})
    written.write_bytes(b"\n".join([lines[0], forged, *lines[2:]]) + b"\n")
    assert verify_audit_log(written).first_bad_line == 3


def test_missing_end_is_found_with_the_last_hash(written: Path) -> None:
    """The chain alone cannot know it."""
    last, lines = AuditLog(written.parent).last_hash, written.read_bytes().splitlines(keepends=True)
    assert audit_log.find_line(written, last) == 5
    written.write_bytes(b"".join(lines[:4]))
    assert verify_audit_log(written).first_bad_line is None
    assert audit_log.find_line(written, last) is None


@pytest.mark.parametrize("bytes_left", [1, 40, -80, -2])
def test_incomplete_line_is_kept_and_reported(written: Path, bytes_left: int) -> None:
    whole = written.read_bytes()
    lines = whole.splitlines(keepends=True)
    piece = lines[-1][:bytes_left]
    written.write_bytes(b"".join(lines[:-1]) + piece)
    assert verify_audit_log(written).first_bad_line == 5  # not reported yet
    AuditLog(written.parent).write("start")
    now = written.read_bytes().splitlines()
    assert now[4] == piece
    assert json.loads(now[5])["bytes"] == len(piece)
    assert [json.loads(line)["event"] for line in now[5:]] == [audit_log.INCOMPLETE, "start"]
    assert verify_audit_log(written) == audit_log.AuditVerification(
        lines=7, incomplete=(6,), last_hash=AuditLog(written.parent).last_hash
    )
    written.write_bytes(b"\n".join([*now[:4], now[4] + b"x", *now[5:]]) + b"\n")  # not the piece it was
    assert verify_audit_log(written).first_bad_line == 5
    written.write_bytes(b"\n".join([*now[:4], *now[5:]]) + b"\n")
    assert verify_audit_log(written).first_bad_line == 5


@pytest.mark.parametrize("forged", [b"x\n", b"\n", b'{"event":"joined","client":"someone else"}\n', b"x\n\n"])
def test_replaced_last_line_is_not_taken_for_an_incomplete_one(written: Path, forged: bytes) -> None:
    """Before, the next entry reported the forged line as incomplete, and the verification accepted it."""
    lines = written.read_bytes().splitlines(keepends=True)
    written.write_bytes(b"".join(lines[:-1]) + forged)
    found = verify_audit_log(written)
    assert (found.first_bad_line, found.reason) == (5, audit_log.CHANGED)  # and it is not called incomplete
    AuditLog(written.parent).write("start")
    assert verify_audit_log(written).first_bad_line == 5
    assert audit_log.INCOMPLETE not in written.read_text()


@pytest.mark.parametrize("remove", [lambda file: file.unlink(), lambda file: file.write_bytes(b"")])
def test_emptied_or_deleted_file_does_not_pass(written: Path, remove: Callable[[Path], object]) -> None:
    remove(written)
    if written.exists():
        found = verify_audit_log(written)
        assert (found.first_bad_line, found.reason) == (1, audit_log.EMPTY)
    AuditLog(written.parent).write("round", round=6)  # the process that wrote the lines goes on
    AuditLog(written.parent).write("round", round=7)
    assert verify_audit_log(written).first_bad_line == 1
    assert AuditLog(written.parent, has_begun=True).is_lost is False


def test_process_that_begins_anew_knows_of_lost_lines(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, has_begun=True)
    assert log.is_lost
    log.write("start")
    assert verify_audit_log(tmp_path / FILE).first_bad_line == 1


def signed(body: bytes) -> bytes:
    """A line whose hash is right, whatever it is a line of."""
    return body[:-1] + b',"hash":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


@pytest.mark.parametrize(
    "body",
    [b"{}", b"{not json}", b'{"event":5,"previous":""}', b'{"event":"x"}', b'{"a":' + b"[" * 10**5 + b"}", b"{\xff}"],
)
def test_line_that_is_no_entry_is_reported(written: Path, body: bytes) -> None:
    lines = written.read_bytes().splitlines(keepends=True)
    written.write_bytes(b"".join([*lines[:2], signed(body), *lines[2:]]))
    assert verify_audit_log(written).first_bad_line == 3
    assert audit_log.read_heads(written) == []


def test_missing_newline_alone_is_no_problem(written: Path) -> None:
    written.write_bytes(written.read_bytes()[:-1])
    AuditLog(written.parent).write("start")
    found = verify_audit_log(written)
    assert (found.lines, found.incomplete, found.first_bad_line) == (6, (), None)


def test_two_incomplete_lines_and_an_incomplete_first_line(tmp_path: Path) -> None:
    """The process was killed in the first line, and again while it reported that."""
    (tmp_path / FILE).write_bytes(b'{"time"')
    AuditLog(tmp_path).write("start")
    text = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(text[: text.index(b"incomplete") + 20])
    AuditLog(tmp_path).write("start")
    found = verify_audit_log(tmp_path / FILE)
    assert (found.lines, found.incomplete, found.first_bad_line) == (4, (3,), None)
    assert (tmp_path / FILE).read_bytes().startswith(b'{"time"\n{"time"')


def test_long_last_lines_are_read_completely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "TAIL_BYTES", 16)
    for number in range(3):
        AuditLog(tmp_path).write("long", text="x" * 100 * number)
    assert verify_audit_log(tmp_path / FILE).first_bad_line is None
    assert verify_audit_log(tmp_path / FILE).lines == 3


def test_next_line_reports_what_a_full_disk_left(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: object, text: bytes) -> None:
        os.write(file.fileno(), text[:20])  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(audit_log, "_write_all", full)
        AuditLog(written.parent).write("start")
    AuditLog(written.parent).write("start")
    assert verify_audit_log(written).incomplete == (7,)


def test_described_message_contains_no_value() -> None:
    message = Message({"weights": torch.full((2, 3), 0.123), "counts": torch.tensor([987])}, {"loss": 0.456})
    assert audit_log.describe_message(message) == {
        "tensors": {"weights": "float32 (2, 3)", "counts": "int64 (1,)"}, "numbers": ["loss"], "bytes": 24 + 8 + 8,
    }  # fmt: skip


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no .*audit\.jsonl"):
        verify_audit_log(tmp_path / FILE)
