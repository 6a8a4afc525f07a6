"""The backward pass and the optimizer of a client: torch's engine and fused kernels, called directly. For a small model
the Python code around them costs more than the arithmetic. The kernels, and so the bits, are the same."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from fedmll.config.settings import TrainingSettings
from fedmll.core.message import Tensors

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # torch's defaults for Adam and AdamW
MOMENTUM, COUNT, MEAN, SQUARE = (
    "momentum_buffer",
    "step",
    "exp_avg",
    "exp_avg_sq",
)  # torch's names


def backward(loss: Tensor) -> None:
    """loss.backward(): 16 µs instead of 50 for a graph of one node."""
    if loss.dim():
        loss.backward()  # raises torch's own error
    else:
        torch.autograd.Variable._execution_engine.run_backward(
            (loss,), (_one(loss.device),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


class ClientOptimizer:
    """torch's SGD, Adam or AdamW for one client after the other. A parameter without a gradient does not move."""

    def __init__(self, training: TrainingSettings, parameters: list[nn.Parameter]) -> None:
        self.training, self.parameters = training, parameters
        self.values = [parameter.data for parameter in parameters]
        self.kinds = (MEAN, SQUARE) if training.optimizer != "sgd" else (MOMENTUM,) if training.momentum else ()
        self.kept: dict[str, list[Tensor]] = {}
        self.steps = torch.zeros(len(parameters), device=parameters[0].device)
        self.counts = self.steps.unbind()
        self.reset({})

    def reset(self, state: Tensors) -> None:
        """Start the round of a client from what `state()` returned in its last round; empty: a fresh optimizer.

        The tensors of the state are used and changed.
        """
        self.steps.zero_()
        self.started = {int(name.partition(".")[0]) for name in state}  # the parameters that have had a gradient
        for kind in self.kinds:
            if state or kind not in self.kept:
                found = (state.get(f"{number}.{kind}") for number in range(len(self.values)))
                own = zip(found, self.values, strict=True)
                self.kept[kind] = [torch.zeros_like(value) if kept is None else kept for kept, value in own]
            else:
                torch._foreach_zero_(self.kept[kind])
        for number, count in enumerate(self.counts):
            if f"{number}.{COUNT}" in state:
                count.copy_(state[f"{number}.{COUNT}"])

    def step(self) -> None:
        """Use up the gradients of the parameters: they are None afterwards."""
        moved, gradients = list[int](), list[Tensor]()
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                moved.append(number)
                gradients.append(parameter.grad)
                parameter.grad = None
        if self.training.optimizer == "sgd":
            self._descend(moved, gradients)
        else:
            self._adapt(moved, gradients)
        self.started.update(moved)

    def state(self) -> Tensors:
        """The tensors to keep for the client's next round, by the number of the parameter and torch's name. They belong
        to the caller: the next client gets new ones."""
        given, self.kept = self.kept, {}
        found = {f"{number}.{kind}": given[kind][number] for kind in self.kinds for number in self.started}
        if self.training.optimizer == "sgd":
            return found
        return found | {f"{number}.{COUNT}": self.counts[number].clone() for number in self.started}

    def _descend(self, moved: list[int], gradients: list[Tensor]) -> None:
        training, chosen = self.training, [(moved, gradients, False)]
        if training.momentum:  # the first gradient initializes the buffer
            pairs = list(zip(moved, gradients, strict=True))
            new, old = ([p for p in pairs if (p[0] in self.started) == begun] for begun in (False, True))
            chosen = [([n for n, _ in of], [g for _, g in of], of is new) for of in (new, old) if of]
        for numbers, own, begins in chosen:
            torch._fused_sgd_(
                [self.values[number] for number in numbers],
                own,
                [self.kept[MOMENTUM][number] for number in numbers] if training.momentum else [],
                weight_decay=training.weight_decay,
                momentum=training.momentum,
                lr=training.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=begins,
            )

    def _adapt(self, moved: list[int], gradients: list[Tensor]) -> None:
        if len(moved) == len(self.counts):
            self.steps.add_(1)
        else:
            for number in moved:
                self.counts[number].add_(1)
        training = self.training
        kernel = torch._fused_adamw_ if training.optimizer == "adamw" else torch._fused_adam_
        kernel(
            [self.values[number] for number in moved],
            gradients,
            [self.kept[MEAN][number] for number in moved],
            [self.kept[SQUARE][number] for number in moved],
            [],
            [self.counts[number] for number in moved],
            amsgrad=False,
            lr=training.lr,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=training.weight_decay,
            eps=EPSILON,
            maximize=False,
        )
