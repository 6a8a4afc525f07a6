"""Read `.npz` files that may be damaged or malicious: no pickled objects, and sizes are checked before reading."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from fedmll.core.errors import DataError

HEADER_READERS = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}
NPY = ".npy"


def read_npz(file: Path, needed: Iterable[str], optional: Iterable[str] = ()) -> dict[str, NDArray[Any]]:
    """The arrays `needed`, and those of `optional` that exist; other arrays are not read."""
    needed = list(needed)
    if not file.is_file():
        raise DataError(
            f"The file '{file}' does not exist; an .npz with the arrays {', '.join(needed)} is expected there."
        )
    try:
        if not zipfile.is_zipfile(file):  # numpy would also accept a plain .npy file
            raise ValueError("it is not a zip archive, as every .npz is")
        with zipfile.ZipFile(file) as archive:
            members = {info.filename.removesuffix(NPY): info for info in archive.infolist()}
            missing = [name for name in needed if name not in members]
            wanted = [name for name in [*needed, *optional] if name in members]
            if not missing:
                _check_memory(file, sum(members[name].file_size for name in wanted))
                for name in wanted:
                    _check_array(archive, members[name], name)
        if not missing:
            with np.load(file, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in wanted}
    except DataError:
        raise
    except Exception as error:  # a damaged archive can raise almost anything
        raise DataError(
            f"'{file}' is not a readable .npz of plain arrays ({error}). Copy it again, or write it with numpy.savez."
        ) from None
    raise DataError(
        f"'{file}' has no array '{missing[0]}'; needed are {', '.join(needed)}, and it has "
        f"{', '.join(members) or 'none'}."
    )


def _check_memory(file: Path, size: int) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else size
    if size > memory:
        raise DataError(
            f"The arrays of '{file}' have {size / 2**30:,.1f} GB, and this machine has {memory / 2**30:,.1f} GB of "
            "memory. Use fewer or smaller samples."
        )


def _check_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> None:
    """Compare the shape that the array's header declares with the bytes that are there."""
    if member.flag_bits & 1:
        raise ValueError("it is encrypted; store it without a password")
    with archive.open(member) as stream:
        version = npy_format.read_magic(stream)
        if version not in HEADER_READERS:
            raise ValueError(f"the array '{name}' has the unsupported format {version}")
        shape, _, kind = HEADER_READERS[version](stream)
        stored = member.file_size - stream.tell()
    if kind.hasobject:
        raise ValueError(f"the array '{name}' contains Python objects, which are not read because they can run code")
    if not shape:
        raise ValueError(f"the array '{name}' is a single value, and one entry per sample or class is needed")
    if min(shape) < 0 or math.prod(shape) * kind.itemsize != stored:
        raise ValueError(f"the array '{name}' declares the shape {shape} of {kind}, and has {stored:,} bytes")


def class_names(arrays: dict[str, NDArray[Any]], count: int, where: str) -> tuple[str, ...]:
    """The array `classes`, or names made from class numbers."""
    if "classes" not in arrays:
        return tuple(f"class {number}" for number in range(count))
    names = arrays["classes"]
    if names.ndim != 1:
        raise DataError(f"{where}: the array 'classes' has the shape {names.shape}; a list of names is needed.")
    return tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in names.tolist())
