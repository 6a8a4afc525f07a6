"""What every site gets when the run is over: the model. It travels as the bytes of one safetensors file, told by their
SHA-256 digest, so that what a site has is bit for bit what the server has. Of the rest of a model file a site takes
thresholds, calibration and the round; what the model is, it says itself, from the experiment that it approved."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from fedmll import files
from fedmll.client import Peer
from fedmll.deploy.sentences import Refused
from fedmll.engines.learner import Learner
from fedmll.errors import FedmllError
from fedmll.message import Message, Tensors
from fedmll.methods.parts.rows import own_rows
from fedmll.running.folder import MODEL
from fedmll.running.model import FORMAT, KEY, SavedModel, describe, load_model, write_model

CONTENT = "model"  # the file's name in a message
SLOWEST = 250_000  # bytes a second: a slower link does not get the model in time
ROOM = "Free some space, and ask the server's operator for the model's file."

Own = Mapping[str, Mapping[str, Any]]
"""By a site's name: its `thresholds`, `thresholds_for` and `calibration`, for all classes of the run in their order."""


@dataclass
class Handed:
    """At the server: the run's model, and what single sites have instead of its thresholds and calibration."""

    learner: Learner
    model: SavedModel
    own: Own = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.made: dict[str, Message] = {}

    def seconds(self, least: float) -> float:
        """The deadline: as long as a slow link needs, and at least `least`."""
        return max(least, sum(tensor.nbytes for tensor in self.model.weights.values()) / SLOWEST)

    def letter(self, peer: Peer) -> tuple[Message, dict[str, Any]]:
        """Sites that get the same share its memory. With private labels a site gets its own rows, and no other name."""
        private = self.learner.method.private
        key = peer.name if private or peer.name in self.own else ""
        if key not in self.made:
            content = save(*(self._own_rows(peer) if private else self._all(peer)))
            self.made[key] = Message({CONTENT: torch.frombuffer(bytearray(content), dtype=torch.uint8)})
        message = self.made[key]
        return message, {"digest": hashlib.sha256(message[CONTENT].numpy().tobytes()).hexdigest()}

    def _all(self, peer: Peer) -> tuple[Tensors, dict[str, str]]:
        return _contiguous(self.model.weights), self._told(peer, range(len(self.model.classes)))

    def _own_rows(self, peer: Peer) -> tuple[Tensors, dict[str, str]]:
        learner = self.learner
        learner.load(self.model.weights)
        sent = learner.method.send(learner.weights.dump(), peer, learner.task.rounds)
        rows = own_rows(self.model.classes, peer.owned).tolist()
        narrow = Learner(replace(learner.task, classes=tuple(self.model.classes[row] for row in rows)))
        return _contiguous(narrow.named(sent) | narrow.frozen()), self._told(peer, rows)

    def _told(self, peer: Peer, rows: Sequence[int]) -> dict[str, str]:
        said = {name: self.model.description.get(name) for name in ("thresholds", "thresholds_for", "calibration")}
        said |= self.own.get(peer.name, {})
        for name in ("thresholds", "calibration"):
            said[name] = None if said[name] is None else np.asarray(said[name])[list(rows)].tolist()
        said |= {"format": FORMAT, "round": self.model.description["round"]}
        return {KEY: json.dumps(said | {"classes": [self.model.classes[row] for row in rows]})}


def not_given(names: Sequence[str], file: Path, private: bool) -> str:
    """For the operator: who has no model, and what to do."""
    advice = "it has rows of other clients' classes, so it is not for them" if private else "send it to them"
    return f"{', '.join(names)} did not get the model. It is in {file}; {advice}"


def taken(sent: Message, digest: object, learner: Learner, window: Any, folder: Path) -> SavedModel:
    """At a site: the model as a file in `folder`, whole or not at all. Refused: it is not what was announced, or not a
    model of the experiment that this site takes part in."""
    content = sent.tensors.get(CONTENT)
    if content is None or content.dtype != torch.uint8 or len(sent.tensors) != 1:
        raise Refused("model", "The server sent no model where one was due.")
    raw = content.numpy().tobytes()
    if hashlib.sha256(raw).hexdigest() != digest:
        raise Refused("model", "The model that came is not the one that the server announced (another SHA-256 digest).")
    file = folder / MODEL
    try:
        with files.room_for(folder, ROOM), files.replacing(file) as temporary:
            temporary.write_bytes(raw)
            came = load_model(temporary)
            reason = _wrong(came, learner)
            if reason is not None:
                raise Refused("model", f"The model that came is refused: {reason}. What was in {file} is untouched.")
            told = came.description
            mine = describe(learner.task.experiment, learner, None, told["round"]) | {"window": window}
            mine |= {name: told.get(name) for name in ("thresholds", "thresholds_for", "calibration")}
            write_model(temporary, came.weights, mine)
    except Refused:
        raise
    except FedmllError as error:
        raise Refused("model", f"The model that came cannot be kept: {error}") from None
    return SavedModel(file, mine, came.weights)


def _wrong(came: SavedModel, learner: Learner) -> str | None:
    """What is wrong with it beside the model that this site trains, or None."""
    told, classes = came.description, list(learner.task.classes)
    if told.get("classes") != classes:
        return f"its classes are not those of the study ({len(classes)} of them, from '{classes[0]}' on)"
    if type(told.get("round")) is not int:
        return "it does not say of which round it is"
    if not isinstance(told.get("thresholds_for"), str | None):
        return "it does not say what its thresholds are for"
    for name, shape in (("thresholds", (len(classes),)), ("calibration", (len(classes), 2))):
        if told.get(name) is not None and not _numbers(told[name], shape):
            return f"its {name} are not one a class"
    places = learner.weights.layout | learner.weights.counter_layout
    wanted = {name: tuple(place.shape) for name, place in places.items()}
    kinds = dict.fromkeys(learner.weights.layout, torch.float32)
    kinds |= dict.fromkeys(learner.weights.counter_layout, torch.int64)
    frozen = learner.frozen()
    wanted |= {name: tuple(tensor.shape) for name, tensor in frozen.items()}
    kinds |= {name: tensor.dtype for name, tensor in frozen.items()}
    lacking = [name for name in wanted if name not in came.weights]
    parts = {part.name for part in learner.method.list}
    strange = [name for name in came.weights if name not in wanted and name.partition("/")[0] not in parts]
    if lacking or strange:
        return f"'{(lacking or strange)[0]}' is {'missing' if lacking else 'no tensor of this model'}"
    for name, tensor in came.weights.items():
        if name in wanted and (tuple(tensor.shape) != wanted[name] or tensor.dtype != kinds[name]):
            return f"'{name}' is {tensor.dtype} {tuple(tensor.shape)}, not {kinds[name]} {wanted[name]}"
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"'{name}' has values that are not finite"
    return None


def _numbers(values: Any, shape: tuple[int, ...]) -> bool:
    try:
        array = np.array(values, dtype=np.float64)
    except (ValueError, TypeError):
        return False
    return array.shape == shape and all(map(math.isfinite, array.ravel()))


def _contiguous(tensors: Tensors) -> Tensors:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
