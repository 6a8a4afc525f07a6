"""Are the margins of a comparison more than chance?

Over seeds: Wilcoxon's signed-rank test, with Holm's correction for the number of rows. Over test samples: the paired
bootstrap, from the stored predictions of the runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedmll.core import registry
from fedmll.core.errors import DataError
from fedmll.evaluation.bootstrap import CONFIDENCE, DRAWS, VECTORISED, bootstrap_distribution, percentile_interval
from fedmll.evaluation.ranking import Floats
from fedmll.evaluation.significance import LEVEL, holm, lowest_p, seeds_needed, wilcoxon
from fedmll.evaluation.thresholds import best_thresholds
from fedmll.runs.array_files import Predictions
from fedmll.runs.formatting import TextTable, format_number

if TYPE_CHECKING:
    from fedmll.comparison.results import Comparison, ComparisonRow

BOOTSTRAP_SEED = 0  # the same comparison always has the same intervals
SAMPLES, PATIENTS = "samples", "patients"  # what the bootstrap draws

RunKey = tuple[str, int]  # row and seed
StoredPredictions = Mapping[RunKey, Predictions | str]  # or the reason why there are none
Distributions = Mapping[RunKey, Mapping[str, Floats]]  # metric → its value in each draw


@dataclass(frozen=True, kw_only=True)
class MarginTest:
    """The margin of a row over the reference row in one metric, over the seeds that both have."""

    row: str
    metric: str
    seeds: int  # how many
    margin: float = math.nan  # the mean over the seeds
    low: float = math.nan  # the interval over test samples; NaN without stored predictions
    high: float = math.nan
    p: float = math.nan  # of Wilcoxon's test; NaN without a seed
    adjusted: float = math.nan  # p after Holm's correction
    drawn: str = SAMPLES  # what the bootstrap draws, samples or patients
    missing: str = ""  # why there is no interval


def compute_margin_tests(
    comparison: Comparison, against: str, metrics: Sequence[str], draws: int = DRAWS
) -> list[MarginTest]:
    """One test for each metric and each row other than `against`."""
    (base,) = (row for row in comparison.rows if row.label == against)
    others = [row for row in comparison.rows if row is not base]
    stored = {(row.label, seed): found for row in comparison.rows for seed, found in _read_predictions(row).items()}
    units, drawn = _drawn_units([found for found in stored.values() if isinstance(found, Predictions)])
    names = [name for name in metrics if name in VECTORISED or name in registry.find_added("metric")]
    distributions = {
        key: bootstrap_distribution(
            found.probabilities, found.targets, np.searchsorted(units, _unit_names(found, drawn)), len(units),
            BOOTSTRAP_SEED, names, _tuned_thresholds(comparison, *key), draws,
        )
        for key, found in stored.items()
        if isinstance(found, Predictions)
    }  # fmt: skip
    tests = []
    for metric in dict.fromkeys(metrics):
        of_metric = [_test_margin(row, base, metric, distributions, stored, drawn) for row in others]
        adjusted = holm([test.p for test in of_metric])
        tests += [replace(test, adjusted=p) for test, p in zip(of_metric, adjusted, strict=True)]
    return tests


def _read_predictions(row: ComparisonRow) -> dict[int, Predictions | str]:
    """By seed."""
    found: dict[int, Predictions | str] = {}
    for cell in row.cells:
        if cell.summary is not None:
            try:
                found[cell.seed] = cell.folder.read_predictions()
            except DataError as error:
                found[cell.seed] = str(error)
    return found


def _tuned_thresholds(comparison: Comparison, label: str, seed: int) -> NDArray[np.float64] | None:
    """The thresholds of macro_f1_tuned: chosen on the validation data, and the same in every draw."""
    (folder,) = (c.folder for row in comparison.rows if row.label == label for c in row.cells if c.seed == seed)
    try:
        validation = folder.read_predictions("validation")
    except DataError:
        return None
    return best_thresholds(validation.probabilities, validation.targets) if len(validation) else None


def _drawn_units(predictions: Sequence[Predictions]) -> tuple[NDArray[np.generic], str]:
    """What is drawn: all patients, or all samples, that are in the test data of some seed.

    A unit that is drawn is drawn in the test data of every seed that has it, for both rows: seeds that share test
    samples are not independent.
    """
    drawn = PATIENTS if predictions and all(found.patients is not None for found in predictions) else SAMPLES
    names = [_unit_names(found, drawn) for found in predictions]
    return (np.unique(np.concatenate(names)) if names else np.array([])), drawn


def _unit_names(predictions: Predictions, drawn: str) -> NDArray[np.generic]:
    return predictions.rows if drawn == SAMPLES or predictions.patients is None else predictions.patients


def _test_margin(
    row: ComparisonRow, base: ComparisonRow, metric: str, distributions: Distributions, stored: StoredPredictions,
    drawn: str,
) -> MarginTest:  # fmt: skip
    ours, theirs = row.values(metric), base.values(metric)
    margins = {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}
    margins = {seed: margin for seed, margin in margins.items() if not math.isnan(margin)}
    if not margins:
        return MarginTest(row=row.label, metric=metric, seeds=0)
    low, high, missing = math.nan, math.nan, _reason_without_interval(row.label, base.label, list(margins), stored)
    pairs = [(distributions.get((row.label, seed), {}), distributions.get((base.label, seed), {})) for seed in margins]
    if not missing and all(metric in one and metric in other for one, other in pairs):
        low, high = percentile_interval(np.mean([one[metric] - other[metric] for one, other in pairs], axis=0))
    return MarginTest(
        row=row.label,
        metric=metric,
        seeds=len(margins),
        margin=float(np.mean(list(margins.values()))),
        low=low,
        high=high,
        p=wilcoxon(list(margins.values())),
        drawn=drawn,
        missing=missing,
    )


def _reason_without_interval(label: str, against: str, seeds: Sequence[int], stored: StoredPredictions) -> str:
    """Why the draws of two rows cannot be compared; empty if they can."""
    for seed in seeds:
        one, other = stored[label, seed], stored[against, seed]
        for found in (one, other):
            if isinstance(found, str):
                return found
        if not (np.array_equal(one.rows, other.rows) and np.array_equal(one.targets, other.targets)):  # type: ignore[union-attr]
            return f"{label} and {against} were tested on different samples."
    return ""


def table_of_tests(against: str, tests: Sequence[MarginTest]) -> TextTable:
    header = [f"margin over {against}", "metric", "margin", f"{CONFIDENCE:.0%} interval", "p", "p (Holm)", "seeds"]
    rows = []
    for test in tests:
        interval = "–" if math.isnan(test.low) else f"{test.low:+.2f} … {test.high:+.2f}"
        margin = "–" if math.isnan(test.margin) else f"{test.margin:+.2f}"
        p_values = [format_number(test.p, 4), format_number(test.adjusted, 4)]
        rows.append([test.row, test.metric, margin, interval, *p_values, str(test.seeds)])
    return header, rows


def notes_on_tests(tests: Sequence[MarginTest]) -> list[str]:
    """Which tests were used, what they cannot show, and which intervals are missing."""
    done = [test for test in tests if test.seeds]
    if not done:
        return []
    seeds, rows = max(test.seeds for test in done), len({test.row for test in done})
    corrected = f"; Holm: corrected for the {rows} rows of a metric" if rows > 1 else ""
    lines = [f"p: Wilcoxon signed-rank test over {seeds} seeds, two-sided, exact{corrected}."]
    lowest = lowest_p(seeds, rows)
    if lowest >= LEVEL:
        corrected = f", and {lowest:g} after Holm's correction for {rows} rows" if rows > 1 else ""
        lines.append(
            f"{seeds} seeds are too few to reach p < {LEVEL}: the lowest p that they can give is "
            f"{lowest_p(seeds):g}{corrected}. {seeds_needed(rows)} seeds can."
        )
    if any(not math.isnan(test.low) for test in done):
        drawn = next(test.drawn for test in done if not math.isnan(test.low))
        lines.append(
            f"{CONFIDENCE:.0%} interval of the margin (mean over the seeds): {DRAWS} bootstrap draws of the test "
            f"{drawn}, the same draws for all rows; it says nothing about other seeds."
        )
    missing = dict.fromkeys(f"no interval for {test.row}: {test.missing}" for test in done if test.missing)
    return lines + list(missing)
