"""How many cores one piece of work takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """For small work in the server's process: the cores belong to the clients' workers, and threads that wait for a
    busy core made it ten times slower. It also makes the result the same on every number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
