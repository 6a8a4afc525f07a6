"""The notebooks run from top to bottom, each in a folder of its own; they are stored without outputs."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_notebook_is_stored_without_outputs(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What it printed. A cell that fails is an error that shows the cell."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    data = [output.get("data", {}) for output in outputs]
    shown = [output.get("text") or d.get("text/plain", "") for output, d in zip(outputs, data, strict=True)]
    return "".join(shown) + "".join(d.get("text/html", "") for d in data)


def test_a_researchers_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = executed("researcher", tmp_path, monkeypatch)
    assert "| fedprox:mu=0.1 |" in said
    assert (tmp_path / "runs" / "digits" / "table.md").is_file()


def test_a_method_authors_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = executed("method_author", tmp_path, monkeypatch)
    assert "was refused: my-liar/counts has more positives than targets" in said
    assert "<progress value='" in said  # a run shows how far it is


@pytest.mark.slow
def test_a_consortiums_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed (fedmll[flower])")
    said = executed("consortium", tmp_path, monkeypatch)
    assert "round 2: 3 clients" in said
    assert "site-a: 60 images, all readable" in said
    assert (tmp_path / "study" / "model.safetensors").is_file()
