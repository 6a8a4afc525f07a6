"""The contract: a method is a network and a short list of parts. A part is one idea, at the server and at the client.

    server   start → (send → merger: add, add, …, result) every round → deploy
    client   prepare → (shape → term → adjust → stepped) every step → finish

What a part keeps (state at the server, memory at a client) and sends is named tensors under the part's own name, so it
is stored, resumed and checked without a line of the part's. A part does not know which engine runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from torch import Tensor

from fedmll.client import Client, Peer, Step, Work
from fedmll.errors import ConfigError
from fedmll.message import Message, Tensors
from fedmll.methods.expected import Like as Like
from fedmll.methods.expected import refuse_unlike as refuse_unlike
from fedmll.models.backbones import Backbone
from fedmll.models.flat import FlatWeights
from fedmll.models.network import Network
from fedmll.registry import register
from fedmll.task import Task

if TYPE_CHECKING:
    from fedmll.experiment import Experiment

AUTO = "auto"  # an option that a rule decides when the experiment is made (`resolve`)
LARGEST_RETURNED = 1e9  # of numbers that a part sends and gets back without a word about their range

RESERVED = {"name", "of", "head", "parts", "average", "start", "optimizer"}  # of an experiment's [method], of memories
Located = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]  # the same from every folder
Records = dict[str, float | Tensor]  # what is written down beside a round's metrics
Found = dict[str, tuple[Any, str]]  # option → what a rule made of "auto", and the rule in words (empty: never mind)


def option(default: Any, meaning: str, **limits: Any) -> Any:
    """A field of Options: its default, what it means (with its equation), its range."""
    return Field(default, description=meaning, **limits)


class PartOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Piece:
    """What a method is put together from: something with a name and options."""

    kind: ClassVar[str]
    name: ClassVar[str] = ""
    Options: ClassVar[type[BaseModel]] = PartOptions
    shared: ClassVar[tuple[str, ...]] = ()  # options that are one and the same for all parts that have them

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__dict__.get("name"):
            if cls.name in RESERVED or not set("/.").isdisjoint(cls.name):
                raise ConfigError(f"A {cls.kind} cannot be called '{cls.name}'; choose another name.")
            register(cls.kind, cls.name)(cls)

    @classmethod
    def check(cls, options: Any, experiment: Experiment, where: str) -> None:
        """Refuse (ConfigError) settings that it cannot work with; `where` its options are, for the message."""

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> Found:
        """What the options that were left open ("auto") are in this experiment: decided once, stored, sent to sites."""
        return {}


H = TypeVar("H", bound=Callable[..., Any])


def together(hook: H) -> H:
    """Of a `term`: it can be computed for several clients at once by torch.func.vmap, so it draws nothing and decides
    nothing by a tensor's values. Of an `adjust`: what it asks of `work` are the client's weights, and it is the same
    sum where they and `mine` have a row a client. A method whose parts all say so goes with `training.together`. All
    clients prepare before the first one finishes: what is for later is in `mine`, nothing on the part itself."""
    hook.together = True  # type: ignore[attr-defined]
    return hook


class Head(Piece):
    """What turns a backbone into a network for the task's classes."""

    kind = "head"
    gives: ClassVar[frozenset[str]] = frozenset()  # what parts may ask of it: prototypes, states, rows

    def __init__(self, task: Task, options: Any) -> None:
        self.task, self.options = task, options

    def build(self, backbone: Backbone) -> Network:
        """Its initial weights come from the experiment's seed: torch is seeded when this is called."""
        raise NotImplementedError


class Merger:
    """One round at the server: replies come one at a time and are let go."""

    def add(self, peer: Peer, reply: Message) -> None:
        """`reply` has the client's weights, the part's own tensors, and the numbers of every reply: samples, steps,
        loss."""

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        """The part's next state, all of it, and what is worth writing down. `merged` are the global weights as the
        average made them; a part may put better ones there."""
        return {}, {}


class Sum(Merger):
    """Σ over the clients of one of the part's own tensors, in float64; `then` makes the next state of it."""

    def __init__(self, name: str, then: Callable[[Tensor], Tensors]) -> None:
        self.name, self.then, self.total = name, then, torch.zeros((), dtype=torch.float64)

    def add(self, peer: Peer, reply: Message) -> None:
        self.total = self.total + reply[self.name]

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        return self.then(self.total), {}


class Part(Piece):
    """One idea, at the server and at the client. Override what it changes: a hook that is left alone costs nothing."""

    kind = "part"
    jobs: ClassVar[frozenset[str]] = frozenset()  # what only one part of a method can do: targets, unknown, average …
    needs: ClassVar[frozenset[str]] = frozenset()  # what the head must give
    requires: ClassVar[tuple[type[Part], ...]] = ()  # what it stands on; put before it where it is not in the list
    exchanges: ClassVar[frozenset[str]] = (
        frozenset()
    )  # asked by `survey`: "opening", "closing", beside the rounds; "rounds"
    sends: ClassVar[tuple[str, ...]] = ()  # what of its state every client receives …
    returns: ClassVar[tuple[str, ...]] = ()  # … and what of that comes back, in the same shape
    losses: ClassVar[Literal["all", "known", "own"]] = "own"  # of a part that teaches targets: which `training.loss`
    every_class: ClassVar[bool] = False  # its messages speak of all classes
    private: ClassVar[bool] = False  # of an average: clients know their own classes only
    alone: ClassVar[bool] = False  # of an average: there is no common model, each client has its own
    common: ClassVar[bool] = False  # it cannot do without a common model
    server_only: ClassVar[bool] = False  # its options never leave the server, and clients do without it

    def __init__(self, task: Task, options: Any, beside: Mapping[str, type[Part]]) -> None:
        self.task, self.options = task, options
        self.beside = beside  # the method's other parts, by name

    def bind(self, model: Network, weights: FlatWeights) -> None:
        """The process's only model and the layout of its weights: parameters first, buffers after them."""
        self.model, self.weights = model, weights

    # ---- the server

    def begin(self, peers: Sequence[Peer]) -> None:
        """Before the first round of a run or of its resumption, and when a client comes late: refuse (ConfigError)
        clients it cannot work with."""

    def start(self) -> Tensors:
        """Its state before round 1."""
        return {}

    def send(self, state: Tensors, peer: Peer, round: int) -> Tensors:
        """What one client receives. Tensors taken from the state as they are cost nothing a client."""
        return {name: state[name] for name in self.sends}

    def expects(self, sent: Tensors, round: int) -> dict[str, Like]:
        """What a good reply holds; everything else is refused. `sent` has the part's own tensors and the weights."""
        bound = LARGEST_RETURNED
        return {name: Like(tuple(sent[name].shape), sent[name].dtype, -bound, bound) for name in self.returns}

    def merger(self, state: Tensors, round: int, beside: Mapping[str, Merger]) -> Merger | None:
        """None: its state stays. `beside` are the mergers of the parts before it, which get every reply first."""
        return None

    def deploy(self, state: Tensors, message: Message) -> None:
        """Change or add to what is needed to predict with the global model."""

    def audit(self, memory: Tensors, truth: Tensor) -> Tensor | None:
        """Only a simulation calls this: it alone knows the true targets (samples, classes) of a client beside what the
        client remembers. Counts, which are summed over all clients that have something to count; nothing of them goes
        back to a client or into the state."""
        return None

    def audited(self, total: Tensor) -> Records:
        """What is worth writing down of the sum."""
        return {}

    # ---- the client

    def narrow(self, client: Client) -> Client:
        """The client as this part wants it to be seen."""
        return client

    def survey(self, work: Work) -> Tensors:
        """Its reply to an opening or closing exchange, in which nobody trains."""
        return {}

    def prepare(self, work: Work) -> Any:
        """What is fixed in the round, computed once; every later call gets it as `mine`."""

    def shape(self, step: Step, mine: Any) -> None:
        """Before the network runs: other views or states, other images."""

    def term(self, step: Step, mine: Any) -> Tensor | None:
        """Its share of the loss."""
        return None

    def adjust(self, work: Work, mine: Any) -> None:
        """Change the gradients before a step: penalties whose gradient is known need no autograd."""

    def stepped(self, work: Work, mine: Any) -> None:
        """After a step: EMA teachers."""

    def finish(self, work: Work, mine: Any) -> Tensors:
        """After training: its share of the reply; remember."""
        return {}

    def probabilities(self, logits: Tensor) -> Tensor:
        """What the network was taught to mean, by the part that teaches targets."""
        return torch.sigmoid(logits)

    def inputs(self, images: Tensor, received: Tensors) -> Tensor:
        """Images as its network takes them when it predicts; `received` is what `deploy` added under its name."""
        return images
