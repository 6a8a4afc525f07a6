"""What a command line makes of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedmll.cli.options import ExperimentArguments


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "study.toml"
    path.write_text('[method]\nname = "fedprox"\nmu = 0.25\n[training]\nrounds = 3\n')
    return path


def test_another_method_leaves_the_files_options_out_and_says_so(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ExperimentArguments(file=file, options={"method.name": "fedavg"}).experiment()
    assert (found.method.name, found.training.rounds) == ("fedavg", 3)
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("--method fedavg: the options of fedprox in")
    assert said.endswith("are not used (mu)")


@pytest.mark.parametrize("options", [{}, {"method.name": "fedprox"}, {"method.name": None}])
def test_the_same_method_keeps_them(
    file: Path, options: dict[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ExperimentArguments(file=file, options=options).experiment().method.options["mu"] == 0.25
    assert capsys.readouterr().out == ""


def test_what_is_said_on_the_command_line_is_the_new_methods(file: Path) -> None:
    file.write_text(file.read_text().replace("fedprox", "fedavg").replace("mu = 0.25", ""))
    found = ExperimentArguments(file=file, options={"method.name": "fedprox"}, settings=["method.mu=0.5"]).experiment()
    assert found.method.options["mu"] == 0.5
