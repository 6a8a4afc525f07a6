"""Everything that has a name in an experiment is found here, and everybody comes through the same door:

@register("loss", "focal")
def focal(logits, targets): …

from a module of this package, an installed package (entry point group `fedmll.plugins`) or a file (`--plugin FILE.py`).
Modules are imported when a name of their kind is first asked for.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from fedmll.errors import ConfigError, nearest

T = TypeVar("T")

# kind → the modules (of a package: all its modules) in which the built-in ones register themselves
BUILT_IN: dict[str, tuple[str, ...]] = {
    "method": ("fedmll.methods",),
    "part": ("fedmll.methods",),
    "head": ("fedmll.methods",),
    "loss": ("fedmll.methods.losses",),
    "backbone": ("fedmll.models.backbones", "fedmll.models.vit"),
    "source": ("fedmll.data.sources",),
    "partition": ("fedmll.data.partition",),
    "annotation": ("fedmll.data.annotate",),
    "augmentation": ("fedmll.data.images.augment",),
    "metric": ("fedmll.evaluation.metrics",),
}
_things: dict[str, dict[str, Any]] = {kind: {} for kind in BUILT_IN}


def register(kind: str, name: str) -> Callable[[T], T]:
    """A decorator. The newest of a name counts (a notebook's cell that was run again); built-in names are taken."""
    if kind not in BUILT_IN:
        raise ConfigError(f"There is no kind '{kind}' of things with names{nearest(kind, BUILT_IN)}.")

    def put(thing: T) -> T:
        known, home = _things[kind].get(name), getattr(thing, "__module__", "")
        theirs = getattr(known, "__module__", "")
        if known is not None and theirs.startswith("fedmll.") and theirs != home:
            raise ConfigError(f"'{name}' in {home} has the name of a built-in {kind}; choose another.")
        _things[kind][name] = thing
        return thing

    return put


def find(kind: str, name: str) -> Any:
    known = all_of(kind)
    if name not in known:
        raise ConfigError(f"There is no {kind} '{name}'{nearest(name, known)}.")
    return known[name]


def all_of(kind: str) -> dict[str, Any]:
    """By name, sorted."""
    _import_built_in(kind)
    return dict(sorted(_things[kind].items()))


@cache
def _import_built_in(kind: str) -> None:
    for name in BUILT_IN[kind]:
        module = importlib.import_module(name)
        for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}."):
            importlib.import_module(found.name)
