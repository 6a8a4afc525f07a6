"""All methods that come with the library, for tests that every one of them has to pass: a new one joins by itself. What
it needs beside the setting of such a test is here, in one table."""

from __future__ import annotations

from typing import Any

from fedmll.core.registry import all_of, find_added

SGD = {"training__optimizer": "sgd", "training__momentum": 0.0, "training__lr": 0.05}
SEVERAL = {"method__loss": "sigmoid"}  # labels a sample

NEEDED: dict[str, dict[str, Any]] = {
    "fedlgt": {"method__encoder": "learned"},
    "fedmlp": {"method__t1": 1, "method__T0": 0.2, "method__T1": 0.3},  # so that there are tags
    "fednova": SGD,
    "private-fedavg": SEVERAL,
    "private-fedprox": SEVERAL,
    "scaffold": SGD,
}

NOT_FEDERATED = ("centralized", "local-only")  # refused by `fedmll server`: tested there


def names() -> list[str]:
    return [name for name in all_of("method") if name not in find_added("method")]


def settings_of(name: str) -> dict[str, Any]:
    return {"method__name": name} | NEEDED.get(name, {})
