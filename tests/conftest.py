"""Small real federations for the tests: scikit-learn's digits as composites, with caches of this test session only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedmll.data import federation
from fedmll.experiment import Experiment

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Caches go where the test session's other files go, never to the user's."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDMLL_CACHE", str(folder))
        yield folder


def small(**overrides: Any) -> Experiment:
    """Four clients, two rounds, a tiny network: under a second. Keys as section__key."""
    values = {
        "data.limit": 160,
        "partition.clients": 4,
        "model.channels": (4, 8),
        "training.rounds": 2,
        "training.batch_size": 16,
        "engine.workers": 0,
    } | {key.replace("__", "."): value for key, value in overrides.items()}
    return Experiment().changed(values)


@pytest.fixture(scope="session")
def small_federation() -> federation.Federation:
    return federation.build(small())
