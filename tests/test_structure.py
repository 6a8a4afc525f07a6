"""Packages import in one direction, only `deploy/flower` knows Flower, names of classes and test files exist once."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "fedmll"
PACKAGES = (  # a package imports only from itself and from those before it
    *("core", "config", "data", "models", "methods", "evaluation", "engines", "runs", "inference", "training"),
    *("comparison", "reports", "deploy", "cli", "testing"),
)
LEVEL = {package: level for level, package in enumerate(PACKAGES)}
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or not path.stem.startswith("__"))
IMMUTABLE = ("data", "methods", "evaluation", "inference", "training")  # packages that share records between callers
MUTABLE = {  # what a client or a method fills while it trains, and a checkpoint, which grows from round to round
    *("Batch", "Client", "ClientRound", "TrainStep", "LabelCounts", "RelationState", "Checkpoint"),
}
OFTEN = {"Options"}  # the options of each part, head and method: a nested class of the same name in all of them


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of everything imported, also inside functions; not what only the type checker imports."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imports(node)


def test_every_module_is_in_a_known_package() -> None:
    assert {package_of(path) for path in MODULES} == LEVEL.keys()


def test_packages_import_in_one_direction() -> None:
    upward = set()
    for path in MODULES:
        own = package_of(path)
        for name in imports(ast.parse(path.read_text())):
            top, _, rest = name.partition(".")
            other = rest.split(".")[0]
            if top != "fedmll" or other == own:
                continue
            if other not in LEVEL or LEVEL[other] > LEVEL[own]:  # `from fedmll import run` is for users
                upward.add((relative(path), name))
    assert upward - {("cli/main.py", "fedmll.__version__")} == set()


def test_only_deploy_flower_imports_flower() -> None:
    for path in MODULES:
        if not relative(path).startswith("deploy/flower/"):
            assert not [name for name in imports(ast.parse(path.read_text())) if name.split(".")[0] == "flwr"], path


def test_a_class_name_exists_once() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(relative(path))
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in OFTEN} == {}


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES} - {ROOT}), ids=relative)
def test_every_package_says_what_is_in_it(folder: Path) -> None:
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), f"{folder}/__init__.py has no docstring"


def test_a_test_file_name_exists_once() -> None:
    """pytest imports test files by their base name, so two of one name cannot be collected in one run."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_records_are_immutable() -> None:
    found = {}
    for path in MODULES:
        if package_of(path) in IMMUTABLE and path.stem != "__main__":
            module = importlib.import_module(f"fedmll.{relative(path).removesuffix('.py').replace('/', '.')}")
            for name, kind in vars(module).items():
                if inspect.isclass(kind) and dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__:
                    found[name] = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert {name for name, frozen in found.items() if not frozen} == MUTABLE
