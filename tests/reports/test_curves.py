"""`fedmll plot`: a curve in the terminal, or as a file."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
from PIL import Image
from report_runs import write_run

from fedmll.cli import main
from fedmll.reports.charts import LINES, NUMBER, Chart, ChartAxis, ChartSeries
from fedmll.reports.curves import draw_in_terminal


def test_terminal_curve_by_hand() -> None:
    """A straight line from corner to corner, and a single point in the middle."""
    x, y = ChartAxis("round", "round"), ChartAxis("loss", "training loss", NUMBER)
    rising = ChartSeries("rising", 0, {"round": [0, 15, 30], "loss": [0.0, 7.5, 15.0]})
    single = ChartSeries("a\x1b[31mb", 1, {"round": [0, 15, 30], "loss": [float("nan"), 0.0, float("nan")]})
    nothing = ChartSeries("nothing", 2, {"round": [1], "loss": [float("nan")]})
    lines = draw_in_terminal(
        Chart(name="c", title="C", caption="", kind=LINES, xs=[x], ys=[y], series=[rising, single, nothing]),
        x,
        width=36,
    )
    assert lines[0] == "training loss"
    inside = [line[4:] for line in lines[1:17]]
    assert inside[0].rstrip() == " " * 30 + "●" and inside[15].rstrip() == "●●" + " " * 13 + "▲"
    assert [line.find("●") for line in inside] == sorted((line.find("●") for line in inside), reverse=True)
    assert [line[:2] for line in lines[1:17] if line[:2].strip()] == ["15", "10", " 5", " 0"]
    assert lines[18].split() == ["0", "round", "30"]
    assert lines[19:] == ["● rising: 15 at round 30", "▲ ab: 0 at round 15"]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for method, top in (("fedavg", 40.0), ("fedprox", 50.0)):
        rounds = [{"round": n, "loss": 1.0 / n, "map": top * n / 3} for n in (1, 2, 3)]
        write_run(tmp_path / "study" / method / "seed-0", method=method, metrics={"map": top}, rounds=rounds)
    return tmp_path / "study"


def call(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["fedmll", *map(str, words)])
    try:
        main.main()
    except SystemExit as leave:
        return int(leave.code or 0)
    return 0


def test_plot_in_the_terminal(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "plot", runs, "--metric", "map") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mAP, %" and max(map(len, lines)) <= 100
    assert lines[-2:] == ["● fedavg: 40.00 at round 3", "▲ fedprox: 50.00 at round 3"]


def test_plot_to_files(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("png", "svg", "csv"):
        assert (
            call(monkeypatch, "plot", runs, "--metric", "map", "--by", "megabytes", "--out", tmp_path / f"map.{kind}")
            == 0
        )
    assert Image.open(tmp_path / "map.png").format == "PNG"
    assert "fedprox" in (tmp_path / "map.svg").read_text(), "text stays text"
    with (tmp_path / "map.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[-1] == {"series": "fedprox", "megabytes": "6.0", "map": "50.0"} and len(rows) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--metric", "mapp"), "No run here has the metric 'mapp' (--metric); did you mean 'map'?"),
        (("--by", "second"), "There is no axis 'second' (--by); did you mean 'seconds'?"),
        (("--out", "map.txt"), "'map.txt' is not the name of an image: it must end in .png, .svg, .pdf, .jpg."),
    ],
)
def test_impossible_plots_are_errors(
    runs: Path,
    words: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, "plot", runs, *words) == 2
    assert capsys.readouterr().err.strip() == f"error: {message}"
