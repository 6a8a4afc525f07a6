"""Helpers for the tests of reports: a small real comparison, run folders written by hand, and a page in a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small

from fedmll import compare
from fedmll.config.experiment import Experiment
from fedmll.runs.run_folder import RunFolder

METHODS = ("local-only", "fedprox:mu=0.1")
COMPARISONS: list[Path] = []  # it is run once for all modules


def experiment() -> Experiment:
    return small(
        annotation__kind="missing", annotation__missing=2, training__rounds=3, data__limit=240, partition__holdout=0.3
    )


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 methods × 2 seeds × 3 rounds on digits. Tests must not change it."""
    if not COMPARISONS:
        folder = tmp_path_factory.mktemp("compared") / "digits"
        compare(experiment(), METHODS, (0, 1), folder)
        COMPARISONS.append(folder)
    return COMPARISONS[0]


def write_run(
    folder: Path,
    *,
    method: str = "fedavg",
    seed: int = 0,
    lr: float = 0.1,
    metrics: dict[str, float] | None = None,
    rounds: list[dict[str, Any]] | None = None,
    classes: tuple[str, ...] = ("cat", "dog"),
    total: int = 3,
) -> Path:
    """Write the folder of a run; with metrics it is finished."""
    folder.mkdir(parents=True)
    settings = {
        "data": 'name = "pets"',
        "partition": 'kind = "iid"\nclients = 2',
        "training": f"rounds = {total}\nlr = {lr}",
    }
    sections = "".join(f"[{name}]\n{text}\n" for name, text in settings.items())
    (folder / "experiment.toml").write_text(f'seed = {seed}\n{sections}[method]\nname = "{method}"\n')
    lines = [{"seconds": 1.0, "bytes_up": 1e6, "bytes_down": 1e6, "clients": 2} | row for row in rounds or []]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if metrics is not None:
        summary = {
            "method": method, "data": "pets", "seed": seed, "round": total, "rounds": total, "clients": 2,
            "classes": list(classes), "samples": {"train": 80, "validation": 10, "test": 10}, "seconds": 3.0,
            "bytes_up": 3e6, "bytes_down": 3e6, "metrics": metrics,
        }  # fmt: skip
        RunFolder(folder).write_summary(summary)
    return folder


def write_predictions(folder: Path, probabilities: np.ndarray, targets: np.ndarray, classes: tuple[str, ...]) -> None:
    np.savez(
        folder / "predictions.npz", classes=np.array(classes), test_probabilities=probabilities.astype(np.float32),
        test_targets=targets.astype(np.int8), test_rows=np.arange(len(targets)),
    )  # fmt: skip


def open_page(browser: Any, page: str, width: int = 1400, dark: bool = False) -> None:
    """Open a page in headless Chromium with this width, in the light or dark colour scheme."""
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": scheme})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page)
