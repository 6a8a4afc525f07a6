"""`ReproductionRecord`: what reproduction.json holds, in a folder of `fedmll reproduce`; reports read it."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel

from fedmll.core.errors import DataError
from fedmll.core.text import printable

REPRODUCTION_FILE = "reproduction.json"


class TitledTable(BaseModel):
    title: str
    header: list[str]
    rows: list[list[str]]


class ReproductionRecord(BaseModel):
    """The contents of reproduction.json."""

    title: str
    groups: list[str]
    tables: list[TitledTable]
    notes: list[str]


def read_reproduction(folder: Path) -> ReproductionRecord | None:
    """The record in a folder of `fedmll reproduce`; None if there is none. DataError if it is damaged."""
    file = folder / REPRODUCTION_FILE
    if not file.is_file():
        return None
    try:
        record = ReproductionRecord.model_validate(json.loads(file.read_bytes()))
        if any(Path(group).name != group for group in record.groups):
            raise ValueError("a group is not the name of a folder")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is damaged ({printable(error, 160)}). `fedmll reproduce` writes it again.") from None
    return record
