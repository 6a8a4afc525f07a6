"""Small real federations for the tests: scikit-learn's digits as composites, with caches of this test session only."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fedmll.cli import main
from fedmll.data import federation
from fedmll.testing import experiment as small

__all__ = ["small"]

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
BROWSER_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)


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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Debian's Chromium, without a window."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.skip("Debian's chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for flag in (*BROWSER_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=programs[1]))
    yield driver
    driver.quit()


class Said(NamedTuple):
    code: int
    out: str
    error: str


@pytest.fixture
def fedmll(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Said]:
    """The command, as a user types it in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str | Path) -> Said:
        monkeypatch.setattr(sys, "argv", ["fedmll", *map(str, words)])
        code = 0
        try:
            main.main()
        except SystemExit as leave:
            code = int(leave.code or 0)
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return call
