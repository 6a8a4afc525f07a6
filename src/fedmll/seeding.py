"""One seed, one result: every random stream is derived from (seed, purpose, …), never from what ran before it."""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, for example `derive(7, "batches", round, client)`."""
    text = "\x1f".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_generator(seed: int, *purpose: str | int) -> np.random.Generator:
    return np.random.default_rng(derive(seed, *purpose))


def torch_generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A generator on the CPU: the same draws whatever the device."""
    return torch.Generator().manual_seed(derive(seed, *purpose))
