"""Everything that has a name in an experiment is found here, and everybody comes through the same door:

@register("loss", "focal")
def focal(logits, targets, positive_weight): …

from a module of this package, an installed package (entry point group `fedmll.plugins`) or a file (`--plugin FILE.py`).
Modules are imported when a name of their kind is first asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

from fedmll import files
from fedmll.errors import ConfigError, nearest

T = TypeVar("T")

# kind → the modules (of a package: all its modules) in which the built-in ones register themselves
BUILT_IN: dict[str, tuple[str, ...]] = {
    "method": ("fedmll.methods",),
    "part": ("fedmll.methods",),
    "head": ("fedmll.methods",),
    "loss": ("fedmll.methods.losses",),
    "backbone": ("fedmll.models.backbones",),
    "pixels": ("fedmll.models.weights", "fedmll.models.backbones.vit"),
    "layout": ("fedmll.models.backbones.vit",),
    "source": ("fedmll.data.sources",),
    "partition": ("fedmll.data.partition", "fedmll.data.freeze", "fedmll.data.skew"),
    "annotation": ("fedmll.data.annotate",),
    "augmentation": ("fedmll.data.images.augment",),
    "metric": ("fedmll.evaluation.metrics",),
}
GROUP = "fedmll.plugins"  # of entry points
_things: dict[str, dict[str, Any]] = {kind: {} for kind in BUILT_IN}
_homes: dict[tuple[str, str], str] = {}  # (kind, name) → the module that registered it
_files: dict[str, tuple[Path, str]] = {}  # module → the plug-in file that it is now, and the file's checksum
_loading: set[str] = set()  # entry points that are loaded, or are being loaded


def register(kind: str, name: str) -> Callable[[T], T]:
    """A decorator. The newest of a name counts (a notebook's cell that was run again); built-in names are taken."""
    if kind not in BUILT_IN:
        raise ConfigError(f"There is no kind '{kind}' of things with names{nearest(kind, BUILT_IN)}")
    caller = sys._getframe(1).f_globals.get("__name__", "")

    def put(thing: T) -> T:
        # a class or a function knows its module, also where a base class registers it; an object does not
        home = thing.__module__ if isinstance(thing, type | FunctionType) else caller
        homes = {home, _homes.get((kind, name), home)}
        if len(homes) > 1 and any(map(_is_ours, homes)):
            stranger = next(module for module in homes if not _is_ours(module))
            raise ConfigError(f"'{name}' in {stranger} has the name of a built-in {kind}; choose another.")
        _things[kind][name], _homes[kind, name] = thing, home
        return thing

    return put


def find(kind: str, name: str) -> Any:
    _prepare(kind)
    if name not in _things[kind]:
        raise ConfigError(f"There is no {kind} '{name}'{nearest(name, _things[kind])}")
    return _things[kind][name]


def all_of(kind: str) -> dict[str, Any]:
    """By name, sorted."""
    _prepare(kind)
    return dict(sorted(_things[kind].items()))


def added(kind: str) -> dict[str, Any]:
    """By name, sorted: what is not built in."""
    return {name: thing for name, thing in all_of(kind).items() if not _is_ours(_homes[kind, name])}


def _is_ours(module: str) -> bool:
    return module.startswith("fedmll.")


def _prepare(kind: str) -> None:
    _import_built_in(kind)
    load_plugins()


@cache
def _import_built_in(kind: str) -> None:
    for name in BUILT_IN[kind]:
        module = importlib.import_module(name)
        for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}."):
            importlib.import_module(found.name)


# Plug-ins


@cache
def installed() -> tuple[EntryPoint, ...]:
    """What installed packages bring."""
    return tuple(entry_points(group=GROUP))


def load_plugins() -> None:
    """Import what installed packages bring, once."""
    for entry in installed():
        if entry.value not in _loading:
            _loading.add(entry.value)
            try:
                importlib.import_module(entry.module)
            except (Exception, SystemExit) as error:
                _loading.discard(entry.value)
                package = entry.dist.name if entry.dist else entry.name
                raise ConfigError(
                    f"The plug-in '{entry.name}' of the installed package {package} cannot be imported "
                    f"({_reason(error)}). Update it, or remove it with `pip uninstall {package}`."
                ) from error


def load_file(path: Path) -> None:
    """Import a plug-in file; again only if it changed."""
    if not path.is_file():
        raise ConfigError(
            f"The plug-in file {path} does not exist. Put it back; or give its new place, with --plugin or as "
            "`plugins` in the experiment's file."
        )
    name, version = f"fedmll_plugin_{path.stem}", (path, files.checksum(path))
    if _files.get(name) == version:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--plugin takes a Python file, FILE.py; it got {path}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as for every import: pickle and dataclasses look there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(
            f"The plug-in file {path} cannot be imported ({_reason(error)}). Correct it, or leave it out."
        ) from error
    _files[name] = version


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")
