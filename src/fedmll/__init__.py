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
    from fedmll.runs.loop import Observer, Result, resume, run

__all__ = ["Experiment", "FedmllError", "Observer", "Result", "resume", "run"]

_HOME = {
    "Experiment": "experiment",
    "FedmllError": "errors",
    "Observer": "runs.loop",
    "Result": "runs.loop",
    "resume": "runs.loop",
    "run": "runs.loop",
}


def __getattr__(name: str) -> Any:
    """Imported at first use: `fedmll --help` does not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'fedmll' has no attribute '{name}'")
    return getattr(importlib.import_module(f"fedmll.{_HOME[name]}"), name)
