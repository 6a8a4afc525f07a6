"""The registry: every class of a method that has a name. A new method is a new file in this folder, nothing else."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

from fedmll.errors import ConfigError, nearest
from fedmll.methods.base import REGISTRY, Method

if TYPE_CHECKING:
    from fedmll.client import Task


@cache
def _import_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def registry() -> dict[str, type[Method]]:
    """By name; a class that a user defines in a notebook counts too."""
    _import_all()
    return dict(sorted(REGISTRY.items()))


def find(name: str) -> type[Method]:
    known = registry()
    if name not in known:
        raise ConfigError(f"There is no method '{name}'{nearest(name, known)}.")
    return known[name]


def make(task: Task) -> Method:
    """The method of a task's experiment."""
    return find(task.experiment.method.name).made(task)
