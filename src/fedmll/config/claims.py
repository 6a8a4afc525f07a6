"""Claims: what the papers say about two rows of a table. They are read from `claims.toml`:

table          the table, as `fedmll reproduce --list` shows it
statement      the claim, for people
better, worse  a row, and the rows that it is compared with
metrics        the columns in which they are compared
equal_within   the claim is that the rows are equal: the largest difference that counts as equal
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict, Field


class Claim(BaseModel):
    """One claim of a paper."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    table: str
    statement: str
    better: str
    worse: tuple[str, ...]
    metrics: tuple[str, ...]
    equal_within: float | None = Field(default=None, gt=0)


@cache
def read_claims() -> tuple[Claim, ...]:
    """All claims, in the order of the papers."""
    text = (files("fedmll.config") / "claims.toml").read_text("utf-8")
    return tuple(Claim.model_validate(claim) for claim in tomllib.loads(text)["claims"])
