"""The contract of a method. The defaults are FedAvg; a method overrides only what it changes.

The server keeps a *state*, a client may keep a *memory*: both are named tensors, so they can be stored and resumed.
What travels is a Message: named tensors and named numbers. A method does not know which engine runs it.

    server   start → (send → … → merge) every round → deploy
    client   receive → prepare → (loss → adjust) every step → finish
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict
from torch import Tensor, nn

from fedmll.errors import ClientError, ConfigError, ReplyRefused
from fedmll.message import Message, Tensors
from fedmll.methods import losses
from fedmll.models.flat import FlatWeights
from fedmll.registry import register
from fedmll.seeding import derive

if TYPE_CHECKING:
    from fedmll.client import Batch, Client, Peer, Task
    from fedmll.experiment import Experiment
    from fedmll.models.backbones import Backbone

LARGEST_GROWTH = 20  # weights whose norm is this many times that of what was sent are of no honest round of training
AUTO = "auto"  # an option that a rule decides when the experiment is made (`Method.resolve`)
BUILT_IN = "fedmll.methods."

Local = dict[str, Any]  # what a method computes once a round at a client
Reply = tuple["Peer", Message]  # a client and what it sent
Located = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]  # the same from every folder

REGISTRY: dict[str, type[Method]] = {}


class Method:
    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    published: ClassVar[dict[str, Any]] = {}  # the paper's settings, used by `--as-published`
    unpublished: ClassVar[dict[str, str]] = {}  # what the paper has and only the user can give: setting → what
    symbols: ClassVar[dict[str, str]] = {}  # the paper's name of an option, accepted too → its name here
    server_only: ClassVar[frozenset[str]] = frozenset()  # options that are the server's own and never leave it
    keep: ClassVar[Literal["last", "best"]] = "last"  # which round's model is the result
    pooled: bool = False  # trains on all data in one place, with every annotation

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
        weights: Literal["size", "equal"] = "size"  # how much a client counts in the average

    options: Options

    def __init_subclass__(cls) -> None:
        """A class with a name of its own is a method, the newest of that name (a notebook's cell that was run again);
        the names of built-in ones are taken."""
        super().__init_subclass__()
        name = cls.__dict__.get("name")
        if not name:
            return
        known = REGISTRY.get(name)
        if known is not None and known.__module__.startswith(BUILT_IN) and known.__module__ != cls.__module__:
            raise ConfigError(
                f"The class {cls.__qualname__} calls itself '{name}', the name of a built-in method; choose another."
            )
        REGISTRY[name] = cls
        register("method", name)(cls)

    def __init__(self, task: Task) -> None:
        self.task = task
        self.options = self.Options(**task.experiment.method.options)
        self.records: dict[str, float | Tensor] = {}  # what `merge` wants written down beside the metrics

    @classmethod
    def named(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options under their names here; of an option under both names the one that came later counts."""
        return {cls.symbols.get(name, name): value for name, value in options.items()}

    @classmethod
    def options_class(cls, values: Mapping[str, Any]) -> type[Options]:
        """What these options are checked with."""
        return cls.Options

    @classmethod
    def made(cls, task: Task) -> Method:
        """The method that the task's experiment names."""
        return cls(task)

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> dict[str, tuple[Any, str]]:
        """What the options that were left open ("auto") are in this experiment, each with its rule in words (empty: it
        does not matter here): decided once, stored, and sent to the sites."""
        return {}

    @classmethod
    def opened(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options without those that a rule may decide."""
        fields = cls.options_class(options).model_fields
        return {name: value for name, value in options.items() if fields[name].default != AUTO}

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

    def expects(self, sent: Message, round: int) -> dict[str, Like]:
        """What the tensors of a good reply are. By default: weights, like those that were sent."""
        expected = {"weights": Like.sent(sent["weights"])}
        if "counters" in sent.tensors:
            expected["counters"] = Like(tuple(sent["counters"].shape), torch.int64, low=0)
        return expected

    def refuse(self, sent: Message, reply: Message, round: int) -> str | None:
        """Why a reply cannot be accepted, or None."""
        return refuse_unlike(self.expects(sent, round), reply)

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


@dataclass(frozen=True)
class Like:
    """What a tensor of a reply must be: its shape, type and range, all stated."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    low: float = -math.inf
    high: float = math.inf
    norm: float = math.inf  # the largest

    @classmethod
    def sent(cls, weights: Tensor) -> Like:
        """Weights after a round of training that started from these."""
        return cls(tuple(weights.shape), weights.dtype, norm=LARGEST_GROWTH * (1 + float(weights.norm())))

    def refuse(self, name: str, tensor: Tensor) -> str | None:
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            return f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {self.dtype} {self.shape}"
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"{name} holds NaN or infinite values"
        if tensor.numel() and not (self.low <= float(tensor.min()) and float(tensor.max()) <= self.high):
            return f"{name} holds values outside [{self.low:g}, {self.high:g}]"
        if self.norm < math.inf and float(tensor.norm()) > self.norm:
            return f"{name} has the norm {float(tensor.norm()):.3g}; at most {self.norm:.3g} is believed"
        return None


def refuse_unlike(expected: Mapping[str, Like], reply: Message) -> str | None:
    """Why a reply does not hold what is expected, or None."""
    missing, unknown = expected.keys() - reply.tensors.keys(), reply.tensors.keys() - expected.keys()
    if missing:
        return f"it lacks {', '.join(sorted(missing))}"
    if unknown:
        return f"it holds the unknown key {', '.join(sorted(unknown))}"
    if not all(math.isfinite(number) for number in reply.numbers.values()):
        return "one of its numbers is not finite"
    if not reply.numbers.get("samples", 0) > 0:
        return "it does not say how many samples it has"
    reasons = (like.refuse(name, reply[name]) for name, like in expected.items())
    return next((reason for reason in reasons if reason is not None), None)
