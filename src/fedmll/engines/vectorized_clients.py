"""Several clients trained at once (`training.clients_per_batch`). Their weights are the rows of one matrix, and one
step of all of them is one call of the network under `torch.func.vmap`. A step of a small network costs mostly overhead,
which is then paid once for all clients. The arithmetic is the same in another order, so the last bits differ.

Clients advance in parallel. Those whose batches have the same size take a step in one call. A client with fewer batches
finishes earlier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedmll.core.errors import ClientError, ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.engines.optimizer import ClientOptimizer, backward
from fedmll.methods.framework.base import Part
from fedmll.methods.framework.client_round import Batch, Client, ClientRound, TrainStep
from fedmll.models.backbones import Backbone
from fedmll.models.flat_weights import FlatWeights
from fedmll.models.network import Lift, Network
from fedmll.models.standardise import StandardiseFeatures

Loss = Callable[[TrainStep], Tensor]
CLIP_EPSILON = 1e-6  # the value of torch.nn.utils.clip_grad_norm_
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Flatten)
SUPPORTED = (Network, Backbone, Lift, StandardiseFeatures, nn.Sequential, nn.Linear, *ACTIVATIONS)


def check_vectorizable(model: Network, clients_per_batch: int) -> None:
    """Raise a ConfigError if several clients cannot be trained at once with this model.

    Other layers than linear ones are slower for many clients at once than for one after the other, draw one random
    number for all clients, or keep statistics that mix the clients.
    """
    for name, module in model.named_modules():
        trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        if module.training and (not isinstance(module, SUPPORTED) or (trained and not isinstance(module, nn.Linear))):
            raise ConfigError(
                f"training.clients_per_batch = {clients_per_batch} is for networks of linear layers (feature vectors, "
                f"a linear head on a frozen backbone), and this one has {name or 'a head'}, a "
                f"{type(module).__name__}. Leave it out: clients are then trained one after the other."
            )


class StackedWeights(FlatWeights):
    """The weights of several clients in a step, as `Part.on_gradients` sees them: one row per client."""

    def __init__(self, parameters: Tensor, gradient: Tensor) -> None:
        self.rows, self.gradient = parameters, gradient

    @property
    def parameter_vector(self) -> Tensor:
        return self.rows

    def add_gradient(self, gradient: Tensor, factor: float = 1.0) -> None:
        self.gradient.add_(gradient, alpha=factor)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            "With training.clients_per_batch `on_gradients` can use weights.parameter_vector and weights.add_gradient, "
            f"but not weights.{name}."
        )


class StackedRoundStates:
    """The round states of several clients: tensors with one row per client, and values that are equal for all."""

    def __init__(self, client_rounds: Sequence[ClientRound], parts: Sequence[Part]) -> None:
        self.leaves, self.specs = list[Any](), dict[str, Any]()
        for part in parts:
            states = [client_round.round_states[part.name] for client_round in client_rounds]
            leaves, specs = zip(*map(tree_flatten, states), strict=True)
            if any(spec != specs[0] for spec in specs) or not all(map(_can_stack, zip(*leaves, strict=True))):
                training = client_rounds[0].client.task.experiment.training
                raise ClientError(
                    f"training.clients_per_batch = {training.clients_per_batch}: the round states of the part "
                    f"'{part.name}' differ between clients in more than the values of their tensors, so the clients "
                    "cannot be trained at once. Leave training.clients_per_batch out."
                )
            self.specs[part.name] = specs[0]
            self.leaves += [torch.stack(of) if isinstance(of[0], Tensor) else of[0] for of in zip(*leaves, strict=True)]
        self.tensors = [place for place, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]

    def rows(self, clients: slice | list[int]) -> list[Tensor]:
        """The tensors of some clients."""
        return [self.leaves[place][clients] for place in self.tensors]

    def with_tensors(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """The round states by the name of the part, with these tensors in them."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.tensors, tensors, strict=True):
            leaves[place] = tensor
        rest = iter(leaves)
        return {name: tree_unflatten(list(islice(rest, spec.num_leaves)), spec) for name, spec in self.specs.items()}


def _can_stack(leaves: tuple[Any, ...]) -> bool:
    first = leaves[0]
    if isinstance(first, Tensor):
        return all(isinstance(leaf, Tensor) and leaf.shape == first.shape for leaf in leaves)
    return all(not isinstance(leaf, Tensor) and leaf == first for leaf in leaves)


class LossModule(nn.Module):
    """The loss of one client's batch as a module, so that its network can be called with any weights."""

    def __init__(self, client: Client, loss: Loss, round_states: StackedRoundStates) -> None:
        super().__init__()
        self.network, self.client, self.loss, self.round_states = client.model, client, loss, round_states

    def forward(
        self, images: Tensor, targets: Tensor, rows: Tensor, states: list[Tensor], unknown_taught: bool, steps: int
    ) -> Tensor:
        client_round = ClientRound(
            self.client,
            Message(),
            round_states=self.round_states.with_tensors(states),
            unknown_targets_taught=unknown_taught,
            steps=steps,
        )
        client, generator = self.client, torch.Generator()
        batch = Batch(
            task=client.task, data=client.data, rows=rows, targets=targets, augmentation="none", generator=generator
        )
        step = TrainStep(client_round, batch)
        step.images = images
        return self.loss(step)


class VectorizedClients:
    """The local epochs of several clients, each from its own weights. `vectors` and `losses` hold the results."""

    def __init__(
        self,
        client_rounds: Sequence[ClientRound],
        starts: Sequence[Tensor],
        loss: Loss,
        loss_parts: list[Part],
        gradient_parts: list[Part],
    ) -> None:
        self.client_rounds, self.gradient_parts, self.client = client_rounds, gradient_parts, client_rounds[0].client
        self.training, self.end = self.client.task.experiment.training, self.client.weights.parameter_end
        self.layout = self.client.weights.layout
        self.vectors = torch.stack(list(starts))  # (clients, weights)
        self.losses = torch.zeros(len(client_rounds), device=self.vectors.device)  # the sum over the steps
        self.round_states = StackedRoundStates(client_rounds, list(dict.fromkeys([*loss_parts, *gradient_parts])))
        self.module = LossModule(self.client, loss, self.round_states)
        self.parameters = [nn.Parameter(vector[: self.end]) for vector in self.vectors.unbind()]
        self.optimizer = ClientOptimizer(self.training, self.parameters)

    def run_epochs(self) -> None:
        batches = [client_round.client.batches() for client_round in self.client_rounds]
        while True:
            groups = defaultdict[tuple[int, bool], dict[int, TrainStep]](dict)
            for number, (client_round, own) in enumerate(zip(self.client_rounds, batches, strict=True)):
                batch = next(own, None)
                if batch is not None:
                    key = len(batch), client_round.unknown_targets_taught
                    groups[key][number] = TrainStep(client_round, batch)
            if not groups:
                return
            for (_, unknown_taught), steps in groups.items():
                self._step(steps, unknown_taught)

    def _step(self, steps: dict[int, TrainStep], unknown_taught: bool) -> None:
        numbers = list(steps)
        consecutive = numbers[-1] - numbers[0] == len(numbers) - 1
        which: slice | list[int] = slice(numbers[0], numbers[-1] + 1) if consecutive else numbers
        vectors, states = self.vectors[which], self.round_states.rows(which)
        parts = vectors.split([place.shape.numel() for place in self.layout.values()], 1)
        tensors = {
            name: part.view(-1, *place.shape).requires_grad_(place.start < self.end)
            for (name, place), part in zip(self.layout.items(), parts, strict=True)
        }
        losses = self._losses(tensors, list(steps.values()), states, unknown_taught)
        backward(losses.sum())
        gradient = self._gradient(tensors)
        if self.gradient_parts:
            rows, round_states = (
                StackedWeights(vectors[:, : self.end], gradient),
                self.round_states.with_tensors(states),
            )
            client_round = ClientRound(replace(self.client, weights=rows), Message(), round_states=round_states)
            for part in self.gradient_parts:
                penalty = part.on_gradients(client_round, round_states[part.name])
                losses = losses.detach() if penalty is None else losses.detach() + penalty
        if self.training.clip is not None:
            norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient *= (self.training.clip / (norms + CLIP_EPSILON)).clamp(max=1)
        for number, row in zip(numbers, gradient.unbind(), strict=True):
            self.parameters[number].grad = row
            self.client_rounds[number].steps += 1
        self.optimizer.step()
        self.losses[which] += losses.detach()

    def _losses(self, tensors: Tensors, steps: list[TrainStep], states: list[Tensor], unknown_taught: bool) -> Tensor:
        """(clients,): the loss of each client, with its own weights."""
        batch = [torch.stack(of) for of in zip(*((s.images, s.targets, s.rows) for s in steps), strict=True)]
        done = steps[0].client_round.steps  # the same for all of them

        def compute_loss(tensors: Tensors, batch: list[Tensor], states: list[Tensor]) -> Tensor:
            named = {f"network.{name}": tensor for name, tensor in tensors.items()}
            loss: Tensor = functional_call(
                self.module, named, (*batch, states, unknown_taught, done), tie_weights=False
            )
            return loss

        try:
            found: Tensor = vmap(compute_loss)(tensors, batch, states)
        except RuntimeError as error:
            if "vmap" not in str(error):  # torch has no class of its own for what vmap cannot do
                raise
            raise ClientError(
                f"training.clients_per_batch = {self.training.clients_per_batch}: something in the loss cannot be "
                f"computed for several clients at once ({' '.join(str(error).split())[:200]}). Leave "
                "training.clients_per_batch out."
            ) from error
        return found

    def _gradient(self, tensors: Tensors) -> Tensor:
        """(clients, parameters). A parameter without a gradient must not move, which a row cannot express."""
        found = {name: tensor.grad for name, tensor in tensors.items() if tensor.requires_grad}
        unused = next((name for name, gradient in found.items() if gradient is None), None)
        if unused is not None:
            raise ClientError(
                f"training.clients_per_batch = {self.training.clients_per_batch}: the loss does not depend on "
                f"{unused}. Leave training.clients_per_batch out, or that layer."
            )
        return torch.cat([gradient.flatten(1) for gradient in found.values() if gradient is not None], 1)
