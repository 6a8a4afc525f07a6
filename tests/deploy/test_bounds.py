"""What would grow, wait or be read by others if nobody bounded it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from sites import Consortium
from test_flower import FakeGrid, consortium, drive, make_grid, quick  # noqa: F401  (fixtures)

from fedmll.deploy import approval, own_folder
from fedmll.deploy.flower import executor, site_app
from fedmll.deploy.flower.executor import Executor
from fedmll.deploy.flower.inflating import Bounds
from fedmll.deploy.flower.roster import Greeting, Roster
from fedmll.deploy.sentences import Refused


def test_a_servers_folder_is_for_its_owner(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
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
    monkeypatch.setattr(approval, "MOST_APPROVED", 2)
    asked: list[int] = []

    def confirm() -> bool:
        asked.append(1)
        return True

    for number in (1, 2, 3, 3, 2, 1):
        approval.approve(tmp_path, {"number": number}, [], lambda _: None, confirm)
    assert len(asked) == 4  # three, and the first one again
    kept = json.loads((tmp_path / approval.FILE).read_text())
    assert list(kept) == [approval.digest_of({"number": number}) for number in (3, 1)]


def test_memories_of_many_runs_are_bounded_and_none_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_folder, "MOST_RUNS", 2)
    for name in ("over", "going", "waiting", own_folder.CACHE, own_folder.FLOWER):
        (tmp_path / name).mkdir()
    for name in ("going", "waiting"):
        (tmp_path / name / "000000.000001.safetensors").write_bytes(b"x")
    own_folder.make_room(tmp_path, "going")  # it goes on
    assert not (tmp_path / "over").exists()
    with pytest.raises(Refused, match="holds memories of 2 runs that did not end, and no more are begun") as refusal:
        own_folder.make_room(tmp_path, "new")
    assert refusal.value.code == "limits"
    (tmp_path / "waiting" / "000000.000001.safetensors").unlink()
    own_folder.make_room(tmp_path, "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [own_folder.CACHE, own_folder.FLOWER, "going"]


def test_a_message_that_cannot_be_put_together_does_not_end_a_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bounds, tries = Bounds(), list[str]()
    monkeypatch.setattr(executor, "BOUNDS", bounds)
    monkeypatch.setattr(Bounds, "install", lambda self: tries.append("installed"))
    monkeypatch.setattr(executor, "acquirer", lambda address, secret: None)
    monkeypatch.setattr(executor, "acquire", lambda client, kind: "token")
    monkeypatch.setattr(executor, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(site_app.standing, "complaint", "")
    (tmp_path / "secret").write_bytes(b"x")
    serving = Executor(1, tmp_path / "secret", tmp_path / "site.json", 4e9)
    assert (bounds.largest, tries) == (4_000_000_000, ["installed"])

    def do(self: Executor, token: str) -> None:
        tries.append(token)
        if len(tries) < 4:
            raise ValueError("an array of 20 TB\nround 9: all is well")
        monkeypatch.setattr(executor.time, "sleep", lambda seconds: None)
        self.over = True

    monkeypatch.setattr(Executor, "_do", do)
    serving.serve(lambda: True)
    assert len(tries) == 4
    said = capsys.readouterr().out
    assert said == "ignored: a message that cannot be read (ValueError: an array of 20 TB round 9: all is well)\n"


def test_a_traceback_does_not_look_like_lines_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    site_app.show_details("Traceback:\nValueError: x\nround 9: all is well\x1b[31m")
    assert capsys.readouterr().out == "  | Traceback:\n  | ValueError: x\n  | round 9: all is well\n"


def test_who_never_answers_its_greeting_is_not_waited_for(tmp_path: Path) -> None:
    def roster(keyed: bool) -> Any:
        return Roster(FakeGrid([]), ("a", "b"), keyed, "", tmp_path / "sites.json", lambda _: None)

    here = roster(keyed=True)
    assert not here.greeting(["a"], 60)
    here.waiting["1"] = Greeting(1, "first", "b", time.monotonic())
    assert here.greeting(["a", "b"], 60)
    assert not here.greeting(["a"], 60)  # somebody else's
    here.waiting["1"] = Greeting(1, "first", "b", time.monotonic() - 61)
    assert not here.greeting(["a", "b"], 60)  # it had its deadline
    nobody_is_known = roster(keyed=False)
    nobody_is_known.waiting["1"] = Greeting(1, "first", "", time.monotonic())
    assert nobody_is_known.greeting(["a"], 60)
