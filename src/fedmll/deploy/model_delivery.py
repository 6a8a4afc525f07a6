"""Delivery of the final model to every site.

The model is sent as the bytes of one safetensors file with their SHA-256 digest, so a site has bit for bit what the
server has. From the file's metadata a site takes the thresholds, the calibration and the round; everything else about
the model it derives from the experiment that it approved.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from fedmll.core import files
from fedmll.core.errors import FedmllError
from fedmll.core.message import Message, Tensors
from fedmll.deploy.error_codes import SiteError, SiteErrorCode
from fedmll.engines.client_trainer import Trainer
from fedmll.inference.model_file import SavedModel, build_metadata, describe_model, read_model, write_model
from fedmll.inference.model_metadata import FORMAT_VERSION
from fedmll.methods.framework.client_round import ClientInfo
from fedmll.methods.parts.classifier_rows import own_rows
from fedmll.runs.run_folder import MODEL_FILE

CONTENT = "model"  # the name of the file's bytes in a message
MIN_BYTES_PER_SECOND = 250_000  # a slower connection does not receive the model in time
DISK_FULL_ADVICE = "Free some space, and ask the server's operator for the model's file."

SiteThresholds = Mapping[str, Mapping[str, Any]]
"""By site: its `thresholds`, `thresholds_for` and `calibration`, for all classes of the run in their order."""


@dataclass
class ModelDelivery:
    """At the server: the run's model, and the thresholds and calibration of sites that have their own."""

    trainer: Trainer
    model: SavedModel
    site_thresholds: SiteThresholds = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.messages: dict[str, Message] = {}

    def timeout(self, min_seconds: float) -> float:
        """How long a slow connection may take, but at least `min_seconds`."""
        return max(min_seconds, sum(tensor.nbytes for tensor in self.model.weights.values()) / MIN_BYTES_PER_SECOND)

    def message_for(self, client: ClientInfo) -> tuple[Message, dict[str, Any]]:
        """The message with the model. Sites that receive the same model share one message in memory.

        With private labels a site receives the rows and the names of its own classes only.
        """
        private = self.trainer.method.has("private-labels")
        key = client.name if private or client.name in self.site_thresholds else ""
        if key not in self.messages:
            all_rows = self.model.weights, range(len(self.model.classes))
            weights, rows = self._own_rows(client) if private else all_rows
            content = save(_contiguous(weights), build_metadata(weights, self._description_for(client, rows)))
            self.messages[key] = Message({CONTENT: torch.frombuffer(bytearray(content), dtype=torch.uint8)})
        message = self.messages[key]
        return message, {"digest": hashlib.sha256(message[CONTENT].numpy().tobytes()).hexdigest()}

    def _own_rows(self, client: ClientInfo) -> tuple[Tensors, Sequence[int]]:
        trainer = self.trainer
        trainer.load(self.model.weights)
        sent = trainer.method.send(trainer.weights.dump(), client, trainer.task.rounds)
        rows = own_rows(self.model.classes, client.owned).tolist()
        site_trainer = Trainer(replace(trainer.task, classes=tuple(self.model.classes[row] for row in rows)))
        return site_trainer.named(sent) | site_trainer.frozen(), rows

    def _description_for(self, client: ClientInfo, rows: Sequence[int]) -> dict[str, Any]:
        values = {name: self.model.description.get(name) for name in ("thresholds", "thresholds_for", "calibration")}
        values |= self.site_thresholds.get(client.name, {})
        for name in ("thresholds", "calibration"):
            values[name] = None if values[name] is None else np.asarray(values[name])[list(rows)].tolist()
        values |= {"format": FORMAT_VERSION, "round": self.model.description["round"]}
        return values | {"classes": [self.model.classes[row] for row in rows]}


def describe_undelivered(names: Sequence[str], file: Path, private: bool) -> str:
    """For the operator: which sites have no model, and what to do."""
    advice = "it has rows of other clients' classes, so do not send it to them" if private else "send it to them"
    return f"{', '.join(names)} did not receive the model. It is in {file}; {advice}"


def receive_model(message: Message, *, digest: object, trainer: Trainer, window: Any, folder: Path) -> SavedModel:
    """At a site: check the model that arrived and write it to `folder`, completely or not at all.

    The SHA-256 digest is the one that the server announced. The window is the intensity window with which the site
    reads its images. A SiteError says that it is not the announced model, or not a model of this site's experiment.
    """
    content = message.tensors.get(CONTENT)
    if content is None or content.dtype != torch.uint8 or len(message.tensors) != 1:
        raise SiteError(SiteErrorCode.MODEL, "The server's message should contain a model and does not.")
    raw = content.numpy().tobytes()
    if hashlib.sha256(raw).hexdigest() != digest:
        raise SiteError(
            SiteErrorCode.MODEL,
            "The model that arrived is not the one that the server announced: its SHA-256 digest differs.",
        )
    file = folder / MODEL_FILE
    try:
        with files.explain_full_disk(folder, DISK_FULL_ADVICE), files.atomic_replace(file) as temporary:
            temporary.write_bytes(raw)
            model = read_model(temporary)
            problem = _find_problem(model, trainer)
            if problem is not None:
                text = f"The model that arrived is rejected: {problem}. {file} was not changed."
                raise SiteError(SiteErrorCode.MODEL, text)
            received = model.description
            description = describe_model(trainer.task.experiment, trainer, None, received["round"])
            description |= {"window": window}
            description |= {name: received.get(name) for name in ("thresholds", "thresholds_for", "calibration")}
            write_model(temporary, model.weights, description)
    except SiteError:
        raise
    except FedmllError as error:
        raise SiteError(SiteErrorCode.MODEL, f"The model that arrived cannot be stored: {error}") from None
    return SavedModel(file, description, model.weights)


def _find_problem(model: SavedModel, trainer: Trainer) -> str | None:
    """How it differs from the model that this site trains, or None."""
    received, classes = model.description, list(trainer.task.classes)
    if received.get("classes") != classes:
        return f"its classes are not those of the study ({len(classes)} of them, from '{classes[0]}' on)"
    if type(received.get("round")) is not int:
        return "it does not say of which round it is"
    if not isinstance(received.get("thresholds_for"), str | None):
        return "it does not say what its thresholds are for"
    for name, shape in (("thresholds", (len(classes),)), ("calibration", (len(classes), 2))):
        if received.get(name) is not None and not _are_numbers(received[name], shape):
            return f"its {name} do not have the shape {shape}, or are not finite"
    thresholds = np.asarray(received.get("thresholds") or 0.0)
    if thresholds.min() < 0 or thresholds.max() > 1:
        return "its thresholds are not from 0 to 1"
    layout = trainer.weights.layout | trainer.weights.counter_layout
    shapes = {name: tuple(place.shape) for name, place in layout.items()}
    dtypes = dict.fromkeys(trainer.weights.layout, torch.float32)
    dtypes |= dict.fromkeys(trainer.weights.counter_layout, torch.int64)
    frozen = trainer.frozen()
    shapes |= {name: tuple(tensor.shape) for name, tensor in frozen.items()}
    dtypes |= {name: tensor.dtype for name, tensor in frozen.items()}
    missing = [name for name in shapes if name not in model.weights]
    parts = {part.name for part in trainer.method.active_parts}
    unknown = [name for name in model.weights if name not in shapes and name.partition("/")[0] not in parts]
    if missing or unknown:
        return f"'{(missing or unknown)[0]}' is {'missing' if missing else 'no tensor of this model'}"
    for name, tensor in model.weights.items():
        if name in shapes and (tuple(tensor.shape) != shapes[name] or tensor.dtype != dtypes[name]):
            return f"'{name}' is {tensor.dtype} {tuple(tensor.shape)}, not {dtypes[name]} {shapes[name]}"
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"'{name}' has values that are not finite"
    return None


def _are_numbers(values: Any, shape: tuple[int, ...]) -> bool:
    try:
        array = np.array(values, dtype=np.float64)
    except (ValueError, TypeError):
        return False
    return array.shape == shape and all(map(math.isfinite, array.ravel()))


def _contiguous(tensors: Tensors) -> Tensors:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
