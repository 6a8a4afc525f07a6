"""The notebooks run from top to bottom, each in its own folder. They are stored with outputs that name no machine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_stored_with_outputs_and_without_traces_of_a_machine(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    printing = [cell for cell in cells if re.search(r"\bprint\(|plt\.show\(\)", cell.source)]
    assert all(cell.outputs for cell in printing), "execute it and store the outputs (CONTRIBUTING.md)"
    assert all(cell.execution_count is None and not cell.metadata.get("execution") for cell in cells)
    stored = json.dumps([cell.outputs for cell in cells])
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert not re.search(r"/tmp/|/home/|/root/|/work/|/Users/|site-packages", stored)


def run_notebook(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Execute a notebook and return what it printed. A cell that fails is an error that shows the cell."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    data = [output.get("data", {}) for output in outputs]
    texts = [output.get("text") or d.get("text/plain", "") for output, d in zip(outputs, data, strict=True)]
    return "".join(texts) + "".join(d.get("text/html", "") for d in data)


def test_the_researchers_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = run_notebook("researcher", tmp_path, monkeypatch)
    assert "| fedprox:mu=0.1 |" in printed
    assert (tmp_path / "runs" / "digits" / "table.md").is_file()


def test_the_method_authors_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = run_notebook("method_author", tmp_path, monkeypatch)
    assert "my-false-rates/counts has more positives than targets" in printed
    assert "<progress value='" in printed  # a run shows its progress


@pytest.mark.slow
def test_the_consortiums_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed (fedmll[flower])")
    printed = run_notebook("consortium", tmp_path, monkeypatch)
    assert "round 2: 3 clients" in printed
    assert "site-a: 60 images" in printed
    assert (tmp_path / "study" / "model.safetensors").is_file()
