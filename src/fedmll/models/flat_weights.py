"""`FlatWeights`: a model's weights as one vector, so that loading, sending and averaging are single operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmll.core.errors import ConfigError
from fedmll.core.message import Tensors
from fedmll.core.seeding import numpy_generator
from fedmll.models.standardise import StandardiseFeatures

SKETCH_PRODUCTS = 4  # per frozen tensor
SKETCH_TOLERANCE = 1e-4  # relative to the tensor's norm


@dataclass(frozen=True)
class TensorSlice:
    """The position of a named tensor in the vector."""

    start: int
    shape: torch.Size

    @property
    def where(self) -> slice:
        return slice(self.start, self.start + self.shape.numel())


class FlatWeights:
    """Binds a model's tensors to views of one vector.

    `vector` holds the trainable parameters, then the float buffers; `counters` holds the integer buffers. The last
    buffers are those that only the server sets (the statistics of standardised features). Frozen tensors (requires_grad
    is off, or a buffer is not persistent) are not included: they are rebuilt from the experiment, never sent and never
    averaged.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not parameters:
            raise ConfigError(
                "With model.freeze = 'backbone' and a fixed head there is nothing to train. Set model.width (a trained "
                "layer between them), or freeze only the first stages."
            )
        persistent = set(model.state_dict())
        frozen = _frozen_buffers(model)
        buffers = {name: b for name, b in model.named_buffers() if name in persistent and name not in frozen}
        by_server = _set_by_server(model)
        floats = {name: b for name, b in buffers.items() if b.is_floating_point() and name not in by_server}
        floats |= {name: b for name, b in buffers.items() if name in by_server}
        integers = {name: b for name, b in buffers.items() if not b.is_floating_point()}
        self.layout = _places([*parameters.items(), *floats.items()])
        self.counter_layout = _places(list(integers.items()))
        self.parameters = list(parameters.values())
        self.parameter_end = sum(p.numel() for p in self.parameters)
        self.server_count = sum(buffers[name].numel() for name in by_server)  # at the end of the vector
        self._batch_counts = [self.counter_layout[n].where for n in _unused_counts(model) if n in self.counter_layout]
        self._variances = [place.where for name, place in self.layout.items() if name.endswith("running_var")]
        device = next(iter(parameters.values())).device
        self.vector = torch.empty(sum(p.shape.numel() for p in self.layout.values()), device=device)
        self.counters = torch.empty(
            sum(p.shape.numel() for p in self.counter_layout.values()), dtype=torch.int64, device=device
        )
        for name, parameter in parameters.items():
            parameter.data = self._bind(self.vector, self.layout[name], parameter.data)
        for names, vector, layout in (
            (floats, self.vector, self.layout),
            (integers, self.counters, self.counter_layout),
        ):
            for name, buffer in names.items():
                module, _, leaf = name.rpartition(".")
                model.get_submodule(module)._buffers[leaf] = self._bind(vector, layout[name], buffer)

    @property
    def parameter_vector(self) -> Tensor:
        """A view of the parameters, without the buffers."""
        return self.vector[: self.parameter_end]

    @property
    def buffer_count(self) -> int:
        """The number of entries at the end of the vector that are not parameters."""
        return len(self.vector) - self.parameter_end

    def variances(self, length: int) -> list[slice]:
        """The positions of BatchNorm's variances in weights of this length.

        A client's weights may be shorter, because they may lack rows of the head, which come before the buffers.
        """
        shift = length - self.vector.numel()
        return [slice(place.start + shift, place.stop + shift) for place in self._variances]

    def add_gradient(self, gradient: Tensor, factor: float = 1.0) -> None:
        """Add a flat gradient to the gradients of the parameters that have one."""
        start = 0
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.add_(gradient[start : start + parameter.numel()].view_as(parameter), alpha=factor)
            start += parameter.numel()

    @staticmethod
    def _bind(vector: Tensor, place: TensorSlice, value: Tensor) -> Tensor:
        view = vector[place.where].view(place.shape)
        view.copy_(value)
        return view

    def load(self, tensors: Tensors) -> None:
        self.vector.copy_(tensors["weights"])
        if len(self.counters):
            self.counters.copy_(tensors["counters"])

    def dump(self) -> Tensors:
        """A copy of the weights, for a message or the server's state.

        The batch counts of normalisation layers are replaced by 0: nothing uses them, and they would reveal how much
        data a client has.
        """
        tensors = {"weights": self.vector.to("cpu", copy=True)}
        if len(self.counters):
            tensors["counters"] = self.counters.to("cpu", copy=True)
            for place in self._batch_counts:
                tensors["counters"][place] = 0
        return tensors

    def named(self, tensors: Tensors) -> Tensors:
        """`weights` and `counters` as named tensors of the model, for a weights file."""
        named = {name: tensors["weights"][p.where].view(p.shape) for name, p in self.layout.items()}
        counters = {name: tensors["counters"][p.where].view(p.shape) for name, p in self.counter_layout.items()}
        return named | counters

    def load_named(self, named: Mapping[str, Tensor]) -> None:
        """Load named tensors into the model: the inverse of `named`."""
        for vector, layout in ((self.vector, self.layout), (self.counters, self.counter_layout)):
            for name, place in layout.items():
                vector[place.where].view(place.shape).copy_(named[name])


def frozen_tensors(model: nn.Module) -> Tensors:
    """The named tensors that `FlatWeights` does not include; not copies."""
    persistent = set(model.state_dict())
    frozen: Tensors = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    kept = _frozen_buffers(model)
    return frozen | {name: b for name, b in model.named_buffers() if name not in persistent or name in kept}


@dataclass(frozen=True)
class FrozenState:
    """The part of a model file that was not trained: frozen tensors by name, and the layout of the backbone.

    With it, a model is loaded without the files that the frozen tensors were made from (weights, text encoders).
    """

    frozen: Tensors
    layout: dict[str, Any] | None = None


Sketch = list[float]


def sketch_frozen_tensors(model: nn.Module) -> dict[str, Sketch]:
    """A few numbers per frozen tensor: its norm, and its products with fixed vectors of ±1.

    Two machines that built the same tensor get the same numbers up to rounding; a hash would differ if the last bit of
    a QR decomposition differs.
    """
    sketches = {}
    for name, tensor in frozen_tensors(model).items():
        values = tensor.detach().double().cpu().flatten().numpy()
        signs = (
            numpy_generator(0, "sketch", name).integers(0, 2, (SKETCH_PRODUCTS, len(values)), dtype=np.int8) * 2.0 - 1
        )
        sketches[name] = [float(np.linalg.norm(values)), *(signs @ values).tolist()]
    return sketches


def find_sketch_differences(ours: Mapping[str, Sketch], theirs: object) -> list[str]:
    """The names of tensors that differ on another machine, are missing there, or cannot be compared."""
    reported = theirs if isinstance(theirs, Mapping) else {}

    def same(name: str) -> bool:
        mine, other = ours[name], reported.get(name)
        if not isinstance(other, list) or len(other) != len(mine):
            return False
        if not all(isinstance(number, int | float) for number in other):
            return False
        tolerance = SKETCH_TOLERANCE * (1e-6 + mine[0])
        return all(abs(a - b) <= tolerance for a, b in zip(mine, other, strict=True))

    return [name for name in ours if not same(name)] + sorted(str(name) for name in reported.keys() - ours.keys())


def _frozen_buffers(model: nn.Module) -> set[str]:
    """Buffers of modules whose parameters are all frozen: their batch statistics do not change."""
    return {
        f"{place}.{name}"
        for place, module in model.named_modules()
        if (own := list(module.parameters(recurse=False))) and not any(p.requires_grad for p in own)
        for name, _ in module.named_buffers(recurse=False)
    }


def _set_by_server(model: nn.Module) -> set[str]:
    """Buffers that clients neither train nor change."""
    return {
        f"{place}.{name}"
        for place, module in model.named_modules()
        if isinstance(module, StandardiseFeatures)
        for name, _ in module.named_buffers()
    }


def _unused_counts(model: nn.Module) -> list[str]:
    """Batch counts of normalisation layers with a momentum; layers without momentum need the counts for their means."""
    return [
        f"{place}.num_batches_tracked".lstrip(".")
        for place, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.momentum is not None
    ]


def _places(tensors: list[tuple[str, Tensor]]) -> dict[str, TensorSlice]:
    places, start = {}, 0
    for name, tensor in tensors:
        places[name] = TensorSlice(start, tensor.shape)
        start += tensor.numel()
    return places
