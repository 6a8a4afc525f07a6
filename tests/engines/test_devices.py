"""The choice of a device: what torch cannot use here is rejected before any data is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedmll.config.settings import EngineSettings
from fedmll.core.errors import ConfigError
from fedmll.data import federation
from fedmll.engines.devices import choose_device, choose_local_device
from fedmll.testing import experiment
from fedmll.training.round_loop import run


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("name", "gpus", "device"),
    [("auto", 0, "cpu"), ("auto", 2, "cuda"), ("cpu", 2, "cpu"), ("cuda", 1, "cuda"), ("cuda:1", 2, "cuda:1")],
)
def test_choice(monkeypatch: pytest.MonkeyPatch, name: str, gpus: int, device: str) -> None:
    with_gpus(monkeypatch, gpus)
    assert choose_device(name) == torch.device(device)


@pytest.mark.parametrize(
    ("name", "gpus", "text"),
    [
        ("cuda", 0, "no CUDA device"),
        ("cuda:0", 0, "no CUDA device"),
        ("cuda:2", 2, "there are 2 CUDA devices here: cuda:0 to cuda:1"),
    ],
)
def test_a_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch, name: str, gpus: int, text: str) -> None:
    with_gpus(monkeypatch, gpus)
    with pytest.raises(ConfigError, match=text):
        choose_device(name)


def test_apple_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no Apple GPU"):
        choose_device("mps")


@pytest.mark.parametrize("name", ["cuda:", "cuda:x", "gpu", "cpu:0", "tpu"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ConfigError, match=r"engine.device"):
        experiment(engine__device=name)


@pytest.mark.parametrize("workers", ["auto", 0])
def test_a_gpu_is_used_by_one_process(monkeypatch: pytest.MonkeyPatch, workers: int | str) -> None:
    with_gpus(monkeypatch, 1)
    assert choose_local_device(EngineSettings(device="cuda", workers=workers)) == torch.device("cuda")
    with pytest.raises(ConfigError, match=r"engine.workers = 2 .* one process on a GPU.*--engine ray"):
        choose_local_device(EngineSettings(device="cuda", workers=2))


def test_rejected_before_any_data_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_gpus(monkeypatch, 0)
    monkeypatch.setattr(federation, "build", lambda *_: pytest.fail("the data was loaded"))
    with pytest.raises(ConfigError, match="no CUDA device"):
        run(experiment(engine__device="cuda"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
