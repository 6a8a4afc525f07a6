"""One seed, one result: every random stream is derived from (seed, purpose, …), never from what ran before it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, for example `derive(7, "batches", round, client)`."""
    text = "\x1f".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_generator(seed: int, *purpose: str | int) -> np.random.Generator:
    return np.random.default_rng(derive(seed, *purpose))


def torch_generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A generator on the CPU: the same draws whatever the device."""
    import torch  # here: data sources are listed without it

    return torch.Generator().manual_seed(derive(seed, *purpose))


def seed_global(device: torch.device, seed: int, *purpose: str | int) -> None:
    """torch's own generators, from which dropout draws. torch.manual_seed does the same for every kind of device there
    is, and costs 200 times as much."""
    import torch

    number = derive(seed, *purpose)
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)
