"""Methods, by name. A new one is a new file in this folder, or in a plug-in; nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmll import registry

if TYPE_CHECKING:
    from fedmll.methods.method import Method
    from fedmll.task import Task


def find(name: str) -> type[Method]:
    method: type[Method] = registry.find("method", name)
    return method


def make(task: Task) -> Method:
    """The method of a task's experiment."""
    return find(task.experiment.method.name).made(task)
