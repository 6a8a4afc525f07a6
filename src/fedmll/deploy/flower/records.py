"""Message ↔ Flower's records. Tensors go as raw NumPy arrays (never pickled), numbers as metrics, and what the two ends
must agree on (round, name, …) as settings. What comes in is checked before it is used: nothing of it is trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedmll.errors import ReplyRefused
from fedmll.message import Message

TENSORS, NUMBERS, ABOUT = "tensors", "numbers", "about"
DTYPES = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")

About: TypeAlias = dict[str, Any]  # whatever JSON can say


def to_records(message: Message, about: Mapping[str, Any]) -> RecordDict:
    records = RecordDict()
    records[TENSORS] = ArrayRecord({name: Array(t.detach().cpu().numpy()) for name, t in message.tensors.items()})
    records[NUMBERS] = MetricRecord({name: float(number) for name, number in message.numbers.items()})
    records[ABOUT] = ConfigRecord({"json": json.dumps(dict(about))})
    return records


def from_records(records: RecordDict) -> tuple[Message, About]:
    """ReplyRefused says what is wrong with records that are not a message."""
    unknown = set(records) - {TENSORS, NUMBERS, ABOUT}
    if unknown:
        raise ReplyRefused(f"it holds the unknown record {', '.join(sorted(unknown))}")
    tensors = {name: _tensor(name, array) for name, array in records.array_records.get(TENSORS, {}).items()}
    numbers: dict[str, float] = {}
    for name, number in records.metric_records.get(NUMBERS, {}).items():
        if isinstance(number, list):
            raise ReplyRefused(f"the number {name} is a list")
        numbers[name] = float(number)
    return Message(tensors, numbers), _about(records)


def _about(records: RecordDict) -> About:
    try:
        about = json.loads(str(records.config_records[ABOUT]["json"])) if ABOUT in records.config_records else {}
    except (ValueError, KeyError):
        about = None
    if not isinstance(about, dict):
        raise ReplyRefused("what it says about itself cannot be read")
    return about


def _tensor(name: str, array: Array) -> torch.Tensor:
    if array.dtype not in DTYPES or array.stype != "numpy.ndarray":
        raise ReplyRefused(f"{name} is '{array.dtype}' stored as '{array.stype}', not plain numbers")
    try:
        values = array.numpy()  # np.load without pickle
    except (ValueError, EOFError, OSError) as error:
        raise ReplyRefused(f"{name} cannot be read ({error})") from None
    if str(values.dtype) != array.dtype or values.shape != tuple(array.shape):
        raise ReplyRefused(f"{name} says {array.dtype} {tuple(array.shape)} and is {values.dtype} {values.shape}")
    return torch.from_numpy(values)
