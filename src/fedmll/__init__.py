"""Federated multi-label learning: one library, one command.

    from fedmll import Experiment, run
    result = run(Experiment(seed=1))

Public names: Experiment, run, resume, compare, load_run, load_model; Method, Part and register for methods of your own;
Callback and Result. The packages, from the lowest to the highest: core, config, data, models, methods, evaluation,
engines, runs, inference, training, comparison, reports, deploy, cli. A package imports only from those before it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedmll.comparison.compare import compare
    from fedmll.config.experiment import Experiment
    from fedmll.core.errors import FedmllError
    from fedmll.core.registry import register
    from fedmll.inference.load_run import load_run
    from fedmll.inference.model_file import load_model
    from fedmll.methods.framework.base import Part
    from fedmll.methods.framework.method import Method
    from fedmll.training.callbacks import Callback, Result
    from fedmll.training.python_objects import make_experiment
    from fedmll.training.round_loop import resume, run

_MODULES = {
    "Callback": "training.callbacks",
    "Experiment": "config.experiment",
    "FedmllError": "core.errors",
    "Method": "methods.framework.method",
    "Part": "methods.framework.base",
    "Result": "training.callbacks",
    "compare": "comparison.compare",
    "load_model": "inference.model_file",
    "load_run": "inference.load_run",
    "make_experiment": "training.python_objects",
    "register": "core.registry",
    "resume": "training.round_loop",
    "run": "training.round_loop",
}
__all__ = [
    "Callback", "Experiment", "FedmllError", "Method", "Part", "Result", "__version__", "compare", "load_model",
    "load_run", "make_experiment", "register", "resume", "run",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: `fedmll --help` does not wait for torch."""
    if name == "__version__":
        from fedmll.core.versions import fedmll_version

        return fedmll_version()
    if name not in _MODULES:
        raise AttributeError(f"module 'fedmll' has no attribute '{name}'")
    return getattr(importlib.import_module(f"fedmll.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
