"""A site's own report, "was it worth joining?": one HTML file in the look of the others, of what its test data says.
Nothing is claimed that an interval does not show, and classes with few samples are named instead of judged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from fedmll.evaluation.beside import FEW, LOWER_IS_BETTER, METRICS, Beside, Figure, Told
from fedmll.report.by_threshold import reliability
from fedmll.report.chart import LINES, NUMBER, Axis, Chart, Series
from fedmll.report.page import part_of, template
from fedmll.running.folder import to_json
from fedmll.running.predictions import Predictions

ALONE, ALONE_OWN, COMMON, COMMON_OWN = "alone", "alone, own", "common", "common, own"
LABELS = {
    ALONE: "your own model",
    ALONE_OWN: "your own model, tuned here",
    COMMON: "the common model",
    COMMON_OWN: "the common model, tuned here",
}
NAMES = {"map": "mAP", "auc": "AUC", "f1": "F1", "ece": "calibration error"}
OF_A_CLASS = NAMES | {"map": "Average precision", "ece": "Calibration error"}
BETTER, WORSE, OPEN = "better", "worse", "open"
CHANCE = 20  # one interval in so many misses zero where there is nothing


@dataclass(frozen=True)
class Worth:
    """What the page is made of. `told`: by the names above, of the test rows; without a model of its own only the
    common one's. `targets`: of the classes that the site annotates."""

    site: str
    study: str  # the experiment, in a few words
    classes: tuple[str, ...]
    told: Mapping[str, Told]
    targets: NDArray[np.int8]
    rows: str  # which rows thresholds were chosen on, and which the figures are of
    notes: Sequence[str] = ()  # what else a reader must know
    seed: int = 0
    patients: NDArray[np.str_] | None = None
    beside: Beside | None = field(default=None)  # None: too few rows for any figure


def judged(figure: Figure, metric: str) -> str:
    sign = -figure.sign if metric in LOWER_IS_BETTER else figure.sign
    return {1: BETTER, -1: WORSE, 0: OPEN}[sign]


def verdict(worth: Worth) -> str:
    """One sentence that a person may quote."""
    if worth.beside is None:
        return (
            f"Your test data is too small to say: no class has {FEW} images with it and {FEW} without it among the "
            f"{len(worth.targets)} test images. No figures are shown, because they would say more than is known."
        )
    if ALONE not in worth.told:
        value = worth.beside.average(COMMON, "map")
        return f"On your test data the common model has an mAP of {_interval(value)}."
    difference = worth.beside.difference(COMMON, ALONE, "map")
    said = f"mAP {_signed(difference)}"
    return {
        BETTER: f"The common model is better on your test data: {said}.",
        WORSE: f"Your own model is better on your test data than the common one: {said}.",
        OPEN: f"The common model and your own cannot be told apart on your test data: {said}.",
    }[judged(difference, "map")]


def by_class_words(worth: Worth) -> list[str]:
    """A paragraph of the classes that gained and lost, and one of those that nothing is said of."""
    found, beside = list[str](), worth.beside
    if beside is None:
        return found
    columns = np.flatnonzero(beside.enough).tolist()
    if ALONE in worth.told:
        sides = {column: judged(beside.difference(COMMON, ALONE, "map", column), "map") for column in columns}
        named = {side: ", ".join(worth.classes[c] for c in columns if sides[c] == side) for side in (BETTER, WORSE)}
        judgements = [f"{side} for {names}" for side, names in named.items() if names]
        if judgements:
            found.append(f"By average precision the common model is {'; it is '.join(judgements)}.")
        left = sum(side == OPEN for side in sides.values())
        if left:
            found.append(f"{_counted(left, 'class')} cannot be told apart.")
        if len(columns) > 1 and left < len(columns):
            found.append(
                f"Of {len(columns)} such intervals about one in {CHANCE} lies on one side of zero by chance: trust a "
                "single class less than the average."
            )
    found = [" ".join(found)] if found else []
    small = [
        f"{name} ({with_it} with, {without} without)"
        for name, with_it, without, enough in zip(
            worth.classes, beside.positives, beside.negatives, beside.enough, strict=True
        )
        if not enough
    ]
    if small:
        found.append(f"Too few test images to say (and in no average): {', '.join(small)}.")
    return found


def site_page(worth: Worth) -> str:
    charts = [] if worth.beside is None else [_calibration(worth)]
    data = to_json({"charts": [chart.as_json for chart in charts]}).replace("<", "\\u003c")
    return template("site.html.jinja").render(
        title=f"{worth.site}: was it worth joining?" if ALONE in worth.told else f"{worth.site}: the common model",
        about=f"{worth.study}. Written at your site by fedmll {version('fedmll')}; it was sent nowhere.",
        verdict=verdict(worth),
        side=_side(worth),
        by_class_words=by_class_words(worth),
        tiles=_tiles(worth),
        models=_models(worth),
        names=[NAMES[metric] for metric in METRICS],
        by_class=_by_class(worth),
        compared=ALONE in worth.told,
        charts={chart.name: chart for chart in charts},
        rows=worth.rows,
        notes=list(worth.notes),
        few=FEW,
        data=Markup(data),
        css=Markup(part_of("page.css") + part_of("site.css")),
        script=Markup(part_of("page.js")),
    )


def _side(worth: Worth) -> str:
    if worth.beside is None or ALONE not in worth.told:
        return OPEN
    return judged(worth.beside.difference(COMMON, ALONE, "map"), "map")


def _tiles(worth: Worth) -> list[dict[str, str]]:
    """What joining changed, a metric a tile: the ranking metrics of the models as they are, what is cut and calibrated
    with each model's own thresholds, so that like is compared with like."""
    if worth.beside is None or ALONE not in worth.told:
        return []
    words = {BETTER: "better", WORSE: "worse", OPEN: "cannot be told apart"}
    found = []
    for metric in METRICS:
        own = metric in ("f1", "ece")
        first, second = (COMMON_OWN, ALONE_OWN) if own else (COMMON, ALONE)
        figure = worth.beside.difference(first, second, metric)
        side = judged(figure, metric)
        found.append(
            {
                "name": NAMES[metric] + (", both tuned here" if own else ""),
                "value": _points(figure.value),
                "interval": f"{_points(figure.low)} to {_points(figure.high)}",
                "words": words[side],
                "side": side,
            }
        )
    return found


def _models(worth: Worth) -> list[dict[str, Any]]:
    beside = worth.beside
    if beside is None:
        return []
    return [
        {"label": LABELS[name], "figures": [_cell(beside.average(name, metric)) for metric in METRICS]}
        for name in worth.told
    ]


def _by_class(worth: Worth) -> list[dict[str, Any]]:
    """A table a metric; bars on one scale in each."""
    beside = worth.beside
    if beside is None:
        return []
    tables = []
    for metric in METRICS:
        own = metric in ("f1", "ece")
        first, second = (COMMON_OWN, ALONE_OWN) if own else (COMMON, ALONE)
        columns = np.flatnonzero(beside.enough).tolist()
        compared = ALONE in worth.told
        gaps = {column: beside.difference(first, second, metric, column) for column in columns} if compared else {}
        ends = [abs(end) for gap in gaps.values() for end in (gap.low, gap.high) if math.isfinite(end)]
        reach = max([1.0, *ends]) * 1.05
        lines = []
        for column in columns:
            line: dict[str, Any] = {
                "class": worth.classes[column],
                "with": int(beside.positives[column]),
                "without": int(beside.negatives[column]),
                "common": _cell(beside.of_class(first, metric, column)),
            }
            if compared:
                gap = gaps[column]
                line |= {
                    "alone": _cell(beside.of_class(second, metric, column)),
                    "gap": _points(gap.value),
                    "interval": f"{_points(gap.low)} to {_points(gap.high)}",
                    "side": judged(gap, metric),
                    "bar": {name: _place(getattr(gap, name), reach) for name in ("low", "value", "high")},
                }
            lines.append(line)
        words = "of both models, tuned here" if own else "of the models as they are"
        if metric in LOWER_IS_BETTER:
            words += "; lower is better"
        tables.append({"name": OF_A_CLASS[metric], "words": words, "lines": lines})
    return tables


def _calibration(worth: Worth) -> Chart:
    series, rows = [], np.arange(len(worth.targets))
    assert worth.beside is not None
    enough = np.flatnonzero(worth.beside.enough)
    classes = tuple(worth.classes[column] for column in enough)
    for place, (name, told) in enumerate(worth.told.items()):
        kept = Predictions(
            classes, np.asarray(told.probabilities, np.float32)[:, enough], worth.targets[:, enough], rows, None, None
        )
        series.append(Series(LABELS[name], place, reliability([kept])[0]))
    words = (
        "Below the diagonal a model claims more than is true. All classes with enough test images together; the band "
        "is the 95 % interval of the observed share (Wilson)."
    )
    x = Axis("predicted", "predicted probability", NUMBER, limits=(0, 1))
    y = Axis("observed", "observed share", NUMBER, limits=(0, 1))
    return Chart("calibration", "Is a probability what it says?", words, LINES, [x], [y], series, line="diagonal")


def _place(value: float, reach: float) -> str:
    """On a bar whose middle is zero, in percent of its width."""
    return f"{50 + 50 * value / reach:.2f}"


def _cell(figure: Figure) -> dict[str, str]:
    return {"value": _number(figure.value), "interval": f"{_number(figure.low)}–{_number(figure.high)}"}


def _number(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "–"


def _points(value: float) -> str:
    """A difference, with its sign; what is written 0.0 has none."""
    if not math.isfinite(value):
        return "–"
    text = f"{value:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")


def _signed(figure: Figure) -> str:
    return f"{_points(figure.value)} (95 % interval {_points(figure.low)} to {_points(figure.high)})"


def _interval(figure: Figure) -> str:
    return f"{_number(figure.value)} (95 % interval {_number(figure.low)} to {_number(figure.high)})"


def _counted(count: int, what: str) -> str:
    return f"{count} {what if count == 1 else f'{what}es'}"
