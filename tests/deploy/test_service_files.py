"""docs/service: the unit, the containers and the settings are valid and name what exists."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main
import yaml

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from fedmll.cli.main import app
from fedmll.config.experiment import Experiment
from fedmll.core.addresses import parse_address
from fedmll.deploy.server.serve import study_digest
from fedmll.methods import find

FOLDER = Path(__file__).parents[2] / "docs" / "service"
SETTINGS = tomllib.loads((FOLDER / "site.toml").read_text())
SERVER = tomllib.loads((FOLDER / "server.toml").read_text())


def command(name: str) -> click.Command:
    return typer.main.get_command(app).commands[name]  # type: ignore[attr-defined,no-any-return]


def join() -> click.Command:
    return command("join")


def option_name(parameter: click.Parameter) -> str:
    return str(parameter.name).replace("_", "-")


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


def run_linter(*words: str | Path) -> None:
    """Run a linter that is installed next to Python."""
    program, *rest = map(str, words)
    found = subprocess.run(
        [str(Path(sys.executable).parent / program), *rest], capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_linters_accept_the_files() -> None:
    run_linter("hadolint", FOLDER / "Dockerfile")
    run_linter("yamllint", "--strict", "-c", FOLDER.parents[1] / ".yamllint.yaml", *sorted(FOLDER.glob("*.yaml")))
    run_linter("check-jsonschema", "--builtin-schema", "vendor.compose-spec", FOLDER / "compose.yaml")
    run_linter("kubernetes-validate", "--strict", FOLDER / "kubernetes.yaml")
    run_linter("shellcheck", FOLDER.parents[1] / "examples" / "slurm" / "compare.sbatch")
    subprocess.run(["sh", "-n", str(FOLDER / "start-server")], check=True)


def dockerfile() -> dict[str, str]:
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    return dict(line.split(" ", 1) for line in lines if re.match("[A-Z]+ ", line))


def test_image_runs_join_and_has_a_volume_for_every_path_in_the_settings() -> None:
    told, text = dockerfile(), (FOLDER / "Dockerfile").read_text()
    volumes = json.loads(told["VOLUME"])
    for name in ("csv", "images", "state-dir", "ca", "key"):
        assert any(SETTINGS[name].startswith(volume) for volume in volumes), name
    assert json.loads(told["ENTRYPOINT"]) == ["fedmll"]
    command_of(json.loads(told["CMD"]))
    assert told["STOPSIGNAL"] == "SIGINT"  # as Ctrl-C: the site signs off
    assert f"--uid {told['USER']} " in text
    assert (
        told["ARG"]
        == f"VERSION={tomllib.loads((FOLDER.parents[1] / 'pyproject.toml').read_text())['project']['version']}"
    )
    for volume in volumes:
        assert f":{volume}" in text  # the command in its first lines


def test_compose_runs_the_server_and_a_site_with_their_files() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    assert services["server"]["entrypoint"] == ["start-server"]
    command_of(services["site"]["command"])
    assert {volume.split(":")[1] for volume in services["site"]["volumes"]} == set(json.loads(dockerfile()["VOLUME"]))
    assert {volume.split(":")[1] for volume in services["server"]["volumes"]} == {"/etc/fedmll", "/var/lib/fedmll"}
    port = parse_address(SERVER["listen"], "listen")[1]
    assert services["server"]["ports"] == [f"{port}:{port}"]
    for service in services.values():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])


def kubernetes() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())}


def test_deployment_mounts_the_secret_and_serves_its_port() -> None:
    found = kubernetes()
    assert set(found) == {"Secret", "PersistentVolumeClaim", "Deployment", "Service"}
    settings = found["Deployment"]["spec"]
    assert (settings["replicas"], settings["strategy"]["type"]) == (1, "Recreate")
    pod = settings["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    secret = volumes["settings"]["secret"]
    assert secret["secretName"] == found["Secret"]["metadata"]["name"]
    assert {item["key"] for item in secret["items"]} == set(found["Secret"]["stringData"])
    assert secret["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"] == int(dockerfile()["USER"])
    paths = {item["path"] for item in secret["items"]}
    server = tomllib.loads(found["Secret"]["stringData"]["server.toml"])
    clients = [f"keys/{name}.pub" for name in server["clients"].split(",")]
    assert paths == {"server.toml", "study.toml", "keys/ca.crt", "keys/server.crt", "keys/server.key", *clients}
    assert server.keys() <= {option_name(parameter) for parameter in command("server").params}
    (container,) = pod["containers"]
    assert container["command"] == ["start-server"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {"/etc/fedmll": "settings", "/var/lib/fedmll": "runs", "/tmp": "tmp"}
    (port,), (offered,) = container["ports"], found["Service"]["spec"]["ports"]
    assert port["containerPort"] == parse_address(server["listen"], "listen")[1]
    assert offered["targetPort"] == port["name"] == container["readinessProbe"]["tcpSocket"]["port"]
    assert found["Service"]["spec"]["selector"] == settings["template"]["metadata"]["labels"]


def test_server_settings_and_study_are_valid(tmp_path: Path) -> None:
    context = click.Context(command("server"), info_name="server")
    command("server").parse_args(context, [str(FOLDER / "study.toml"), "--settings", str(FOLDER / "server.toml")])
    assert context.params["clients"] == "hospital-a,hospital-b,hospital-c"
    assert parse_address(context.params["listen"], "--listen") == ("::", 8000)
    assert len(study_digest(Experiment.load(FOLDER / "study.toml"), 3)) == 64


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ((), "server /etc/fedmll/study.toml --settings /etc/fedmll/server.toml --out {run} --yes"),
        (("server.json",), "resume {run} --yes"),
        (("server.json", "summary.json"), "resume {run} --yes"),  # the model was not delivered yet
        (("server.json", "delivered.json"), "sleep infinity"),
    ],
)
def test_start_server_starts_resumes_or_waits(tmp_path: Path, files: tuple[str, ...], expected: str) -> None:
    run, programs = tmp_path / "study", tmp_path / "bin"
    for name in files:
        run.mkdir(exist_ok=True)
        (run / name).touch()
    programs.mkdir()
    for name, shown in (("fedmll", '"$@"'), ("sleep", 'sleep "$@"')):
        (programs / name).write_text(f"#!/bin/sh\necho {shown}\n")
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "FEDMLL_RUN": str(run)}
    done = subprocess.run([str(FOLDER / "start-server"), "--yes"], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == expected.format(run=run), done.stderr
    if expected.startswith(("server", "resume")):
        name, *words = expected.split()
        known = {option for parameter in command(name).params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known
