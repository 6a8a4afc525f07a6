"""The model card: README.md with metadata for the Hugging Face hub. It says what is known and what is not.

All figures are those of the model in the file, with its thresholds and its calibration. They are computed from the
stored predictions for the test data, so a value and its interval belong together.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmll.core import registry
from fedmll.core.text import printable
from fedmll.evaluation.bootstrap import CONFIDENCE, DRAWS, bootstrap_intervals
from fedmll.evaluation.metric_definitions import HEADLINE, label_of, metrics_in
from fedmll.evaluation.metrics import Confusion, accuracy, evaluate
from fedmll.evaluation.thresholds import DEFAULT_THRESHOLD, format_threshold
from fedmll.inference.load_run import SavedRun
from fedmll.inference.model_file import SavedModel
from fedmll.inference.tune_thresholds import describe_results
from fedmll.runs.formatting import format_number
from fedmll.runs.run_folder import PER_CLASS_FILE

# The six principles of FUTURE-AI (Lekadir et al., BMJ 2025), and what this file can say about each
FUTURE_AI = {
    "Fairness": "The metrics of each class are above. Not assessed: groups of people (sex, age, origin, device).",
    "Universality": "Evaluated only on the test data named above. Not assessed: data from elsewhere.",
    "Traceability": "Experiment, versions, thresholds and classes are in the model file; the run folder has the "
    "metrics of every round. Not set up: monitoring after deployment.",
    "Usability": "`fedmll predict`, Python, ONNX. Not assessed: use in practice.",
    "Robustness": "Trained with one seed. Not assessed: other devices, noise, shift of the data over time.",
    "Explainability": "`fedmll errors RUN` shows the most confident mistakes. Not assessed: whether explanations help.",
}

COLUMNS = {
    "recall": "recall, %",
    "precision": "precision, %",
    "f1": "F1, %",
    "ap": "AP, %",
    "auc": "AUC, %",
    "positives": "positives",
    "known": "labelled samples",
}  # of the table of classes, after the threshold that recall, precision and F1 belong to
MARKUP = re.compile(r"[\\`*\[\]|~!]|:(?=//)|(?<![^\W_])_|_(?![^\W_])")  # inside a word _ means nothing


@dataclass(frozen=True, kw_only=True)
class Example:
    """An example image beside an exported model, and the probabilities that the model must give for it."""

    image: str
    probabilities: list[float]


@dataclass(frozen=True, kw_only=True)
class TestFigures:
    """The figures of a run's model on its test data.

    Attributes:
        values: the metrics of `HEADLINE`, in percent.
        intervals: their 95 % intervals; metrics of the clients have none.
        per_class: columns with one value per class, in percent or counts.
        unit: what the bootstrap draws: patients or samples. Empty if no predictions for test data were stored.
    """

    values: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    per_class: dict[str, Sequence[float]]
    unit: str


def build_model_card(source: SavedRun | SavedModel, file: str, example: Example | None = None) -> str:
    """The card as Markdown. For a run it has metrics with intervals; for a model file alone it has none."""
    run = source if isinstance(source, SavedRun) else None
    model = source.model if isinstance(source, SavedRun) else source
    figures = None if run is None else compute_figures(run, model)
    parts = [
        _front_matter(model, figures),
        f"# {_text(model.description['method'])} on {_text(_data(model))}",
        _description(model, file),
        _use(model, file, example),
        _preprocessing(model, example),
        _data_section(model, run),
        _metrics(figures),
        _classes(model, figures, example),
        _limitations(model),
        "## FUTURE-AI\n\n" + _table(("principle", "what is known"), list(FUTURE_AI.items()), raw=True),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def compute_figures(run: SavedRun, model: SavedModel) -> TestFigures:
    kept, thresholds = run.test_predictions, model.tuned_thresholds
    names = [name for name in metrics_in(HEADLINE) if _defined(run.metrics.get(name))]
    if kept is None:  # a federation whose server has no test data; its figures do not depend on thresholds
        table = run.folder.read_table(PER_CLASS_FILE)
        shown = [name for name in ("ap", "auc", "positives", "known") if table and name in table[0]]
        return TestFigures(
            values={name: run.metrics[name] for name in names},
            intervals={},
            per_class={name: [row[name] for row in table] for name in shown},
            unit="",
        )
    report = evaluate(kept.probabilities, kept.targets, kept.classes, thresholds)
    values = report.values | {"accuracy": accuracy(kept.probabilities, kept.targets)[0]}
    cut = np.full(len(kept.classes), DEFAULT_THRESHOLD) if thresholds is None else thresholds
    at_cut = Confusion.at_thresholds(kept.probabilities, kept.targets, cut)
    return TestFigures(
        values={name: values.get(name, run.metrics[name]) for name in names},
        intervals=bootstrap_intervals(
            kept.probabilities, kept.targets, kept.classes, run.summary["seed"], kept.patients, thresholds
        ),
        per_class={name: report.per_class[name].tolist() for name in ("ap", "auc", "positives", "known")}
        | describe_results(at_cut),
        unit="samples" if kept.patients is None else "patients",
    )


def _data(model: SavedModel) -> str:
    name: str = model.description["experiment"].get("data", {}).get("name", model.experiment.data.name)
    return name


def _front_matter(model: SavedModel, figures: TestFigures | None) -> str:
    """YAML. Values are quoted as in JSON, which is a part of YAML."""
    images = len(model.sample_shape) == 3
    name = f"{model.description['method']} on {_data(model)}"
    lines = [
        "---",
        "library_name: fedmll",
        *(["pipeline_tag: image-classification"] if images else []),
        'tags: ["federated-learning", "multi-label", ' + json.dumps(model.description["method"]) + "]",
    ]
    if figures is not None:
        found = [
            {"type": metric, "value": round(value, 4), "name": f"{metric}, %"}
            for metric, value in figures.values.items()
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
    summary = f" ({_text(method.summary)})" if method is not None and method.summary else ""
    training = model.experiment.training
    shape = " × ".join(map(str, model.sample_shape))
    text = (
        f"`{file}` predicts which of {len(model.classes)} classes a sample shows, with one probability per class. It "
        f"was trained by the federated method {_text(described['method'])}{summary} with {described['clients']} "
        f"clients; it is the model of round {described['round']}. Backbone {_text(model.experiment.model.backbone)}, "
        f"head {_text(described['head'])}, input {shape}, loss {_text(training.loss)}, {training.optimizer} with lr "
        f"{training.lr:g}."
    )
    if described["initial_weights"]:
        text += f" Training started from the weights {_text(described['initial_weights'])}."
    versions = ", ".join(_text(f"{name} {version}") for name, version in described["versions"].items())
    return f"{text} Written by {versions}."


def _use(model: SavedModel, file: str, example: Example | None) -> str:
    if file.endswith(".safetensors"):
        code = f'from fedmll import load_model\n\nprobabilities = load_model("{file}").predict(["image.jpg"])'
    elif example is not None:
        code = 'from preprocess import predict\n\nprobabilities = predict(["image.png"])  # (1, classes)'
    elif file.endswith(".onnx"):
        name = "images" if len(model.sample_shape) == 3 else "features"
        code = (
            "import onnxruntime\n\n"
            f'session = onnxruntime.InferenceSession("{file}")\n'
            f'(probabilities,) = session.run(None, {{"{name}": samples}})  # {_sample(model)}'
        )
    else:
        known = ", known" if model.takes_known_labels else ""
        code = f'import torch\n\nmodule = torch.export.load("{file}").module()\n'
        code += f"probabilities = module(samples{known})  # {_sample(model)}"
    text = f"## Use\n\n```python\n{code}\n```"
    if model.takes_known_labels:
        optional = "-1 where nothing is known" if file.endswith(".pt2") else "may be left out"
        text += f"\n\nKnown labels help it: `known` (N or 1, {len(model.classes)}), int8: 1, 0, -1 unknown; {optional}."
    return text


def _preprocessing(model: SavedModel, example: Example | None) -> str:
    if example is None:
        return ""
    channels, height, width = model.sample_shape
    window = model.description["window"]
    scaling = (
        "An image with more than 8 bits per pixel is rejected: the model was trained on 8-bit images."
        if window is None
        else f"The values v of an image with more than 8 bits per pixel become bytes: ⌊256 (v − {window[0]:g}) / "
        f"({window[1]:g} − {window[0]:g})⌋, at least 0 and at most 255."
    )
    mode = "L" if channels == 1 else "RGB"
    return (
        "## Preprocessing\n\n`preprocess.py` needs NumPy and Pillow, not fedmll. `python preprocess.py image.png` "
        "prints the probabilities of an image, and `python preprocess.py --check` predicts "
        f"`{example.image}` and compares with the expected probabilities.\n\n"
        f"The model's input `images` is {_sample(model)}. To make it:\n\n"
        f"1. {scaling}\n"
        f'2. Convert the image to {"grey" if channels == 1 else "colour"} with Pillow\'s `convert("{mode}")`.\n'
        f"3. Resize it to a height of {height} and a width of {width} with Pillow's "
        f"`resize(({width}, {height}), Image.Resampling.BILINEAR)`, which also smooths; other filters give other "
        "probabilities.\n\n"
        "The model itself scales the bytes to the range that it was trained with, and returns probabilities."
    )


def _sample(model: SavedModel) -> str:
    kind = "uint8" if len(model.sample_shape) == 3 else "float32"
    return f"{kind} (N, {', '.join(map(str, model.sample_shape))})"


def _data_section(model: SavedModel, run: SavedRun | None) -> str:
    text = f"## Data\n\n{_text(_data(model))}"
    if run is None:
        return (
            text
            + ". This card was written without the run folder, so it does not say which client annotated which class."
        )
    samples = run.summary["samples"]
    text += (
        f": {samples['train']} training, {samples['validation']} validation and {samples['test']} test samples; "
        f"the training data was divided among {run.summary['clients']} clients (partition "
        f"`{model.experiment.partition.kind}`, annotation `{model.experiment.annotation.kind}`)."
    )
    annotating: Mapping[str, int] = run.summary.get("annotating_clients", {})
    rows = [(name, f"{count} of {run.summary['clients']}") for name, count in annotating.items()]
    return text + ("\n\n" + _table(("class", "clients that annotate it"), rows) if rows else "")


def _metrics(figures: TestFigures | None) -> str:
    if figures is None:
        return "## Metrics\n\nNot available here: they are in the run's folder."
    rows = []
    for name, value in figures.values.items():
        low, high = figures.intervals.get(name, (math.nan, math.nan))
        interval = f"{format_number(low)} … {format_number(high)}" if _defined(low) else "–"
        rows.append((label_of(name), format_number(value), interval))
    table = _table(("metric", "test, %", f"{CONFIDENCE:.0%} interval"), rows)
    if not figures.intervals:
        return f"## Metrics\n\n{table}\n\nThere are no intervals, because no predictions for test data were stored."
    return (
        f"## Metrics\n\n{table}\n\nThe intervals come from {DRAWS} bootstrap draws of the test {figures.unit}. They "
        "do not show how much another training run would differ. F1 and balanced accuracy use the threshold 0.5; "
        "“tuned” means the threshold of each class."
    )


def _classes(model: SavedModel, figures: TestFigures | None, example: Example | None) -> str:
    """One row per class. F1, precision and recall are at the threshold in the row."""
    columns: Mapping[str, Sequence[Any]] = model.description.get("threshold_results") or {}
    if figures is not None:
        columns = figures.per_class
    tuned = model.tuned_thresholds
    cut = [DEFAULT_THRESHOLD] * len(model.classes) if tuned is None else tuned.tolist()
    texts = {
        COLUMNS[name]: [str(value) if isinstance(value, int) else format_number(value) for value in columns[name]]
        for name in COLUMNS
        if name in columns
    }
    texts = {"class": list(model.classes), "threshold": list(map(format_threshold, cut)), **texts}
    if example is not None:
        texts[example.image] = [f"{value:.6f}" for value in example.probabilities]
    rows = list(zip(*texts.values(), strict=True))
    goal = model.description.get("thresholds_for") or "f1"
    text = (
        "No thresholds were chosen: there was no validation data."
        if tuned is None
        else f"The thresholds were chosen on the validation data, for {goal}."
    )
    if "f1" in columns:
        text += " Recall, precision and F1 are those of the prediction p > threshold on the test data."
    if "positives" in columns:
        text += " The values of a class with few positives are uncertain."
    if example is not None:
        text += f" The last column has the expected probabilities for {example.image}."
    return f"## Classes\n\n{_table(list(texts), rows)}\n\n{text}"


def _limitations(model: SavedModel) -> str:
    calibrated = (
        "They are not calibrated."
        if model.calibration is None
        else "They were calibrated after training, on the validation data, and all numbers above were computed from "
        "calibrated probabilities."
    )
    return (
        "## Limits\n\nThis model is for research and is not a medical device. It knows only these classes. It also "
        f"returns probabilities for an image that shows none of them or differs from the training data. {calibrated}"
        + (
            " Thresholds were tuned on validation data of the same federation."
            if model.tuned_thresholds is not None
            else ""
        )
    )


def _text(value: object) -> str:
    """Text as Markdown shows it: a class name can be neither HTML nor a link, image, emphasis or code."""
    return MARKUP.sub(r"\\\g<0>", html.escape(printable(value), quote=False))


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]], raw: bool = False) -> str:
    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(cell) if raw else _text(cell) for cell in cells) + " |"

    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])
