"""Method: a name, a paper, and the list of parts that it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import BaseModel, create_model
from torch import Tensor

from fedmll import registry
from fedmll.client import Peer, under
from fedmll.errors import ConfigError
from fedmll.message import Message, Tensors
from fedmll.methods.contract import AUTO, Found, Head, Like, Part, PartOptions, Piece, refuse_unlike
from fedmll.methods.heads import Linear
from fedmll.methods.merging import Merging
from fedmll.methods.parts.basic import Absent, Mean
from fedmll.methods.parts.ridge import Ridge
from fedmll.methods.recipe import Choice, Recipe, refuse_rivals, stood_on, switch
from fedmll.models.backbones import build_backbone
from fedmll.models.flat import FlatWeights
from fedmll.models.frozen import fit_out
from fedmll.models.network import Network
from fedmll.seeding import derive
from fedmll.task import Task

if TYPE_CHECKING:
    from fedmll.experiment import Experiment

__all__ = ["Choice", "Method", "Recipe", "switch"]

P = TypeVar("P", bound=Part)
START = Choice("start", {"seed": None, "ridge": Ridge}, "what the head starts from: the seed, or the exact ridge head")


class Method:
    """A head and a list of parts under a name. With the defaults it is FedAvg; a class with a `name` is registered."""

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""  # authors, venue, year
    setting: ClassVar[tuple[str, ...]] = ("skew",)  # what it is for: skew, partial annotation, private labels
    up: ClassVar[str] = ""  # what travels beside the weights, in words …
    down: ClassVar[str] = ""
    remembers: ClassVar[str] = ""  # … and what a client keeps between its rounds
    head: ClassVar[type[Head]] = Linear
    parts: ClassVar[tuple[type[Part] | Choice, ...]] = (Absent,)
    average: ClassVar[type[Part] | Choice] = Mean
    published: ClassVar[dict[str, Any]] = {}  # the paper's settings, used by `--as-published`
    unpublished: ClassVar[dict[str, str]] = {}  # what the paper has and only the user can give: setting → what
    symbols: ClassVar[dict[str, str]] = {}  # the paper's name of an option, accepted too → its name here
    keep: ClassVar[Literal["last", "best"]] = "last"  # which round's model is the result
    pooled: bool = False  # trains on all data in one place, with every annotation

    Options: ClassVar[type[BaseModel]] = PartOptions

    def __init_subclass__(cls) -> None:
        """The options of a method are its own, those of its head and parts, and its choices."""
        super().__init_subclass__()
        if not cls.__dict__.get("name"):
            return
        refuse_rivals(cls.name, (cls.head, *cls.every_part()))
        fields: dict[str, Any] = {entry.option: entry.field for entry in cls.choices()}
        bases = dict.fromkeys((cls.Options, cls.head.Options, *(part.Options for part in cls.every_part())))
        bases.pop(PartOptions, None)
        cls.Options = create_model("Options", __base__=tuple(bases) or PartOptions, **fields)
        registry.register("method", cls.name)(cls)

    # ---- what an experiment asks of the class

    @classmethod
    def entries(cls) -> tuple[type[Part] | Choice, ...]:
        """The list, with what every method can start from; the average is the last."""
        return (*(() if Ridge in cls.parts else (START,)), *cls.parts, cls.average)

    @classmethod
    def choices(cls) -> list[Choice]:
        return [entry for entry in cls.entries() if isinstance(entry, Choice)]

    @classmethod
    def every_part(cls) -> list[type[Part]]:
        """Also those that are switched off; those that others stand on too."""
        found: dict[type[Part], None] = {}
        for entry in cls.entries():
            for part in entry.parts.values() if isinstance(entry, Choice) else (entry,):
                if part is not None:
                    found |= dict.fromkeys(stood_on(part))
        return list(found)

    @classmethod
    def recipe(cls, options: Any) -> Recipe:
        """The head and the parts that these options ask for."""
        *parts, average = cls.chosen(options)
        return Recipe.of(cls.head, parts, average)

    @classmethod
    def chosen(cls, options: Any) -> list[type[Part]]:
        """Of the parts in the list, those that these options ask for; the average is the last."""
        parts = [e.parts[getattr(options, e.option)] if isinstance(e, Choice) else e for e in cls.entries()]
        return [part for part in parts if part is not None]

    @classmethod
    def options_of(cls, piece: type[Piece], options: Any) -> Any:
        return piece.Options(**{name: getattr(options, name) for name in piece.Options.model_fields})

    @classmethod
    def pieces(cls, options: Any) -> list[tuple[type[Piece], Any]]:
        return [(piece, cls.options_of(piece, options)) for piece in cls.recipe(options).pieces]

    @classmethod
    def where(cls, piece: type[Piece]) -> str:
        """Where the options of a piece are in an experiment."""
        return "method."

    @classmethod
    def named(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options under their names here; of an option under both names the one that came later counts."""
        return {cls.symbols.get(name, name): value for name, value in options.items()}

    @classmethod
    def options_class(cls, values: Mapping[str, Any]) -> type[BaseModel]:
        """What these options are checked with."""
        return cls.Options

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> Found:
        """What the options that were left open are in this experiment."""
        found: Found = {}
        for piece, own in cls.pieces(options):
            prefix = cls.where(piece).removeprefix("method.")
            decisions = {prefix + name: decision for name, decision in piece.resolve(own, experiment).items()}
            found = decisions | found  # of parts that share an option the first speaks
        return found

    @classmethod
    def opened(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options without those that a rule may decide."""
        fields = cls.options_class(options).model_fields
        return {name: value for name, value in options.items() if fields[name].default != AUTO}

    @classmethod
    def rounds(cls, options: Any) -> int | None:
        """How many there are, where it is not the experiment's to say."""
        return None

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """Refuse (ConfigError) settings that it cannot work with."""
        options = cls.options_class(experiment.method.options)(**experiment.method.options)
        cls.recipe(options).check(experiment.training)
        for piece, own in cls.pieces(options):
            piece.check(own, experiment, cls.where(piece))

    @classmethod
    def told(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options that sites are told: not those of parts that are the server's own."""
        servers = [part for part in cls.every_part() if part.server_only]
        own = {name for part in servers for name in part.Options.model_fields}
        own |= {entry.option for entry in cls.choices() if any(part in servers for part in entry.parts.values())}
        return {name: value for name, value in options.items() if name not in own}

    @classmethod
    def made(cls, task: Task) -> Method:
        """The method that the task's experiment names."""
        return cls(task)

    # ---- at work

    def __init__(self, task: Task) -> None:
        self.task = task
        values = task.experiment.method.options
        self.options: Any = self.options_class(values)(**values)
        (head, head_options), *pieces = self.pieces(self.options)
        assert issubclass(head, Head)
        self.network_head = head(task, head_options)
        kinds = {piece.name: piece for piece, _ in pieces if issubclass(piece, Part)}
        self.list: list[Part] = [
            piece(task, own, {other: kind for other, kind in kinds.items() if kind is not piece})
            for piece, own in pieces
            if issubclass(piece, Part)
        ]
        self.mean: Any = next(part for part in self.list if "average" in part.jobs)

    def part(self, kind: type[P]) -> P:
        return next(part for part in self.list if isinstance(part, kind))

    @property
    def private(self) -> bool:
        """Whether clients know their own classes only."""
        return bool(self.mean.private)

    def model(self) -> Network:
        setting, seed = self.task.experiment.model, self.task.seed
        layout = None if self.task.finished is None else self.task.finished.layout
        backbone = fit_out(build_backbone(setting, self.task.sample_shape, seed, layout), setting, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.task.seed, "head"))
            return self.network_head.build(backbone)

    def bind(self, model: Network, weights: FlatWeights) -> None:
        for part in self.list:
            part.bind(model, weights)

    def receive(self, weights: FlatWeights, message: Message) -> None:
        """Put what the server sent into the model."""
        if "weights" in message.tensors:
            weights.load(message.tensors)
        self.received = message.tensors

    def predict(self, model: Network, images: Tensor, known: Tensor | None = None) -> Tensor:
        """Probabilities (batch, classes). `known` targets (1, 0, -1 unknown) help the heads that can use them: such a
        label is its own probability."""
        if known is not None and "states" not in self.network_head.gives:
            raise ConfigError(f"The head '{self.network_head.name}' cannot use known labels; ctran and text-query can.")
        teacher = next(part for part in self.list if "targets" in part.jobs)
        scores = teacher.probabilities(model(self.seen(images), known))
        return scores if known is None else torch.where(known < 0, scores, known.to(scores.dtype))

    def seen(self, images: Tensor) -> Tensor:
        """As the network gets them where it predicts."""
        for part in self.overriding("inputs"):
            images = part.inputs(images, under(part.name, self.received))
        return images

    def overriding(self, hook: str) -> list[Part]:
        """The parts that do something there: the others cost nothing a step."""
        return [part for part in self.list if getattr(type(part), hook) is not getattr(Part, hook)]

    # ---- the server

    def asks(self, exchange: str) -> bool:
        return any(exchange in part.exchanges for part in self.list)

    def exchange(self, round: int) -> str | None:
        """Round 0 is the opening exchange and the one after the last the closing one: nobody trains in them, and in no
        round at all where a part asks for the rounds."""
        if 0 < round <= self.task.rounds:
            return "rounds" if self.asks("rounds") else None
        return "closing" if round else "opening"

    def replying(self, round: int) -> list[Part]:
        """The parts that a reply is of."""
        exchange = self.exchange(round)
        return [part for part in self.list if exchange is None or exchange in part.exchanges]

    def begin(self, peers: Sequence[Peer]) -> None:
        for part in self.list:
            part.begin(peers)

    def start(self) -> Tensors:
        return self.joined({part: part.start() for part in self.list})

    def send(self, state: Tensors, peer: Peer, round: int) -> Message:
        return Message(self.joined({part: part.send(self.own(part, state), peer, round) for part in self.list}))

    def expects(self, sent: Message, round: int) -> dict[str, Like]:
        """What a good reply holds, all of it."""
        weights = self.own(self.mean, sent.tensors)
        return {
            self.key(part, name): like
            for part in self.replying(round)
            for name, like in part.expects(weights | self.own(part, sent.tensors), round).items()
        }

    def refuse(self, sent: Message, reply: Message, round: int) -> str | None:
        """Why a reply cannot be accepted, or None."""
        return refuse_unlike(self.expects(sent, round), reply)

    def merger(self, state: Tensors, round: int) -> Merging:
        return Merging(self, state, round)

    def deploy(self, state: Tensors) -> Message:
        """What is needed to predict with the global model."""
        message = Message(self.own(self.mean, state))
        for part in self.list:
            part.deploy(self.own(part, state), message)
        return message

    # ---- names: the average's tensors are the weights themselves, everybody else's are under the part's name

    def key(self, part: Part, name: str) -> str:
        return name if part is self.mean else f"{part.name}/{name}"

    def own(self, part: Part, tensors: Tensors) -> Tensors:
        if part is self.mean:
            return {name: tensor for name, tensor in tensors.items() if "/" not in name}
        return under(part.name, tensors)

    def joined(self, tensors: Mapping[Part, Tensors]) -> Tensors:
        return {self.key(part, name): tensor for part, own in tensors.items() for name, tensor in own.items()}
