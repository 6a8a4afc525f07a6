"""The texts of the report: one paragraph on what was run and what came out, and the settings of the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from fedmll.comparison.compared_runs import ComparedRow, ComparedRuns
from fedmll.evaluation.metric_definitions import BEST_METHOD_BY, METRICS, label_of
from fedmll.reports.result_table import UPPER_BOUND, ranked_rows
from fedmll.runs.formatting import mean_and_std
from fedmll.runs.run_folder import RunState
from fedmll.runs.run_overview import RunRecord

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
PARTITIONS = {
    "dirichlet": "split over {clients} with a Dirichlet distribution for each class (β = {beta:g})",
    "natural": "split over {clients} by the sites that it comes from",
    "labels-per-client": "split over {clients} with {labels_per_client} classes each",
    "iid": "split over {clients} at random",
}
PARTS = (("train", "training"), ("validation", "validation"), ("test", "test"))
NO_DATA = "none"  # data.name at the server of a federation between machines
NO_BREAK = "\N{NO-BREAK SPACE}"
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}
NO_SETTINGS = ("seed", "engine", "plugins")  # parts of an experiment that do not change what is compared
PATHS = ("data.root", "model.weights")  # only the file name is shown

Settings = list[tuple[str, str]]


def describe_study(study: ComparedRuns) -> str:
    """One paragraph. It says nothing that is not in the files of the runs."""
    sentences = [_what_was_run(study), _data(study), _training(study), _best_method(study), _unfinished_runs(study)]
    text = " ".join(sentence for sentence in sentences if sentence)
    return text.replace(" ± ", f"{NO_BREAK}±{NO_BREAK}").replace(" %", f"{NO_BREAK}%")


def count_of(number: int, thing: str) -> str:
    """`two classes`, `1,200 clients`"""
    word = NUMBERS[number] if number < len(NUMBERS) else f"{number:,}"
    return f"{word} {thing}" + ("" if number == 1 else "es" if thing.endswith("ss") else "s")


def _what_was_run(study: ComparedRuns) -> str:
    seeds = sorted({run.seed for run in study.runs})
    with_seeds = f"with seed {seeds[0]}" if len(seeds) == 1 else f"with seeds {_list(seeds)}"
    if len(study.rows) == 1:
        return f"The method {study.rows[0].label} was run on {_data_names(study)} {with_seeds}."
    return f"{count_of(len(study.rows), 'method').capitalize()} were compared on {_data_names(study)} {with_seeds}."


def _data_names(study: ComparedRuns) -> str:
    names = {run.data_name for run in study.runs if run.experiment}
    names = {"the data of the sites" if name == NO_DATA else name for name in names}
    return _list(sorted(names)) or "unknown data"


def _data(study: ComparedRuns) -> str:
    """The data of the first finished run; in a comparison all runs have the same."""
    run = next(iter(study.finished), None)
    if run is None:
        return ""
    try:
        samples = run.summary["samples"]
        sizes = [f"{samples[name]:,} {word}" for name, word in PARTS if samples.get(name)]
        text = f"The data has {count_of(len(run.summary['classes']), 'class')}"
        text += f" and {_list(sizes)} samples" if sizes else ""
        return f"{text}. {_partition(run)}"
    except (KeyError, TypeError, ValueError):
        return ""


def _partition(run: RunRecord) -> str:
    if run.data_name == NO_DATA:
        return f"It is held by {count_of(int(run.summary['clients']), 'site')}."
    setting = run.experiment.get("partition", {})
    clients = count_of(int(run.summary["clients"]), "client")
    how = PARTITIONS.get(str(setting.get("kind", "")), "split over {clients} by the partition “{kind}”")
    text = f"It is {how.format(**{'beta': 0, 'labels_per_client': 0, 'kind': '?'} | setting | {'clients': clients})}"
    annotation = run.experiment.get("annotation", {})
    if annotation.get("kind", "none") != "none":
        text += f"; not every client annotates every class (annotation “{annotation['kind']}”"
        text += f", {annotation['missing']} classes missing)" if annotation.get("missing") else ")"
    return text + "."


def _training(study: ComparedRuns) -> str:
    """The training settings that all rows share."""
    shared = dict(compare_settings(study.rows)[0])
    parts = []
    if "training.rounds" in shared:
        parts.append(count_of(int(shared["training.rounds"]), "round"))
    if "training.local_epochs" in shared:
        parts.append(f"{count_of(int(shared['training.local_epochs']), 'local epoch')} per round")
    optimizer, lr = shared.get("training.optimizer"), shared.get("training.lr")
    if optimizer:
        optimizer = OPTIMIZERS.get(optimizer, optimizer)
        rate = f"learning rate {lr}" if lr else "a learning rate that differs between the rows"
        parts.append(f"{optimizer} with {rate}")
    backbone = shared.get("model.backbone")
    if backbone:
        frozen = " (frozen)" if shared.get("model.freeze") == "backbone" else ""
        parts.append(f"backbone {backbone}{frozen}")
    text = f"Training: {', '.join(parts)}." if parts else ""
    if study.trials:
        text += f" {count_of(len(study.trials), 'further run').capitalize()} chose the settings on the validation data."
    return text


def _best_method(study: ComparedRuns) -> str:
    """The row with the highest mean of the first metric that there is, among the rows that compete."""
    for metric in BEST_METHOD_BY:
        found = [(row, row.values(metric)) for row in study.rows]
        found = [(row, values) for row, values in found if len(values)]
        if not found:
            continue
        ranked = [pair for pair in found if pair[0] in ranked_rows(study)] or found
        best, values = max(ranked, key=lambda pair: float(pair[1].mean()))
        value = f"{mean_and_std(np.asarray(values))} %"
        where = " on the test data" if metric in METRICS else ""
        if len(found) == 1:
            return f"The {label_of(metric)}{where} is {value}." if where else f"{label_of(metric)}: {value}."
        text = f"{best.label} has the highest {label_of(metric)}{where}: {value}"
        bound = [of_row for row, of_row in found if row.first.method == UPPER_BOUND]
        central = f" (centralized training: {mean_and_std(np.asarray(bound[0]))} %)" if bound else ""
        return f"{text}{central}."
    return "No run is finished yet; the numbers are those of the rounds so far."


def _unfinished_runs(study: ComparedRuns) -> str:
    states = Counter(run.state for run in [*study.runs, *study.trials] if not run.is_finished)
    states[RunState.FAILED] += len(study.rejected)
    parts = [
        f"{count_of(count, 'run')} " + ("failed" if state is RunState.FAILED else f"{_is(count)} {state}")
        for state, count in states.items()
        if count
    ]
    text = _list(parts)
    return f"{text[0].upper()}{text[1:]} (see below)." if text else ""


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _list(items: Sequence[Any]) -> str:
    texts = [str(item) for item in items]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def compare_settings(rows: Sequence[ComparedRow]) -> tuple[Settings, list[tuple[str, list[str]]]]:
    """The settings that all rows share, and those that differ, with the value of each row."""
    flat = [_flatten(row.first.experiment) for row in rows]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    shared = [(key, flat[0][key]) for key in keys if all(one.get(key) == flat[0].get(key) for one in flat)]
    differing = [(key, [one.get(key, "–") for one in flat]) for key in keys if key not in dict(shared)]
    return shared, differing


def _flatten(experiment: dict[str, Any]) -> dict[str, str]:
    settings = {}
    for section, values in experiment.items():
        if section not in NO_SETTINGS and isinstance(values, dict):
            for key, value in values.items():
                name = f"{section}.{key}"
                settings[name] = PurePath(str(value)).name if name in PATHS else _text(value)
    return settings


def _text(value: Any) -> str:
    if isinstance(value, str):
        kind, colon, path = value.rpartition(":")  # `packed:/data/FILE.npz` becomes `packed:FILE.npz`
        return f"{kind}{colon}{PurePath(path).name}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
