"""Conversion between Message and Flower's records: what arrives is checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedmll.core.errors import ReplyRejected
from fedmll.core.message import Message
from fedmll.deploy.flower.records import from_records, to_records


def test_a_message_is_the_same_after_conversion() -> None:
    tensors = {
        "weights": torch.randn(7),
        "counters": torch.tensor([3, 2**40]),
        "mask": torch.tensor([True, False]),
        "tags": torch.tensor([[1, -1]], dtype=torch.int8),
        "scalar": torch.tensor(0.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
    }
    message, info = from_records(to_records(Message(tensors, {"loss": 0.25, "samples": 12}), {"round": 3, "keep": []}))
    assert info == {"round": 3, "keep": []}
    assert message.numbers == {"loss": 0.25, "samples": 12.0}
    assert message.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert message[name].dtype == tensor.dtype
        assert torch.equal(message[name], tensor)


def records(array: Array | None = None, **more: Any) -> RecordDict:
    result = to_records(Message({"weights": torch.zeros(2)}), {})
    if array is not None:
        result["tensors"] = ArrayRecord({"weights": array})
    for name, record in more.items():
        result[name] = record
    return result


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (records(Array("object", (1,), "numpy.ndarray", b"x")), "not stored as plain numbers"),
        (records(Array("float32", (2,), "pickle", b"x")), "not stored as plain numbers"),
        (records(Array("float32", (2,), "numpy.ndarray", b"\x80\x04N.")), "cannot be read"),
        (records(replace(Array(np.zeros(3, np.float32)), shape=(4,))), "claims float32"),
        (records(code=ConfigRecord({"a": 1})), "unknown record"),
        (records(numbers=MetricRecord({"loss": [1.0, 2.0]})), "loss is a list"),
        (records(info=ConfigRecord({"json": "[1]"})), "cannot be read"),
        (records(info=ConfigRecord({"json": "{"})), "cannot be read"),
    ],
)
def test_records_that_are_no_message_are_rejected(wrong: RecordDict, reason: str) -> None:
    with pytest.raises(ReplyRejected, match=reason):
        from_records(wrong)


def test_a_pickled_array_is_never_loaded(tmp_path: Path) -> None:
    flag = tmp_path / "executed"

    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return (Path.touch, (flag,))  # type: ignore[return-value]

    import io

    buffer = io.BytesIO()
    np.save(buffer, np.array([Bomb()], dtype=object), allow_pickle=True)
    with pytest.raises(ReplyRejected, match="cannot be read"):
        from_records(records(Array("float32", (1,), "numpy.ndarray", buffer.getvalue())))
    assert not flag.exists()
