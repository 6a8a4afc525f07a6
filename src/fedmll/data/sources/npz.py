"""Read untrusted `.npz` files: no pickled objects, and errors that name the file."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import DataError


def read_npz(file: Path, needed: Iterable[str], optional: Iterable[str] = ()) -> dict[str, NDArray[Any]]:
    """The arrays `needed`, and those of `optional` that exist; other arrays are not read."""
    needed, optional = list(needed), list(optional)
    if not file.is_file():
        raise DataError(
            f"The file '{file}' does not exist; an .npz with the arrays {', '.join(needed)} is expected there."
        )
    try:
        if not zipfile.is_zipfile(file):  # numpy would also accept a plain .npy file
            raise ValueError("it is not a zip archive, as every .npz is")
        with np.load(file, allow_pickle=False) as archive:
            names = archive.files
            missing = [name for name in needed if name not in names]
            if not missing:
                return {name: archive[name] for name in [*needed, *optional] if name in names}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"'{file}' is not a readable .npz of plain arrays ({error}). Copy it again, or write it with numpy.savez."
        ) from None
    raise DataError(
        f"'{file}' has no array '{missing[0]}'; needed are {', '.join(needed)}, and it has "
        f"{', '.join(names) or 'none'}."
    )


def class_names(arrays: dict[str, NDArray[Any]], count: int) -> tuple[str, ...]:
    """The array `classes`, or names made from class numbers."""
    if "classes" in arrays:
        return tuple(str(name) for name in arrays["classes"])
    return tuple(f"class {number}" for number in range(count))
