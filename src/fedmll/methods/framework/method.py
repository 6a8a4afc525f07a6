"""Method: a name, a paper, and a list of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import create_model
from torch import Tensor

from fedmll.config.experiment import Experiment
from fedmll.core.errors import AggregationError, ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.core.seeding import derive
from fedmll.methods.framework import contract_checks
from fedmll.methods.framework.allowed_replies import ReplyProblem, all_finite, find_reply_problem, has_negative_variance
from fedmll.methods.framework.base import (
    Aggregator,
    Component,
    Head,
    ImageTransform,
    Part,
    PartOptions,
    Records,
    TargetLoss,
    TensorSpec,
    overrides,
)
from fedmll.methods.framework.client_round import ClientInfo, tensors_of
from fedmll.methods.framework.method_config import MethodConfig, MethodEntry
from fedmll.methods.framework.recipe import MethodRecipe, PartChoice, check_option_names, switch, with_dependencies
from fedmll.methods.framework.task import Task
from fedmll.methods.heads import LinearHead
from fedmll.methods.losses import UnknownAsNegative
from fedmll.methods.parts.averaging import AVERAGES
from fedmll.methods.parts.logistic_head import LogisticRefit, LogisticStart
from fedmll.methods.parts.ridge_head import HeadFromSums, RidgeHead, RidgeRefit
from fedmll.methods.parts.server_optimizer import ServerOptimizer
from fedmll.methods.parts.standardisation import LocalStandardisation, Standardisation
from fedmll.models.backbones import build_backbone
from fedmll.models.flat_weights import FlatWeights
from fedmll.models.frozen_features import freeze_and_add_neck
from fedmll.models.network import Network

__all__ = ["Method", "MethodRecipe", "PartChoice", "switch"]

P = TypeVar("P", bound=Part)
START = PartChoice(
    "start",
    {"seed": None, "ridge": RidgeHead, "logistic": LogisticStart},
    "initial weights of the linear head: random, or the exact ridge or logistic regression",
)
REFIT = PartChoice(
    "refit",
    {"none": None, "ridge": RidgeRefit, "logistic": LogisticRefit},
    "after the last round: replace the linear head by the exact ridge or logistic regression on the trained features",
)
SERVER_OPTIMIZER = PartChoice(
    "server_optimizer",
    {"none": None} | dict.fromkeys(("sgd", "adam", "yogi", "adagrad"), ServerOptimizer),
    "optimizer with which the server applies the average update (FedOpt); none: the average is the new model",
)


class Method(MethodEntry):
    """A head and a list of parts under a name. With the defaults it is FedAvg."""

    head: ClassVar[type[Head]] = LinearHead
    parts: ClassVar[tuple[type[Part] | PartChoice, ...]] = (UnknownAsNegative,)
    average: ClassVar[type[Part] | PartChoice] = AVERAGES

    def __init_subclass__(cls) -> None:
        """The options of a method are its own, those of its head and parts, and its choices."""
        if cls.__dict__.get("name"):
            if not contract_checks.is_built_in(cls):
                contract_checks.check_method(cls, Part, Head, PartChoice)
            check_option_names(cls.name, cls.every_component())
            fields: dict[str, Any] = {choice.option: choice.field for choice in cls.choices()}
            bases = dict.fromkeys((cls.Options, *(component.Options for component in cls.every_component())))
            bases.pop(PartOptions, None)
            cls.Options = create_model("Options", __base__=tuple(bases) or PartOptions, **fields)
        super().__init_subclass__()

    # ---- its parts

    @classmethod
    def entries(cls) -> tuple[type[Part] | PartChoice, ...]:
        """The list of parts, with the choices that every method with rounds has; the average is the last."""
        if any(isinstance(part, type) and issubclass(part, HeadFromSums) for part in cls.parts):
            return (*cls.parts, cls.average)
        local = isinstance(cls.average, type) and "local-models" in cls.average.provides
        return (START, *(() if local else (SERVER_OPTIMIZER,)), *cls.parts, REFIT, cls.average)

    @classmethod
    def choices(cls) -> list[PartChoice]:
        return [entry for entry in cls.entries() if isinstance(entry, PartChoice)]

    @classmethod
    def every_part(cls) -> list[type[Part]]:
        """All parts that its options can select, and their dependencies."""
        found: dict[type[Part], None] = {}
        for entry in cls.entries():
            for part in entry.parts.values() if isinstance(entry, PartChoice) else (entry,):
                if part is not None:
                    found |= dict.fromkeys(with_dependencies(part))
        return list(found)

    @classmethod
    def every_component(cls) -> list[type[Component]]:
        return [cls.head, *cls.every_part()]

    @classmethod
    def selected_parts(cls, options: Any) -> list[type[Part]]:
        """The parts that these options select; the average is the last."""
        parts = [e.parts[getattr(options, e.option)] if isinstance(e, PartChoice) else e for e in cls.entries()]
        return [part for part in parts if part is not None]

    # ---- what a method may override

    @classmethod
    def recipe(cls, options: Any) -> MethodRecipe:
        """The head and the parts that these options select."""
        *parts, average = cls.selected_parts(options)
        return MethodRecipe.of(cls.head, parts, average)

    @classmethod
    def fixed_rounds(cls, options: Any) -> int | None:
        """The number of rounds, where it follows from the options."""
        return None

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """Raise a ConfigError if the method cannot work with these settings. Its components have checked theirs."""

    @classmethod
    def default_recipe(cls) -> MethodRecipe | None:
        return cls.recipe(cls.Options())

    # ---- an instance: the method of a task

    def __init__(self, task: Task, config: MethodConfig, *, pooled: bool = False) -> None:
        self.task, self.config, self.options = task, config, config.options
        self.pooled = pooled  # one client has all data and all labels
        (head, head_options), *components = config.components
        components = self._with_standardisation(components)
        assert issubclass(head, Head)
        self.network_head = head(task, head_options)
        kinds = {component.name: component for component, _ in components if issubclass(component, Part)}
        self.active_parts: list[Part] = [
            component(task, options, {name: kind for name, kind in kinds.items() if kind is not component})
            for component, options in components
            if issubclass(component, Part)
        ]
        before = 0
        for part in self.active_parts:
            part.closing_start, before = before, before + part.exchange_count("closing")
        self.average_part: Any = next(part for part in self.active_parts if "aggregation" in part.provides)
        self.target_loss = self.part(TargetLoss)

    def _with_standardisation(self, components: list[tuple[type[Component], Any]]) -> list[tuple[type[Component], Any]]:
        """The parts and the one that [model] adds. It is the first, because its result decides what features are; where
        clients have their own models it is the last, because it changes what the client has loaded."""
        model = self.task.experiment.model
        if (not model.standardise and model.bias != "prior") or any(c is Standardisation for c, _ in components):
            return components
        if any("local-models" in component.provides for component, _ in components):
            return [*components, (LocalStandardisation, PartOptions())]
        return [(Standardisation, PartOptions()), *components]

    def part(self, kind: type[P]) -> P:
        return next(part for part in self.active_parts if isinstance(part, kind))

    def has(self, capability: str) -> bool:
        """Whether one of its parts provides a capability."""
        return any(capability in part.provides for part in self.active_parts)

    def parts_with(self, hook: str) -> list[Part]:
        """The parts that implement a hook."""
        return [part for part in self.active_parts if overrides(type(part), hook)]

    def build_model(self) -> Network:
        """The network with its initial weights."""
        setting, seed = self.task.experiment.model, self.task.seed
        layout = None if self.task.finished is None else self.task.finished.layout
        shape = self.task.sample_shape
        pooled = shape if self.network_head.pools_tokens else None
        backbone = freeze_and_add_neck(build_backbone(setting, shape, seed, layout), setting, seed, pooled)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.task.seed, "head"))
            model = self.network_head.build(backbone)
        if backbone.standardise is not None:
            backbone.standardise.pools = model.uses_mean_features and backbone.neck is None
        if not contract_checks.is_built_in(type(self.network_head)):
            contract_checks.check_network(self.network_head, model, self.task.sample_shape, len(self.task.classes))
        return model

    def bind(self, model: Network, weights: FlatWeights) -> None:
        for part in self.active_parts:
            part.bind(model, weights)

    def receive(self, weights: FlatWeights, message: Message) -> None:
        """Load what the server sent into the model."""
        if "weights" in message.tensors:
            weights.load(message.tensors)
        self.received = message.tensors

    def predict(self, model: Network, images: Tensor, known: Tensor | None = None) -> Tensor:
        """Probabilities (batch, classes).

        Args:
            model: The network.
            images: A preprocessed batch.
            known: Known targets (1, 0, -1 unknown), for heads that can use them. A known target is its probability.
        """
        if known is not None and "label-states" not in self.network_head.provides:
            raise ConfigError(f"The head '{self.network_head.name}' cannot use known labels; ctran and text-query can.")
        scores = self.target_loss.probabilities(model(self.transform_images(images), known))
        return scores if known is None else torch.where(known < 0, scores, known.to(scores.dtype))

    def transform_images(self, images: Tensor) -> Tensor:
        """The images as the network expects them in prediction."""
        for part in self.active_parts:
            if isinstance(part, ImageTransform):
                images = part.transform_images(images, tensors_of(part.name, self.received))
        return images

    # ---- the server

    def has_exchange(self, exchange: str) -> bool:
        return any(exchange in part.exchanges for part in self.active_parts)

    @property
    def starts_with_a_head(self) -> bool:
        """Whether the opening exchange computes a head, so that the model before round 1 is worth evaluating."""
        return any("opening" in part.exchanges for part in self.active_parts if not isinstance(part, Standardisation))

    def exchange_in(self, round: int) -> str | None:
        """The exchange of statistics in a round, or None if clients train in it (see `exchange_rounds`)."""
        if 0 < round <= self.task.rounds:
            return "rounds" if self.has_exchange("rounds") else None
        return "opening" if round <= 0 else "closing"

    def exchange_rounds(self, exchange: str) -> list[int]:
        """The numbers of the opening exchanges (0, −1, −2, … in this order) or of the closing ones (T + 1, T + 2, …),
        so that the rounds of training are 1 … T with any of them."""
        counts = [part.exchange_count(exchange) for part in self.active_parts]
        if exchange == "opening":
            return [-step for step in range(max(counts))]
        return [self.task.rounds + 1 + step for step in range(sum(counts))]

    def replying_parts(self, round: int) -> list[Part]:
        """The parts that have tensors in the replies of a round."""
        trains = self.exchange_in(round) is None
        return [part for part in self.active_parts if trains or part.collects(round)]

    def validate_clients(self, clients: Sequence[ClientInfo]) -> None:
        for part in self.active_parts:
            part.validate_clients(clients)

    def initial_state(self) -> Tensors:
        return self.join({part: part.initial_state() for part in self.active_parts})

    def send(self, state: Tensors, client: ClientInfo, round: int) -> Message:
        """What one client receives."""
        sent = {part: part.send(self.tensors_of(part, state), client, round) for part in self.active_parts}
        return Message(self.join(sent))

    def reply_spec(self, sent: Message, round: int) -> dict[str, TensorSpec]:
        """What a reply must hold, for all parts."""
        weights = self.tensors_of(self.average_part, sent.tensors)
        return {
            self.tensor_name(part, name): spec
            for part in self.replying_parts(round)
            for name, spec in part.reply_spec(weights | self.tensors_of(part, sent.tensors), round).items()
        }

    def find_problem(self, sent: Message, reply: Message, round: int) -> ReplyProblem | None:
        """Why a reply is rejected, or None."""
        return find_reply_problem(self.reply_spec(sent, round), reply)

    def aggregator(self, state: Tensors, round: int) -> MethodAggregator:
        return MethodAggregator(self, state, round)

    def final_model(self, state: Tensors) -> Message:
        """What is needed to predict with the global model."""
        message = Message(self.tensors_of(self.average_part, state))
        for part in self.active_parts:
            part.finalize_model(self.tensors_of(part, state), message)
        return message

    # ---- names of tensors: the average has the weights themselves, the other parts have theirs under their names

    def tensor_name(self, part: Part, name: str) -> str:
        return name if part is self.average_part else f"{part.name}/{name}"

    def tensors_of(self, part: Part, tensors: Tensors) -> Tensors:
        """The tensors of one part, under the names that the part uses."""
        if part is self.average_part:
            return {name: tensor for name, tensor in tensors.items() if "/" not in name}
        return tensors_of(part.name, tensors)

    def join(self, tensors: Mapping[Part, Tensors]) -> Tensors:
        """The tensors of all parts under their full names."""
        return {self.tensor_name(part, name): tensor for part, own in tensors.items() for name, tensor in own.items()}


class MethodAggregator:
    """Aggregates the replies of one round for all parts of a method."""

    def __init__(self, method: Method, state: Tensors, round: int) -> None:
        self.method, self.state = method, state
        self.aggregators: dict[str, Aggregator] = {}
        self.parts = method.replying_parts(round)
        for part in self.parts:
            aggregator = part.aggregator(method.tensors_of(part, state), round, self.aggregators)
            if aggregator is not None:
                aggregator.global_weights = method.tensors_of(method.average_part, state)
                self.aggregators[part.name] = aggregator

    def add(self, client: ClientInfo, reply: Message) -> None:
        weights = self.method.tensors_of(self.method.average_part, reply.tensors)
        for part in self.parts:
            if part.name in self.aggregators:
                own = weights | self.method.tensors_of(part, reply.tensors)
                self.aggregators[part.name].add(client, Message(own, reply.numbers))

    def result(self) -> tuple[Tensors, Records]:
        """The next state and the records of the round. The weights come first, because other parts may replace them."""
        method, records = self.method, Records()
        average = method.average_part
        merged = method.tensors_of(average, self.state)
        states = {part: method.tensors_of(part, self.state) for part in method.active_parts}
        for part in sorted(self.parts, key=lambda part: part is not average):
            if part.name in self.aggregators:
                own, logged = self.aggregators[part.name].result(merged)
                records |= logged
                if part is average:
                    merged |= self._with_server_buffers(own)
                else:
                    states[part] = own
        self._check(merged)
        return method.join(states | {average: merged}), records

    def _with_server_buffers(self, averaged: Tensors) -> Tensors:
        """What only the server sets is not averaged: a plug-in's average might round it."""
        layout = getattr(self.method.average_part, "weights", None)
        if layout is not None and layout.server_count and "weights" in averaged:
            averaged["weights"][-layout.server_count :] = self.state["weights"][-layout.server_count :]
        return averaged

    def _check(self, merged: Tensors) -> None:
        """An unusable model is never stored: clients that train from it would be blamed in the next round."""
        weights, average = merged.get("weights"), self.method.average_part
        if weights is None:
            return
        reason = None if all_finite(weights) else "the aggregated weights hold NaN or infinite values"
        if reason is None and hasattr(average, "weights") and has_negative_variance(weights, average.weights):
            reason = "the aggregated model holds a negative variance"
        if reason is not None:
            raise AggregationError(f"{reason}, so that no round can follow from it.")
