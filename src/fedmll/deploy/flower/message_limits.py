"""A limit on the size of arrays that Flower assembles.

Flower assembles a message before fedmll sees it. An array lists its chunks by number and may list the same chunk any
number of times: 20 MB listed a million times would become 20 TB. So no array is assembled that is larger than a valid
reply, or, at a site, than the memory that the site allows.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from flwr.app import Array

from fedmll.deploy.flower.flower_internals import (
    get_object_body,
    get_object_children_ids_from_object_content,
    register_array_class,
)

HEADER_BYTES = 4096  # of an array, in addition to its values


class ArraySizeLimit:
    """The limit of this process: the server's, or a site's."""

    def __init__(self) -> None:
        self.max_bytes = 0

    def install(self) -> None:
        """Make Flower assemble arrays with `inflate`."""
        register_array_class(SimpleNamespace(inflate=self.inflate))

    def allow(self, size: int) -> None:
        """Allow arrays of this many bytes."""
        self.max_bytes = max(self.max_bytes, size)

    def inflate(self, object_content: bytes, children: dict[str, Any] | None = None) -> Array:
        """Flower's `Array.inflate`, after a check of the size."""
        header = json.loads(get_object_body(object_content, Array))
        names = get_object_children_ids_from_object_content(object_content)
        chunks = [(children or {})[names[place]] for place in header["arraychunk_ids"]]
        size = sum(len(chunk.data) for chunk in chunks)
        if size > self.max_bytes + HEADER_BYTES:
            raise ValueError(f"an array of {size} bytes; at most {self.max_bytes} are expected")
        return Array.inflate(object_content, children)


ARRAY_LIMIT = ArraySizeLimit()
