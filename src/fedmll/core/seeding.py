"""Random generators derived from (seed, purpose, …), so that they do not depend on what ran before."""

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
    """A generator on the CPU, so that its draws do not depend on the device."""
    import torch  # here: listing data sources needs no torch

    return torch.Generator().manual_seed(derive(seed, *purpose))


def seed_global(device: torch.device, seed: int, *purpose: str | int) -> None:
    """Seed torch's global generators, which dropout uses.

    `torch.manual_seed` does the same for every kind of device and takes 200 times as long.
    """
    import torch

    number = derive(seed, *purpose)
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)
