"""What a server's operator sees and can change: settings, damaged files, a full disk, rejections."""

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

from consortium import NAMES, Consortium
from fake_grid import RecordingCallback, close, consortium, drive, fast_polling, make_grid  # noqa: F401  (fixtures)

from fedmll import run
from fedmll.config.experiment import Experiment
from fedmll.core import files
from fedmll.core.errors import ConfigError, FedmllError
from fedmll.core.text import printable
from fedmll.deploy import error_codes
from fedmll.deploy.experiment_for_sites import StudySetup, resolve_for_sites, settings_for_sites
from fedmll.deploy.flower import client_app, membership
from fedmll.deploy.flower.records import from_records
from fedmll.deploy.server import serve, server_settings
from fedmll.deploy.server.console import OperatorLog
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.deploy.site.site_config import Site
from fedmll.deploy.site.worker import SiteWorker
from fedmll.runs.run_folder import RunFolder


def test_text_from_other_machines_is_made_printable() -> None:
    assert printable("a\x1b[2J\x07b\r\nc\u202ed\u2028e\x00") == "ab cd e"
    assert printable("Pleuraerguß, 胸水") == "Pleuraerguß, 胸水"
    assert printable("x" * 400) == "x" * 400
    assert printable("x" * 401) == "x" * 400 + " …"
    assert printable("\x1b" * 2_000_000) == " …"
    assert printable(" " * 1600 + "y") == " …"
    assert printable(ValueError("why")) == "why"


def test_operator_log_has_times_and_no_control_characters(tmp_path: Path) -> None:
    hear = RecordingCallback()
    log = OperatorLog(tmp_path, hear)
    log.notify("site-a is rejected: \x1b[31m" + "long " * 1000)
    log.notify("site-b has joined")
    assert hear.said[1] == "site-b has joined"
    assert len(hear.said[0]) < 620
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert len(lines) == 2  # each once
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ INFO site-", line) for line in lines)
    assert "\x1b" not in "".join(lines)


def test_joins_are_in_the_log(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    drive(consortium, make_grid(consortium, tmp_path), tmp_path / "out", training__rounds=1)
    lines = (tmp_path / "out" / "log.txt").read_text().splitlines()
    for name in NAMES:
        assert sum(f"{name} has joined" in line for line in lines) == 1
    assert sum("round 1: loss" in line for line in lines) == 1


GARBAGE = ("", "{", "[]", "3", '{"clients": 3}', '{"clients": ["a"], "port": "x"}', '{"clients": ["a"], "colour": 1}')


@pytest.mark.parametrize("garbage", [*GARBAGE, '{"clients": ["a"], "min_clients": true}'])
def test_damaged_server_json_is_one_paragraph(tmp_path: Path, garbage: str) -> None:
    (tmp_path / "server.json").write_text(garbage)
    with pytest.raises(ConfigError, match=r"server.json, the settings of this server .* Restore it") as found:
        server_settings.read_server_settings(tmp_path)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["round_timeout", "join_timeout"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "0"])
def test_infinite_deadline_is_rejected(tmp_path: Path, name: str, value: str) -> None:
    (tmp_path / "server.json").write_text(f'{{"clients": ["a", "b"], "{name}": {value}}}')
    with pytest.raises(ConfigError, match="are seconds, more than 0"):
        server_settings.read_server_settings(tmp_path)


@pytest.mark.parametrize("wrong", [{"port": 65536}, {"port": 0}, {"max_attempts": 0}], ids=str)
def test_impossible_port_or_number_of_attempts_is_rejected(wrong: dict[str, int]) -> None:
    ServerSettings(clients=("a", "b"), port=65535, max_attempts=1)
    with pytest.raises(ConfigError, match=r"is not from 1 to 65535|a round is tried at least once"):
        ServerSettings(clients=("a", "b"), **wrong)  # type: ignore[arg-type]


LATE = '{"site-a": {"samples": 1, "held_out": 0, "classes": ["a"], "digest": "' + 32 * "0" + '", "first_round": 1e999}}'


@pytest.mark.parametrize("garbage", ["", "{", "[1]", '{"site-a": 3}', '{"site-a": {"samples": "x"}}', LATE])
def test_damaged_sites_json_is_one_paragraph(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    garbage: str,
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "sites.json").write_text(garbage)
    with pytest.raises(ConfigError, match=r"sites.json, the description of each client's data, cannot be read"):
        serve.run_federation(
            make_grid(consortium, tmp_path),
            consortium.server(),
            ServerSettings(clients=NAMES, join_timeout=1),
            out,
            callback=RecordingCallback(),
        )


def test_settings_are_stored_and_changed(tmp_path: Path) -> None:
    server = ServerSettings(
        clients=("a", "b", "c", "d"),
        host="127.0.0.1",
        port=9000,
        keys=None,
        min_clients=3,
        round_timeout=60,
        join_timeout=30,
    )
    server_settings.write_server_settings(server, tmp_path)
    assert server_settings.read_server_settings(tmp_path) == server
    assert server_settings.change_server_settings(tmp_path) == server
    changed = server_settings.change_server_settings(
        tmp_path, round_timeout=5.5, min_clients=2, address=("0.0.0.0", 8100)
    )
    assert (changed.round_timeout, changed.min_clients, changed.host, changed.port) == (5.5, 2, "0.0.0.0", 8100)
    assert changed.run == server.run  # the sites find their memories
    assert server_settings.read_server_settings(tmp_path) == changed
    with pytest.raises(ConfigError, match="no such client"):
        server_settings.change_server_settings(tmp_path, drop=["e"])
    with pytest.raises(ConfigError, match="--min-clients 5 is not possible with 4"):
        server_settings.change_server_settings(tmp_path, min_clients=5)


def test_dropped_client_that_never_joined_is_removed_and_others_keep_their_index(tmp_path: Path) -> None:
    server_settings.write_server_settings(ServerSettings(clients=("a", "b", "c"), min_clients=3), tmp_path)
    (tmp_path / "sites.json").write_text('{"a": {}, "b": {}}')
    changed = server_settings.change_server_settings(tmp_path, drop=["a", "c"])
    assert changed.clients == ("a", "b")
    assert changed.dropped == ("a",)
    assert changed.participants == ("b",)
    assert changed.min_clients == 1  # no more can come
    with pytest.raises(ConfigError, match="not possible with 0 clients"):
        server_settings.change_server_settings(tmp_path, drop=["b"])
    (tmp_path / "sites.json").write_text("garbage")
    with pytest.raises(ConfigError, match="cannot be read"):
        server_settings.change_server_settings(tmp_path, drop=["b"])


def test_run_goes_on_without_a_client(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    """site-b is dropped after round 1: refused when it comes, and nobody waits for it."""
    out, hear = tmp_path / "out", RecordingCallback()
    drive(consortium, make_grid(consortium, tmp_path), out, training__rounds=1)
    (out / "summary.json").unlink()
    text = (out / "experiment.toml").read_text().replace("\nrounds = 1\n", "\nrounds = 2\n")
    (out / "experiment.toml").write_text(text)
    server_settings.write_server_settings(
        ServerSettings(clients=NAMES, min_clients=3, round_timeout=5, join_timeout=2, run="run1"), out
    )
    server = server_settings.change_server_settings(out, drop=["site-b"])
    grid = make_grid(consortium, tmp_path)
    result = serve.run_federation(grid, Experiment.load(out / "experiment.toml"), server, out, callback=hear)
    assert [row["clients"] for row in result.rows] == [3, 2]
    assert any("site-b is rejected: its name is not among the clients" in text for text in hear.said)
    assert not any("skipped" in text for text in hear.said)  # it is not part of the run any more


class FullDisk:
    """The server's, from the n-th write on; the sites' are their own."""

    def __init__(self, folder: Path, after: int) -> None:
        self.folder, self.left, self.write = folder, after, files.write_atomic

    def __call__(self, path: Path, content: Any) -> None:
        self.left -= path.is_relative_to(self.folder)
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.write(path, content)


@pytest.mark.parametrize("after", [0, 3, 6])
def test_full_disk_is_reported_and_the_run_continues_when_there_is_space(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
) -> None:
    disk = FullDisk(tmp_path / "out", after)
    changes: dict[str, Any] = {"method__name": "test-drifting-slowly", "training__rounds": 2}
    grid = make_grid(consortium, tmp_path)
    RunFolder(tmp_path / "out").create(consortium.server(**changes))
    with (
        monkeypatch.context() as patch,
        pytest.raises(FedmllError) as found,
        files.explain_full_disk(tmp_path, "Free some."),
    ):
        patch.setattr(files, "write_atomic", disk)
        drive(consortium, grid, tmp_path / "out", **changes)
    assert str(found.value) == f"The disk of {tmp_path} is full. Free some."
    again = drive(consortium, make_grid(consortium, tmp_path), tmp_path / "out", **changes)
    assert close(again, run(consortium.local(**changes)))


def test_only_a_full_disk_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), files.explain_full_disk(tmp_path, ""):
        raise PermissionError(errno.EACCES, "no")
    with pytest.raises(FedmllError, match="is full"), files.explain_full_disk(tmp_path, ""):
        raise RuntimeError("I/O error: No space left on device (os error 28)")  # as safetensors says it
    with pytest.raises(ConfigError), files.explain_full_disk(tmp_path, ""):
        raise ConfigError("os error 28")


def test_run_named_like_the_sites_own_folder_is_rejected(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    home = consortium.folder
    site = Site(
        name="site-a", csv=home / "site-a" / "labels.csv", images=home / "images", state_dir=tmp_path, device="cpu"
    )
    (tmp_path / "flower").mkdir()
    (tmp_path / "flower" / "site.json").write_text("mine")
    for run_name in ("flower", "FLOWER", "../flower"):
        setup = StudySetup(
            run=run_name,
            experiment=settings_for_sites(consortium.server()),
            classes=("digit-0",),
            shape=(1, 8, 8),
            clients=3,
        )
        with pytest.raises(FedmllError, match="not a valid folder name"):
            SiteWorker(site, setup)
    assert (tmp_path / "flower" / "site.json").read_text() == "mine"


def test_every_rejection_code_has_a_text_for_the_site() -> None:
    for code, advice in error_codes.ADVICE.items():
        assert error_codes.describe_rejection(code.value) == f"the server rejected you: {advice}"
    assert "ask the server's operator" in str(error_codes.describe_rejection("\x1b[2J made up by a server"))
    assert error_codes.describe_rejection(None) is None
    assert error_codes.describe_rejection(["other"]) is None


def test_rejected_site_shows_why(
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
    client_app.join_state.rejections_shown.clear()
    grid = make_grid(consortium, tmp_path)
    with pytest.raises(FedmllError):
        drive(consortium, grid, out, training__rounds=1, join_timeout=3.0)
    shown = capsys.readouterr().out
    assert shown.count("the server rejected you: your images or labels differ from those that this run began with") == 1
    told = [from_records(m.content)[1].get("rejected") for m in grid.sent if m.metadata.dst_node_id == 2]
    assert "changed" in told
    assert set(told) <= {None, "changed"}
    assert membership.RETRY_SECONDS < 1  # as the fixture sets it: the second hello is sent within this test


def test_stored_experiment_of_a_server_without_data_has_no_composites() -> None:
    values = {"data": {"name": "none", "size": 8}, "study": {"classes": ["a", "b"], "channels": 1}}
    text = resolve_for_sites(Experiment.make(values), (1, 8, 8)).to_toml()
    for meaningless in ("layout", "singles", "pairs", "beta", "labels_per_client", "presence", "unassignable"):
        assert f"{meaningless} =" not in text
    assert 'name = "none"' in text
    assert "holdout =" in text


def test_rehearsal_with_a_wrong_option_leaves_nothing(fedmll: Callable[..., Said], tmp_path: Path) -> None:
    for words in (("--thresholds", "foo"), ("--calibrate", "foo")):
        said = fedmll("server", "--simulate", "2", *words, "--out", "study")
        assert (said.code, "foo" in said.error) == (2, True)
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "study-sites").mkdir()
    said = fedmll("server", "--simulate", "2", "--out", "study")
    assert "study-sites" in said.error
    assert "--out" in said.error
    assert said.code == 2


def test_exclude_rejects_a_folder_that_is_no_servers_run(fedmll: Callable[..., Said]) -> None:
    assert "not the folder of a server's run" in fedmll("exclude", "nowhere", "site-a").error
