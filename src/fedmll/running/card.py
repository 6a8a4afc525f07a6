"""The model card: README.md with the Hugging Face hub's metadata. It says what is known, and what is not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedmll import registry
from fedmll.evaluation.intervals import COVERED, DRAWS, bootstrap
from fedmll.running.folder import PREDICTIONS
from fedmll.running.model import SavedModel
from fedmll.running.saved import SavedRun
from fedmll.running.shown import HEADLINES, number

CLASS_TABLE = ("ap", "auc", "f1", "precision", "recall", "positives", "known")
# The six principles of FUTURE-AI (Lekadir et al., BMJ 2025), and what this file can say of each
FUTURE_AI = {
    "Fairness": "Metrics by class are above. Not assessed: subgroups of persons (sex, age, origin, device).",
    "Universality": "Evaluated on the test data named above and on no other site's. Not assessed: external data.",
    "Traceability": "Experiment, versions, thresholds and classes are in the model file; the run's folder has every "
    "round. Not set up: monitoring after deployment.",
    "Usability": "`fedmll predict`, Python, ONNX. Not assessed: with its users.",
    "Robustness": "One seed, one result. Not assessed: other devices, noise, shift of the data over time.",
    "Explainability": "The most confident mistakes: `fedmll errors RUN`. Not assessed: whether explanations help.",
}


def card(source: SavedRun | SavedModel, file: str) -> str:
    """Of a run with its metrics and intervals; of a model file alone without them."""
    run = source if isinstance(source, SavedRun) else None
    model = source.model if isinstance(source, SavedRun) else source
    limits = {} if run is None else _limits(run, model)
    parts = [
        _front_matter(model, run),
        f"# {model.description['method']} on {_data(model)}",
        _what(model, file),
        _use(model, file),
        _data_section(model, run),
        _metrics(run, limits),
        _classes(model, run),
        _limitations(model),
        "## FUTURE-AI\n\n" + _table(("principle", "what is known"), list(FUTURE_AI.items())),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _limits(run: SavedRun, model: SavedModel) -> dict[str, tuple[float, float]]:
    if not (run.folder / PREDICTIONS).is_file():
        return {}  # a federation whose server has no test data
    kept = run.predictions()
    return bootstrap(
        kept.probabilities, kept.targets, kept.classes, run.summary["seed"], kept.patients, model.tuned_thresholds
    )


def _data(model: SavedModel) -> str:
    return str(model.description["experiment"]["data"]["name"])


def _front_matter(model: SavedModel, run: SavedRun | None) -> str:
    """YAML, of which JSON is a part: every value is quoted as JSON quotes it."""
    images = len(model.sample_shape) == 3
    name = f"{model.description['method']} on {_data(model)}"
    lines = [
        "---",
        "library_name: fedmll",
        *(["pipeline_tag: image-classification"] if images else []),
        'tags: ["federated-learning", "multi-label", ' + json.dumps(model.description["method"]) + "]",
    ]
    if run is not None:
        found = [
            {"type": metric, "value": round(run.metrics[metric], 4), "name": f"{metric}, %"}
            for metric in HEADLINES
            if _defined(run.metrics.get(metric))
        ]
        dataset = {"name": _data(model), "type": _data(model), "split": "test"}
        kind = "image-classification" if images else "tabular-classification"
        result = {"task": {"type": kind}, "dataset": dataset, "metrics": found}
        lines.append(f"model-index: {json.dumps([{'name': name, 'results': [result]}])}")
    return "\n".join([*lines, "---"])


def _defined(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _what(model: SavedModel, file: str) -> str:
    described = model.description
    method = registry.all_of("method").get(described["method"])
    summary = f" ({method.summary})" if method is not None and method.summary else ""
    settings, training = described["experiment"]["model"], described["experiment"]["training"]
    shape = " × ".join(map(str, model.sample_shape))
    text = (
        f"`{file}` tells which of {len(model.classes)} classes a sample shows, each with its own probability. It was "
        f"trained by the federated method `{described['method']}`{summary} with {described['clients']} clients; it is "
        f"the model of round {described['round']}. Backbone `{settings['backbone']}`, head `{described['head']}`, "
        f"input {shape}, loss `{training['loss']}`, {training['optimizer']} with lr {training['lr']:g}."
    )
    if described["began_from"]:
        text += f" It began from the weights `{described['began_from']}`."
    versions = ", ".join(f"{name} {version}" for name, version in described["versions"].items())
    return f"{text} Written by {versions}."


def _use(model: SavedModel, file: str) -> str:
    if file.endswith(".safetensors"):
        code = f'from fedmll import load_model\n\nprobabilities = load_model("{file}").predict(["image.jpg"])'
    elif file.endswith(".onnx"):
        name = "images" if len(model.sample_shape) == 3 else "features"
        code = (
            "import onnxruntime\n\n"
            f'session = onnxruntime.InferenceSession("{file}")\n'
            f'(probabilities,) = session.run(None, {{"{name}": samples}})  # {_sample(model)}'
        )
    else:
        known = ", known" if model.takes_known_labels else ""
        code = f'import torch\n\nprobabilities = torch.jit.load("{file}")(samples{known})  # {_sample(model)}'
    text = f"## Use\n\n```python\n{code}\n```"
    if model.takes_known_labels:
        optional = "may be left out" if file.endswith((".onnx", ".safetensors")) else "-1 where nothing is known"
        text += f"\n\nKnown labels help it: `known` (N or 1, {len(model.classes)}), int8: 1, 0, -1 unknown; {optional}."
    return text


def _sample(model: SavedModel) -> str:
    kind = "uint8" if len(model.sample_shape) == 3 else "float32"
    return f"{kind} (N, {', '.join(map(str, model.sample_shape))})"


def _data_section(model: SavedModel, run: SavedRun | None) -> str:
    values = model.description["experiment"]
    text = f"## Data\n\n`{_data(model)}`"
    if run is None:
        return text + ". The run's folder was not at hand: who annotated what is not known here."
    samples = run.summary["samples"]
    text += (
        f": {samples['train']} training, {samples['validation']} validation and {samples['test']} test samples; "
        f"training data divided by `{values['partition']['kind']}` among {run.summary['clients']} clients, annotation "
        f"`{values['annotation']['kind']}`."
    )
    annotating: Mapping[str, int] = run.summary.get("annotating", {})
    rows = [(name, f"{count} of {run.summary['clients']}") for name, count in annotating.items()]
    return text + ("\n\n" + _table(("class", "clients that annotate it"), rows) if rows else "")


def _metrics(run: SavedRun | None, limits: Mapping[str, tuple[float, float]]) -> str:
    if run is None:
        return "## Metrics\n\nNot at hand: they are in the run's folder."
    rows = []
    for name in HEADLINES:
        if _defined(run.metrics.get(name)):
            low, high = limits.get(name, (math.nan, math.nan))
            rows.append((name, number(run.metrics[name]), f"{number(low)} … {number(high)}"))
    table = _table(("metric", "test, %", "interval"), rows)
    if not limits:
        return f"## Metrics\n\n{table}\n\nWithout intervals: no predictions of test data were kept."
    whose = "patients" if run.predictions().patients is not None else "samples"
    note = f"Intervals: {COVERED:.0%}, bootstrap over test {whose}, {DRAWS} draws; not over seeds."
    return f"## Metrics\n\n{table}\n\n{note}"


def _classes(model: SavedModel, run: SavedRun | None) -> str:
    tuned = model.tuned_thresholds
    cut = ["–"] * len(model.classes) if tuned is None else [f"{value:.4f}" for value in tuned]
    goal = model.description.get("thresholds_for") or "f1"
    text = f"Threshold: chosen on the validation data for {goal}. F1, precision and recall are at 0.5."
    if model.calibration is not None:
        text += " Probabilities were calibrated afterwards, on the same data; F1, precision and recall are from before."
    if run is None:
        table = _table(("class", "threshold"), list(zip(model.classes, cut, strict=True)))
        return f"## Classes\n\n{table}\n\n{text}"
    shown = [name for name in CLASS_TABLE if name in run.table_of_classes()[0]]
    rows = [
        (
            row["class"],
            *(f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name]) for name in shown),
            limit,
        )
        for row, limit in zip(run.table_of_classes(), cut, strict=True)
    ]
    return f"## Classes\n\n{_table(('class', *shown, 'threshold'), rows)}\n\n{text}"


def _limitations(model: SavedModel) -> str:
    return (
        "## Limits\n\nFor research; not a medical device. It knows these classes and no other: an image that shows "
        "none of them, or is of another kind than the training data, gets probabilities too. They are not calibrated. "
        + (
            "Thresholds were tuned on validation data of the same federation."
            if model.tuned_thresholds is not None
            else "No thresholds were tuned: there was no validation data."
        )
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])
