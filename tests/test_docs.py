"""The documents: every page is in the site, which builds without a warning; generated pages are up to date; and every
module, command, option and setting that a document names exists."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest
import typer.main

from fedmll.cli.main import app
from fedmll.comparison.plan import parse_variant
from fedmll.config.experiment import Experiment

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))])
SOURCES = sorted((ROOT / "src").rglob("*.py"))
DOTTED = re.compile(r"\bfedmll(?:\.[A-Za-z_]\w*)+")
NOT_MODULES = {"fedmll.plugins"}  # the entry point


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_reference", DOCS / "generate_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert [page for page in pages if not re.search(rf"[ :-] {re.escape(page)}\n", nav)] == []


def test_every_attack_has_a_test() -> None:
    text = (DOCS / "reference" / "attacks.md").read_text()
    rows = text.partition("| attack | before | now | test |")[2].splitlines()[2:]
    rows = [row for row in rows if row.startswith("| ") and not row.startswith("| **")]
    assert len(rows) > 30
    for row in rows:
        found = re.search(r"`(tests/\w+/\w+\.py)::(test_\w+)` \|$", row)
        assert found is not None, row
        assert f"\ndef {found[2]}(" in (ROOT / found[1]).read_text(), found[0]


@pytest.mark.parametrize("page", ["settings.md", "commands.md"])
def test_generated_reference_pages_are_up_to_date(page: str) -> None:
    generated = load_generator().PAGES[page]()
    assert (DOCS / "reference" / page).read_text() == generated, "run `make docs` (or docs/generate_reference.py)"


def name_exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one: fedmll.testing.experiment."""
    words = name.split(".")
    for length in range(len(words), 0, -1):
        try:
            found: object = importlib.import_module(".".join(words[:length]))
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("fedmll"):
                return True  # the module exists and needs an extra that is not installed
            continue
        for attribute in words[length:]:
            if attribute not in getattr(found, "model_fields", {}) and not hasattr(found, attribute):
                return False
            found = getattr(found, attribute, None)
        return True
    return False


@pytest.mark.parametrize("file", [*PAGES, *SOURCES], ids=relative)
def test_every_dotted_name_in_text_exists(file: Path) -> None:
    """In documents, and in the docstrings, comments and messages of the code."""
    names = {name.rstrip(".") for name in DOTTED.findall(file.read_text())} - NOT_MODULES
    files = re.compile(r"fedmll\.(?:css|toml|log|json)$")  # names of files, not of modules
    assert [name for name in sorted(names) if not files.search(name) and not name_exists(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"\b((?:src|tests|examples|benchmarks|notebooks|docs)/[\w./-]+\.\w+)", page.read_text())
    assert [name for name in dict.fromkeys(named) if not (ROOT / name).exists()] == []


def commands_in(page: Path) -> Iterator[list[str]]:
    """The `fedmll` commands in the code of a page, as words; what comes after a command's own words is left out."""
    text = page.read_text().replace("\\\n", " ")
    for block in re.findall(r"```(?:console|text)?\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            found = re.match(r"^(?:[\w-]*\$\s+)?fedmll (.*)$", line.strip())
            if found:
                yield found[1].split(" #")[0].split()
    for found in re.finditer(r"`fedmll ([a-z][^`\n]*)`", text):
        yield found[1].split()


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_command_and_option_in_a_page_exists(page: Path) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    wrong = []
    for words in commands_in(page):
        command: click.Command = group
        while words and isinstance(command, click.Group) and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        if command is group and words and re.fullmatch(r"[a-z]+", words[0]):
            wrong.append(words[0])
            continue
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        known |= {"--help", "-h", "--install-completion"}
        given = [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]
        wrong += [f"{command.name} {option}" for option in given if option not in known]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_setting_in_a_page_exists(page: Path) -> None:
    """Settings in `code` and in commands, as section.name; the options of methods are their own."""
    sections = {
        name: set(field.annotation.model_fields)
        for name, field in Experiment.model_fields.items()
        if hasattr(field.annotation, "model_fields") and name != "method"
    }
    named = re.findall(r"(?:`|--set |--tune |--vary |[:+])([a-z]+)\.([a-z_]+)\b(?!\.)(?=[=` ])", page.read_text())
    wrong = {f"{section}.{name}" for section, name in named if section in sections and name not in sections[section]}
    assert wrong - {"model.safetensors"} == set()


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_module_path_in_a_page_exists(page: Path) -> None:
    """Paths relative to the package, as `training/round_loop.py`."""
    package = ROOT / "src" / "fedmll"
    folders = "|".join(path.name for path in package.iterdir() if path.is_dir())
    named = re.findall(rf"(?<![\w/-])((?:{folders})/[\w/]+\.py)\b", page.read_text())
    assert [name for name in dict.fromkeys(named) if not (package / name).exists()] == []


def test_make_run_shows_every_system_that_the_readme_promises() -> None:
    makefile, readme = (ROOT / "Makefile").read_text(), (ROOT / "README.md").read_text()
    systems = re.search(r"SYSTEMS := (.*)", makefile)
    command = re.search(r"--methods (\S+)", makefile)
    assert systems and command
    rows = command[1].replace("$(SYSTEMS)", systems[1]).split(",")
    names = [row.partition(":")[0] for row in rows]
    assert names == [
        "local-only", "fedavg", "fednca-ml", "fedlgt", "fedmlp", "private-fedavg", "fedharmony", "fed-ridge",
        "fed-logistic", "centralized",
    ]  # fmt: skip
    assert all(f"`{name}`" in readme for name in names)
    base = Experiment.load(ROOT / "examples" / "digits.toml")
    for row in rows:
        base.changed(parse_variant(row).overrides)  # none of them is rejected


def test_the_citation_and_the_changelog_are_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {project['version']}" in lines
    assert f"license: {project['license']}" in lines
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(project['version'])} - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE)


def test_the_workflow_calls_make_targets_that_exist() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    targets = re.findall(r"run: make ([\w-]+)", workflow)
    assert targets == ["test", "slow", "docs"]
    assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in targets)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="mkdocs is not installed (fedmll[docs])")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement of the theme
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert (
        'id="fedmll.methods.framework.base.Part.loss"'
        in (tmp_path / "site" / "reference" / "api" / "index.html").read_text()
    )
