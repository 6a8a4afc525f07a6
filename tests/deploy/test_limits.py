"""Limits: file modes, the number of approvals and of client states, broken messages, clients that never answer."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import Consortium
from fake_grid import FakeGrid, consortium, drive, fast_polling, make_grid  # noqa: F401  (fixtures)

from fedmll.deploy.error_codes import SiteError
from fedmll.deploy.flower import client_app, executor
from fedmll.deploy.flower.executor import TaskExecutor
from fedmll.deploy.flower.membership import Membership, PendingHello
from fedmll.deploy.flower.records import ArraySizeLimit
from fedmll.deploy.site import approval, site_folder


def test_only_the_owner_can_read_a_servers_folder(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    before = os.umask(0o022)
    try:
        drive(consortium, make_grid(consortium, tmp_path), tmp_path / "out", training__rounds=1)
    finally:
        after = os.umask(before)
    assert after == 0o022  # of the run only
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700
    for name in ("log.txt", "metrics.jsonl", "sites.json", "summary.json"):
        assert (tmp_path / "out" / name).stat().st_mode & 0o777 == 0o600, name


def test_the_latest_approvals_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approval, "MAX_APPROVED", 2)
    asked: list[int] = []

    def confirm(question: str) -> bool:
        asked.append(1)
        return True

    for number in (1, 2, 3, 3, 2, 1):
        approval.request_approval(tmp_path, str(number), [], lambda _: None, confirm)
    assert len(asked) == 4  # three, and the first one again
    kept = json.loads((tmp_path / approval.FILE).read_text())
    assert list(kept) == ["3", "1"]


def test_client_states_of_many_runs_are_limited_and_none_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_folder, "MAX_RUNS", 2)
    for name in ("over", "going", "waiting", site_folder.CACHE, site_folder.FLOWER):
        (tmp_path / name).mkdir()
    for name in ("going", "waiting"):
        (tmp_path / name / "000000.000001.safetensors").write_bytes(b"x")
    site_folder.limit_runs(tmp_path, "going")  # it goes on
    assert not (tmp_path / "over").exists()
    with pytest.raises(SiteError, match="contains client state of 2 unfinished runs") as refusal:
        site_folder.limit_runs(tmp_path, "new")
    assert refusal.value.code == "limits"
    (tmp_path / "waiting" / "000000.000001.safetensors").unlink()
    site_folder.limit_runs(tmp_path, "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [site_folder.CACHE, site_folder.FLOWER, "going"]


def test_a_message_that_cannot_be_assembled_does_not_end_a_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limit, tries = ArraySizeLimit(), list[str]()
    monkeypatch.setattr(executor, "ARRAY_LIMIT", limit)
    monkeypatch.setattr(ArraySizeLimit, "install", lambda self: tries.append("installed"))
    monkeypatch.setattr(executor, "open_task_client", lambda address, secret: None)
    monkeypatch.setattr(executor, "acquire_task", lambda client, kind: "token")
    monkeypatch.setattr(executor, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(client_app.join_state, "last_error", "")
    (tmp_path / "secret").write_bytes(b"x")
    serving = TaskExecutor(1, tmp_path / "secret", tmp_path / "site.json", 4e9)
    assert (limit.max_bytes, tries) == (4_000_000_000, ["installed"])

    def run_task(self: TaskExecutor, token: str) -> None:
        tries.append(token)
        if len(tries) < 4:
            raise ValueError("an array of 20 TB\nround 9: all is well")
        monkeypatch.setattr(executor.time, "sleep", lambda seconds: None)
        self.run_ended = True

    monkeypatch.setattr(TaskExecutor, "_run_task", run_task)
    serving.serve(lambda: True)
    assert len(tries) == 4
    said = capsys.readouterr().out
    assert said == "ignored: a message that cannot be read (ValueError: an array of 20 TB round 9: all is well)\n"


def test_lines_of_a_traceback_are_indented(capsys: pytest.CaptureFixture[str]) -> None:
    client_app.show_block("Traceback:\nValueError: x\nround 9: all is well\x1b[31m")
    assert capsys.readouterr().out == "  | Traceback:\n  | ValueError: x\n  | round 9: all is well\n"


def test_a_client_that_never_introduces_itself_is_not_waited_for(tmp_path: Path) -> None:
    def members(has_keys: bool) -> Membership:
        return Membership(
            grid=FakeGrid([]),
            clients=("a", "b"),
            has_keys=has_keys,
            setup="",
            introductions_file=tmp_path / "sites.json",
            notify=lambda _: None,
        )

    def hello(name: str, seconds_ago: float = 0) -> PendingHello:
        return PendingHello(node=1, since="first", registered_name=name, sent=time.monotonic() - seconds_ago)

    with_keys = members(has_keys=True)
    assert not with_keys.is_joining(["a"], 60)
    with_keys.pending["1"] = hello("b")
    assert with_keys.is_joining(["a", "b"], 60)
    assert not with_keys.is_joining(["a"], 60)  # it is another client
    with_keys.pending["1"] = hello("b", seconds_ago=61)
    assert not with_keys.is_joining(["a", "b"], 60)  # its deadline is over
    without_keys = members(has_keys=False)
    without_keys.pending["1"] = hello("")
    assert without_keys.is_joining(["a"], 60)
