"""The registry: every class in this folder that has a name. A new method is a new file, nothing else."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from fedmll.errors import ConfigError, nearest
from fedmll.methods.base import Method


@cache
def _import_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def registry() -> dict[str, type[Method]]:
    """By name; a class that a user defines in a notebook counts too."""
    _import_all()
    found: dict[str, type[Method]] = {}
    todo = [Method]
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        if cls.__dict__.get("name"):
            found[cls.name] = cls
    return dict(sorted(found.items()))


def find(name: str) -> type[Method]:
    known = registry()
    if name not in known:
        raise ConfigError(f"There is no method '{name}'{nearest(name, known)}.")
    return known[name]
