"""The documents: all in the site, which builds without a warning; the citation is of this version."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedmll.experiment import Experiment
from fedmll.running.variants import parse_variant

ROOT = Path(__file__).parents[1]


def test_every_document_is_in_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    assert [name for name in (path.name for path in (ROOT / "docs").glob("*.md")) if f": {name}\n" not in nav] == []


def test_make_run_shows_every_system_that_the_readme_promises() -> None:
    makefile, readme = (ROOT / "Makefile").read_text(), (ROOT / "README.md").read_text()
    systems = re.search(r"SYSTEMS := (.*)", makefile)
    command = re.search(r"--methods (\S+)", makefile)
    assert systems and command
    rows = command[1].replace("$(SYSTEMS)", systems[1]).split(",")
    names = [row.partition(":")[0] for row in rows]
    assert names == [
        "local-only", "fedavg", "fednca-ml", "fedlgt", "fedmlp", "private-fedavg", "fedharmony", "fed-ridge",
        "centralized",
    ]  # fmt: skip
    assert all(f"`{name}`" in readme for name in names if not name.startswith("centralized"))
    base = Experiment.load(ROOT / "examples" / "digits.toml")
    for row in rows:
        base.changed(parse_variant(row).overrides)  # none of them is refused


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {project['version']}" in lines
    assert f"license: {project['license']}" in lines


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="mkdocs is not installed (fedmll[docs])")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # the theme's own advertisement
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert 'id="fedmll.methods.contract.Part.term"' in (tmp_path / "site" / "api" / "index.html").read_text()
