"""Are the margins of a comparison more than chance? Over seeds: Wilcoxon's signed-rank test, corrected over the rows by
Holm. Over test samples: the paired bootstrap, from the predictions that the runs kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedmll import registry
from fedmll.errors import DataError
from fedmll.evaluation.intervals import COVERED, DRAWS, distribution, limits
from fedmll.evaluation.metrics import Floats, best_thresholds
from fedmll.evaluation.paired import LEVEL, holm, lowest_p, seeds_needed, wilcoxon
from fedmll.evaluation.redrawn import QUICK
from fedmll.running.folder import PREDICTIONS
from fedmll.running.predictions import Predictions, read_predictions
from fedmll.running.shown import number

if TYPE_CHECKING:
    from fedmll.running.comparison import Comparison, Row

SEED = 0  # of the drawings: one comparison, one interval


@dataclass(frozen=True)
class MarginTest:
    """A row's margin over the reference in one metric, over the seeds that both have."""

    row: str
    metric: str
    seeds: int
    margin: float  # the mean over the seeds
    low: float  # of the interval over test samples; NaN without kept predictions
    high: float
    p: float  # NaN without a seed
    adjusted: float = math.nan
    drawn: str = "samples"  # or patients
    missing: str = ""  # why there is no interval


def margin_tests(comparison: Comparison, against: str, metrics: Sequence[str], draws: int = DRAWS) -> list[MarginTest]:
    """Every row and metric, by metric."""
    (base,) = (row for row in comparison.rows if row.label == against)
    others = [row for row in comparison.rows if row is not base]
    kept = {(row.label, seed): found for row in comparison.rows for seed, found in _kept(row).items()}
    units, drawn = _units([found for found in kept.values() if isinstance(found, Predictions)])
    names = [name for name in metrics if name in QUICK or name in registry.added("metric")]
    redrawn = {
        key: distribution(
            found.probabilities, found.targets, _places(found, units, drawn), len(units), SEED, names,
            _thresholds(comparison, *key), draws,
        )
        for key, found in kept.items()
        if isinstance(found, Predictions)
    }  # fmt: skip
    results = []
    for metric in dict.fromkeys(metrics):
        found = [_test(row, base, metric, redrawn, kept, drawn) for row in others]
        adjusted = holm([test.p for test in found])
        results += [replace(test, adjusted=p) for test, p in zip(found, adjusted, strict=True)]
    return results


Kept = Mapping[tuple[str, int], Predictions | str]  # by row and seed: predictions, or why there are none
Redrawn = Mapping[tuple[str, int], Mapping[str, Floats]]


def _kept(row: Row) -> dict[int, Predictions | str]:
    found: dict[int, Predictions | str] = {}
    for cell in row.cells:
        if cell.summary is not None:
            try:
                found[cell.seed] = read_predictions(cell.folder / PREDICTIONS)
            except DataError as error:
                found[cell.seed] = str(error)
    return found


def _thresholds(comparison: Comparison, label: str, seed: int) -> NDArray[np.float64] | None:
    """Those of macro_f1_tuned: chosen on the validation data, and the same in every drawing."""
    (folder,) = (c.folder for row in comparison.rows if row.label == label for c in row.cells if c.seed == seed)
    try:
        found = read_predictions(Path(folder) / PREDICTIONS, "validation")
    except DataError:
        return None
    return best_thresholds(found.probabilities, found.targets) if len(found) else None


def _units(every: Sequence[Predictions]) -> tuple[NDArray[np.generic], str]:
    """What is drawn: all patients, or all samples, that are in the test data of some seed. Where one is drawn it is
    drawn in every seed's test data that has it, for both rows: nothing is taken for independent that is not."""
    drawn = "patients" if every and all(found.patients is not None for found in every) else "samples"
    names = [_names(found, drawn) for found in every]
    return (np.unique(np.concatenate(names)) if names else np.array([])), drawn


def _names(found: Predictions, drawn: str) -> NDArray[np.generic]:
    return found.rows if drawn == "samples" or found.patients is None else found.patients


def _places(found: Predictions, units: NDArray[np.generic], drawn: str) -> NDArray[np.int64]:
    return np.searchsorted(units, _names(found, drawn))


def _test(row: Row, base: Row, metric: str, redrawn: Redrawn, kept: Kept, drawn: str) -> MarginTest:
    ours, theirs = row.values(metric), base.values(metric)
    pairs = {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}
    pairs = {seed: margin for seed, margin in pairs.items() if not math.isnan(margin)}
    if not pairs:
        return MarginTest(row.label, metric, 0, math.nan, math.nan, math.nan, math.nan)
    margin, p = float(np.mean(list(pairs.values()))), wilcoxon(list(pairs.values()))
    low, high, missing = math.nan, math.nan, _unpaired(row.label, base.label, list(pairs), kept)
    both = [(redrawn.get((row.label, seed), {}), redrawn.get((base.label, seed), {})) for seed in pairs]
    if not missing and all(metric in one and metric in other for one, other in both):
        low, high = limits(np.mean([one[metric] - other[metric] for one, other in both], axis=0))
    return MarginTest(row.label, metric, len(pairs), margin, low, high, p, drawn=drawn, missing=missing)


def _unpaired(label: str, against: str, seeds: Sequence[int], kept: Kept) -> str:
    """Why the drawings of two rows cannot be compared; empty if they can."""
    for seed in seeds:
        one, other = kept[label, seed], kept[against, seed]
        for found in (one, other):
            if isinstance(found, str):
                return found
        if not (np.array_equal(one.rows, other.rows) and np.array_equal(one.targets, other.targets)):  # type: ignore[union-attr]
            return f"{label} and {against} were tested on different samples."
    return ""


def table_of_tests(against: str, tests: Sequence[MarginTest]) -> tuple[list[str], list[list[str]]]:
    header = [f"margin over {against}", "metric", "margin", f"{COVERED:.0%} interval", "p", "p (Holm)", "seeds"]
    rows = []
    for test in tests:
        interval = "–" if math.isnan(test.low) else f"{test.low:+.2f} … {test.high:+.2f}"
        margin = "–" if math.isnan(test.margin) else f"{test.margin:+.2f}"
        rows.append(
            [test.row, test.metric, margin, interval, number(test.p, 4), number(test.adjusted, 4), str(test.seeds)]
        )
    return header, rows


def notes_on_tests(tests: Sequence[MarginTest]) -> list[str]:
    """What the tests are, what they cannot show, and where there is none."""
    done = [test for test in tests if test.seeds]
    if not done:
        return []
    seeds, rows = max(test.seeds for test in done), len({test.row for test in done})
    corrected = f"; Holm: corrected over the {rows} rows of a metric" if rows > 1 else ""
    lines = [f"p: Wilcoxon signed-rank test over {seeds} seeds, two-sided, exact{corrected}."]
    best = lowest_p(seeds, rows)
    if best >= LEVEL:
        corrected = f", and {best:g} after Holm's correction over {rows} rows" if rows > 1 else ""
        lines.append(
            f"{seeds} seeds are too few to reach p < {LEVEL}: the lowest that they can give is "
            f"{lowest_p(seeds):g}{corrected}. {seeds_needed(rows)} seeds can."
        )
    if any(not math.isnan(test.low) for test in done):
        drawn = next(test.drawn for test in done if not math.isnan(test.low))
        lines.append(
            f"{COVERED:.0%} interval: of the margin (mean over the seeds) over {DRAWS} drawings of the test {drawn}, "
            "the same for all rows; it says nothing of other seeds."
        )
    missing = dict.fromkeys(f"no interval for {test.row}: {test.missing}" for test in done if test.missing)
    return lines + list(missing)
