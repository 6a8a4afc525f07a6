"""What runs in a Ray actor: it builds its data and its trainer from the experiment, and does jobs.

Nothing of this module needs Ray, so a test can use a worker directly. Tensors are passed as arrays of bytes, which Ray
does not copy within a node.
"""

from __future__ import annotations

import os
import socket
import time
import tomllib
import warnings
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmll.config.experiment import Experiment
from fedmll.core import registry
from fedmll.core.errors import ConfigError, FedmllError
from fedmll.core.message import Message, Tensors
from fedmll.core.processes import portable_error
from fedmll.data import federation
from fedmll.data.federation import Federation
from fedmll.data.fingerprint import Fingerprint, describe_changes
from fedmll.data.images.cache import CachedArrayWriter, find_cached_array
from fedmll.engines.client_trainer import Trainer
from fedmll.engines.devices import choose_device
from fedmll.engines.simulation import JobRunner
from fedmll.methods.framework.task import task_of
from fedmll.models.frozen_features import BATCH, FrozenFeatures

Piece = tuple[int, int, int]  # of stored features: the view, the first image, and the image after the last one
FAILED = "failed"


class PackedTensor(NamedTuple):
    """A tensor as an array of bytes."""

    dtype: str
    shape: tuple[int, ...]
    content: NDArray[np.uint8]


class SharedTensor(NamedTuple):
    """A tensor that was put into the object store, for many jobs: the place of its reference in a call."""

    place: int


class RemoteJob(NamedTuple):
    """A job as it is sent to an actor."""

    kind: str
    arguments: tuple
    messages: list[tuple[dict[str, PackedTensor | SharedTensor], dict[str, float]]]
    states: list[dict[str, PackedTensor]]  # of the clients, if it is a training job


class RemoteReply(NamedTuple):
    """The replies to a job, and the client states as the training left them."""

    messages: list[tuple[dict[str, PackedTensor], dict[str, float]]]
    states: list[dict[str, PackedTensor]]


class RunDescription(NamedTuple):
    """What a worker needs to build a run, and to prove that it has the driver's data."""

    experiment: str  # TOML
    fingerprint: str  # of the experiment
    data: dict[str, Fingerprint]
    plugins: dict[str, dict[str, str]]
    folder: str  # the driver's current folder, for relative paths
    device: str


def pack(tensors: Tensors) -> dict[str, PackedTensor]:
    return {name: pack_tensor(tensor) for name, tensor in tensors.items()}


def pack_tensor(tensor: Tensor) -> PackedTensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    content = flat.view(torch.uint8).numpy() if len(flat) else np.zeros(0, np.uint8)
    return PackedTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), content)


def unpack_tensor(packed: PackedTensor, *, copy: bool) -> Tensor:
    """`copy`: the tensor can be written to, and the object store can free its memory."""
    dtype, shape, content = packed
    kind: torch.dtype = getattr(torch, dtype)
    if not content.size:
        return torch.empty(shape, dtype=kind)
    if copy:
        content = content.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # memory of the object store is read-only, and a job only reads its message
        return torch.from_numpy(content).view(kind).reshape(shape)


def unpack(tensors: dict[str, PackedTensor]) -> Tensors:
    return {name: unpack_tensor(packed, copy=True) for name, packed in tensors.items()}


def _returns_errors(method: Any) -> Any:
    """Return an error of a method as a value: (FAILED, kind, arguments). Ray would wrap it."""

    @wraps(method)
    def call(self: RayWorker, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except Exception as error:
            return (FAILED, *portable_error(error, f"in a Ray actor on {self.node}"))

    return call


class RayWorker:
    """One trainer in one process. The driver builds a run in it, and then gives it jobs."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.node = socket.gethostname()
        self.kept: tuple[str, Federation] | None = None  # the data of the last run, and its key
        self.writer: CachedArrayWriter | None = None

    def name_of_node(self) -> str:
        return self.node

    @_returns_errors
    def build(self, described: RunDescription) -> None:
        """Build the data and the trainer of a run.

        Raises:
            ConfigError: this node has other data or other plug-ins than the driver, or none.
        """
        if Path(described.folder).is_dir():
            os.chdir(described.folder)
        try:
            experiment = Experiment.make(tomllib.loads(described.experiment))
            if registry.plugin_versions(experiment.plugins) != described.plugins:
                raise ConfigError("its plug-ins differ; install the same plug-ins on every node")
            data = self._load(experiment)
        except (FedmllError, OSError) as error:
            raise ConfigError(f"The node {self.node} of the Ray cluster cannot take part: {error}") from None
        changes = describe_changes(described.data, data.fingerprints)
        if changes or data.experiment.fingerprint() != described.fingerprint:
            found = "; ".join(changes) or "its settings are resolved differently"
            raise ConfigError(
                f"The node {self.node} of the Ray cluster has other data than this machine: {found}. Every node needs "
                "the same files under the same paths."
            )
        self.trainer = Trainer(task_of(data, choose_device(described.device)))
        self.federation = data
        self.features: list[FrozenFeatures] = self.trainer.frozen_features(data)
        self.runner: JobRunner | None = None

    def _load(self, experiment: Experiment) -> Federation:
        key = federation.data_key(experiment)
        if self.kept is None or self.kept[0] != key:
            self.kept = None  # free the old data before the new data is loaded
            self.kept = key, federation.build(experiment)
        return self.kept[1].with_experiment(experiment)

    # ---- features of a frozen backbone, computed once per cluster

    @_returns_errors
    def missing_features(self) -> list[bool]:
        """Of each store of images: whether this node does not have the features yet."""
        return [find_cached_array(features.key, _kind(features.means)) is None for features in self.features]

    @_returns_errors
    def feature_pieces(self, number: int) -> list[Piece]:
        """The batches of images of a store."""
        last = len(self.features[number].store)
        return [(view, start, min(start + BATCH, last)) for view, start in self.features[number].batches()]

    @_returns_errors
    def compute_tokens(self, number: int, piece: Piece) -> NDArray[Any]:
        return self.features[number].compute(*piece[:2])

    @_returns_errors
    def open_tokens(self, number: int) -> None:
        """Begin to write the tokens of a store, which arrive in pieces."""
        features = self.features[number]
        self._open(features.tokens_key, features.shape, np.float16)

    @_returns_errors
    def open_copy(self, number: int, shape: tuple[int, ...]) -> None:
        """Begin to write a copy of another node's features."""
        features = self.features[number]
        self._open(features.key, shape, _kind(features.means))

    def _open(self, key: str, shape: tuple[int, ...], kind: Any) -> None:
        if self.writer is not None:  # an attempt that ended because another actor was lost
            self.writer.abandon()
        self.writer = None
        self.writer = CachedArrayWriter(key, shape, kind)

    @_returns_errors
    def write_piece(self, piece: Piece, content: Any) -> Any:
        if isinstance(content, tuple):  # the error of the actor that computed it
            return content
        assert self.writer is not None
        view, start, stop = piece
        self.writer.array[view, start:stop] = content
        return None

    @_returns_errors
    def finish_features(self) -> None:
        assert self.writer is not None
        self.writer.finish()
        self.writer = None

    @_returns_errors
    def stored_shape(self, number: int) -> tuple[int, ...]:
        return self.features[number].load(processes=0).shape

    @_returns_errors
    def read_piece(self, number: int, piece: Piece) -> NDArray[Any]:
        view, start, stop = piece
        return np.array(self.features[number].load(processes=0)[view, start:stop])

    # ---- jobs

    @_returns_errors
    def start(self) -> None:
        """Read the features. A node that joins later computes those that it does not have."""
        data = self.trainer.with_frozen_features(self.federation, processes=0)
        self.runner = JobRunner(self.trainer, data)

    @_returns_errors
    def work(self, jobs: list[RemoteJob], *shared: PackedTensor) -> tuple[float, list[RemoteReply]]:
        """Do some jobs. Returns the CPU time and the replies."""
        begin = time.process_time()
        common = [unpack_tensor(packed, copy=False) for packed in shared]
        done = [self._do(job, common) for job in jobs]
        return time.process_time() - begin, done

    def _do(self, job: RemoteJob, common: list[Tensor]) -> RemoteReply:
        assert self.runner is not None
        messages = [Message(_resolve(tensors, common), dict(numbers)) for tensors, numbers in job.messages]
        states = [unpack(state) for state in job.states]
        if job.kind == "predict":
            replies = [self.runner.predict(messages[0], *job.arguments)]
        else:
            clients, number, _ = job.arguments
            replies = self.runner.train(messages, states, clients, number)
        return RemoteReply([(pack(reply.tensors), reply.numbers) for reply in replies], [pack(s) for s in states])


def _resolve(tensors: dict[str, PackedTensor | SharedTensor], common: list[Tensor]) -> Tensors:
    return {
        name: common[tensor.place] if isinstance(tensor, SharedTensor) else unpack_tensor(tensor, copy=True)
        for name, tensor in tensors.items()
    }


def _kind(means: bool) -> Any:
    return np.float32 if means else np.float16
