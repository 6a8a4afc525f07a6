"""Several clients trained at once (`training.together`): their weights are the rows of one matrix, and a step of all is
one call of the network by torch.func.vmap. Where a network is small, a step costs mostly what is around its arithmetic,
and that is then paid once for all. The arithmetic is the same, in another order: the last bits differ.

Clients keep step with each other. Those whose batch has as many samples take a step together; who has fewer batches is
done earlier.
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

from fedmll.client import Batch, Client, Step, Work
from fedmll.engines.optimiser import Optimiser, backward
from fedmll.errors import ClientError, ConfigError
from fedmll.message import Message, Tensors
from fedmll.methods.contract import Part
from fedmll.models.backbones import Backbone
from fedmll.models.flat import FlatWeights
from fedmll.models.lift import Lift
from fedmll.models.network import Network

Loss = Callable[[Step], Tensor]
CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Flatten)
SUITED = (Network, Backbone, Lift, nn.Sequential, nn.Linear, *ACTIVATIONS)


def refuse_unsuited(model: Network, together: int) -> None:
    """What is not made of linear layers is slower for many clients than for one after the other, draws for all of them
    at once, or keeps statistics that are not a client's own."""
    for name, module in model.named_modules():
        own = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        if module.training and (not isinstance(module, SUITED) or (own and not isinstance(module, nn.Linear))):
            raise ConfigError(
                f"training.together = {together} is for networks of linear layers (feature vectors, a linear head on a "
                f"frozen backbone), and this one has {name or 'a head'}, a {type(module).__name__}. Leave it out: "
                "clients are then trained one after the other."
            )


class Rows(FlatWeights):
    """The weights of some clients in a step, as a part's `adjust` sees them: a row a client."""

    def __init__(self, parameters: Tensor, gradient: Tensor) -> None:
        self.rows, self.gradient = parameters, gradient

    @property
    def parameter_vector(self) -> Tensor:
        return self.rows

    def add_gradient(self, gradient: Tensor, factor: float = 1.0) -> None:
        self.gradient.add_(gradient, alpha=factor)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"With training.together `adjust` has parameter_vector and add_gradient, and no '{name}'.")


class Fixed:
    """What each client's parts prepared: tensors with a row a client, everything else the same for all."""

    def __init__(self, works: Sequence[Work], parts: Sequence[Part]) -> None:
        self.leaves, self.specs = list[Any](), dict[str, Any]()
        for part in parts:
            leaves, specs = zip(*(tree_flatten(work.fixed[part.name]) for work in works), strict=True)
            if any(spec != specs[0] for spec in specs) or not all(map(_alike, zip(*leaves, strict=True))):
                raise ClientError(
                    f"training.together = {works[0].client.task.experiment.training.together}: what the part "
                    f"'{part.name}' prepares differs from client to client in more than the values of its tensors, so "
                    "they cannot be trained at once. Leave training.together out."
                )
            self.specs[part.name] = specs[0]
            self.leaves += [torch.stack(of) if isinstance(of[0], Tensor) else of[0] for of in zip(*leaves, strict=True)]
        self.tensors = [place for place, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]

    def of(self, clients: slice | list[int]) -> list[Tensor]:
        return [self.leaves[place][clients] for place in self.tensors]

    def mapped(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """By part's name, with these tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.tensors, tensors, strict=True):
            leaves[place] = tensor
        rest = iter(leaves)
        return {name: tree_unflatten(list(islice(rest, spec.num_leaves)), spec) for name, spec in self.specs.items()}


def _alike(leaves: tuple[Any, ...]) -> bool:
    first = leaves[0]
    if isinstance(first, Tensor):
        return all(isinstance(leaf, Tensor) and leaf.shape == first.shape for leaf in leaves)
    return all(not isinstance(leaf, Tensor) and leaf == first for leaf in leaves)


class LossOf(nn.Module):
    """The loss of one client's batch as a module, so that its network can be called with any weights."""

    def __init__(self, client: Client, loss: Loss, fixed: Fixed) -> None:
        super().__init__()
        self.network, self.client, self.loss, self.fixed = client.model, client, loss, fixed

    def forward(
        self, images: Tensor, targets: Tensor, rows: Tensor, mine: list[Tensor], claimed: bool, steps: int
    ) -> Tensor:
        work = Work(self.client, Message(), fixed=self.fixed.mapped(mine), claimed=claimed, steps=steps)
        step = Step(work, Batch(self.client.task, self.client.data, rows, targets, "none", torch.Generator()))
        step.images = images
        return self.loss(step)


class Together:
    """The local epochs of several clients, each from its own weights."""

    def __init__(
        self, works: Sequence[Work], starts: Sequence[Tensor], loss: Loss, teaching: list[Part], adjusting: list[Part]
    ) -> None:
        self.works, self.adjusting, self.client = works, adjusting, works[0].client
        self.training, self.end = self.client.task.experiment.training, self.client.weights.parameter_end
        self.places = self.client.weights.layout
        self.vectors = torch.stack(list(starts))  # (clients, weights)
        self.losses = torch.zeros(len(works), device=self.vectors.device)  # their sums
        self.fixed = Fixed(works, list(dict.fromkeys([*teaching, *adjusting])))
        self.module = LossOf(self.client, loss, self.fixed)
        self.own = [nn.Parameter(vector[: self.end]) for vector in self.vectors.unbind()]
        self.optimiser = Optimiser(self.training, self.own)

    def learn(self) -> None:
        """`vectors` and `losses` are then those of the trained clients."""
        batches = [work.client.batches() for work in self.works]
        while True:
            alike = defaultdict[tuple[int, bool], dict[int, Step]](dict)
            for number, (work, mine) in enumerate(zip(self.works, batches, strict=True)):
                batch = next(mine, None)
                if batch is not None:
                    alike[len(batch), work.claimed][number] = Step(work, batch)
            if not alike:
                return
            for (_, claimed), steps in alike.items():
                self._step(steps, claimed)

    def _step(self, steps: dict[int, Step], claimed: bool) -> None:
        numbers = list(steps)
        whole = numbers[-1] - numbers[0] == len(numbers) - 1
        which: slice | list[int] = slice(numbers[0], numbers[-1] + 1) if whole else numbers
        vectors, mine = self.vectors[which], self.fixed.of(which)
        parts = vectors.split([place.shape.numel() for place in self.places.values()], 1)
        tensors = {
            name: part.view(-1, *place.shape).requires_grad_(place.start < self.end)
            for (name, place), part in zip(self.places.items(), parts, strict=True)
        }
        losses = self._losses(tensors, list(steps.values()), mine, claimed)
        backward(losses.sum())
        gradient = self._gradient(tensors)
        if self.adjusting:
            rows, fixed = Rows(vectors[:, : self.end], gradient), self.fixed.mapped(mine)
            work = Work(replace(self.client, weights=rows), Message(), fixed=fixed)
            for part in self.adjusting:
                part.adjust(work, fixed[part.name])
        if self.training.clip is not None:
            norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient *= (self.training.clip / (norms + CLIP_EPSILON)).clamp(max=1)
        for number, row in zip(numbers, gradient.unbind(), strict=True):
            self.own[number].grad = row
            self.works[number].steps += 1
        self.optimiser.step()
        self.losses[which] += losses.detach()

    def _losses(self, tensors: Tensors, steps: list[Step], mine: list[Tensor], claimed: bool) -> Tensor:
        """(clients,), each of its own network."""
        batch = [torch.stack(of) for of in zip(*((s.images, s.targets, s.rows) for s in steps), strict=True)]
        done = steps[0].work.steps  # all of them

        def loss_of(tensors: Tensors, batch: list[Tensor], mine: list[Tensor]) -> Tensor:
            named = {f"network.{name}": tensor for name, tensor in tensors.items()}
            loss: Tensor = functional_call(self.module, named, (*batch, mine, claimed, done), tie_weights=False)
            return loss

        try:
            found: Tensor = vmap(loss_of)(tensors, batch, mine)
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            raise ClientError(
                f"training.together = {self.training.together}: something in the loss cannot be computed for several "
                f"clients at once ({' '.join(str(error).split())[:200]}). Leave training.together out."
            ) from error
        return found

    def _gradient(self, tensors: Tensors) -> Tensor:
        """(clients, parameters). A parameter without one must stay as it is, which a row does not say."""
        found = {name: tensor.grad for name, tensor in tensors.items() if tensor.requires_grad}
        unused = next((name for name, gradient in found.items() if gradient is None), None)
        if unused is not None:
            raise ClientError(
                f"training.together = {self.training.together}: the loss does not depend on {unused}. Leave "
                "training.together out, or that layer."
            )
        return torch.cat([gradient.flatten(1) for gradient in found.values() if gradient is not None], 1)
