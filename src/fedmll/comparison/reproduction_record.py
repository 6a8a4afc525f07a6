"""`ReproductionRecord`: what reproduction.json holds, in a folder of `fedmll reproduce`; reports and claims read it."""

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


class RecordedValue(BaseModel):
    """A figure of the table: what the paper has, and the value of each finished seed."""

    group: str
    row: str
    metric: str
    published: float | None
    ours: dict[int, float | None]  # None: the metric is undefined


class ReproductionRecord(BaseModel):
    """The contents of reproduction.json.

    Attributes:
        table: for example fednca-ml/1.
        small: whether it is the small variant.
        seeds: the seeds that were asked for.
        title: for people.
        groups: the column groups that were run.
        some_groups: whether the table has others too.
        changed_settings: group → setting → the value of the full table and the value here.
        values: one entry per group, row and metric.
        tables: the tables of reproduction.md.
        notes: what a reader must know.
    """

    table: str
    small: bool
    seeds: list[int]
    title: str
    groups: list[str]
    some_groups: bool
    changed_settings: dict[str, dict[str, tuple[str, str]]]
    values: list[RecordedValue]
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
