"""Execute the notebooks and store them with their outputs, without paths, times and names of this machine.

python notebooks/store_outputs.py [NAME …]
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
# what differs from run to run or from machine to machine → what is stored instead
REPLACED = (
    (re.compile(r"/(?:tmp|home|root|var|Users|work)/[^\s'\"<>,;]*?(?=/(?:runs|study|site-|keys)|[\s'\"<>,;)])"), "."),
    (re.compile(r"\b\d+(?:\.\d+)? s(?=[,;) ]|$)", re.MULTILINE), "… s"),
    (re.compile(r"\b\d\d:\d\d:\d\d\b"), "…"),
)  # fmt: skip


def cleaned(text: str, folder: str) -> str:
    text = text.replace(folder, ".")
    for pattern, replacement in REPLACED:
        text = pattern.sub(replacement, text)
    return text


def store_outputs(file: Path) -> None:
    """Execute one notebook in an empty folder and write it with its outputs."""
    notebook = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        cell.metadata.clear()
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if "execution_count" in output:
                output["execution_count"] = None
            if "text" in output:
                output["text"] = cleaned(output["text"], folder)
            for kind, value in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output["data"][kind] = cleaned(value, folder)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, file)


def main(names: list[str]) -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER.parent / "src"), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    for file in sorted(FOLDER.glob("*.ipynb")):
        if not names or file.stem in names:
            store_outputs(file)
            print(f"stored {file.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
