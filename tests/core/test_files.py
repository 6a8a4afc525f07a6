"""Files that cannot be written: the error names the file, and nothing half-written is left."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmll.core import files
from fedmll.core.processes import portable_error
from fedmll.core.tensor_files import write_tensors
from fedmll.runs.run_folder import RunFolder


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_error_of_a_full_disk_names_the_file_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "summary.json"
    files.write_atomic(file, "old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError) as found:
        files.write_atomic(file, "new")
    assert found.value.filename == str(file)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"] and file.read_text() == "old"
    described = files.describe_file_error(found.value)
    assert described is not None and described.startswith(f"{file} cannot be written: the disk is full")


def test_error_of_safetensors_becomes_an_error_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(*_: object) -> None:
        raise RuntimeError("Error while serializing: I/O error: Read-only file system (os error 30)")

    monkeypatch.setattr("fedmll.core.tensor_files.save_file", save)
    with pytest.raises(OSError) as found:
        write_tensors(tmp_path / "x.safetensors", {"x": torch.zeros(1)})
    described = files.describe_file_error(found.value)
    assert described is not None and "x.safetensors cannot be written or read (Read-only file system)" in described


def test_error_of_a_hidden_file_names_its_folder(tmp_path: Path) -> None:
    described = files.describe_file_error(OSError(errno.EACCES, "Permission denied", str(tmp_path / ".lock")))
    assert described is not None and described.startswith(f"{tmp_path} cannot be written or read (Permission denied)")


def test_error_without_a_file_is_not_described() -> None:
    assert files.describe_file_error(ConnectionResetError(errno.ECONNRESET, "Connection reset")) is None
    assert files.describe_file_error(OSError("something else")) is None


def test_full_disk_writes_no_part_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"round": 1})
    before, opened = (tmp_path / "metrics.jsonl").read_bytes(), Path.open

    class Partial(io.FileIO):
        """A file on a disk with room for three more bytes."""

        def write(self, content: Any) -> int:
            return super().write(content[:3])

    def open_partial(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        return Partial(path, mode) if mode == "ab" else opened(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_partial)
    with pytest.raises(OSError, match="No space left"):
        folder.append_metrics({"round": 2})
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_error_of_another_process_keeps_its_meaning(tmp_path: Path) -> None:
    kind, arguments = portable_error(OSError(errno.ENOSPC, "No space left on device", str(tmp_path)), "in a worker")
    again = kind(*arguments)
    assert isinstance(again, OSError) and files.is_disk_full(again) and again.filename == str(tmp_path)
    kind, arguments = portable_error(RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "in a worker")
    assert kind is MemoryError
    try:
        raise ValueError("a bug")
    except ValueError as error:
        kind, arguments = portable_error(error, "in a worker")
    assert kind is RuntimeError and "in a worker:\nTraceback" in arguments[0] and "a bug" in arguments[0]
