"""Shared memory that grows: the parent and its forked workers map the same unnamed file. Nothing is left behind,
however a process ends."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import NamedTuple

import torch
from torch import Tensor

from fedmll.core.message import Tensors

ALIGNMENT = 64


class Entry(NamedTuple):
    """Where a tensor lies in an arena."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class Arena:
    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("fedmll")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        self.memory: mmap.mmap | None = None
        self.used = 0

    def clear(self) -> None:
        self.used = 0

    def write(self, tensor: Tensor) -> Entry:
        entry = Entry(tensor.dtype, tuple(tensor.shape), self.used)
        self.used += -(-max(tensor.numel() * tensor.element_size(), 1) // ALIGNMENT) * ALIGNMENT
        size = os.fstat(self.descriptor).st_size
        if self.used > size:
            os.ftruncate(self.descriptor, max(self.used, size + size // 2))
        self.view(entry).copy_(tensor)
        return entry

    def read(self, entry: Entry) -> Tensor:
        """A copy: the arena may be written again at once."""
        return self.view(entry).clone()

    def view(self, entry: Entry) -> Tensor:
        count = torch.Size(entry.shape).numel()
        if count == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        end = entry.offset + count * entry.dtype.itemsize
        if self.memory is None or len(self.memory) < end:
            # an older map lives on while tensors still look at it
            self.memory = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        return torch.frombuffer(self.memory, dtype=entry.dtype, count=count, offset=entry.offset).view(entry.shape)

    def close(self) -> None:
        os.close(self.descriptor)


def write_all(arena: Arena, tensors: Tensors) -> dict[str, Entry]:
    return {name: arena.write(tensor) for name, tensor in tensors.items()}


def read_all(arena: Arena, entries: dict[str, Entry]) -> Tensors:
    return {name: arena.read(entry) for name, entry in entries.items()}
