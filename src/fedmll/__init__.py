"""Federated multi-label learning: one library, one command.

from fedmll import Experiment, run
result = run(Experiment(seed=1))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedmll.errors import FedmllError
    from fedmll.experiment import Experiment
    from fedmll.methods.contract import Part
    from fedmll.methods.method import Method
    from fedmll.registry import register
    from fedmll.running.compare import compare
    from fedmll.running.loop import resume, run
    from fedmll.running.model import load_model
    from fedmll.running.observers import Observer, Result
    from fedmll.running.saved import load_run

_HOME = {
    "Experiment": "experiment",
    "FedmllError": "errors",
    "Method": "methods.method",
    "Observer": "running.observers",
    "Part": "methods.contract",
    "Result": "running.observers",
    "compare": "running.compare",
    "load_model": "running.model",
    "load_run": "running.saved",
    "register": "registry",
    "resume": "running.loop",
    "run": "running.loop",
}
__all__ = [
    "Experiment", "FedmllError", "Method", "Observer", "Part", "Result", "__version__", "compare", "load_model",
    "load_run", "register", "resume", "run",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imported at first use: `fedmll --help` does not wait for torch."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("fedmll")
        except PackageNotFoundError:  # a source tree that is not installed
            return "0+source"
    if name not in _HOME:
        raise AttributeError(f"module 'fedmll' has no attribute '{name}'")
    return getattr(importlib.import_module(f"fedmll.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
