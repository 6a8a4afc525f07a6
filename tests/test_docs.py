"""The documents: all in the site, which builds without a warning; the citation is of this version."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_document_is_in_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    assert [name for name in (path.name for path in (ROOT / "docs").glob("*.md")) if f": {name}\n" not in nav] == []


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {project['version']}" in lines
    assert f"license: {project['license']}" in lines


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="mkdocs is not installed (fedmll[docs])")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    assert 'id="fedmll.methods.contract.Part.term"' in (tmp_path / "site" / "api" / "index.html").read_text()
