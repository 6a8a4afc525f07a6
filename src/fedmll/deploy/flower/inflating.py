"""Flower puts a message together before we see it. An array names its chunks by number, as often as it likes: 20 MB
named a million times would be 20 TB. So nothing is put together that is larger than what a good reply holds, or, at a
site, than the memory that it allows."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from flwr.app import Array

from fedmll.deploy.flower.internals import (
    get_object_body,
    get_object_children_ids_from_object_content,
    take_array_from,
)

HEADER_BYTES = 4096  # of an array beside its values


class Bounds:
    """For this process: the server's, or a site's."""

    def __init__(self) -> None:
        self.largest = 0

    def install(self) -> None:
        take_array_from(SimpleNamespace(inflate=self.inflate))

    def allow(self, largest: int) -> None:
        """An array may have this many bytes."""
        self.largest = max(self.largest, largest)

    def inflate(self, object_content: bytes, children: dict[str, Any] | None = None) -> Array:
        told = json.loads(get_object_body(object_content, Array))
        names = get_object_children_ids_from_object_content(object_content)
        chunks = [(children or {})[names[place]] for place in told["arraychunk_ids"]]
        size = sum(len(chunk.data) for chunk in chunks)
        if size > self.largest + HEADER_BYTES:
            raise ValueError(f"an array of {size} bytes; {self.largest} are expected")
        return Array.inflate(object_content, children)


BOUNDS = Bounds()
