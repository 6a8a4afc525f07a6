"""Which device trains. Everything else asks `Task.device`, or the device of a tensor."""

from __future__ import annotations

import torch

from fedmll.config.settings import EngineSettings
from fedmll.core.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """The device with a name of `engine.device`.

    Raises:
        ConfigError: torch cannot use it here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device = '{name}', but torch finds no CUDA device here; use --device cpu or auto.")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"engine.device = '{name}', but there are {count} CUDA devices here: cuda:0 to cuda:{count - 1}."
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("engine.device = 'mps', but torch finds no Apple GPU here; use --device cpu or auto.")
    return device


def choose_local_device(setting: EngineSettings) -> torch.device:
    """The device of the local engine, whose worker processes are forked: a process that uses a GPU cannot be.

    Raises:
        ConfigError: torch cannot use the device, or worker processes were asked for.
    """
    device = choose_device(setting.device)
    if device.type != "cpu" and setting.workers not in ("auto", 0):
        raise ConfigError(
            f"engine.workers = {setting.workers} with engine.device = '{device}': the local engine trains in one "
            "process on a GPU. Leave --workers out, or use --engine ray, which starts one actor per GPU or "
            "engine.per_device of them."
        )
    return device
