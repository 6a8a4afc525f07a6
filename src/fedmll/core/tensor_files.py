"""Tensor files: safetensors files that notice damage, for checkpoints, client states and recorded tensors.

The header has facts in JSON, with a checksum of their own; one of the facts is the checksum of the tensors. Reading
gives either what was written or the error `DamagedFile`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedmll.core import files
from fedmll.core.errors import DataError
from fedmll.core.message import Tensors

FACTS, CHECKSUM, TENSORS_CHECKSUM = "facts", "sha256", "tensors_sha256"


class DamagedFile(DataError):
    """A file is missing, or is not what was written. The message names the file."""


def write_tensors(
    path: Path, tensors: Tensors, facts: Mapping[str, Any] | None = None, *, durable: bool = True
) -> None:
    """Write a tensor file; for `durable` see `files.atomic_replace`."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    text = json.dumps({**(facts or {}), TENSORS_CHECKSUM: _checksum(tensors)})
    with files.atomic_replace(path, durable=durable) as temporary:
        save_file(tensors, temporary, {FACTS: text, CHECKSUM: _text_checksum(text)})


def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a tensor file. Its tensors are not read."""
    return _read(path, with_tensors=False)[0]


def read_tensors(path: Path) -> Tensors:
    return _read(path, with_tensors=True)[1]


def _read(path: Path, *, with_tensors: bool) -> tuple[dict[str, Any], Tensors]:
    facts: dict[str, Any] = {}
    tensors: Tensors = {}
    try:
        with safe_open(path, "pt") as opened:
            header = opened.metadata()
            facts = json.loads(header[FACTS])
            is_whole = header[CHECKSUM] == _text_checksum(header[FACTS])
            if is_whole and with_tensors:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
                is_whole = facts[TENSORS_CHECKSUM] == _checksum(tensors)
    except FileNotFoundError:
        raise DamagedFile(f"{path} is missing.") from None
    except SafetensorError as error:
        raise DamagedFile(f"{path} is damaged ({error}).") from None
    except (ValueError, KeyError, TypeError, RuntimeError):  # it has no checksum, or no tensor has these bytes
        is_whole = False
    if not is_whole:
        raise DamagedFile(f"{path} is damaged (its checksum does not match).")
    return facts, tensors


def _text_checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def checksum_with_description(tensors: Tensors, description: Mapping[str, Any]) -> str:
    """SHA-256 of a model file: of its tensors, and of its description without the key `checksum`."""
    described = {name: value for name, value in description.items() if name != "checksum"}
    return _text_checksum(json.dumps(described, sort_keys=True) + _checksum(tensors))


def _checksum(tensors: Tensors) -> str:
    """SHA-256 of the names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\x1f{tensor.dtype}\x1f{tuple(tensor.shape)}\x1f".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
