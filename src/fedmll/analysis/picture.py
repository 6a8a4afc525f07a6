"""A picture of a report: drawn once, shown in the page, kept as PNG, SVG and the numbers it was drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    name: str  # of its files: "attention-cat"
    title: str
    words: str  # what one sees, in a sentence or two
    figure: Figure
    rows: list[dict[str, Any]] = field(default_factory=list)  # its numbers, as the CSV has them
