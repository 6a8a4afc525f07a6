"""What a server's operator sees and can change: settings, damaged files, a full disk, refusals that reach the site."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Said

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from sites import NAMES, Consortium
from test_flower import Hear, close, consortium, drive, make_grid, quick  # noqa: F401  (fixtures)

from fedmll import files, run
from fedmll.deploy import serving, setting, turned_away
from fedmll.deploy.flower import roster, site_app
from fedmll.deploy.flower.records import from_records
from fedmll.deploy.journal import Journal
from fedmll.deploy.setting import Server
from fedmll.deploy.site import Site
from fedmll.deploy.site_worker import Setup, SiteWorker
from fedmll.errors import ConfigError, FedmllError, printable
from fedmll.experiment import Experiment
from fedmll.running import loop


def test_what_others_send_is_fit_for_a_terminal() -> None:
    assert printable("a\x1b[2J\x07b\r\nc\u202ed\u2028e\x00") == "a [2J b c d e"
    assert printable("Pleuraerguß, 胸水") == "Pleuraerguß, 胸水"
    assert printable("x" * 400) == "x" * 400
    assert printable("x" * 401) == "x" * 400 + " …"
    assert printable("\x1b" * 2_000_000) == " …"
    assert printable(" " * 1600 + "y") == " …"
    assert printable(ValueError("why")) == "why"


def test_the_journal_has_times_and_nothing_that_moves_a_cursor(tmp_path: Path) -> None:
    hear = Hear()
    journal = Journal(tmp_path, hear)
    journal.say("site-a is refused: \x1b[31m" + "long " * 1000)
    journal.say("site-b is here")
    assert hear.said[1] == "site-b is here"
    assert len(hear.said[0]) < 620
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert len(lines) == 2  # each once
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ INFO site-", line) for line in lines)
    assert "\x1b" not in "".join(lines)


def test_joins_and_refusals_are_in_the_log(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    drive(consortium, make_grid(consortium, tmp_path), tmp_path / "out", training__rounds=1)
    lines = (tmp_path / "out" / "log.txt").read_text().splitlines()
    for name in NAMES:
        assert sum(f"{name} is here" in line for line in lines) == 1
    assert sum("round 1: loss" in line for line in lines) == 1


GARBAGE = ("", "{", "[]", "3", '{"clients": 3}', '{"clients": ["a"], "port": "x"}', '{"clients": ["a"], "colour": 1}')


@pytest.mark.parametrize("garbage", [*GARBAGE, '{"clients": ["a"], "min_clients": true}'])
def test_garbage_in_server_json_is_one_paragraph(tmp_path: Path, garbage: str) -> None:
    (tmp_path / "server.json").write_text(garbage)
    with pytest.raises(ConfigError, match=r"server.json, which says how this server is run .* Put it back") as found:
        setting.server_in(tmp_path)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["round_timeout", "join_timeout"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "0"])
def test_a_deadline_that_never_comes_is_refused(tmp_path: Path, name: str, value: str) -> None:
    (tmp_path / "server.json").write_text(f'{{"clients": ["a", "b"], "{name}": {value}}}')
    with pytest.raises(ConfigError, match="are seconds, more than 0"):
        setting.server_in(tmp_path)


@pytest.mark.parametrize("wrong", [{"port": 65536}, {"port": 0}, {"tries": 0}], ids=str)
def test_a_port_or_a_number_of_tries_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    Server(("a", "b"), port=65535, tries=1)
    with pytest.raises(ConfigError, match="is not from 1 to 65535, or a round is tried"):
        Server(("a", "b"), **wrong)  # type: ignore[arg-type]


LATE = '{"site-a": {"samples": 1, "held_out": 0, "classes": ["a"], "digest": "' + 32 * "0" + '", "first_round": 1e999}}'


@pytest.mark.parametrize("garbage", ["", "{", "[1]", '{"site-a": 3}', '{"site-a": {"samples": "x"}}', LATE])
def test_garbage_in_sites_json_is_one_paragraph(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    garbage: str,
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "sites.json").write_text(garbage)
    with pytest.raises(ConfigError, match=r"sites.json, which says what each client has, cannot be read"):
        serving.drive(make_grid(consortium, tmp_path), consortium.server(), Server(NAMES, join_timeout=1), out, Hear())


def test_a_setting_survives_and_changes(tmp_path: Path) -> None:
    server = Server(("a", "b", "c", "d"), "127.0.0.1", 9000, None, 3, 60, 30)
    setting.save(server, tmp_path)
    assert setting.server_in(tmp_path) == server
    assert setting.change(tmp_path) == server
    changed = setting.change(tmp_path, round_timeout=5.5, min_clients=2, address=("0.0.0.0", 8100))
    assert (changed.round_timeout, changed.min_clients, changed.host, changed.port) == (5.5, 2, "0.0.0.0", 8100)
    assert changed.run == server.run  # the sites find their memories
    assert setting.server_in(tmp_path) == changed
    with pytest.raises(ConfigError, match="no such client"):
        setting.change(tmp_path, drop=["e"])
    with pytest.raises(ConfigError, match="--min-clients 5 is not possible with 4"):
        setting.change(tmp_path, min_clients=5)


def test_who_never_came_is_taken_off_the_list_and_who_came_keeps_its_place(tmp_path: Path) -> None:
    setting.save(Server(("a", "b", "c"), min_clients=3), tmp_path)
    (tmp_path / "sites.json").write_text('{"a": {}, "b": {}}')
    changed = setting.change(tmp_path, drop=["a", "c"])
    assert changed.clients == ("a", "b")
    assert changed.dropped == ("a",)
    assert changed.taking_part == ("b",)
    assert changed.min_clients == 1  # no more can come
    with pytest.raises(ConfigError, match="not possible with 0 clients"):
        setting.change(tmp_path, drop=["b"])
    (tmp_path / "sites.json").write_text("garbage")
    with pytest.raises(ConfigError, match="cannot be read"):
        setting.change(tmp_path, drop=["b"])


def test_a_run_goes_on_without_a_client(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    """site-b is dropped after round 1: refused when it comes, and nobody waits for it."""
    out, hear = tmp_path / "out", Hear()
    drive(consortium, make_grid(consortium, tmp_path), out, training__rounds=1)
    (out / "summary.json").unlink()
    text = (out / "experiment.toml").read_text().replace("rounds = 1", "rounds = 2")
    (out / "experiment.toml").write_text(text)
    setting.save(Server(NAMES, min_clients=3, round_timeout=5, join_timeout=2, run="run1"), out)
    server = setting.change(out, drop=["site-b"])
    grid = make_grid(consortium, tmp_path)
    result = serving.drive(grid, Experiment.load(out / "experiment.toml"), server, out, hear)
    assert [row["clients"] for row in result.rows] == [3, 2]
    assert any("site-b is refused: 'site-b' is not among the clients" in text for text in hear.said)
    assert not any("left out" in text for text in hear.said)  # it is not part of the run any more


class FullDisk:
    """The server's, from the n-th write on; the sites' are their own."""

    def __init__(self, folder: Path, after: int) -> None:
        self.folder, self.left, self.write = folder, after, files.write

    def __call__(self, path: Path, content: Any) -> None:
        self.left -= path.is_relative_to(self.folder)
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.write(path, content)


@pytest.mark.parametrize("after", [0, 3, 6])
def test_a_full_disk_is_said_and_the_run_goes_on_when_there_is_room(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
) -> None:
    disk = FullDisk(tmp_path / "out", after)
    changes: dict[str, Any] = {"method__name": "test-drifting-slowly", "training__rounds": 2}
    grid = make_grid(consortium, tmp_path)
    loop.create(tmp_path / "out", consortium.server(**changes))
    with monkeypatch.context() as patch, pytest.raises(FedmllError) as found, files.room_for(tmp_path, "Free some."):
        patch.setattr(files, "write", disk)
        drive(consortium, grid, tmp_path / "out", **changes)
    assert str(found.value) == f"The disk of {tmp_path} is full. Free some."
    again = drive(consortium, make_grid(consortium, tmp_path), tmp_path / "out", **changes)
    assert close(again, run(consortium.local(**changes)))


def test_only_a_full_disk_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), files.room_for(tmp_path, ""):
        raise PermissionError(errno.EACCES, "no")
    with pytest.raises(FedmllError, match="is full"), files.room_for(tmp_path, ""):
        raise RuntimeError("I/O error: No space left on device (os error 28)")  # as safetensors says it
    with pytest.raises(ConfigError), files.room_for(tmp_path, ""):
        raise ConfigError("os error 28")


def test_a_run_called_as_the_sites_own_folder_is_refused(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    home = consortium.folder
    site = Site("site-a", home / "site-a" / "labels.csv", home / "images", tmp_path, device="cpu")
    (tmp_path / "flower").mkdir()
    (tmp_path / "flower" / "site.json").write_text("mine")
    for run_name in ("flower", "FLOWER", "../flower"):
        setup = Setup(run_name, serving.told(consortium.server()), ("digit-0",), (1, 8, 8), 3)
        with pytest.raises(FedmllError, match="no name for a folder"):
            SiteWorker(site, setup)
    assert (tmp_path / "flower" / "site.json").read_text() == "mine"


def test_every_refusal_has_words_for_the_site_that_name_nobody() -> None:
    for words, (name, told) in turned_away.WRONG.items():
        assert turned_away.short_name(f"it is said: {words} (site-x)") == name
        assert turned_away.advice(name) == f"the server refused you: {told}"
    assert turned_away.short_name("whatever") == "other"
    assert "ask the server's operator" in str(turned_away.advice("\x1b[2J made up by a server"))
    assert turned_away.advice(None) is None
    assert turned_away.advice(["other"]) is None


def test_a_refused_site_is_told_why(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    drive(consortium, make_grid(consortium, tmp_path), out, training__rounds=1)
    (out / "summary.json").unlink()
    known = json.loads((out / "sites.json").read_text())
    known["site-b"]["digest"] = "0" * 32
    (out / "sites.json").write_text(json.dumps(known))
    site_app._told.clear()
    grid = make_grid(consortium, tmp_path)
    with pytest.raises(FedmllError):
        drive(consortium, grid, out, training__rounds=1, join_timeout=1.0)
    shown = capsys.readouterr().out
    assert shown.count("the server refused you: your images or labels are not those that this run began with") == 1
    told = [from_records(m.content)[1].get("refused") for m in grid.sent if m.metadata.dst_node_id == 2]
    assert "changed" in told
    assert set(told) <= {None, "changed"}
    assert roster.ASK_AGAIN_SECONDS < 1  # as the fixture has it: the second greeting comes within this test


def test_the_stored_experiment_of_a_server_without_data_has_no_composites() -> None:
    values = {"data": {"name": "none", "size": 8}, "sites": {"classes": ["a", "b"], "channels": 1}}
    text = serving.settled(Experiment.make(values), (1, 8, 8)).to_toml()
    for meaningless in ("layout", "singles", "pairs", "beta", "labels_per_client", "presence", "outside"):
        assert f"{meaningless} =" not in text
    assert 'name = "none"' in text
    assert "holdout =" in text


def test_a_rehearsal_with_a_wrong_option_leaves_nothing(fedmll: Callable[..., Said], tmp_path: Path) -> None:
    for words in (("--thresholds", "foo"), ("--calibrate", "foo")):
        said = fedmll("server", "--simulate", "2", *words, "--out", "study")
        assert (said.code, "foo" in said.error) == (2, True)
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "study-sites").mkdir()
    said = fedmll("server", "--simulate", "2", "--out", "study")
    assert "study-sites" in said.error
    assert "--out" in said.error
    assert said.code == 2


def test_who_is_excluded_from_what_is_no_servers_run(fedmll: Callable[..., Said]) -> None:
    assert "no folder of a server's run" in fedmll("exclude", "nowhere", "site-a").error
