"""docs/service: the unit, the container and the settings name what there is."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import click
import pytest
import typer.main

from fedmll.cli.main import app
from fedmll.methods import find

FOLDER = Path(__file__).parents[2] / "docs" / "service"
SETTINGS = tomllib.loads((FOLDER / "site.toml").read_text())


def join() -> click.Command:
    command = typer.main.get_command(app)
    return command.commands["join"]  # type: ignore[attr-defined]


def unit() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(interpolation=None, strict=True)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(FOLDER / "fedmll-join.service")
    return parsed


def test_service_settings_are_options_of_join() -> None:
    known = {parameter.name: parameter for parameter in join().params}
    assert {name.replace("-", "_") for name in SETTINGS} <= known.keys()
    context = click.Context(join(), info_name="join")
    given = ["--settings", str(FOLDER / "site.toml")]
    join().parse_args(context, given)
    assert context.params["server"] == "fed.example.org:8000"
    assert (context.params["max_rounds"], context.params["patience"], context.params["approve"]) == (
        100,
        86400,
        "0" * 64,
    )
    assert [find(name).name for name in SETTINGS["methods"]] == SETTINGS["methods"]


def command_of(words: list[str]) -> None:
    """`fedmll join --settings FILE`, with options that exist."""
    assert words[0] == "join"
    known = {option for parameter in join().params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    assert words[words.index("--settings") + 1] == "/etc/fedmll/site.toml"


def test_systemd_unit_runs_join_and_may_write_the_state_folder() -> None:
    service = unit()["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert Path(program).name == "fedmll"
    command_of(words)
    assert SETTINGS["state-dir"].startswith(f"/var/lib/{service['StateDirectory']}/")
    assert service["ProtectSystem"] == "strict"
    assert service["RestartPreventExitStatus"] == "2"  # what an error of fedmll's ends with
    assert unit()["Install"]["WantedBy"] == "multi-user.target"


def test_systemd_accepts_the_unit() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(FOLDER / "fedmll-join.service")], capture_output=True, text=True, timeout=60
    )
    assert "Unknown" not in done.stderr


def test_container_has_a_volume_for_every_path_in_the_settings() -> None:
    text = (FOLDER / "Containerfile").read_text()
    lines = [line for line in text.splitlines() if re.match("[A-Z]+ ", line)]
    told = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in lines}
    volumes = json.loads(told["VOLUME"])
    for name in ("csv", "images", "state-dir", "ca", "key"):
        assert any(SETTINGS[name].startswith(volume) for volume in volumes), name
    assert json.loads(told["ENTRYPOINT"]) == ["fedmll"]
    command_of(json.loads(told["CMD"]))
    assert told["STOPSIGNAL"] == "SIGINT"  # Ctrl-C is a goodbye
    assert told["USER"] == "fedmll"
    for volume in volumes:
        assert f":{volume}" in text  # the command in its first lines
