"""Conversion between Message and Flower's records.

Tensors are sent as raw NumPy arrays (never pickled), numbers as metrics, and everything else that the two ends must
agree on (round, name, …) as `info`, a JSON object. Nothing that arrives is trusted: an array is compared with its
specification and with the number of bytes that arrived before any memory is allocated.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedmll.core.errors import ReplyRejected
from fedmll.core.message import Message
from fedmll.core.text import printable
from fedmll.deploy.flower.flower_internals import (
    get_object_body,
    get_object_children_ids_from_object_content,
    register_array_class,
)
from fedmll.methods.framework.base import TensorSpec

TENSORS, NUMBERS, INFO = "tensors", "numbers", "info"
DTYPES = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
MAX_INFO = 1 << 20  # characters of JSON
MAX_INFO_DEPTH = 6  # of nested brackets
MAX_HEADER = 1024  # bytes, of a .npy file
ARRAY_HEADER_BYTES = 4096  # of an array, in addition to its values
HEADER = re.compile(rb"\{'descr': '([<|])([a-z]\d)', 'fortran_order': (True|False), 'shape': \(([\d, ]*)\), \} *\n")
STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')

Info: TypeAlias = dict[str, Any]  # a JSON object


def to_records(message: Message, info: Mapping[str, Any]) -> RecordDict:
    records = RecordDict()
    records[TENSORS] = ArrayRecord({name: Array(t.detach().cpu().numpy()) for name, t in message.tensors.items()})
    records[NUMBERS] = MetricRecord({name: float(number) for name, number in message.numbers.items()})
    records[INFO] = ConfigRecord({"json": json.dumps(dict(info))})
    return records


def from_records(
    records: RecordDict, specs: Mapping[str, TensorSpec] | None = None, numbers: Collection[str] | None = None
) -> tuple[Message, Info]:
    """Decode Flower's records, or raise ReplyRejected.

    Only the tensors in `specs` and these `numbers` are allowed; at a site (None) any.
    """
    try:
        return _decode(records, specs, numbers)
    except ReplyRejected as error:
        raise ReplyRejected(printable(error)) from None
    except Exception as error:  # any error of a decoder; this is the one place where records are decoded
        raise ReplyRejected(f"it cannot be read ({type(error).__name__})") from None


def _decode(
    records: RecordDict, specs: Mapping[str, TensorSpec] | None, allowed: Collection[str] | None
) -> tuple[Message, Info]:
    unknown = set(records) - {TENSORS, NUMBERS, INFO}
    if unknown:
        raise ReplyRejected("it holds an unknown record")
    arrays: Mapping[str, Array] = records.array_records.get(TENSORS, {})
    found: Mapping[str, Any] = records.metric_records.get(NUMBERS, {})
    for names, known in ((arrays, specs), (found, allowed)):
        unknown = set() if known is None else set(names) - set(known)
        if unknown:
            raise ReplyRejected("it holds an unknown key")
    info = _info(records)
    tensors = {}
    for name, array in arrays.items():
        # before anything of it is named: only known words and numbers reach the operator's log
        if array.dtype not in DTYPES or array.stype != "numpy.ndarray" or not all(type(n) is int for n in array.shape):
            raise ReplyRejected(f"{name} is not stored as plain numbers")
        shape, dtype = tuple(array.shape), array.dtype
        problem = None if specs is None else specs[name].find_shape_problem(name, shape, dtype)
        if problem is not None:
            raise ReplyRejected(problem.text)
        tensors[name] = _tensor(name, array)
    return Message(tensors, {name: _number(name, number) for name, number in found.items()}), info


def _number(name: str, number: Any) -> float:
    if isinstance(number, list):
        raise ReplyRejected(f"the number {name} is a list")
    value = float(number)
    return 0.0 if 0 < abs(value) < np.finfo(np.float64).tiny else value


def _info(records: RecordDict) -> Info:
    text = records.config_records[INFO].get("json") if INFO in records.config_records else "{}"
    if not isinstance(text, str) or len(text) > MAX_INFO or _depth(text) > MAX_INFO_DEPTH:
        raise ReplyRejected("its info cannot be read: it is too long or too deeply nested")
    try:
        info = json.loads(text)
    except ValueError:
        info = None
    if not isinstance(info, dict):
        raise ReplyRejected("its info cannot be read")
    return info


def _depth(text: str) -> int:
    """How deeply brackets are nested outside strings; computed without recursion."""
    depth = deepest = 0
    for letter in STRINGS.sub("", text):
        if letter in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif letter in "]}":
            depth -= 1
    return deepest


def _tensor(name: str, array: Array) -> torch.Tensor:
    dtype, shape, column_order, start = _header(name, array.data)
    if dtype != array.dtype or shape != tuple(array.shape):
        raise ReplyRejected(f"{name} claims {array.dtype} {tuple(array.shape)} and is {dtype} {shape}")
    count = math.prod(shape)
    if len(array.data) - start != count * np.dtype(dtype).itemsize:
        raise ReplyRejected(f"{name} claims {dtype} {shape} and has {len(array.data) - start} bytes")
    values = np.frombuffer(array.data, dtype, count, start) if count else np.zeros(0, dtype)
    if dtype == "bool" and bool((values.view(np.uint8) > 1).any()):
        raise ReplyRejected(f"{name} holds values that are neither true nor false")
    return torch.from_numpy(_flush_subnormals(values).reshape(shape, order="F" if column_order else "C"))


def _flush_subnormals(values: NDArray[Any]) -> NDArray[Any]:
    """A copy in which subnormal numbers are 0: they would make arithmetic slow."""
    flushed = values.copy()
    if flushed.dtype.kind == "f" and flushed.dtype.itemsize > 2:
        flushed[np.abs(flushed) < np.finfo(flushed.dtype).tiny] = 0
    return flushed


def _header(name: str, data: bytes) -> tuple[str, tuple[int, ...], bool, int]:
    """Parse the header of a .npy file: dtype, shape, whether it is in column order, and where the values begin.

    Nothing is evaluated. A header that numpy.save would not write is rejected.
    """
    versions = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}
    width = versions.get(data[:8])
    if width is None:
        raise ReplyRejected(f"{name} cannot be read (no array)")
    start = 8 + width
    length = int.from_bytes(data[8:start], "little")
    found = HEADER.fullmatch(data[start : start + length]) if length <= MAX_HEADER else None
    if found is None or len(data) < start + length:
        raise ReplyRejected(f"{name} cannot be read (its header is not NumPy's)")
    order, kind, columns, sizes = found.groups()
    shape = tuple(int(size) for size in sizes.split(b",") if size.strip())
    dtype = np.dtype((order + kind).decode()).name
    return dtype, shape, columns == b"True", start + length


class ArraySizeLimit:
    """How many bytes of arrays Flower may assemble for one message in this process, the server's or a site's.

    Flower assembles a message before fedmll sees it. An array lists its chunks by number and may list the same chunk
    any number of times, and so may any number of arrays: 20 MB listed a million times would become 20 TB.
    """

    def __init__(self) -> None:
        self.max_bytes = 0
        # bytes of the arrays of the current message, without their headers; None: messages are not told apart, as in
        # Flower's simulation engine, and each array is limited by itself
        self.assembled: int | None = None

    def install(self) -> None:
        """Make Flower assemble arrays with `inflate`."""
        register_array_class(SimpleNamespace(inflate=self.inflate))

    def allow(self, size: int) -> None:
        """Allow this many bytes in all arrays of a message together."""
        self.max_bytes = max(self.max_bytes, size)

    def start_message(self) -> None:
        """Call this before Flower assembles a message."""
        self.assembled = 0

    def inflate(self, object_content: bytes, children: dict[str, Any] | None = None) -> Array:
        """Flower's `Array.inflate`, after a check of the size."""
        header = json.loads(get_object_body(object_content, Array))
        names = get_object_children_ids_from_object_content(object_content)
        chunks = [(children or {})[names[place]] for place in header["arraychunk_ids"]]
        size = sum(len(chunk.data) for chunk in chunks)
        together = size + (self.assembled or 0)
        if together > self.max_bytes + ARRAY_HEADER_BYTES:
            raise ValueError(f"arrays of {together} bytes; at most {self.max_bytes} are expected")
        if self.assembled is not None:
            self.assembled += max(0, size - ARRAY_HEADER_BYTES)
        return Array.inflate(object_content, children)


ARRAY_LIMIT = ArraySizeLimit()
