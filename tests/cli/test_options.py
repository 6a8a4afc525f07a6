"""Options on the command line together with an experiment file."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedmll.cli.options import ExperimentArguments


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "study.toml"
    path.write_text('[method]\nname = "fedprox"\nmu = 0.25\n[training]\nrounds = 3\n')
    return path


def test_other_method_drops_the_options_of_the_file_with_a_message(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ExperimentArguments(file=file, options={"method.name": "fedavg"}).experiment()
    assert (found.method.name, found.training.rounds) == ("fedavg", 3)
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("--method fedavg: the options of fedprox in")
    assert said.endswith("are not used (mu)")


@pytest.mark.parametrize("options", [{}, {"method.name": "fedprox"}, {"method.name": None}])
def test_same_method_keeps_the_options_of_the_file(
    file: Path, options: dict[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ExperimentArguments(file=file, options=options).experiment().method.options["mu"] == 0.25
    assert capsys.readouterr().out == ""


def test_options_on_the_command_line_belong_to_the_new_method(file: Path) -> None:
    file.write_text(file.read_text().replace("fedprox", "fedavg").replace("mu = 0.25", ""))
    found = ExperimentArguments(file=file, options={"method.name": "fedprox"}, settings=["method.mu=0.5"]).experiment()
    assert found.method.options["mu"] == 0.5
