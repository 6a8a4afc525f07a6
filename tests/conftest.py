"""Small real federations for the tests: scikit-learn's digits as composites, with caches of this test session only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedmll.data import federation
from fedmll.testing import experiment as small

__all__ = ["small"]

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Caches go where the test session's other files go, never to the user's."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDMLL_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def small_federation() -> federation.Federation:
    return federation.build(small())
