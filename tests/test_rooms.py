"""Imports go one way: a room may import only from itself and from the rooms above it. And no file, no function, has
grown so large that it must have two jobs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "fedmll"
LEAVES = ("errors", "seeding", "files", "message", "threads", "processes", "registry")
ROOMS = (
    *("settings", "experiment", "data", "models", "task", "client", "methods", "evaluation", "engines", "running"),
    *("analysis", "report", "deploy", "cli", "testing"),
)
LEVEL = dict.fromkeys(LEAVES, 0) | {room: place for place, room in enumerate(ROOMS, 1)}
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or not path.stem.startswith("__"))

MOST_LINES, MOST_IN_FUNCTION = 300, 50
LONG_FILES = {
    "data/images/decode.py": "every kind of pixel, one after the other",
    "evaluation/metrics.py": "all metrics share one ranking",
}
LONG_FUNCTIONS = {
    "evaluation/metrics.py evaluate": "the metrics side by side",
    "cli/federation.py server": "its options",
    "cli/site.py join": "its options",
    "cli/site.py check": "its options",
    "cli/validate.py validate": "its options",
    "cli/compare.py compare": "its options",
}


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of what is imported, also inside functions, but not for the type checker alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imports(node)


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_every_module_is_in_a_room() -> None:
    assert {room(path) for path in MODULES} <= LEVEL.keys()


def upward() -> set[tuple[str, str]]:
    found = set()
    for path in MODULES:
        own = room(path)
        for name in imports(ast.parse(path.read_text())):
            package, _, rest = name.partition(".")
            other = rest.split(".")[0]
            if package != "fedmll" or other == own:
                continue
            if other not in LEVEL:
                found.add((named(path), name))  # from the package itself: that is for users
            elif LEVEL[other] >= max(1, LEVEL[own]):
                found.add((named(path), other))
    return found


def test_imports_go_one_way() -> None:
    assert upward() - {("cli/main.py", "fedmll.__version__")} == set()


def test_nothing_outside_deploy_flower_knows_flower() -> None:
    for path in MODULES:
        if not named(path).startswith("deploy/flower/"):
            assert not [n for n in imports(ast.parse(path.read_text())) if n.split(".")[0] == "flwr"], path


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_files_and_functions_have_one_job(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES or named(path) in LONG_FILES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MOST_IN_FUNCTION or f"{named(path)} {node.name}" in LONG_FUNCTIONS, node.name


def test_the_exceptions_are_still_needed() -> None:
    for name in LONG_FILES:
        assert len((ROOT / name).read_text().splitlines()) > MOST_LINES, f"{name} is no exception any more"
