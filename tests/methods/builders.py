"""What the tests of methods stand on: experiments, rounds and their messages, networks to compare with.

Tests see a method through its options, the messages of a round and the server's state; how a method is put together
is known here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import small
from torch import Tensor, nn

from fedmll.config.experiment import Experiment
from fedmll.core.message import Message, Tensors
from fedmll.core.registry import all_of
from fedmll.data.federation import Federation
from fedmll.engines.client_trainer import Trainer
from fedmll.engines.local import LocalEngine
from fedmll.methods import find
from fedmll.methods.framework.client_round import Batch, Client, ClientInfo
from fedmll.methods.framework.task import task_of
from fedmll.models.backbones import build_backbone
from fedmll.models.flat_weights import FlatWeights
from fedmll.models.network import Classifier
from fedmll.testing import aggregate

# ---- what a method says of itself


def own_methods() -> set[str]:
    """The names of the methods that come with the library."""
    return {name for name, method in all_of("method").items() if method.__module__.startswith("fedmll.")}


def options_of(name: str, **options: Any) -> dict[str, Any]:
    """The method's options as a complete experiment has them, and which round's model it keeps."""
    changes = {"method.name": name, "data.name": "digits"} | {f"method.{key}": value for key, value in options.items()}
    if "training.optimizer" in find(name).published:  # some know one optimizer only
        changes["training.optimizer"] = find(name).published["training.optimizer"]
    experiment = Experiment().changed(changes)
    return {"keep": experiment.training.keep} | experiment.method.options


def published_of(name: str) -> dict[str, Any]:
    return dict(find(name).published)


# ---- rounds


@dataclass
class Exchange:
    """One client in one round."""

    peer: ClientInfo
    sent: Message
    reply: Message

    @property
    def samples(self) -> float:
        return self.reply.numbers["samples"]


@dataclass
class Round:
    number: int
    before: Tensors
    exchanges: list[Exchange]
    after: Tensors
    records: dict[str, Any]

    @property
    def sizes(self) -> np.ndarray:
        return np.array([exchange.samples for exchange in self.exchanges])

    @property
    def models(self) -> np.ndarray:
        """(clients, weights), float64."""
        return np.stack([exchange.reply["weights"].double().numpy() for exchange in self.exchanges])


class Rounds:
    """A federation that is run round by round in this process, with everything that travels written down."""

    def __init__(self, federation: Federation, experiment: Experiment, folder: Path) -> None:
        self.federation = replace(federation, experiment=experiment)
        self.engine = LocalEngine(self.federation, folder)
        self.trainer = self.engine.trainer
        self.method, self.task, self.model = self.trainer.method, self.trainer.task, self.trainer.model
        self.state = self.engine.initial_state()
        self.number = 0

    def next(self) -> Round:
        self.number += 1
        before, exchanges = dict(self.state), []
        for peer, reply in self.engine.collect_replies(self.state, self.number):
            sent = self.method.send(self.state, peer, self.number)
            exchanges.append(Exchange(peer, copy_of(sent), copy_of(reply)))
        self.state, records = merged(self.method, self.state, exchanges, self.number)
        return Round(self.number, before, exchanges, self.state, records)

    def train(self, peer: ClientInfo, module: nn.Module | None = None) -> tuple[Exchange, list[Pass]]:
        """One client of the next round alone; also every pass through the network, or a module of it."""
        number = self.number + 1
        sent = self.method.send(self.state, peer, number)
        client = self.trainer.client_in_round(self.federation, peer, number)
        with watched(module or self.model.backbone) as passes:
            reply = self.trainer.train(client, copy_of(sent), {})
        return Exchange(peer, sent, copy_of(reply)), passes

    def client(self, peer: ClientInfo) -> Client:
        """As it is in the last round that was run."""
        return self.trainer.client_in_round(self.federation, peer, self.number)

    def inputs(self, peer: ClientInfo) -> Tensor:
        """All the client's samples in order, as a model takes them."""
        data = self.federation.train.subset(self.federation.samples[peer.index])
        return self.task.preprocess(torch.from_numpy(data.samples(slice(None))))

    def targets(self, peer: ClientInfo) -> np.ndarray:
        return self.federation.train.labels[self.federation.samples[peer.index]]

    def scores(self, tensors: Tensors, images: Tensor, *, mode: str = "eval") -> np.ndarray:
        """Logits (N, C), float64, of the network with these weights, in eval or train mode."""
        self.trainer.weights.load(tensors)
        self.model.train(mode == "train")
        with torch.no_grad():
            return self.model(images).double().numpy()


@contextmanager
def rounds_of(federation: Federation, experiment: Experiment, folder: Path) -> Iterator[Rounds]:
    rounds = Rounds(federation, experiment, folder)
    try:
        yield rounds
    finally:
        rounds.engine.close()


def copy_of(message: Message) -> Message:
    return Message({name: tensor.clone() for name, tensor in message.tensors.items()}, dict(message.numbers))


def merged(method: Any, state: Tensors, exchanges: Iterable[Exchange], number: int) -> tuple[Tensors, dict[str, Any]]:
    return aggregate(method, state, ((e.peer, copy_of(e.reply)) for e in exchanges), number)


def method_for(federation: Federation, experiment: Experiment) -> Any:
    """With a network of its own."""
    return Trainer(task_of(replace(federation, experiment=experiment))).method


# ---- what happens inside a client


@dataclass
class Pass:
    """One pass through the network (or through its backbone alone)."""

    training: bool
    inputs: tuple[Any, ...]
    output: Tensor

    @property
    def images(self) -> Tensor:
        images: Tensor = self.inputs[0]
        return images


@contextmanager
def watched(module: nn.Module) -> Iterator[list[Pass]]:
    """Every pass through the module, in order."""
    passes: list[Pass] = []

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        copies = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in inputs)
        passes.append(Pass(module.training, copies, output.detach().clone()))

    handle = module.register_forward_hook(hook)
    try:
        yield passes
    finally:
        handle.remove()


def rows_of(images: Tensor, among: Tensor) -> np.ndarray:
    """The places of a batch's images among a client's; these must all differ."""
    places = {image.numpy().tobytes(): row for row, image in enumerate(among)}
    assert len(places) == len(among)
    return np.array([places[image.numpy().tobytes()] for image in images])


Loss = Callable[[Tensor, Batch], Tensor]


def trained_by_hand(model: nn.Module, start: Tensors, client: Client, loss: Loss, *, lr: float, mu: float = 0.0) -> Any:
    """The weights after a round of plain SGD on loss(logits, batch) + μ/2 ‖w − w_start‖²; and the mean of that."""
    weights = FlatWeights(model)
    weights.load(start)
    origin = [parameter.detach().clone() for parameter in weights.parameters]
    losses = []
    model.train()
    for batch in client.batches():
        images = (batch.raw.float() / 255 - 0.5) / 0.5 if batch.augmentation == "none" else batch.images
        penalty = sum(((p - o) ** 2).sum() for p, o in zip(weights.parameters, origin, strict=True))
        value = loss(model(images), batch) + mu / 2 * penalty
        gradients = torch.autograd.grad(value, weights.parameters)
        with torch.no_grad():
            for parameter, gradient in zip(weights.parameters, gradients, strict=True):
                parameter.sub_(lr * gradient)
        losses.append(value.item())
    return weights.dump(), float(np.mean(losses))


SGD = {"training__optimizer": "sgd", "training__lr": 0.1, "training__weight_decay": 0.0}


def classifier(rounds: Rounds, outputs: int) -> Classifier:
    """A network like the global one with so many outputs; its weights are to be loaded."""
    task = rounds.task
    return Classifier(build_backbone(task.experiment.model, task.sample_shape, task.seed), outputs)


# ---- formulas


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def bce(logits: np.ndarray, present: np.ndarray) -> np.ndarray:
    """By entry."""
    return np.where(present, np.logaddexp(0, -logits), np.logaddexp(0, logits))


def rejection_by_loops(s: np.ndarray, targets: np.ndarray, tau: float) -> float:
    """FedNCA-ML's L_neg (Eq. 12) of h_c·m_r (samples, C, C)."""
    total = 0.0
    for i in range(len(s)):
        negatives = np.flatnonzero(targets[i] == 0)
        for c in negatives:
            for r in range(s.shape[2]):
                p = sigmoid(s[i, c, r])
                if r != c and p > tau:
                    total += -np.log(1 - p) / (s.shape[2] - 1) / len(negatives)
    return total / len(s)


def contrast_by_loops(s: np.ndarray, targets: np.ndarray) -> float:
    """FedNCA-ML's L_pos (Eq. 13) of h_c·m_r (samples, C, C)."""
    total = 0.0
    for i in range(len(s)):
        positives = np.flatnonzero(targets[i] == 1)
        for c in positives:
            total += -np.log(np.exp(s[i, c, c]) / np.exp(s[i, c]).sum()) / len(positives)
    return total / len(s)


def same_bits(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def twelve(**overrides: Any) -> Experiment:
    """Twelve clients of different sizes, so that a client's number has two digits; a network with BatchNorm."""
    return small(**{"partition__clients": 12, "data__limit": 360, "partition__minimum": 6} | overrides)


DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDS = ("the", "photo", "contains", "positive", "negative", *DIGITS)


def word_vectors(folder: Path) -> str:
    """An encoder for label names (random word vectors), so that tests need no text library."""
    path = folder / "vectors.txt"
    vectors = np.random.default_rng(0).normal(size=(len(WORDS), 12))
    lines = (f"{word} {' '.join(map(repr, map(float, row)))}" for word, row in zip(WORDS, vectors, strict=True))
    path.write_text("\n".join(lines) + "\n")
    return f"glove:{path}"
