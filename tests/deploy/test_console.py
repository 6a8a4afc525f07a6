"""What the operator of a run sees and decides: messages, the audit log, and excluded clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import NAMES, Consortium
from fake_grid import RecordingCallback, consortium, drive, fast_polling, make_grid, make_site  # noqa: F401  (fixtures)
from typer.testing import CliRunner

from fedmll.cli.main import app
from fedmll.core.errors import ConfigError, FederationError
from fedmll.deploy import error_codes
from fedmll.deploy.flower import client_app, membership
from fedmll.deploy.security import audit_log, certificates, client_keys
from fedmll.deploy.security.audit_log import FILE, AuditLog, read_heads, verify_audit_log
from fedmll.deploy.server import exclusions, serve, server_settings
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.deploy.site.join import audit_join
from fedmll.deploy.site.server_access import ServerAccess
from fedmll.deploy.site.site_config import SERVER_CERTIFICATE
from fedmll.runs.run_folder import RunFolder


def read_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


# ---- the audit of a run


def test_run_is_in_the_audit_logs_of_the_server_and_of_every_site(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "out"
    result = drive(consortium, make_grid(consortium, tmp_path), out, RecordingCallback(), training__rounds=2)
    found = read_lines(out)
    assert verify_audit_log(out / FILE).first_bad_line is None
    assert [found[0]["event"], found[-1]["event"]] == ["start", "end"]
    marks = {each[0].removesuffix(".pub"): each[3] for each in client_keys.list_keys(consortium.keys)}
    joined = {line["client"]: line for line in found if line["event"] == "joined"}
    assert {name: line["key"] for name, line in joined.items()} == {name: marks[name] for name in NAMES}
    assert (joined["site-c"]["images"], joined["site-c"]["classes"], joined["site-c"]["first_round"]) == (50, 7, 1)
    handed = [line["client"] for line in found if line["event"] == "reply" and line["kind"] == client_app.MODEL]
    assert handed == list(NAMES)
    replies = [line for line in found if line["event"] == "reply" and line["kind"] == client_app.TRAIN]
    assert [(line["round"], line["client"]) for line in replies] == [(r, name) for r in (1, 2) for name in NAMES]
    for number, row in enumerate(result.rows, 1):
        assert sum(line["bytes"] for line in replies if line["round"] == number) == row["bytes_up"]
        sent = [line for line in found if line["event"] == "sent" and line["round"] == number]
        assert sum(line["bytes"] for line in sent if line["kind"] == client_app.TRAIN) == row["bytes_down"]

    for name in NAMES:  # the other end says the same
        own = read_lines(tmp_path / name)
        assert verify_audit_log(tmp_path / name / FILE).first_bad_line is None
        left = [line for line in own if line["event"] == "left" and line["kind"] == "train"]
        same = ("round", "tensors", "numbers", "bytes")
        assert [[line[key] for key in same] for line in left] == [
            [line[key] for key in same] for line in replies if line["client"] == name
        ]
        assert own[0]["event"] == "approved"
        hello = next(line for line in own if line["event"] == "left" and line["kind"] == "query.hello")
        assert hello["samples"] == joined[name]["images"]
        assert own[-1]["kind"] == "query.bye"
        assert own[-1]["server_head"]["hash"] == found[-1]["hash"]  # who shortens the server's must change everybody's


def test_sites_keep_the_signed_head_of_every_round(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    """The operator rewrites the log after the run, with hashes that fit: what the sites have kept contradicts it."""
    out, grid = tmp_path / "out", make_grid(consortium, tmp_path)
    certificate = consortium.keys / "server.crt"
    for node in grid.nodes:
        node.site_file.with_name(SERVER_CERTIFICATE).write_bytes(certificate.read_bytes())
    drive(consortium, grid, out, RecordingCallback(), training__rounds=3)
    site, lines = tmp_path / "site-a", read_lines(out)
    rounds = {line["round"]: line["hash"] for line in lines if line["event"] == "round"}
    heads = read_heads(site / FILE)
    assert {head.round: head.hash for head in heads} == rounds | {3: lines[-1]["hash"]}
    assert all(head.is_signed_by(certificate.read_bytes()) for head in heads)

    def verified(*more: str | Path) -> tuple[int, str]:
        shown = CliRunner().invoke(app, ["audit", "verify", str(out), "--kept", str(site), *map(str, more)])
        return shown.exit_code, " ".join(shown.output.split())

    code, said = verified("--certificate", certificate)
    assert code == 0, said
    assert f"{len(heads)} hashes that the site kept are in the log and are signed" in said
    (out / FILE).unlink()
    log = AuditLog(tmp_path / "forged")
    log.path.parent.mkdir()
    for line in lines:  # without the second round
        if line.get("round") != 2:
            facts = {key: value for key, value in line.items() if key not in ("time", "event", "previous", "hash")}
            log.write(line["event"], **facts)
    log.path.rename(out / FILE)
    assert verify_audit_log(out / FILE).first_bad_line is None  # the chain alone cannot know it
    code, said = verified()
    assert (code, "which the server sent to the site: lines were changed or removed since" in said) == (1, True)


def test_head_that_the_server_did_not_sign_is_not_kept(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid = make_grid(consortium, tmp_path)
    client_keys.create_client_key(tmp_path / "other", "x")
    certificates.create_server_certificate(tmp_path / "other", [])
    for node in grid.nodes:
        certificate = (tmp_path / "other" / "server.crt").read_bytes()  # as another server would show it
        node.site_file.with_name(SERVER_CERTIFICATE).write_bytes(certificate)
    drive(consortium, grid, tmp_path / "out", RecordingCallback(), training__rounds=2)
    assert read_heads(tmp_path / "site-a" / FILE) == []
    assert any(line.get("server_head_valid") is False for line in read_lines(tmp_path / "site-a"))


def test_deleted_log_of_a_resumed_run_is_reported_and_never_verified(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    for number, loss in enumerate((lambda file: file.unlink(), lambda file: file.write_bytes(b""))):
        folder = tmp_path / str(number)
        out, hear = folder / "out", RecordingCallback()

        def end() -> None:
            raise KeyboardInterrupt

        hear.at_round = {1: end}
        with pytest.raises(KeyboardInterrupt):
            drive(consortium, make_grid(consortium, folder), out, hear, training__rounds=2)
        loss(out / FILE)
        audit_log._last_written.clear()  # as in a new process
        hear = RecordingCallback()
        drive(consortium, make_grid(consortium, folder), out, hear, training__rounds=2)
        assert any("audit.jsonl of this run is missing or empty" in text for text in hear.said), hear.said
        assert verify_audit_log(out / FILE).first_bad_line == 1


def test_resumed_run_continues_the_chain_and_reports_an_incomplete_line(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
) -> None:
    out, hear = tmp_path / "out", RecordingCallback()

    def end() -> None:
        raise KeyboardInterrupt

    hear.at_round = {1: end}
    with pytest.raises(KeyboardInterrupt):
        drive(consortium, make_grid(consortium, tmp_path), out, hear, training__rounds=2)
    assert read_lines(out)[-1] | {"reason": "interrupted"} == read_lines(out)[-1]
    with (out / FILE).open("ab") as file:
        file.write(b'{"time":"2026-')
    drive(consortium, make_grid(consortium, tmp_path), out, RecordingCallback(), training__rounds=2)
    found = verify_audit_log(out / FILE)
    assert (found.first_bad_line, len(found.incomplete)) == (None, 1)
    shown = CliRunner().invoke(app, ["audit", "verify", str(out)])
    assert shown.exit_code == 0
    assert f"line {found.incomplete[0]} reports an incomplete line" in shown.output
    assert f"ok: {found.lines} lines, the last hash is {found.last_hash}" in shown.output


def test_command_finds_an_edited_line_and_a_missing_end(tmp_path: Path) -> None:
    for number in range(4):
        AuditLog(tmp_path).write("round", round=number)
    last, text = AuditLog(tmp_path).last_hash, (tmp_path / FILE).read_text()

    def verified(*more: str) -> tuple[int, str]:
        shown = CliRunner().invoke(app, ["audit", "verify", str(tmp_path / FILE), *more])
        return shown.exit_code, shown.output

    assert verified("--last", last) == (0, "ok: 4 lines; line 4 has that hash, and 0 lines follow it\n")
    (tmp_path / FILE).write_text("".join(text.splitlines(keepends=True)[:3]))
    assert verified()[0] == 0  # the chain alone cannot know it
    code, output = verified("--last", last)
    assert (code, "the end is missing" in output) == (1, True)
    (tmp_path / FILE).write_text(text.replace('"round":2', '"round":1'))
    code, output = verified()
    assert (code, "line 3 does not fit" in output) == (1, True)
    assert isinstance(CliRunner().invoke(app, ["audit", "verify", str(tmp_path), "--last", "x"]).exception, ConfigError)


def test_join_writes_its_key_and_its_end_to_the_audit_log(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    site, said = make_site(consortium, "site-a", tmp_path), list[str]()
    site.state_dir.mkdir()
    access = ServerAccess(server="server:1", ca=consortium.keys / "ca.crt", key=consortium.keys / "site-a.key")
    with pytest.raises(FederationError), audit_join(site, access, said.append):
        raise FederationError("gone\x1b[2J")
    with audit_join(site, access, said.append):
        pass
    found = read_lines(site.state_dir)
    marks = {row[0]: row[3] for row in client_keys.list_keys(consortium.keys)}
    assert (found[0]["key"], found[0]["ca"]) == (marks["site-a.pub"], marks["ca.crt"])
    assert [line.get("reason") for line in found] == [None, "gone", None, "the run is over"]
    assert said == [f"{site.state_dir / FILE}: the last hash is {found[-1]['hash']}"]


def test_nothing_leaves_a_site_that_is_not_in_its_audit_log(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A site whose disk is full in round 1 sends a sentence, and takes part again when there is room."""
    grid, hear, write, full = make_grid(consortium, tmp_path), RecordingCallback(), AuditLog.write, [True]
    monkeypatch.setattr(client_app.join_state, "last_error", "")

    def written(self: AuditLog, event: str, **facts: Any) -> None:
        if full[0] and self.path.parent.name == "site-b" and facts.get("kind") == "train":
            raise OSError(28, "No space left on device")
        write(self, event, **facts)

    monkeypatch.setattr(AuditLog, "write", written)
    hear.at_round = {1: lambda: full.__setitem__(0, False)}
    result = drive(consortium, grid, tmp_path / "out", hear, training__rounds=2, min_clients=2)
    assert [row["clients"] for row in result.rows] == [2, 3]
    assert "round 1: the reply of site-b is rejected: its disk is full (the site shows which one)" in hear.said
    refused = [line for line in read_lines(tmp_path / "out") if line["event"] == "rejected"]
    assert [(line["client"], line["round"]) for line in refused] == [("site-b", 1)]


# ---- exclusions


def test_site_is_excluded_and_readmitted_while_the_run_goes_on(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid, hear, out = make_grid(consortium, tmp_path), RecordingCallback(), tmp_path / "out"
    client_app.join_state.rejections_shown.clear()
    monkeypatch.setattr(membership, "RETRY_SECONDS", 0.0)  # the clock of these tests only moves in waits
    server = ServerSettings(
        clients=NAMES, min_clients=2, round_timeout=5, join_timeout=2, run="run1", keys=str(consortium.keys)
    )
    experiment = consortium.server(training__rounds=6)
    RunFolder(out).create(experiment)
    server_settings.write_server_settings(server, out)
    hear.at_round = {
        1: lambda: exclusions.exclude(out, "site-b"),
        4: lambda: exclusions.readmit(out, "site-b"),
    }
    result = serve.run_federation(grid, experiment, server, out, callback=hear)
    clients = [row["clients"] for row in result.rows]
    assert clients[:4] == [3, 2, 2, 2]
    assert clients[-1] == 3
    assert [hear.said.count(f"site-b is {what} by the operator") for what in ("excluded", "readmitted")] == [1, 1]
    assert not any("skipped" in text for text in hear.said[: hear.said.index("site-b is readmitted by the operator")])
    events = [line["event"] for line in read_lines(out) if line.get("client") == "site-b"]
    assert events.index("excluded") < events.index("readmitted") < len(events) - events[::-1].index("reply")
    told = capsys.readouterr().out
    assert told.count("the server rejected you: the operator has excluded you from this run") == 1
    assert not any(name in error_codes.describe_rejection("excluded") for name in NAMES)  # type: ignore[operator]


def test_excluded_site_is_told_that_the_run_is_over(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid, hear, out = make_grid(consortium, tmp_path), RecordingCallback(), tmp_path / "out"
    experiment = consortium.server(training__rounds=2)
    server = ServerSettings(clients=NAMES, min_clients=2, join_timeout=2, run="run1", keys=None)
    RunFolder(out).create(experiment)
    server_settings.write_server_settings(server, out)
    hear.at_round = {1: lambda: exclusions.exclude(out, "site-b")}
    result = serve.run_federation(grid, experiment, server, out, callback=hear)
    assert [row["clients"] for row in result.rows] == [3, 2]
    assert sorted(name for kind, name in grid.log if kind == "query.bye") == sorted(NAMES)
    assert result.summary["samples"]["train"] == 140  # of who takes part in the end


def test_which_clients_can_be_excluded(tmp_path: Path) -> None:
    server_settings.write_server_settings(ServerSettings(clients=("a", "b", "c"), min_clients=2), tmp_path)
    with pytest.raises(ConfigError, match="There is no client 'd'"):
        exclusions.exclude(tmp_path, "d")
    with pytest.raises(ConfigError, match="a is not excluded"):
        exclusions.readmit(tmp_path, "a")
    shown = CliRunner().invoke(app, ["exclude", str(tmp_path), "a"])
    assert (shown.exit_code, "a is excluded from" in shown.output) == (0, True)
    assert exclusions.Exclusions(tmp_path).excluded() == {"a"}
    with pytest.raises(ConfigError, match=r"Without b there are 1 clients, and a round needs 2 .* --drop b"):
        exclusions.exclude(tmp_path, "b")
    assert CliRunner().invoke(app, ["exclude", str(tmp_path), "a", "--readmit"]).exit_code == 0
    assert exclusions.Exclusions(tmp_path).excluded() == frozenset()
    (tmp_path / exclusions.EXCLUDED_FILE).write_text("garbage")
    with pytest.raises(ConfigError, match=r"excluded\.json, the list of excluded clients"):
        exclusions.read_excluded(tmp_path)


def test_key_that_is_revoked_during_a_run_is_rejected_at_once_by_name(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The port lets nothing of it through; nobody waits for it, nor greets it."""
    grid, hear, folder = make_grid(consortium, tmp_path), RecordingCallback(), tmp_path / "keys"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.pub").write_bytes((consortium.keys / f"{name}.pub").read_bytes())
    server = ServerSettings(
        clients=NAMES, min_clients=2, round_timeout=60, join_timeout=2, run="run1", keys=str(folder)
    )
    experiment, out = consortium.server(training__rounds=3), tmp_path / "out"
    RunFolder(out).create(experiment)

    def revoke() -> None:
        client_keys.revoke_client_key(folder, "site-b")
        grid.nodes[1].answers = False  # what the port does

    hear.at_round = {1: revoke}
    result = serve.run_federation(grid, experiment, server, out, callback=hear)
    assert [row["clients"] for row in result.rows] == [3, 2, 2]
    assert max(row["seconds"] for row in result.rows) < 30  # half of the deadline
    assert hear.said.count("site-b is rejected: its key was revoked") == 1
    assert "round 2: site-b is skipped (it is rejected: its key was revoked)" in hear.said


def test_last_clients_cannot_be_excluded(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / exclusions.EXCLUDED_FILE).write_text('{"a": "", "b": ""}')
    members: Any = membership.Membership(
        grid=None,  # type: ignore[arg-type]
        clients=("a", "b"),
        has_keys=True,
        setup="",
        introductions_file=tmp_path / "sites.json",
        notify=lambda text, *_, **__: said.append(text),
        exclusions=exclusions.Exclusions(tmp_path),
    )
    members.introductions = {"a": "A", "b": "B"}
    members.first_round = {"a": 1, "b": 1}
    assert members.participants(1, 1) == {"a": "A", "b": "B"}
    assert said == ["no client would be left, so no further client is excluded"]
