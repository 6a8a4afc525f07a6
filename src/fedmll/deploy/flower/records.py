"""Message ↔ Flower's records. Tensors go as raw NumPy arrays (never pickled), numbers as metrics, and what the two ends
must agree on (round, name, …) as settings. What comes in is checked before it is used: nothing of it is trusted. An
array is first compared with what is expected and with the bytes that are there; only then is anything allocated."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedmll.errors import ReplyRefused, printable
from fedmll.message import Message
from fedmll.methods.contract import Like

TENSORS, NUMBERS, ABOUT = "tensors", "numbers", "about"
DTYPES = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
LONGEST_ABOUT = 1 << 20  # characters of JSON
DEEPEST_ABOUT = 6  # brackets in brackets
LONGEST_HEADER = 1024  # bytes, of a .npy file
HEADER = re.compile(rb"\{'descr': '([<|])([a-z]\d)', 'fortran_order': (True|False), 'shape': \(([\d, ]*)\), \} *\n")
STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')

About: TypeAlias = dict[str, Any]  # whatever JSON can say


def to_records(message: Message, about: Mapping[str, Any]) -> RecordDict:
    records = RecordDict()
    records[TENSORS] = ArrayRecord({name: Array(t.detach().cpu().numpy()) for name, t in message.tensors.items()})
    records[NUMBERS] = MetricRecord({name: float(number) for name, number in message.numbers.items()})
    records[ABOUT] = ConfigRecord({"json": json.dumps(dict(about))})
    return records


def from_records(
    records: RecordDict, expected: Mapping[str, Like] | None = None, numbers: Collection[str] | None = None
) -> tuple[Message, About]:
    """ReplyRefused says what is wrong with records that are not a message. `expected` are the only tensors and
    `numbers` the only numbers there may be (None: any, from who is trusted to say how much it sends)."""
    try:
        return _decoded(records, expected, numbers)
    except ReplyRefused as refusal:
        raise ReplyRefused(printable(refusal)) from None
    except Exception as error:  # whatever a decoder stumbles over; the one place where records are decoded
        raise ReplyRefused(f"it cannot be read ({type(error).__name__})") from None


def _decoded(
    records: RecordDict, expected: Mapping[str, Like] | None, allowed: Collection[str] | None
) -> tuple[Message, About]:
    unknown = set(records) - {TENSORS, NUMBERS, ABOUT}
    if unknown:
        raise ReplyRefused(f"it holds the unknown record {sorted(unknown)[0]}")
    arrays: Mapping[str, Array] = records.array_records.get(TENSORS, {})
    found: Mapping[str, Any] = records.metric_records.get(NUMBERS, {})
    for names, known in ((arrays, expected), (found, allowed)):
        strange = set() if known is None else set(names) - set(known)
        if strange:
            raise ReplyRefused(f"it holds the unknown key {min(strange)}")
    about = _about(records)
    tensors = {}
    for name, array in arrays.items():
        reason = None if expected is None else expected[name].refuse_shape(name, tuple(array.shape), str(array.dtype))
        if reason is not None:
            raise ReplyRefused(reason)
        tensors[name] = _tensor(name, array)
    return Message(tensors, {name: _number(name, number) for name, number in found.items()}), about


def _number(name: str, number: Any) -> float:
    if isinstance(number, list):
        raise ReplyRefused(f"the number {name} is a list")
    value = float(number)
    return 0.0 if 0 < abs(value) < np.finfo(np.float64).tiny else value


def _about(records: RecordDict) -> About:
    text = records.config_records[ABOUT].get("json") if ABOUT in records.config_records else "{}"
    if not isinstance(text, str) or len(text) > LONGEST_ABOUT or _depth(text) > DEEPEST_ABOUT:
        raise ReplyRefused("what it says about itself cannot be read: it is too long or too deep")
    try:
        about = json.loads(text)
    except ValueError:
        about = None
    if not isinstance(about, dict):
        raise ReplyRefused("what it says about itself cannot be read")
    return about


def _depth(text: str) -> int:
    """How deep brackets are in brackets, strings aside; without recursion."""
    depth = deepest = 0
    for letter in STRINGS.sub("", text):
        if letter in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif letter in "]}":
            depth -= 1
    return deepest


def _tensor(name: str, array: Array) -> torch.Tensor:
    if array.dtype not in DTYPES or array.stype != "numpy.ndarray":
        raise ReplyRefused(f"{name} is '{array.dtype}' stored as '{array.stype}', not plain numbers")
    dtype, shape, in_columns, start = _header(name, array.data)
    if dtype != array.dtype or shape != tuple(array.shape):
        raise ReplyRefused(f"{name} says {array.dtype} {tuple(array.shape)} and is {dtype} {shape}")
    count = math.prod(shape)
    if len(array.data) - start != count * np.dtype(dtype).itemsize:
        raise ReplyRefused(f"{name} says {dtype} {shape} and has {len(array.data) - start} bytes")
    values = np.frombuffer(array.data, dtype, count, start) if count else np.zeros(0, dtype)
    if dtype == "bool" and bool((values.view(np.uint8) > 1).any()):
        raise ReplyRefused(f"{name} holds what is neither true nor false")
    return torch.from_numpy(_flushed(values).reshape(shape, order="F" if in_columns else "C"))


def _flushed(values: NDArray[Any]) -> NDArray[Any]:
    """A copy, in which numbers that are too small for full precision are 0: they would make arithmetic slow."""
    mine = values.copy()
    if mine.dtype.kind == "f" and mine.dtype.itemsize > 2:
        mine[np.abs(mine) < np.finfo(mine.dtype).tiny] = 0
    return mine


def _header(name: str, data: bytes) -> tuple[str, tuple[int, ...], bool, int]:
    """Of a .npy file: dtype, shape, whether it is stored by columns, and where the values begin. Nothing is evaluated;
    what numpy.save does not write is refused."""
    versions = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}
    width = versions.get(data[:8])
    if width is None:
        raise ReplyRefused(f"{name} cannot be read (no array)")
    start = 8 + width
    length = int.from_bytes(data[8:start], "little")
    found = HEADER.fullmatch(data[start : start + length]) if length <= LONGEST_HEADER else None
    if found is None or len(data) < start + length:
        raise ReplyRefused(f"{name} cannot be read (its header is none of numpy's)")
    order, kind, columns, sizes = found.groups()
    shape = tuple(int(size) for size in sizes.split(b",") if size.strip())
    dtype = np.dtype((order + kind).decode()).name
    return dtype, shape, columns == b"True", start + length
