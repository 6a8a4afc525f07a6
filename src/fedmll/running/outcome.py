"""What a finished run leaves in its folder: the model, its predictions, the summary, tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll import files
from fedmll.data.federation import Federation
from fedmll.engines.learner import Learner
from fedmll.evaluation.metrics import best_thresholds
from fedmll.evaluation.pooled import Evaluation
from fedmll.message import Message
from fedmll.running import federated
from fedmll.running.clients import write_clients
from fedmll.running.folder import (
    CLIENTS,
    METRICS_CSV,
    MODEL,
    PER_CLASS,
    PER_CLIENT,
    PREDICTIONS,
    SUMMARY,
    Row,
    to_json,
    write_csv,
    write_rows,
)
from fedmll.running.model import describe, write_model
from fedmll.running.observers import Result
from fedmll.running.predictions import write_predictions


def leave(
    out: Path, data: Federation, learner: Learner, message: Message, found: Evaluation, kept: int, rows: list[Row],
    notes: Sequence[str],
) -> Result:  # fmt: skip
    """Write all of it; the summary last but for tables: a run that has one is finished. `kept`: the model's round."""
    weights = learner.named(message)
    if not learner.method.mean.alone:
        description = describe(data.experiment, learner, thresholds_of(data, found), kept)
        chosen = federated.chosen(found.counted)
        described = description if chosen is None else description | chosen.described
        write_model(out / MODEL, weights | learner.frozen(), described)
    if found.scores:
        write_predictions(out / PREDICTIONS, data, found.scores)
    if found.counted is not None:
        federated.write(out, found.counted, data.experiment.seed)
    write_rows(out / METRICS_CSV, rows)
    write_clients(out / CLIENTS, data)
    summary = _summary(data, learner, found, kept, rows, notes)
    files.write(out / SUMMARY, to_json(summary, indent=2) + "\n")
    per_class = {"class": np.array(data.test.classes), **found.report.per_class}
    write_csv(out / PER_CLASS, per_class)
    per_client: dict[str, NDArray[Any]] = {}
    if found.clients is not None:
        per_client = found.clients.table | {"client": np.array(data.names)[found.clients.table["client"]]}
        write_csv(out / PER_CLIENT, per_client)
    return Result(data.experiment, out, rows, summary, weights, per_class, per_client)


def thresholds_of(data: Federation, found: Evaluation) -> NDArray[np.float64] | None:
    """Those of macro_f1_tuned, if there is validation data here."""
    scores = found.scores.get("validation")
    return None if scores is None or not len(scores) else best_thresholds(scores, data.validation.labels)


def _summary(
    data: Federation, learner: Learner, found: Evaluation, kept: int, rows: list[Row], notes: Sequence[str]
) -> dict[str, Any]:
    experiment, pooled = data.experiment, learner.method.pooled
    annotating = data.annotated.sum(0).tolist()
    return {
        "method": experiment.method.name,
        "data": experiment.data.label,
        "seed": experiment.seed,
        "round": kept,
        "rounds": experiment.training.rounds,
        "clients": len(data.names),
        "classes": list(data.train.classes),
        "sample_shape": list(data.train.sample_shape),
        "samples": {
            "train": len(data.pooled_rows) if pooled else int(data.sizes.sum()),
            "validation": len(data.validation),
            "test": len(data.test),
        },
        "annotating": dict(zip(data.train.classes, annotating, strict=True)),  # clients that know a label of the class
        "notes": list(notes),
        "partition": data.report,
        "parameters": learner.weights.parameter_end,
        "seconds": round(sum(row["seconds"] for row in rows), 3),
        **{name: sum(row[name] for row in rows) for name in ("bytes_up", "bytes_down")},
        "metrics": found.values,
        "left_out": found.report.left_out,
    }
