"""Class names and file names that a spreadsheet, a browser, LaTeX or a terminal would interpret are shown as text."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import Said
from PIL import Image

import fedmll as fedmll_package
from fedmll import load_run
from fedmll.runs.formatting import escape_cell, unescape_cell

CLASSES = ("=HYPERLINK(0)", "+1+cmd", "-x", "@SUM(A1)", "'=quoted", "<script>alert(1)</script>", "$a_b$ [red]&%#|")
FORMULA = re.compile(r"[=+@\t\r]|-(?!\d+\.?\d*(e[+-]?\d+)?$)")


def write_images(folder: Path) -> None:
    (folder / "images").mkdir()
    draw = np.random.default_rng(0)
    with (folder / "labels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", *CLASSES])
        for place in range(60):
            name = f"=image{place}.png"
            Image.fromarray(draw.integers(0, 255, (8, 8), dtype=np.uint8)).save(folder / "images" / name)
            writer.writerow([name, *draw.integers(0, 2, len(CLASSES))])


def cells(file: Path) -> Iterator[str]:
    with file.open(newline="") as opened:
        for row in csv.reader(opened):
            yield from row


def test_no_cell_of_a_csv_is_a_formula(fedmll: Callable[..., Said], tmp_path: Path) -> None:
    write_images(tmp_path)
    data = ["--data", "folder:labels.csv", "--root", "images", "--clients", "2"]
    words = [
        *data,
        "--rounds",
        "1",
        "--workers",
        "0",
        "--methods",
        "fedavg,local-only,fedprox",
        "--seeds",
        "0",
        "--against",
        "fedavg",
    ]
    for command in (
        ["compare", *words, "--out", "grid", "--set", "model.channels=[4,8]"],
        ["report", "grid", "--files", "--images"],
        ["predict", "grid/fedavg/seed-0", "images", "--out", "predictions.csv"],
        ["data", "coverage", *data, "--out", "coverage.csv"],
        ["data", "describe", *data],
        ["plot", "grid", "--out", "plot.csv"],
        ["errors", "grid/fedavg/seed-0"],
    ):
        said = fedmll(*command)
        assert said.code == 0, said.error
    found = [file for file in tmp_path.rglob("*.csv") if file.name != "labels.csv"]
    assert {file.name for file in found} >= {
        "table.csv", "tests.csv", "per_class.csv", "per_client.csv", "metrics.csv", "results.csv", "predictions.csv",
        "coverage.csv", "plot.csv", "mistakes.csv", "classes-ap.csv",
    }  # fmt: skip
    for file in found:
        assert not [cell for cell in cells(file) if FORMULA.match(cell)], file
    assert list(cells(tmp_path / "predictions.csv"))[3:5] == ["'=HYPERLINK(0)", "'+1+cmd"]
    assert "'images/" not in (tmp_path / "predictions.csv").read_text()
    saved = load_run(tmp_path / "grid" / "fedavg" / "seed-0")
    assert [row["class"] for row in saved.folder.read_table("per_class.csv")] == list(saved.classes) == list(CLASSES)


def test_only_known_modules_write_csv_files() -> None:
    """Others use `format_csv`. A rehearsal and `data labels` write input data, where class names stay as they are."""
    source = Path(fedmll_package.__file__).parent
    writers = {str(path.relative_to(source)) for path in source.rglob("*.py") if "csv.writer" in path.read_text()}
    assert writers == {
        "runs/formatting.py",
        "inference/image_predictions.py",
        "deploy/server/rehearsal.py",
        "data/sources/__init__.py",
    }
    assert not [path for path in source.rglob("*.py") if "DictWriter" in path.read_text()]


def test_markup_in_class_names_is_shown_as_text(fedmll: Callable[..., Said], tmp_path: Path) -> None:
    write_images(tmp_path)
    data = ["--data", "folder:labels.csv", "--root", "images", "--clients", "2"]
    assert (
        fedmll("run", *data, "--rounds", "1", "--workers", "0", "--out", "run", "--set", "model.channels=[4,8]").code
        == 0
    )
    assert fedmll("report", "run", "--images").code == 0
    assert "<script>alert" not in (tmp_path / "report.html").read_text()
    for command in (["data", "describe", *data], ["data", "coverage", *data], ["errors", "run"], ["tune", "run"]):
        said = fedmll(*command)
        assert said.code == 0 and "$a_b$ [red]&%#|" in re.sub(r"\s+", " ", said.out), command


@pytest.mark.parametrize("text", [*CLASSES, "''=x", "'", "", "-0.5", "-1e-7", "+3", "-1 2", "\tx", "\rx", "it's"])
def test_escaped_cells_are_read_back_exactly(text: str) -> None:
    assert unescape_cell(escape_cell(text)) == text
    assert not FORMULA.match(escape_cell(text)) or text in ("+3",)


def test_numbers_stay_numbers() -> None:
    numbers = ["-0.5", "-1e-7", "+3", "-12", -0.5, -3, np.float64(-1), None]
    assert [escape_cell(number) for number in numbers] == numbers
