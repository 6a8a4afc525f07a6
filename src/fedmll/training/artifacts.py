"""The files of a finished run: the model, its predictions, the summary and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core.message import Message
from fedmll.data.federation import Federation
from fedmll.engines.trainer import Trainer
from fedmll.evaluation.evaluate import Evaluation
from fedmll.evaluation.thresholds import best_thresholds
from fedmll.inference.model_file import describe_model, write_model
from fedmll.runs.run_folder import PER_CLASS_FILE, PER_CLIENT_FILE, MetricsRow, RunFolder
from fedmll.training import federated_evaluation
from fedmll.training.callbacks import Result


def write_artifacts(
    folder: RunFolder, *, data: Federation, trainer: Trainer, message: Message, evaluation: Evaluation,
    model_round: int, rows: list[MetricsRow], notes: Sequence[str],
) -> Result:  # fmt: skip
    """Write the files of a finished run. The summary comes after the model: a run with a summary is finished.

    Args:
        folder: the run's folder.
        data: the federation as it was in the last round.
        trainer: has the network and the method.
        message: the model's tensors as they are sent.
        evaluation: the metrics of this model.
        model_round: the round that the model is from; with training.keep = "best" it may not be the last one.
        rows: the metrics of each round.
        notes: information about automatic settings, for the summary.
    """
    weights = trainer.named(message)
    if not trainer.method.has("local-models"):
        description = describe_model(data.experiment, trainer, tuned_thresholds(data, evaluation), model_round)
        choice = federated_evaluation.choose_common_thresholds(evaluation.histograms)
        write_model(
            folder.model_file,
            weights | trainer.frozen(),
            description if choice is None else description | choice.description,
        )
    if evaluation.scores:
        folder.write_predictions(data, evaluation.scores)
    if evaluation.histograms is not None:
        federated_evaluation.write_site_metrics(folder.path, evaluation.histograms, data.experiment.seed)
    folder.write_metrics_csv(rows)
    folder.write_client_labels(data)
    summary = _build_summary(data, trainer, evaluation, model_round, rows, notes)
    folder.write_summary(summary)
    per_class = {"class": np.array(data.test.classes), **evaluation.report.per_class}
    folder.write_table(PER_CLASS_FILE, per_class)
    per_client: dict[str, NDArray[Any]] = {}
    if evaluation.clients is not None:
        table = evaluation.clients.table
        per_client = table | {"client": np.array(data.names)[table["client"]]}
        folder.write_table(PER_CLIENT_FILE, per_client)
    return Result(
        experiment=data.experiment,
        folder=folder.path,
        rows=rows,
        summary=summary,
        weights=weights,
        per_class=per_class,
        per_client=per_client,
    )


def tuned_thresholds(data: Federation, evaluation: Evaluation) -> NDArray[np.float64] | None:
    """The thresholds of macro_f1_tuned; None without validation data on this machine."""
    scores = evaluation.scores.get("validation")
    return None if scores is None or not len(scores) else best_thresholds(scores, data.validation.labels)


def _build_summary(
    data: Federation, trainer: Trainer, evaluation: Evaluation, model_round: int, rows: list[MetricsRow],
    notes: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    experiment, pooled = data.experiment, trainer.method.pooled
    annotating_clients = data.annotated.sum(0).tolist()
    return {
        "method": experiment.method.name,
        "data": experiment.data.label,
        "seed": experiment.seed,
        "round": model_round,
        "rounds": experiment.training.rounds,
        "clients": len(data.names),
        "classes": list(data.train.classes),
        "sample_shape": list(data.train.sample_shape),
        "samples": {
            "train": len(data.pooled_rows) if pooled else int(data.sizes.sum()),
            "validation": len(data.validation),
            "test": len(data.test),
        },
        "annotating_clients": dict(zip(data.train.classes, annotating_clients, strict=True)),
        "notes": list(notes),
        "partition": data.report,
        "parameters": trainer.weights.parameter_end,
        "seconds": round(sum(row["seconds"] for row in rows), 3),
        **{name: sum(row[name] for row in rows) for name in ("bytes_up", "bytes_down")},
        "metrics": evaluation.values,
        "left_out": evaluation.report.left_out,
    }
