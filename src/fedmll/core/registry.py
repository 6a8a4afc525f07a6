"""The registry: everything that an experiment refers to by name (methods, losses, data sources, …).

    @register("loss", "focal")
    def focal(logits, targets, positive_weight): …

The decorator works in this package, in an installed package (entry point group `fedmll.plugins`) and in a plug-in file
(`--plugin FILE.py`). Modules are imported when a name of their kind is first requested.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.core.text import suggest

T = TypeVar("T")

# kind → the modules that register the built-in names (for a package: all its modules)
BUILT_IN: dict[str, tuple[str, ...]] = {
    "method": ("fedmll.methods",),
    "part": ("fedmll.methods",),
    "head": ("fedmll.methods",),
    "loss": ("fedmll.methods.losses",),
    "backbone": ("fedmll.models.backbones",),
    "pixels": ("fedmll.models.pretrained_weights", "fedmll.models.backbones.vit"),
    "layout": ("fedmll.models.backbones.vit",),
    "source": ("fedmll.data.sources",),
    "partition": ("fedmll.data.partition", "fedmll.data.partition_file"),
    "annotation": ("fedmll.data.annotation",),
    "augmentation": ("fedmll.data.images.augmentation",),
    "metric": ("fedmll.evaluation.metrics",),
}
ENTRY_POINT_GROUP = "fedmll.plugins"
OBJECT_PREFIX = "object-"  # of the names of data, backbones and losses that were given as Python objects
_registered: dict[str, dict[str, Any]] = {kind: {} for kind in BUILT_IN}
_bases: dict[str, type] = {}  # kind → the class that everything of the kind is derived from
_modules: dict[tuple[str, str], str] = {}  # (kind, name) → the module that registered it
_files: dict[str, tuple[Path, str]] = {}  # module → its plug-in file, and the checksum of the imported version
_loading: set[str] = set()  # entry points that are loaded or being loaded


def register(kind: str, name: str) -> Callable[[T], T]:
    """A decorator that registers a class, function or object under a name.

    A name can be registered again (as when a notebook cell is run again), except built-in names.
    """
    if kind not in BUILT_IN:
        raise ConfigError(f"There is no kind '{kind}' in the registry{suggest(kind, BUILT_IN)}")
    caller = sys._getframe(1).f_globals.get("__name__", "")

    def add(thing: T) -> T:
        if kind == "source" and not hasattr(thing, "load"):
            raise ConfigError(
                f"the data source '{name}' must be a Source (fedmll.data.sources.base), and {_describe(thing)} was "
                f"registered: write register('source', '{name}')(Source(description=…, load=…))."
            )
        # a class or function has its own module, even if a base class registers it; other objects have none
        home = thing.__module__ if isinstance(thing, type | FunctionType) else caller
        homes = {home, _modules.get((kind, name), home)}
        if len(homes) > 1 and any(map(_is_built_in, homes)):
            stranger = next(module for module in homes if not _is_built_in(module))
            raise ConfigError(f"'{name}' in {stranger} has the name of a built-in {kind}; choose another.")
        _registered[kind][name], _modules[kind, name] = thing, home
        return thing

    return add


def find(kind: str, name: str) -> Any:
    """The object registered under a name; raises ConfigError if there is none."""
    _import_all(kind)
    if name not in _registered[kind] and name.startswith(OBJECT_PREFIX):
        argument = {"source": "data", "backbone": "model"}.get(kind, kind)
        raise ConfigError(
            f"The {argument} '{name}' was given as a Python object, and is not known in this process. Pass the same "
            f"object again from Python: `fedmll.resume(FOLDER, {argument}=…)`, or "
            f"`fedmll.load_model(FILE, model=…)` for predictions."
        )
    if name not in _registered[kind]:
        named = [known for known in _registered[kind] if not known.startswith(OBJECT_PREFIX)]
        raise ConfigError(f"There is no {kind} '{name}'{suggest(name, named)}")
    return _checked(kind, name)


def all_of(kind: str) -> dict[str, Any]:
    """All registered objects of a kind by name, sorted."""
    _import_all(kind)
    return {name: _checked(kind, name) for name in sorted(_registered[kind])}


def require_subclass(kind: str, base: type) -> None:
    """Everything of a kind must be a subclass of `base`, which has a `name`. It is checked when a name is looked up."""
    _bases[kind] = base


def _checked(kind: str, name: str) -> Any:
    thing, base = _registered[kind][name], _bases.get(kind)
    if base is not None and not (isinstance(thing, type) and issubclass(thing, base) and getattr(thing, "name", None)):
        what = f"the class {thing.__name__}" if isinstance(thing, type) else f"an object of {type(thing).__name__}"
        raise ConfigError(
            f"The {kind} '{name}' is {what} ({_modules[kind, name]}), and must be a subclass of "
            f"{base.__module__}.{base.__name__} with a `name`; such a class registers itself."
        )
    return thing


def find_added(kind: str) -> dict[str, Any]:
    """The objects of a kind that are not built in, by name, sorted."""
    return {name: thing for name, thing in all_of(kind).items() if not _is_built_in(_modules[kind, name])}


def _is_built_in(module: str) -> bool:
    return module.startswith("fedmll.")


def _import_all(kind: str) -> None:
    _import_built_in(kind)
    load_installed_plugins()


@cache
def _import_built_in(kind: str) -> None:
    for name in BUILT_IN[kind]:
        module = importlib.import_module(name)
        for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}."):
            importlib.import_module(found.name)


# Plug-ins


@cache
def installed_plugins() -> tuple[EntryPoint, ...]:
    """The entry points of installed plug-in packages."""
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def plugin_versions(plugin_files: Iterable[str]) -> dict[str, dict[str, str]]:
    """Plug-in files with their checksums, and installed packages with plug-ins with their versions."""
    packages = {entry.dist.name: entry.dist.version for entry in installed_plugins() if entry.dist}
    return {"files": {file: files.checksum(Path(file)) for file in plugin_files}, "packages": packages}


def load_installed_plugins() -> None:
    """Import the plug-ins of installed packages, once."""
    for entry in installed_plugins():
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


def load_plugin_file(path: Path) -> None:
    """Import a plug-in file; a file that did not change is not imported again."""
    if not path.is_file():
        raise ConfigError(
            f"The plug-in file {path} does not exist. Put it back, or give its new path with --plugin or as "
            "`plugins` in the experiment file."
        )
    name, version = f"fedmll_plugin_{path.stem}", (path, files.checksum(path))
    if _files.get(name) == version:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--plugin takes a Python file, FILE.py; it got {path}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as for each import: pickle and dataclasses need it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(
            f"The plug-in file {path} cannot be imported ({_reason(error)}). Correct it, or do not use it."
        ) from error
    _files[name] = version


def checksum_of(path: Path) -> str | None:
    """The checksum of a plug-in file as it was imported; None if it was not imported."""
    return dict(_files.values()).get(path)


def _describe(thing: object) -> str:
    return f"the {type(thing).__name__} {getattr(thing, '__name__', thing)!s}"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")
