"""The model card: README.md with metadata for the Hugging Face hub. It says what is known and what is not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedmll.core import registry
from fedmll.evaluation.bootstrap import CONFIDENCE, DRAWS, bootstrap_intervals
from fedmll.evaluation.metric_definitions import CLASS_COLUMNS, HEADLINE, metrics_in
from fedmll.inference.load import SavedRun
from fedmll.inference.model_file import SavedModel
from fedmll.runs.formatting import format_number
from fedmll.runs.run_folder import PREDICTIONS_FILE

# The six principles of FUTURE-AI (Lekadir et al., BMJ 2025), and what this file can say about each
FUTURE_AI = {
    "Fairness": "Metrics of each class are above. Not assessed: subgroups of persons (sex, age, origin, device).",
    "Universality": "Evaluated on the test data named above only. Not assessed: external data.",
    "Traceability": "Experiment, versions, thresholds and classes are in the model file; the run's folder has every "
    "round. Not set up: monitoring after deployment.",
    "Usability": "`fedmll predict`, Python, ONNX. Not assessed: use in practice.",
    "Robustness": "One seed, one result. Not assessed: other devices, noise, shift of the data over time.",
    "Explainability": "The most confident mistakes: `fedmll errors RUN`. Not assessed: whether explanations help.",
}


def build_model_card(source: SavedRun | SavedModel, file: str) -> str:
    """The card as Markdown. For a run it has metrics with intervals; for a model file alone it has none."""
    run = source if isinstance(source, SavedRun) else None
    model = source.model if isinstance(source, SavedRun) else source
    intervals = {} if run is None else _intervals(run, model)
    parts = [
        _front_matter(model, run),
        f"# {model.description['method']} on {_data(model)}",
        _description(model, file),
        _use(model, file),
        _data_section(model, run),
        _metrics(run, intervals),
        _classes(model, run),
        _limitations(model),
        "## FUTURE-AI\n\n" + _table(("principle", "what is known"), list(FUTURE_AI.items())),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _intervals(run: SavedRun, model: SavedModel) -> dict[str, tuple[float, float]]:
    if not run.folder.has(PREDICTIONS_FILE):
        return {}  # a federation whose server has no test data
    kept = run.predictions()
    return bootstrap_intervals(
        kept.probabilities, kept.targets, kept.classes, run.summary["seed"], kept.patients, model.tuned_thresholds
    )


def _data(model: SavedModel) -> str:
    name: str = model.description["experiment"].get("data", {}).get("name", model.experiment.data.name)
    return name


def _front_matter(model: SavedModel, run: SavedRun | None) -> str:
    """YAML. Values are quoted as in JSON, which is a part of YAML."""
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
            for metric in metrics_in(HEADLINE)
            if _defined(run.metrics.get(metric))
        ]
        dataset = {"name": _data(model), "type": _data(model), "split": "test"}
        kind = "image-classification" if images else "tabular-classification"
        result = {"task": {"type": kind}, "dataset": dataset, "metrics": found}
        lines.append(f"model-index: {json.dumps([{'name': name, 'results': [result]}])}")
    return "\n".join([*lines, "---"])


def _defined(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _description(model: SavedModel, file: str) -> str:
    described = model.description
    method = registry.all_of("method").get(described["method"])
    summary = f" ({method.summary})" if method is not None and method.summary else ""
    training = model.experiment.training
    shape = " × ".join(map(str, model.sample_shape))
    text = (
        f"`{file}` predicts which of {len(model.classes)} classes a sample shows, with one probability per class. It "
        f"was trained by the federated method `{described['method']}`{summary} with {described['clients']} clients; it "
        f"is the model of round {described['round']}. Backbone `{model.experiment.model.backbone}`, head "
        f"`{described['head']}`, input {shape}, loss `{training.loss}`, {training.optimizer} with lr {training.lr:g}."
    )
    if described["initial_weights"]:
        text += f" Training started from the weights `{described['initial_weights']}`."
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
    text = f"## Data\n\n`{_data(model)}`"
    if run is None:
        return text + ". The run's folder was not available: which client annotated which class is not known here."
    samples = run.summary["samples"]
    text += (
        f": {samples['train']} training, {samples['validation']} validation and {samples['test']} test samples; "
        f"training data divided by `{model.experiment.partition.kind}` among {run.summary['clients']} clients, "
        f"annotation `{model.experiment.annotation.kind}`."
    )
    annotating: Mapping[str, int] = run.summary.get("annotating_clients", {})
    rows = [(name, f"{count} of {run.summary['clients']}") for name, count in annotating.items()]
    return text + ("\n\n" + _table(("class", "clients that annotate it"), rows) if rows else "")


def _metrics(run: SavedRun | None, intervals: Mapping[str, tuple[float, float]]) -> str:
    if run is None:
        return "## Metrics\n\nNot available here: they are in the run's folder."
    rows = []
    for name in metrics_in(HEADLINE):
        if _defined(run.metrics.get(name)):
            low, high = intervals.get(name, (math.nan, math.nan))
            rows.append((name, format_number(run.metrics[name]), f"{format_number(low)} … {format_number(high)}"))
    table = _table(("metric", "test, %", "interval"), rows)
    if not intervals:
        return f"## Metrics\n\n{table}\n\nWithout intervals: no predictions for test data were stored."
    whose = "patients" if run.predictions().patients is not None else "samples"
    note = f"Intervals: {CONFIDENCE:.0%}, bootstrap over test {whose}, {DRAWS} draws; not over seeds."
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
    shown = [name for name in CLASS_COLUMNS if name in run.class_table()[0]]
    rows = [
        (
            row["class"],
            *(f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name]) for name in shown),
            limit,
        )
        for row, limit in zip(run.class_table(), cut, strict=True)
    ]
    return f"## Classes\n\n{_table(('class', *shown, 'threshold'), rows)}\n\n{text}"


def _limitations(model: SavedModel) -> str:
    return (
        "## Limits\n\nFor research; not a medical device. The model knows these classes only: an image that shows "
        "none of them, or that differs from the training data, gets probabilities too. They are not calibrated. "
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
