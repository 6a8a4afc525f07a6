"""What was run, in words; and the settings, those that all rows share and those that differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from fedmll.evaluation.pooled import POOLED, SITES
from fedmll.report.metric_names import called
from fedmll.report.results import UPPER_BOUND, contenders
from fedmll.report.runs import FINISHED, Run
from fedmll.report.study import Row, Study
from fedmll.running.comparison import mean_and_spread

COUNTED = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
KINDS = {
    "dirichlet": "a Dirichlet draw of each class (β = {beta:g})",
    "natural": "the sites that the data comes from",
    "labels-per-client": "{labels_per_client} classes each",
    "iid": "chance",
}
NO_DATA = "none"  # data.name at the server of a federation between machines
SITES_OWN = "the sites' own data"
GLUE = "\N{NO-BREAK SPACE}"
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}
NO_SETTING = ("seed", "engine", "plugins")
PATHS = ("data.root", "model.weights")  # of a machine: only the file's name is told

Settings = list[tuple[str, str]]


def paragraph(study: Study) -> str:
    """One paragraph; it says no more than the runs' files do."""
    sentences = [_what(study), _data(study), _training(study), _winner(study), _losses(study)]
    text = " ".join(sentence for sentence in sentences if sentence)
    return text.replace(" ± ", f"{GLUE}±{GLUE}").replace(" %", f"{GLUE}%")


def counted(number: int, thing: str) -> str:
    word = COUNTED[number] if number < len(COUNTED) else f"{number:,}"
    return f"{word} {thing}" + ("" if number == 1 else "es" if thing.endswith("ss") else "s")


def _what(study: Study) -> str:
    seeds = sorted({run.seed for run in study.runs})
    with_seeds = f"with the seed {seeds[0]}" if len(seeds) == 1 else f"with the seeds {_listed(seeds)}"
    if len(study.rows) == 1:
        return f"The method {study.rows[0].label} was run on {_source(study)} {with_seeds}."
    return f"{counted(len(study.rows), 'method').capitalize()} were compared on {_source(study)} {with_seeds}."


def _source(study: Study) -> str:
    found = {_name(run.experiment.get("data", {}).get("name", "?")) for run in study.runs if run.experiment}
    found = {SITES_OWN if name == NO_DATA else name for name in found}
    return _listed(sorted(found)) or "unknown data"


def _name(text: object) -> str:
    """`packed:/long/way/to/FILE.npz` is `packed:FILE.npz`."""
    kind, colon, path = str(text).rpartition(":")
    return f"{kind}{colon}{PurePath(path).name}"


def _data(study: Study) -> str:
    """Of the first finished run; the others have the same in a comparison."""
    run = next(iter(study.finished), None)
    if run is None:
        return ""
    try:
        found, parts = run.summary, run.summary["samples"]
        text = f"It has {counted(len(found['classes']), 'class')}"
        sizes = [f"{parts[name]:,} {word}" for name, word in _PARTS if parts.get(name)]
        text += f"; {_listed(sizes)} samples" if sizes else ""
        return f"{text}. {_division(run)}"
    except (KeyError, TypeError, ValueError):
        return ""


_PARTS = (("train", "training"), ("validation", "validation"), ("test", "test"))


def _division(run: Run) -> str:
    if run.experiment.get("data", {}).get("name") == NO_DATA:
        return f"{counted(int(run.summary['clients']), 'site').capitalize()} hold it."
    setting = run.experiment.get("partition", {})
    kind = str(setting.get("kind", ""))
    by = KINDS.get(kind, f"the rule “{kind}”").format(**{"beta": 0, "labels_per_client": 0} | setting)
    text = f"{counted(int(run.summary['clients']), 'client').capitalize()} share it, divided by {by}"
    annotation = run.experiment.get("annotation", {})
    if annotation.get("kind", "none") != "none":
        text += f"; not every client annotates every class ({annotation['kind']}"
        text += f", {annotation['missing']} missing)" if annotation.get("missing") else ")"
    return text + "."


def _training(study: Study) -> str:
    """What all rows have in common."""
    shared = dict(common(study.rows)[0])
    parts = []
    if "training.rounds" in shared:
        parts.append(counted(int(shared["training.rounds"]), "round"))
    if "training.local_epochs" in shared:
        parts.append(f"{counted(int(shared['training.local_epochs']), 'local epoch')} a round")
    optimizer, lr = shared.get("training.optimizer"), shared.get("training.lr")
    if optimizer:
        optimizer = OPTIMIZERS.get(optimizer, optimizer)
        parts.append(
            f"{optimizer} with a learning rate of {lr}" if lr else f"{optimizer} with each row's own learning rate"
        )
    backbone = shared.get("model.backbone")
    if backbone:
        frozen = ", frozen" if shared.get("model.freeze") == "backbone" else ""
        parts.append(f"the backbone {backbone}{frozen}")
    text = f"Training: {', '.join(parts)}." if parts else ""
    if study.trials:
        text += f" {counted(len(study.trials), 'more run').capitalize()} chose the settings on validation data."
    return text


def _winner(study: Study) -> str:
    """The best mean of the first metric that there is, among the methods that one can choose."""
    for metric in ("map", "macro_auc", "pooled_map", "sites_map", "pooled_macro_auc", "sites_macro_auc"):
        found = [(row, row.values(metric)) for row in study.rows]
        found = [(row, values) for row, values in found if len(values)]
        if not found:
            continue
        ranked = [pair for pair in found if pair[0] in contenders(study)] or found
        best, values = max(ranked, key=lambda pair: float(pair[1].mean()))
        figure = f"{mean_and_spread(np.asarray(values))} %"
        where = "" if metric.startswith((SITES, POOLED)) else " on the test data"
        if len(found) == 1:
            return f"Its {called(metric)}{where} is {figure}."
        text = f"The highest {called(metric)}{where} has {best.label}: {figure}"
        above = [(row, v) for row, v in found if row.first.method == UPPER_BOUND]
        bound = f"; all data in one place would give {mean_and_spread(np.asarray(above[0][1]))} %" if above else ""
        return f"{text}{bound}."
    return "No run is finished yet; the figures are of the rounds so far."


def _losses(study: Study) -> str:
    states: dict[str, int] = {}
    for run in [*study.runs, *study.trials]:
        if run.state != FINISHED:
            states[run.state] = states.get(run.state, 0) + 1
    if study.refused:
        states["failed"] = states.get("failed", 0) + len(study.refused)
    if not states:
        return ""
    said = _listed(
        [f"{counted(count, 'run')} {'is' if count == 1 else 'are'} {state}" for state, count in states.items()]
    )
    return f"{said[0].upper()}{said[1:].replace(' is failed', ' failed').replace(' are failed', ' failed')} (below)."


def _listed(items: Sequence[Any]) -> str:
    texts = [str(item) for item in items]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def common(rows: Sequence[Row]) -> tuple[Settings, list[tuple[str, list[str]]]]:
    """The settings that all rows share, and those that differ with each row's value."""
    flat = [_flat(row.first.experiment) for row in rows]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    shared = [(key, flat[0][key]) for key in keys if all(one.get(key) == flat[0].get(key) for one in flat)]
    differ = [(key, [one.get(key, "–") for one in flat]) for key in keys if key not in dict(shared)]
    return shared, differ


def _flat(experiment: dict[str, Any]) -> dict[str, str]:
    found = {}
    for section, values in experiment.items():
        if section not in NO_SETTING and isinstance(values, dict):
            for key, value in values.items():
                name = f"{section}.{key}"
                found[name] = PurePath(str(value)).name if name in PATHS else _text(value)
    return found


def _text(value: Any) -> str:
    return (
        _name(value)
        if isinstance(value, str)
        else ", ".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )
