"""Which claims of the papers hold here? Reads folders of `fedmll reproduce` and compares the rows that a claim names.

Two rows are compared seed by seed. d is the mean over the seeds of the difference (positive: as claimed), with the 95 %
interval of Student's t over the seeds.

holds              the interval is above 0; for a claim of equality: within ± its tolerance
does not hold      the interval is below 0; for a claim of equality: outside of its tolerance
cannot be judged   anything else: the interval contains both answers, or there are fewer than two seeds

claims.md    the page: a table for each table of a paper that was run, and what was not run
claims.csv   one line per claim, pair of rows, metric and column group
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedmll.comparison.reproduction_record import REPRODUCTION_FILE, ReproductionRecord, read_reproduction
from fedmll.config.claims import Claim, read_claims
from fedmll.core import files
from fedmll.core.errors import DataError
from fedmll.evaluation.metric_definitions import lower_is_better
from fedmll.runs.formatting import TextTable, escape_markdown, format_csv, markdown_table

HOLDS, FAILS, UNDECIDED, NOT_CLAIMED, NOT_RUN = (
    "holds", "does not hold", "cannot be judged", "not claimed", "not run"
)  # fmt: skip
COUNTED = (HOLDS, FAILS, UNDECIDED, NOT_RUN)
CONFIDENCE = 0.95
FEWEST_SEEDS = 2


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A claim in one metric and column group.

    Attributes:
        claim: the claim.
        worse: the row that is compared with `claim.better`.
        metric: the column.
        group: the column group.
        published: the published difference; None: the paper has no such figures.
        margins: the difference of each seed that both rows have; positive: as claimed.
    """

    claim: Claim
    worse: str
    metric: str
    group: str
    published: float | None
    margins: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.margins)) if self.margins else math.nan

    @property
    def half_width(self) -> float:
        """Half of the interval; infinite with fewer than two seeds."""
        from scipy.stats import t  # here: it takes most of a second

        seeds = len(self.margins)
        if seeds < FEWEST_SEEDS:
            return math.inf
        return float(t.ppf((1 + CONFIDENCE) / 2, seeds - 1) * np.std(self.margins, ddof=1) / math.sqrt(seeds))

    @property
    def verdict(self) -> str:
        tolerance = self.claim.equal_within
        if tolerance is None and self.published is not None and self.published <= 0:
            return NOT_CLAIMED
        if not self.margins:
            return NOT_RUN
        low, high = self.mean - self.half_width, self.mean + self.half_width
        if tolerance is None:
            return HOLDS if low > 0 else FAILS if high < 0 else UNDECIDED
        if -tolerance < low and high < tolerance:
            return HOLDS
        return FAILS if low > tolerance or high < -tolerance else UNDECIDED

    @property
    def text(self) -> str:
        """The verdict with its numbers."""
        if self.verdict in (NOT_CLAIMED, NOT_RUN):
            return self.verdict
        interval = f" ± {self.half_width:.2f}" if math.isfinite(self.half_width) else ", one seed"
        paper = "" if self.published is None else f"; paper {self.published:+.2f}"
        return f"{self.verdict} ({self.mean:+.2f}{interval}{paper})"


@dataclass(frozen=True, kw_only=True)
class JudgedClaims:
    """All claims with what the reproductions in a folder say about them.

    Attributes:
        records: the tables that were run, by name.
        findings: one entry per claim, pair of rows, metric and column group of these tables.
        not_run: claims about tables that were not run.
    """

    records: dict[str, ReproductionRecord]
    findings: list[Finding]
    not_run: list[Claim]

    @property
    def summary(self) -> TextTable:
        """The number of findings per table and verdict."""
        rows = []
        for name in self.records:
            counts = Counter(finding.verdict for finding in self.findings if finding.claim.table == name)
            rows.append([name, *(str(counts[verdict]) for verdict in COUNTED)])
        total = Counter(finding.verdict for finding in self.findings)
        return ["table", *COUNTED], [*rows, ["all", *(str(total[verdict]) for verdict in COUNTED)]]

    def table_of(self, name: str) -> TextTable:
        """The findings of one table: a line per pair of rows and metric, a column per column group."""
        found = [finding for finding in self.findings if finding.claim.table == name]
        groups = list(dict.fromkeys(finding.group for finding in found))
        lines: dict[tuple[str, str], dict[str, str]] = {}
        for finding in found:
            sign = ">" if finding.claim.equal_within is None else "="
            pair = f"{finding.claim.better} {sign} {finding.worse}"
            lines.setdefault((pair, finding.metric), {})[finding.group] = finding.text
        rows = [[*key, *(cells.get(group, "–") for group in groups)] for key, cells in lines.items()]
        return ["rows", "metric", *(group or "result" for group in groups)], rows

    def page(self) -> str:
        """claims.md."""
        parts = [markdown_table(*self.summary)]
        for name, record in self.records.items():
            statements = [claim.statement for claim in read_claims() if claim.table == name]
            if not statements:
                continue
            title = escape_markdown(record.title)
            said = "; ".join(map(escape_markdown, dict.fromkeys(statements)))
            command = f"```console\n{command_of(record)}\n```\n"
            settings = "".join(f"- {escape_markdown(line)}\n" for line in different_settings(record))
            parts += [f"## {title}\n", command, f"Claims: {said}.\n", markdown_table(*self.table_of(name))]
            parts += [f"Settings that differ from the paper's table (in the first column group):\n\n{settings}"]
        if self.not_run:
            parts.append("## Not run\n")
            lines = [f"- `{claim.table}`: {escape_markdown(claim.statement)}\n" for claim in self.not_run]
            parts.append("".join(lines))
        return "\n".join(parts)

    def csv_rows(self) -> Iterable[list[Any]]:
        yield [
            "table", "statement", "better", "worse", "metric", "group", "published", "difference", "half_width",
            "seeds", "verdict",
        ]  # fmt: skip
        for finding in self.findings:
            claim, wide = finding.claim, finding.half_width
            published = "" if finding.published is None else round(finding.published, 4)
            numbers = [finding.mean if finding.margins else "", wide if math.isfinite(wide) else ""]
            cells = [claim.table, claim.statement, claim.better, finding.worse, finding.metric, finding.group]
            yield [*cells, published, *numbers, len(finding.margins), finding.verdict]

    def write(self, out: Path) -> None:
        files.write_atomic(out / "claims.md", self.page())
        files.write_atomic(out / "claims.csv", format_csv(self.csv_rows()))


def judge_claims(folder: Path | str) -> JudgedClaims:
    """Judge all claims by the reproductions in a folder: each is one of its folders, as `fedmll reproduce` writes it.

    Raises:
        DataError: there is none, or two of them are the same table.
    """
    records: dict[str, ReproductionRecord] = {}
    for file in sorted(Path(folder).glob(f"*/{REPRODUCTION_FILE}")):
        record = read_reproduction(file.parent)
        assert record is not None
        if record.table in records:
            raise DataError(f"{folder} has two folders of {record.table}; move one of them away.")
        records[record.table] = record
    if not records:
        raise DataError(f"{folder} has no folder of `fedmll reproduce` (with {REPRODUCTION_FILE}).")
    claims = read_claims()
    order = list(dict.fromkeys(claim.table for claim in claims))
    records = {name: records[name] for name in order if name in records}
    findings = [finding for claim in claims if claim.table in records for finding in judge(claim, records[claim.table])]
    return JudgedClaims(
        records=records, findings=findings, not_run=[claim for claim in claims if claim.table not in records]
    )


def judge(claim: Claim, record: ReproductionRecord) -> list[Finding]:
    """The findings of a claim, by pair of rows, metric and column group."""
    values = {(value.group, value.row, value.metric): value for value in record.values}
    groups = list(dict.fromkeys(value.group for value in record.values))
    findings = []
    for worse in claim.worse:
        for metric in claim.metrics:
            sign = -1 if lower_is_better(metric) else 1
            for group in groups:
                first, second = (values.get((group, row, metric)) for row in (claim.better, worse))
                if first is None or second is None:
                    continue
                published = None
                if first.published is not None and second.published is not None:
                    published = sign * (first.published - second.published)
                seeds = sorted(first.ours.keys() & second.ours.keys())
                pairs = [(first.ours[seed], second.ours[seed]) for seed in seeds]
                findings.append(
                    Finding(
                        claim=claim,
                        worse=worse,
                        metric=metric,
                        group=group,
                        published=published,
                        margins=tuple(sign * (a - b) for a, b in pairs if a is not None and b is not None),
                    )
                )
    return findings


def command_of(record: ReproductionRecord) -> str:
    """The command that made a reproduction; where the data is depends on the machine."""
    small, seeds = " --small" if record.small else "", ",".join(map(str, record.seeds))
    groups = f" --groups {','.join(record.groups)}" if record.some_groups else ""
    return f"fedmll reproduce {record.table}{small}{groups} --seeds {seeds} --root DATA"


def different_settings(record: ReproductionRecord) -> Sequence[str]:
    """`setting: value here (value of the full table)`, of the first column group."""
    first = next(iter(record.changed_settings.values()), {})
    return [f"{key}: {here} (paper: {paper})" for key, (paper, here) in first.items()] or ["none"]
