"""The contract of a method: `Head`, `Part`, `Aggregator`, `TensorSpec`.

A method is a network (a head on a backbone) and a short list of parts. A part is one idea. It has a server side and a
client side, and overrides only the hooks that it needs:

    server   initial_state → every round: send → aggregation of the replies → … → finalize_model
    client   on_round_start → every step: transform_batch → loss → on_gradients → on_step_end → … → on_round_end

What a part keeps (its state on the server, its client state on each client) and what it sends are named tensors under
the part's name. The library stores, resumes and checks them. A part does not know which engine runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from torch import Tensor

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.core.registry import register, require_subclass
from fedmll.methods.framework import contract_checks
from fedmll.methods.framework.allowed_replies import TensorSpec as TensorSpec
from fedmll.methods.framework.client_round import ClientInfo, ClientRound, TrainStep
from fedmll.methods.framework.task import Task
from fedmll.models.backbones import Backbone
from fedmll.models.flat_weights import FlatWeights
from fedmll.models.network import Network

AUTO = "auto"  # the value of an option that `resolve` decides when the experiment is made
LARGEST_SUMMED = 1e9  # the default bound on the numbers of a tensor that is summed over the clients

RESERVED = {"name", "of", "head", "parts", "average", "start", "optimizer"}  # keys of [method] and of client states
AbsolutePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
Records = dict[str, float | Tensor]  # what is logged with the metrics of a round
Resolved = dict[str, tuple[Any, str]]  # option → the value that replaces "auto", and why (empty: not worth a note)

# The capabilities that heads and parts provide, require and conflict with. A method has each of them at most once.
CAPABILITIES = {
    # provided by heads
    "class-rows": "a linear classifier with one row of weights per class",
    "prototypes": "one fixed prototype vector per class",
    "label-states": "a network that can be given the known states of some labels",
    "unit-features": "features of norm 1 and a classifier that is not trained",
    # provided by parts
    "target-loss": "the loss of the targets",
    "unknown-targets": "what is learned for unknown targets",
    "views": "the views of a batch that the network sees",
    "aggregation": "how the server aggregates the weights",
    "private-labels": "clients know only their own classes",
    "local-models": "every client has its own model and there is no global model",
    "final-classifier": "the classifier of the final model",
}


def option(default: Any, meaning: str, *, shared: bool = False, **limits: Any) -> Any:
    """A field of `Options`.

    Args:
        default: The default value.
        meaning: What the option means, with its symbol and equation in the paper.
        shared: The option has one value for all parts that have it, also in `compose`.
        limits: The range, as in pydantic: `ge`, `gt`, `le`, `lt`.
    """
    return Field(default, description=meaning, json_schema_extra={"shared": True} if shared else None, **limits)


class PartOptions(BaseModel):
    """The base class of the `Options` of heads, parts and methods."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Component:
    """A head or a part: something with a name and options from which methods are composed."""

    kind: ClassVar[str]
    name: ClassVar[str] = ""
    Options: ClassVar[type[BaseModel]] = PartOptions
    provides: ClassVar[frozenset[str]] = frozenset()  # capabilities (see CAPABILITIES)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__dict__.get("name"):
            if cls.name in RESERVED or not set("/.").isdisjoint(cls.name):
                raise ConfigError(f"A {cls.kind} cannot be called '{cls.name}'; choose another name.")
            register(cls.kind, cls.name)(cls)
        if not contract_checks.is_built_in(cls):
            own = (Head,) if issubclass(cls, Head) else (Part, TargetLoss, ImageTransform, TruthAudit)
            contract_checks.check_component(cls, (Component, *own))

    @classmethod
    def shared_options(cls) -> list[str]:
        """The options that have one value for all parts of a method."""
        extras = {name: field.json_schema_extra for name, field in cls.Options.model_fields.items()}
        return [name for name, extra in extras.items() if isinstance(extra, dict) and extra.get("shared")]

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        """Raise a ConfigError if it cannot work with these settings.

        Args:
            options: Its own options.
            experiment: The whole experiment.
            prefix: Where its options are in the experiment (`method.` or `method.NAME.`), for messages.
        """

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> Resolved:
        """The values of the options that were left at "auto". They are decided once and stored with the experiment."""
        return {}


class Head(Component):
    """Turns a backbone into a network for the classes of the task."""

    kind = "head"

    def __init__(self, task: Task, options: Any) -> None:
        self.task, self.options = task, options

    @property
    def pools_tokens(self) -> bool:
        """Whether one vector per image is enough, so that a frozen backbone may give vectors (`model.stages`)."""
        return False

    def build(self, backbone: Backbone) -> Network:
        """The network. torch is seeded when this is called, so that the initial weights follow from the seed."""
        raise NotImplementedError


Hook = TypeVar("Hook", bound=Callable[..., Any])


def vectorized(hook: Hook) -> Hook:
    """Marks a `loss` or an `on_gradients` that can be computed for several clients in one call.

    A marked `loss` runs under `torch.func.vmap`: it draws no random numbers and does not branch on the values of a
    tensor. A marked `on_gradients` uses only `client_round.weights`, and computes the same where the weights and the
    round state have one row per client. All clients run `on_round_start` before the first one runs `on_round_end`, so
    the part keeps what it needs later in its round state and not on itself.
    """
    hook.vectorized = True  # type: ignore[attr-defined]
    return hook


class Aggregator:
    """Aggregates the replies of one round for one part. Replies arrive one at a time and are not kept."""

    global_weights: Tensors  # of the average, at the start of the round; set before the first reply

    def add(self, client: ClientInfo, reply: Message) -> None:
        """One reply: the client's weights, the tensors of the part, and the numbers samples, steps and loss."""

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        """The next state of the part, complete, and what is logged. `merged` are the aggregated global weights; a part
        may replace them."""
        return {}, {}


class SumAggregator(Aggregator):
    """The default: sums the tensors `Part.summands` over the clients and calls `Part.update_state`."""

    def __init__(self, part: Part, state: Tensors, round: int) -> None:
        self.part, self.state, self.round = part, state, round
        self.totals = {name: torch.zeros((), dtype=torch.float64) for name in part.sums}

    def add(self, client: ClientInfo, reply: Message) -> None:
        summands = self.part.summands(client, reply)
        if summands.keys() != self.totals.keys():
            raise ConfigError(
                f"The part '{self.part.name}': `summands` returned {', '.join(summands) or 'nothing'}, and must return "
                f"the tensors in `sums`: {', '.join(self.totals)}."
            )
        for name, tensor in summands.items():
            self.totals[name] = self.totals[name] + tensor

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        return self.part.update_state(self.state, self.totals, self.round)


class Part(Component):
    """One idea, on the server and on the client. Override the hooks that it needs; the others cost nothing."""

    kind = "part"
    requires: ClassVar[frozenset[str]] = frozenset()  # capabilities that the head or another part must provide
    conflicts: ClassVar[frozenset[str]] = frozenset()  # capabilities that no other part may provide
    depends_on: ClassVar[tuple[type[Part], ...]] = ()  # parts that run before it; added where they are not listed
    exchanges: ClassVar[frozenset[str]] = frozenset()  # "opening", "closing", "rounds": calls collect_statistics then
    sends: ClassVar[tuple[str, ...]] = ()  # tensors of its state that every client receives
    sums: ClassVar[tuple[str, ...]] = ()  # tensors that are summed over the clients and passed to update_state

    def __init__(self, task: Task, options: Any, other_parts: Mapping[str, type[Part]]) -> None:
        self.task, self.options = task, options
        self.other_parts = other_parts  # of the method, by name
        self.closing_start = 0  # how many closing exchanges come before those of this part; the method sets it

    def bind(self, model: Network, weights: FlatWeights) -> None:
        """Called once with the only model of the process and the layout of its weights: parameters, then buffers."""
        self.model, self.weights = model, weights

    def received(self, client_round: ClientRound) -> Tensors:
        """Client: what the server side of this part sent."""
        return client_round.received(self.name)

    def client_state(self, client_round: ClientRound) -> Tensors:
        """Client: what this part keeps between the client's rounds. Change it in place."""
        return client_round.client_state(self.name)

    def exchange_count(self, exchange: str) -> int:
        """In how many opening or closing exchanges it collects statistics. Opening exchanges of several parts are
        simultaneous; closing exchanges of a part follow those of the part before, because each may change the model."""
        return int(exchange in self.exchanges)

    def exchange_step(self, round: int) -> int:
        """The number of an exchange among those of this part, from 0 on. In a part that collects statistics in every
        round, 0 is the opening exchange."""
        if round <= self.task.rounds:
            return abs(round)
        return round - self.task.rounds - 1 - self.closing_start

    def collects(self, round: int) -> bool:
        """Whether it collects statistics in this round."""
        if 0 < round <= self.task.rounds:
            return "rounds" in self.exchanges
        return 0 <= self.exchange_step(round) < self.exchange_count("opening" if round <= 0 else "closing")

    def _check_names(self, declared: str, tensors: Tensors, problem: str) -> None:
        for name in getattr(self, declared):
            if name not in tensors:
                raise ConfigError(f"The part '{self.name}' has '{name}' in `{declared}`, which {problem}.")

    # ---- hooks on the server

    def validate_clients(self, clients: Sequence[ClientInfo]) -> None:
        """Raise a ConfigError if it cannot work with these clients. Called before the first round of a run or of a
        resumed run, and when a client joins late."""

    def initial_state(self) -> Tensors:
        """The state before round 1."""
        return {}

    def send(self, state: Tensors, client: ClientInfo, round: int) -> Tensors:
        """What one client receives. Tensors taken from the state unchanged are transferred to a worker once."""
        self._check_names("sends", state, "is not in its state: return it from `initial_state` and `update_state`")
        return {name: state[name] for name in self.sends}

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        """Which tensors a reply must hold; a reply with others is rejected. `sent` has the tensors of the part and the
        weights. The default: the tensors in `sums`, each with the shape of the tensor of the same name that was
        sent."""
        bound = LARGEST_SUMMED
        self._check_names("sums", sent, "is not a tensor that it sends: describe it with a TensorSpec in `reply_spec`")
        return {name: TensorSpec(tuple(sent[name].shape), sent[name].dtype, -bound, bound) for name in self.sums}

    def summands(self, client: ClientInfo, reply: Message) -> Tensors:
        """The tensors of one reply that are summed over the clients. Return float64 for an exact sum."""
        return {name: reply[name] for name in self.sums}

    def update_state(self, state: Tensors, sums: Tensors, round: int) -> tuple[Tensors, Records]:
        """The next state, complete, and what is logged. Called after a round with the sums over its clients."""
        self._check_names("sums", state, "is not in its state: write `update_state`, or return it in `initial_state`")
        return state | {name: total.to(state[name].dtype) for name, total in sums.items()}, {}

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator | None:
        """For what is not a sum. None: the state does not change in this round. `earlier` are the aggregators of the
        parts before this one, which receive every reply first."""
        return SumAggregator(self, state, round) if self.sums else None

    def finalize_model(self, state: Tensors, message: Message) -> None:
        """Change or extend what is needed to predict with the global model."""

    # ---- hooks on the client

    def collect_statistics(self, client_round: ClientRound) -> Tensors:
        """The reply in one of its `exchanges`, in which no client trains."""
        return {}

    def on_round_start(self, client_round: ClientRound) -> Any:
        """Before the first step. What it returns is the round state, which the later hooks receive."""

    def transform_batch(self, step: TrainStep, round_state: Any) -> None:
        """Before the network runs: change the images, the views or the label states."""

    def loss(self, step: TrainStep, round_state: Any) -> Tensor | None:
        """Its term of the loss."""
        return None

    def on_gradients(self, client_round: ClientRound, round_state: Any) -> Tensor | None:
        """After the backward pass: change the gradients. A penalty with a known gradient needs no autograd; its value
        may be returned and is then part of the reported loss."""
        return None

    def on_step_end(self, client_round: ClientRound, round_state: Any) -> None:
        """After the optimizer's step, for example to update an EMA teacher."""

    def on_round_end(self, client_round: ClientRound, round_state: Any) -> Tensors:
        """After the last step: its tensors of the reply. Also the place to change the client state."""
        return {}


# ---- parts with an additional task


class TargetLoss(Part):
    """The part that teaches the known targets, and so decides what the outputs of the network mean."""

    provides = frozenset({"target-loss"})
    accepts: ClassVar[Literal["all", "known-targets", "none"]] = "none"  # values of training.loss that it can use

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probabilities that the logits stand for."""
        return torch.sigmoid(logits)


class ImageTransform(Part):
    """A part that changes images before the network sees them, also in prediction."""

    def transform_images(self, images: Tensor, tensors: Tensors) -> Tensor:
        """The images as the network expects them. `tensors` are the part's own: what it sent, or `finalize_model`
        added."""
        return images


class ServerOnlyPart(Part):
    """A part whose options never leave the server. Clients run the method without it."""


class TruthAudit(Part):
    """A part that a simulation compares with the true targets, which clients and server do not know."""

    def count_correct(self, client_state: Tensors, targets: Tensor) -> Tensor | None:
        """Counts for one client, from its client state and all true targets (samples, classes). They are summed over
        the clients; None: nothing to count yet."""
        return None

    def audit_records(self, total: Tensor) -> Records:
        """What is logged of the sum."""
        return {}


require_subclass("head", Head)
require_subclass("part", Part)


def overrides(part: type[Part], hook: str) -> bool:
    """Whether a part implements a hook."""
    implementation = getattr(part, hook, None)
    return implementation is not None and all(
        implementation is not vars(base).get(hook) for base in (Part, TargetLoss, ImageTransform, TruthAudit)
    )


def missing_vectorized(parts: Iterable[type[Part]]) -> list[str]:
    """The names of the parts that can only run for one client at a time."""

    def is_vectorized(part: type[Part]) -> bool:
        private = "private-labels" in part.provides  # its clients have models of different shapes
        hooks = [getattr(part, hook) for hook in STEP_HOOKS if overrides(part, hook)]
        return not private and all(getattr(hook, "vectorized", False) for hook in hooks)

    return [part.name for part in parts if not is_vectorized(part)]


STEP_HOOKS = ("transform_batch", "loss", "on_gradients", "on_step_end", "transform_images")
