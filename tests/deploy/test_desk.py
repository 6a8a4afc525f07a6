"""What an operator has before him while a run goes on: the audit, the status page, and who is taken out."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from sites import NAMES, Consortium
from test_flower import Hear, consortium, drive, make_grid, quick, site_of  # noqa: F401  (fixtures)
from typer.testing import CliRunner

from fedmll.cli.main import app
from fedmll.deploy import barring, keys, serving, setting, status_page, turned_away
from fedmll.deploy.audit import FILE, Audit, verify
from fedmll.deploy.flower import roster, site_app
from fedmll.deploy.joining import Access, audited
from fedmll.deploy.setting import Server
from fedmll.deploy.status import Status, address_in, is_loopback, page
from fedmll.errors import ConfigError, FederationError
from fedmll.experiment import Experiment
from fedmll.running import loop


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


# ---- the audit of a run


def test_a_run_is_in_the_servers_audit_and_in_every_sites(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "out"
    result = drive(consortium, make_grid(consortium, tmp_path), out, Hear(), training__rounds=2)
    found = lines_of(out)
    assert verify(out / FILE).wrong is None
    assert [found[0]["event"], found[-1]["event"]] == ["start", "end"]
    marks = {each[0].removesuffix(".pub"): each[3] for each in keys.listed(consortium.keys)}
    joined = {line["client"]: line for line in found if line["event"] == "joined"}
    assert {name: line["key"] for name, line in joined.items()} == {name: marks[name] for name in NAMES}
    assert (joined["site-c"]["images"], joined["site-c"]["classes"], joined["site-c"]["first_round"]) == (50, 7, 1)
    handed = [line["client"] for line in found if line["event"] == "reply" and line["kind"] == site_app.MODEL]
    assert handed == list(NAMES)
    replies = [line for line in found if line["event"] == "reply" and line["kind"] == site_app.TRAIN]
    assert [(line["round"], line["client"]) for line in replies] == [(r, name) for r in (1, 2) for name in NAMES]
    for number, row in enumerate(result.rows, 1):
        assert sum(line["bytes"] for line in replies if line["round"] == number) == row["bytes_up"]
        sent = [line for line in found if line["event"] == "sent" and line["round"] == number]
        assert sum(line["bytes"] for line in sent if line["kind"] == site_app.TRAIN) == row["bytes_down"]

    for name in NAMES:  # the other end says the same
        own = lines_of(tmp_path / name)
        assert verify(tmp_path / name / FILE).wrong is None
        left = [line for line in own if line["event"] == "left" and line["kind"] == "train"]
        same = ("round", "tensors", "numbers", "bytes")
        assert [[line[key] for key in same] for line in left] == [
            [line[key] for key in same] for line in replies if line["client"] == name
        ]
        assert own[0]["event"] == "approved"
        hello = next(line for line in own if line["event"] == "left" and line["kind"] == "query.hello")
        assert hello["samples"] == joined[name]["images"]
        assert own[-1]["kind"] == "query.bye"
        assert own[-1]["server_audit"] == found[-1]["hash"]  # who shortens the server's must change everybody's


def test_a_resumed_run_goes_on_with_the_chain_and_a_torn_line_is_owned_up_to(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
) -> None:
    out, hear = tmp_path / "out", Hear()

    def end() -> None:
        raise KeyboardInterrupt

    hear.at_round = {1: end}
    with pytest.raises(KeyboardInterrupt):
        drive(consortium, make_grid(consortium, tmp_path), out, hear, training__rounds=2)
    assert lines_of(out)[-1] | {"why": "interrupted"} == lines_of(out)[-1]
    with (out / FILE).open("ab") as file:
        file.write(b'{"time":"2026-')
    drive(consortium, make_grid(consortium, tmp_path), out, Hear(), training__rounds=2)
    found = verify(out / FILE)
    assert (found.wrong, len(found.torn)) == (None, 1)
    shown = CliRunner().invoke(app, ["audit", "verify", str(out)])
    assert shown.exit_code == 0
    assert f"line {found.torn[0]} owns up to a piece" in shown.output
    assert f"ok: {found.lines} lines, the last hash is {found.last}" in shown.output


def test_the_command_finds_an_edited_line_and_a_missing_end(tmp_path: Path) -> None:
    for number in range(4):
        Audit(tmp_path).write("round", round=number)
    last, text = Audit(tmp_path).last, (tmp_path / FILE).read_text()

    def verified(*more: str) -> tuple[int, str]:
        shown = CliRunner().invoke(app, ["audit", "verify", str(tmp_path / FILE), *more])
        return shown.exit_code, shown.output

    assert verified("--last", last) == (0, "ok: 4 lines; line 4 has that hash, 0 came after it\n")
    (tmp_path / FILE).write_text("".join(text.splitlines(keepends=True)[:3]))
    assert verified()[0] == 0  # the chain alone cannot know it
    code, output = verified("--last", last)
    assert (code, "the end is missing" in output) == (1, True)
    (tmp_path / FILE).write_text(text.replace('"round":2', '"round":1'))
    code, output = verified()
    assert (code, "line 3 does not fit" in output) == (1, True)
    assert isinstance(CliRunner().invoke(app, ["audit", "verify", str(tmp_path), "--last", "x"]).exception, ConfigError)


def test_a_join_has_its_key_and_its_end_in_the_audit(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    site, said = site_of(consortium, "site-a", tmp_path), list[str]()
    site.memory.mkdir()
    access = Access("server:1", consortium.keys / "ca.crt", consortium.keys / "site-a.key")
    with pytest.raises(FederationError), audited(site, access, said.append):
        raise FederationError("gone\x1b[2J")
    with audited(site, access, said.append):
        pass
    found = lines_of(site.memory)
    marks = {row[0]: row[3] for row in keys.listed(consortium.keys)}
    assert (found[0]["key"], found[0]["ca"]) == (marks["site-a.pub"], marks["ca.crt"])
    assert [line.get("why") for line in found] == [None, "gone", None, "the run is over"]
    assert said == [f"{site.memory / FILE}: the last hash is {found[-1]['hash']}"]


def test_nothing_leaves_a_site_that_is_not_in_its_audit(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A site whose disk is full in round 1 sends a sentence, and takes part again when there is room."""
    grid, hear, write, full = make_grid(consortium, tmp_path), Hear(), Audit.write, [True]
    monkeypatch.setattr(site_app.standing, "complaint", "")

    def written(self: Audit, event: str, **facts: Any) -> None:
        if full[0] and self.path.parent.name == "site-b" and facts.get("kind") == "train":
            raise OSError(28, "No space left on device")
        write(self, event, **facts)

    monkeypatch.setattr(Audit, "write", written)
    hear.at_round = {1: lambda: full.__setitem__(0, False)}
    result = drive(consortium, grid, tmp_path / "out", hear, training__rounds=2, min_clients=2)
    assert [row["clients"] for row in result.rows] == [2, 3]
    assert "round 1: the reply of site-b is refused: its disk is full; it sees which" in hear.said
    refused = [line for line in lines_of(tmp_path / "out") if line["event"] == "refused"]
    assert [(line["client"], line["round"]) for line in refused] == [("site-b", 1)]


# ---- who is taken out


def test_a_site_is_excluded_and_readmitted_while_the_run_goes_on(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    grid, hear, out = make_grid(consortium, tmp_path), Hear(), tmp_path / "out"
    site_app._told.clear()
    server = Server(NAMES, min_clients=2, round_timeout=5, join_timeout=2, run="run1", keys=str(consortium.keys))
    experiment = consortium.server(training__rounds=6)
    loop.create(out, experiment)
    setting.save(server, out)
    hear.at_round = {
        1: lambda: barring.exclude(out, "site-b"),
        4: lambda: barring.readmit(out, "site-b"),
    }
    result = serving.drive(grid, experiment, server, out, hear)
    clients = [row["clients"] for row in result.rows]
    assert clients[:4] == [3, 2, 2, 2]
    assert clients[-1] == 3  # greeted again in round 5
    assert [hear.said.count(f"site-b is {what} by the operator") for what in ("excluded", "readmitted")] == [1, 1]
    assert not any("left out" in text for text in hear.said[: hear.said.index("site-b is readmitted by the operator")])
    events = [line["event"] for line in lines_of(out) if line.get("client") == "site-b"]
    assert events.index("excluded") < events.index("readmitted") < len(events) - events[::-1].index("reply")
    told = capsys.readouterr().out
    assert told.count("the server refused you: the operator has taken you out of this run") == 1
    assert not any(name in turned_away.advice("excluded") for name in NAMES)  # type: ignore[operator]


def test_who_is_excluded_to_the_end_is_told_that_the_run_is_over(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid, hear, out = make_grid(consortium, tmp_path), Hear(), tmp_path / "out"
    experiment = consortium.server(training__rounds=2)
    server = Server(NAMES, min_clients=2, join_timeout=2, run="run1", keys=None)
    loop.create(out, experiment)
    setting.save(server, out)
    hear.at_round = {1: lambda: barring.exclude(out, "site-b")}
    result = serving.drive(grid, experiment, server, out, hear)
    assert [row["clients"] for row in result.rows] == [3, 2]
    assert sorted(name for kind, name in grid.log if kind == "query.bye") == sorted(NAMES)
    assert result.summary["samples"]["train"] == 140  # of who takes part in the end


def test_who_may_be_excluded(tmp_path: Path) -> None:
    setting.save(Server(("a", "b", "c"), min_clients=2), tmp_path)
    with pytest.raises(ConfigError, match="There is no client 'd'"):
        barring.exclude(tmp_path, "d")
    with pytest.raises(ConfigError, match="a is not excluded"):
        barring.readmit(tmp_path, "a")
    shown = CliRunner().invoke(app, ["exclude", str(tmp_path), "a"])
    assert (shown.exit_code, "a is excluded from" in shown.output) == (0, True)
    assert barring.Bars(tmp_path).excluded() == {"a"}
    with pytest.raises(ConfigError, match=r"Without b there are 1 clients, and a round needs 2 .* --drop b"):
        barring.exclude(tmp_path, "b")
    assert CliRunner().invoke(app, ["exclude", str(tmp_path), "a", "--readmit"]).exit_code == 0
    assert barring.Bars(tmp_path).excluded() == frozenset()
    (tmp_path / barring.FILE).write_text("garbage")
    with pytest.raises(ConfigError, match=r"excluded\.json, which says who is excluded"):
        barring.excluded_in(tmp_path)


def test_a_key_that_is_revoked_in_a_run_is_refused_at_once_and_named(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The port lets nothing of it through; nobody waits for it, nor greets it."""
    grid, hear, folder = make_grid(consortium, tmp_path), Hear(), tmp_path / "keys"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.pub").write_bytes((consortium.keys / f"{name}.pub").read_bytes())
    server = Server(NAMES, min_clients=2, round_timeout=60, join_timeout=2, run="run1", keys=str(folder))
    experiment, out = consortium.server(training__rounds=3), tmp_path / "out"
    loop.create(out, experiment)

    def revoke() -> None:
        keys.revoke(folder, "site-b")
        grid.nodes[1].answers = False  # what the port does

    hear.at_round = {1: revoke}
    result = serving.drive(grid, experiment, server, out, hear)
    assert [row["clients"] for row in result.rows] == [3, 2, 2]
    assert max(row["seconds"] for row in result.rows) < 30  # half of the deadline
    assert hear.said.count("site-b is refused: its key was revoked") == 1
    assert "round 2: site-b is left out (it is refused: its key was revoked)" in hear.said


def test_nobody_left_is_not_followed(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / barring.FILE).write_text('{"a": "", "b": ""}')
    bars = barring.Bars(tmp_path)
    here: Any = roster.Roster(None, ("a", "b"), True, "", tmp_path / "sites.json", lambda text, *_, **__: said.append(text), bars=bars)  # type: ignore[arg-type]  # fmt: skip  # noqa: E501
    here.introductions = {"a": "A", "b": "B"}
    here.first_round = {"a": 1, "b": 1}
    assert here.taking_part(1, 1) == {"a": "A", "b": "B"}
    assert said == ["nobody would be left, so nobody else is excluded"]


# ---- the status page


@pytest.fixture
def status() -> Status:
    experiment = Experiment.make({"training": {"rounds": 4}})
    found = Status(experiment, Server(("site-a", "site-b", "site-c")))
    found.clients['<b>"x"\\'] = found.clients.pop("site-c")  # a name that must not be believed
    found.record("joined", {"client": "site-a", "images": 90})
    found.record("sent", {"client": "site-a", "bytes": 1000, "round": 1})
    found.record("reply", {"client": "site-a", "bytes": 2_500_000, "round": 1})
    found.record("joined", {"client": "site-b", "images": 70})
    found.record("left out", {"client": "site-b", "text": "round 1: <script>alert(1)</script> & so on"})
    found.record("gone", {"client": "site-b", "text": "site-b is gone"})
    found.record("start", {"clients": ["site-a"]})
    found.started(experiment, None, 1)  # type: ignore[arg-type]
    found.client_done(2, 1, 3)
    found.round_done({"round": 1, "seconds": 30.0})
    return found


@pytest.fixture
def served(status: Status) -> Iterator[int]:
    with page("127.0.0.1:0", status) as port:
        assert port is not None
        yield port


def asked(port: int, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.getheaders())


def test_the_status_as_json(status: Status, served: int) -> None:
    code, text, headers = asked(served, "/status.json")
    found = json.loads(text)
    assert (code, headers["Content-Type"]) == (200, "application/json")
    assert (found["state"], found["round"], found["rounds"], found["rounds_done"]) == ("running", 2, 4, 1)
    assert (found["seconds_a_round"], found["seconds_left"]) == (30.0, 90.0)
    assert (found["bytes_up"], found["bytes_down"]) == (2_500_000, 1000)
    a, b = found["clients"]["site-a"], found["clients"]["site-b"]
    assert (a["connected"], a["images"], a["last_round"], a["errors"]) == (True, 90, 1, 0)
    assert (b["connected"], b["errors"], b["last_error"]) == (False, 2, "site-b is gone")
    status.record("excluded", {"client": "site-a", "text": ""})
    assert status.shown()["clients"]["site-a"]["excluded"]
    status.stopped("too few")
    assert (status.shown()["state"], status.shown()["reason"]) == ("stopped", "too few")


LINE = re.compile(r'fedmll_[a-z_]+(?:\{[a-z]+="(?:[^"\\\n]|\\.)*"(?:,[a-z]+="(?:[^"\\\n]|\\.)*")*\})? [0-9.e+]+')


def test_the_status_as_prometheus_reads_it(served: int) -> None:
    code, text, headers = asked(served, "/metrics")
    assert (code, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    lines = text.splitlines()
    assert text.endswith("\n")
    assert all(line.startswith(("# HELP fedmll_", "# TYPE fedmll_")) or LINE.fullmatch(line) for line in lines), text
    assert 'fedmll_client_connected{client="site-a"} 1' in lines
    assert 'fedmll_client_connected{client="<b>\\"x\\"\\\\"} 0' in lines
    assert 'fedmll_client_bytes_total{client="site-a",direction="up"} 2500000' in lines
    assert "fedmll_left_seconds 90" in lines
    assert 'fedmll_state{state="running"} 1' in lines
    named = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(named) == len(set(named))


def test_what_is_not_known_yet_is_left_out() -> None:
    fresh = Status(Experiment.make({"training": {"rounds": 4}}), Server(("a", "b"))).shown()
    assert "left_seconds" not in status_page.prometheus(fresh)
    assert "has not come" in status_page.html(fresh)


def test_the_page_shows_names_and_runs_nothing(served: int) -> None:
    code, text, headers = asked(served, "/")
    assert code == 200
    assert "<script" not in text
    assert "&lt;b&gt;&quot;x&quot;\\" in text
    assert "2 of 4" in text
    assert "about 2 min" in text
    assert "2.5 MB" in text
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert 'http-equiv="refresh"' in text
    assert not re.search(r"(src|href)=", text)  # nothing is loaded from anywhere


def test_nothing_but_get_of_these_and_under_its_own_name(served: int) -> None:
    assert asked(served, "/etc/passwd")[0] == 404
    assert asked(served, "/", method="POST")[0] == 501
    assert asked(served, "/", host="evil.example.org")[0] == 403
    assert asked(served, "/", host="localhost:1")[0] == 200


def test_durations_and_sizes() -> None:
    assert [status_page.duration(s) for s in (None, 3.14, 90, 7200, 36060)] == [
        "–", "3.1 s", "2 min", "2 h 0 min", "10 h 1 min"
    ]  # fmt: skip
    assert [status_page.size(n) for n in (0, 999, 1500, 2_500_000, 3e12)] == [
        "0 B", "999 B", "1.5 kB", "2.5 MB", "3000.0 GB"
    ]  # fmt: skip


def test_where_the_page_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    from fedmll.cli.federation import warn_of_status

    assert address_in("[::1]:80") == ("::1", 80)
    assert [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "10.0.0.1", "fed.org")] == [
        True, True, True, False, False, False
    ]  # fmt: skip
    for wrong in ("8080", "127.0.0.1", ":80", "a:b", "a:70000"):
        with pytest.raises(ConfigError, match="--status takes HOST:PORT"):
            address_in(wrong)
    warn_of_status("127.0.0.1:80")
    assert capsys.readouterr().err == ""
    warn_of_status("0.0.0.0:80")
    assert "no password" in capsys.readouterr().err


def test_a_taken_port_is_said_before_the_run(status: Status, served: int) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"), page(f"127.0.0.1:{served}", status):
        pass


def test_a_run_shows_itself_while_it_goes_on(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid, hear, out, seen = make_grid(consortium, tmp_path), Hear(), tmp_path / "out", list[dict[str, Any]]()
    experiment = consortium.server(training__rounds=2)
    server = Server(NAMES, min_clients=2, join_timeout=2, run="run1", keys=None, status="127.0.0.1:0")
    loop.create(out, experiment)
    with pytest.MonkeyPatch.context() as patch:
        ports: list[int] = []
        real = page

        def noted(address: str | None, status: Status) -> Any:
            held = real(address, status)

            class Held:
                def __enter__(self) -> int | None:
                    ports.append(held.__enter__())  # type: ignore[arg-type]
                    return ports[0]

                def __exit__(self, *error: Any) -> Any:
                    return held.__exit__(*error)

            return Held()

        patch.setattr("fedmll.deploy.desk.page", noted)
        hear.at_round = {1: lambda: seen.append(json.loads(asked(ports[0], "/status.json")[1]))}
        serving.drive(grid, experiment, server, out, hear)
    assert [client["images"] for client in seen[0]["clients"].values()] == [90, 70, 50]
    assert (seen[0]["state"], seen[0]["round"]) == ("running", 1)
    assert seen[0]["bytes_up"] > 0
    with pytest.raises(OSError):
        asked(ports[0], "/")  # it ends with the run
    assert not [thread for thread in threading.enumerate() if "serve_forever" in thread.name]
