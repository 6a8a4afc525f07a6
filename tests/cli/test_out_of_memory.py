"""Too little memory: one sentence that says what to lower, exit status 1."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedmll.engines.client_trainer import Trainer

LIMIT = 16 * 2**30


def assert_sentence(code: int, text: str) -> None:
    assert code == 1 and "Memory ran out" in text and "Lower training.batch_size" in text, text
    assert "Traceback" not in text


def test_model_that_does_not_fit_into_memory(tmp_path: Path) -> None:
    """2 × 65536² × 9 weights: 300 GB; the limit makes the test independent of the machine."""
    command = [sys.executable, "-m", "fedmll", "run", "--out", str(tmp_path / "run"), "--workers", "0"]
    done = subprocess.run(
        [*command, "--set", "model.channels=[65536,65536,65536]"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT)),
    )
    assert_sentence(done.returncode, done.stderr)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes.")])
def test_client_that_does_not_fit_into_memory(
    fedmll: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: str, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Trainer, "train_clients", fail)
    said = fedmll("run", "--out", tmp_path / "run", "--rounds", "1", "--set", "data.limit=100", "--workers", workers)
    assert_sentence(said.code, said.error)
    assert "stopped: " in (tmp_path / "run" / "log.txt").read_text()
