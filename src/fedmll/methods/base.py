"""The contract of a method. The defaults are FedAvg; a method overrides only what it changes.

The server keeps a *state*, a client may keep a *memory*: both are named tensors, so they can be stored and resumed.
What travels is a Message: named tensors and named numbers. A method does not know which engine runs it.

    server   start → (send → … → merge) every round → deploy
    client   receive → prepare → (loss → adjust) every step → finish
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from fedmll import losses
from fedmll.errors import ClientError, ReplyRefused
from fedmll.message import Message, Tensors
from fedmll.models.flat import FlatWeights
from fedmll.seeding import derive

if TYPE_CHECKING:
    from fedmll.client import Batch, Client, Peer, Task
    from fedmll.experiment import Experiment
    from fedmll.models.backbones import Backbone

LARGEST_GROWTH = 20  # a reply whose norm is this many times that of what was sent is no honest round of training

Local = dict[str, Any]  # what a method computes once a round at a client
Reply = tuple["Peer", Message]  # a client and what it sent


class Method:
    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    published: ClassVar[dict[str, Any]] = {}  # the paper's settings, used by `--as-published`
    keep: ClassVar[Literal["last", "best"]] = "last"  # which round's model is the result
    pooled: ClassVar[bool] = False  # trains on all data in one place, with every annotation

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
        weights: Literal["size", "equal"] = "size"  # how much a client counts in the average

    options: Options

    def __init__(self, task: Task) -> None:
        self.task = task
        self.options = self.Options(**task.experiment.method.options)
        self.records: dict[str, float | Tensor] = {}  # what `merge` wants written down beside the metrics

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """Refuse (ConfigError) settings that this method cannot work with."""

    # ---- the network

    def model(self) -> nn.Module:
        from fedmll.models.backbones import build_backbone

        backbone = build_backbone(self.task.experiment.model, self.task.sample_shape, self.task.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.task.seed, "head"))
            return self.network(backbone)

    def network(self, backbone: Backbone) -> nn.Module:
        """What this method trains on top of the backbone; its initial weights come from the experiment's seed."""
        from fedmll.models.backbones import Classifier

        return Classifier(backbone, len(self.task.classes))

    def receive(self, weights: FlatWeights, message: Message) -> None:
        """Put what the server sent into the model."""
        weights.load(message.tensors)

    def predict(self, model: nn.Module, images: Tensor, known: Tensor | None = None) -> Tensor:
        """Probabilities (batch, classes). `known` targets (1, 0, -1 unknown) help the methods that can use them."""
        return torch.sigmoid(model(images))

    # ---- the server

    def begin(self, peers: Sequence[Peer]) -> None:
        """Before the first round of a run or of its resumption: refuse (ConfigError) clients it cannot work with."""

    def start(self, weights: FlatWeights) -> Tensors:
        """The server's state before round 1."""
        return weights.dump()

    def send(self, state: Tensors, client: Peer, round: int) -> Message:
        """What one client receives. Tensors taken from the state as they are cost nothing a client."""
        return self.deploy(state)

    def merge(self, state: Tensors, replies: Iterable[Reply], round: int) -> Tensors:
        """The next state. `replies` is a stream: take from each what is needed and let it go."""
        mean = WeightedMean()
        for _, reply in replies:
            mean.add(reply.tensors, self.weight(reply))
        return state | mean.result()

    def weight(self, reply: Message) -> float:
        return reply.numbers["samples"] if self.options.weights == "size" else 1.0

    def deploy(self, state: Tensors) -> Message:
        """What is needed to predict with the global model."""
        return Message({name: state[name] for name in ("weights", "counters") if name in state})

    def refuse(self, sent: Message, reply: Message) -> str | None:
        """Why a reply cannot be accepted, or None. By default it must look like what was sent."""
        return refuse_unlike(sent.tensors, reply)

    def audit(self, memories: Iterable[tuple[Tensors, Tensor]]) -> dict[str, float | Tensor]:
        """More records. Only a simulation calls this: it alone knows the true targets (samples, classes) of a client
        beside what the client remembers. Nothing of it goes back to a client or into the state."""
        return {}

    # ---- the client

    def train(self, client: Client, message: Message, memory: Tensors) -> Message:
        """Read, learn, reply. `memory` is the client's own, kept between its rounds: change it in place."""
        self.receive(client.weights, message)
        client.seed_torch()
        local = self.prepare(client, message, memory)
        loss, steps = self.learn(client, local)
        reply = Message(client.weights.dump(), {"samples": len(client.data), "steps": steps, "loss": loss})
        self.finish(client, local, reply, memory)
        return reply

    def learn(self, client: Client, local: Local) -> tuple[float, int]:
        """The local epochs; gives the mean loss and the number of steps."""
        model, parameters = client.model, client.weights.parameters
        clip = self.task.experiment.training.clip
        optimizer = self.optimizer(parameters)
        total, steps = torch.zeros((), device=self.task.device), 0
        model.train()
        for batch in client.batches():
            loss = self.loss(model, batch, local)
            loss.backward()
            self.adjust(client.weights, local)
            if clip is not None:
                nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            steps += 1
        mean = total.item() / steps
        if not math.isfinite(mean):
            raise ClientError(
                f"The loss of client {client.name} became {mean} in round {client.round}. Lower training.lr "
                f"(now {self.task.experiment.training.lr:g}), or set training.clip = 1.0; also look at its data."
            )
        return mean, steps

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """A fresh one every round."""
        training = self.task.experiment.training
        if training.optimizer == "sgd":
            return torch.optim.SGD(
                parameters, training.lr, training.momentum, weight_decay=training.weight_decay, fused=True
            )
        adam = torch.optim.AdamW if training.optimizer == "adamw" else torch.optim.Adam
        return adam(parameters, training.lr, weight_decay=training.weight_decay, fused=True)

    def prepare(self, client: Client, message: Message, memory: Tensors) -> Local:
        """What is fixed in the round, computed once: class weights, teacher predictions, …"""
        if self.task.experiment.training.loss == "weighted":
            return {"positive_weight": losses.positive_weights(client.targets)}
        return {}

    def loss(self, model: nn.Module, batch: Batch, local: Local) -> Tensor:
        """One step's loss. FedAvg: the mean over all entries, unknown targets taken as absent."""
        return self.entries(model(batch.images), batch, local).mean()

    def entries(self, logits: Tensor, batch: Batch, local: Local) -> Tensor:
        """The loss of every entry (batch, classes), by the experiment's `training.loss`."""
        name = self.task.experiment.training.loss
        return losses.entrywise(name, logits, batch.present, local.get("positive_weight"))

    def adjust(self, weights: FlatWeights, local: Local) -> None:
        """Change the gradients before a step: penalties whose gradient is known need no autograd."""

    def finish(self, client: Client, local: Local, reply: Message, memory: Tensors) -> None:
        """After training: add to the reply, remember."""


class WeightedMean:
    """Streamed Σ w·x / Σ w over float tensors, summed in float64; integers are the first reply's."""

    def __init__(self) -> None:
        self.total = 0.0
        self.sums: Tensors = {}
        self.first: Tensors = {}

    def add(self, tensors: Tensors, weight: float) -> None:
        self.total += weight
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                if name not in self.sums:
                    self.sums[name] = torch.zeros_like(tensor, dtype=torch.float64)
                self.sums[name].add_(tensor, alpha=weight)
            else:
                self.first.setdefault(name, tensor)

    def result(self) -> Tensors:
        if self.total <= 0:
            raise ReplyRefused("No client replied in this round, so there is nothing to average.")
        return {name: (s / self.total).float() for name, s in self.sums.items()} | self.first


def refuse_unlike(expected: Tensors, reply: Message) -> str | None:
    """Why the reply's tensors are not usable in the place of `expected`."""
    missing, unknown = expected.keys() - reply.tensors.keys(), reply.tensors.keys() - expected.keys()
    if missing:
        return f"it lacks {', '.join(sorted(missing))}"
    if unknown:
        return f"it holds the unknown key {', '.join(sorted(unknown))}"
    for name, tensor in reply.tensors.items():
        like = expected[name]
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            return f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {like.dtype} {tuple(like.shape)}"
        if tensor.is_floating_point():
            if not bool(torch.isfinite(tensor).all()):
                return f"{name} holds NaN or infinite values"
            norm, limit = float(tensor.norm()), LARGEST_GROWTH * (1 + float(like.norm()))
            if norm > limit:
                return f"{name} has the norm {norm:.3g}, {LARGEST_GROWTH} times what was sent would be {limit:.3g}"
    if not all(math.isfinite(number) for number in reply.numbers.values()):
        return "one of its numbers is not finite"
    return None
