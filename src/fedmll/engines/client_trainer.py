"""The trainer: one method with one model object, which builds, receives, trains and predicts. The local engine, the
sites of a real federation and everything that loads a finished run use it and nothing else."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmll.core.errors import ClientError
from fedmll.core.message import Message, Tensors
from fedmll.data.dataset import Dataset
from fedmll.data.federation import Federation
from fedmll.data.images.cache import Progress, no_progress
from fedmll.engines.optimizer import ClientOptimizer, backward
from fedmll.engines.vectorized_clients import VectorizedClients
from fedmll.methods import build_method
from fedmll.methods.framework.base import Part
from fedmll.methods.framework.client_round import (
    EVALUATION_BATCH,
    Batch,
    Client,
    ClientInfo,
    ClientRound,
    TrainStep,
    tensors_of,
)
from fedmll.methods.framework.task import Task
from fedmll.methods.parts.classifier_rows import own_rows
from fedmll.models.backbones import pixel_scale
from fedmll.models.flat_weights import FlatWeights, frozen_tensors
from fedmll.models.frozen_features import WHOLE, FrozenFeatures
from fedmll.models.network import Classifier, Network

OPTIMIZER = "optimizer"  # the name under which a client state holds the state of the optimizer


class Trainer:
    """One method with one model object: it builds, receives, trains and predicts."""

    def __init__(self, task: Task) -> None:
        self.task, self.method = task, build_method(task)
        self.model = self.method.build_model().to(task.device)
        self.weights = FlatWeights(self.model)
        self.trained_modules = [module for module in self.model.train().modules() if module.training]
        self.method.bind(self.model, self.weights)
        with_hook = self.method.parts_with
        self.image_transforms, self.batch_transforms = with_hook("transform_images"), with_hook("transform_batch")
        self.losses, self.on_gradients, self.on_step_end = map(with_hook, ("loss", "on_gradients", "on_step_end"))
        self._restricted: tuple[Classifier, FlatWeights] | None = None  # the model of the last client, see _restrict

    @cached_property
    def optimizer(self) -> ClientOptimizer:
        return ClientOptimizer(self.task.experiment.training, self.weights.parameters)

    def with_frozen_features(
        self, data: Federation, progress: Progress = no_progress, *, processes: int | None = None
    ) -> Federation:
        """The federation with the features that a frozen backbone computes once; unchanged for any other model."""
        return replace(data, **with_tokens(self.task, self.model, _parts(data), progress, processes=processes))

    def frozen_features(self, data: Federation) -> list[FrozenFeatures]:
        """The features that `with_frozen_features` loads, in an order that depends on the data only."""
        return list(frozen_features(self.task, self.model, _parts(data)).values())

    def client_infos(self, data: Federation) -> list[ClientInfo]:
        """The clients as the server knows them. In the run mode `pooled` there is one, with all data."""
        if self.method.pooled:
            return [ClientInfo(0, "pooled", torch.ones(len(self.task.classes), dtype=torch.bool))]
        owned = torch.from_numpy(data.allowed & data.annotated)
        return [ClientInfo(index, name, owned[index]) for index, name in enumerate(data.names)]

    def participants(self, data: Federation, round: int) -> list[int]:
        """The clients of a round, the largest first. The order does not depend on how fast they are."""
        if self.method.pooled:
            return [0]
        everybody = self.method.exchange_in(round) is not None
        chosen = (data.active_clients if everybody else data.participants(round)).tolist()
        sizes = data.sizes
        return sorted(chosen, key=lambda client: (-sizes[client], client))

    def client_in_round(self, data: Federation, info: ClientInfo, round: int) -> Client:
        """A client with its data, for one round."""
        if self.method.pooled:
            samples, annotated = data.pooled, info.owned
        else:
            samples = data.train.subset(data.samples[info.index])
            annotated = torch.from_numpy(data.annotated[info.index].copy())
        return Client(
            task=self.method.task,
            name=info.name,
            round=round,
            data=samples,
            annotated=annotated,
            owned=info.owned,
            model=self.model,
            weights=self.weights,
        )

    def receive(self, message: Message) -> None:
        """Load what the server sent into the model."""
        self.method.receive(self.weights, message)

    def named(self, message: Message) -> Tensors:
        """What is needed to predict, for a file: the weights under the names of the model, and what parts added."""
        return self.weights.named(message.tensors) | {k: t for k, t in message.tensors.items() if "/" in k}

    def frozen(self) -> Tensors:
        """What was never trained, by name. With `named` it is the whole model."""
        return {name: t.detach().cpu().clone() for name, t in frozen_tensors(self.model).items()}

    def load(self, named: Tensors) -> None:
        """Load the tensors of such a file into the model."""
        self.weights.load_named(named)
        for name, tensor in frozen_tensors(self.model).items():
            if name in named:
                tensor.data.copy_(named[name])
        self.method.received = named

    def predict(self, data: Dataset, start: int, stop: int, known: Tensor | None = None) -> Tensor:
        """The probabilities of the samples from `start` to `stop`. `known` (samples, C) are known targets of them."""
        self.model.eval()
        scores = []
        with torch.inference_mode():
            for first in range(start, stop, EVALUATION_BATCH):
                rows = slice(first, min(first + EVALUATION_BATCH, stop))
                states = None if known is None else known[rows].to(self.task.device)
                scores.append(self.method.predict(self.model, self.task.model_inputs(data, rows), states).cpu())
        return torch.cat(scores) if scores else torch.zeros(0, len(self.task.classes))

    def train(self, client: Client, message: Message, client_state: Tensors) -> Message:
        """One round of a client: its reply to the message. The client state is changed in place."""
        if self.method.has("private-labels"):
            client = self._restrict(client)
        client_round = self._start_round(client, message, client_state)
        if self.method.exchange_in(client.round) is not None:
            parts = self.method.replying_parts(client.round)
            return self._reply(
                client_round, client_state, {part: part.collect_statistics(client_round) for part in parts}
            )
        return self._end_round(client_round, client_state, self._run_epochs(client_round))

    def train_clients(self, clients: list[Client], messages: list[Message], states: list[Tensors]) -> list[Message]:
        """One round of several clients (`training.clients_per_batch`); arguments as of `train`."""
        jobs = list(zip(clients, messages, states, strict=True))
        if len(clients) == 1 or self.method.exchange_in(clients[0].round) is not None:
            return [self.train(*job) for job in jobs]
        client_rounds, starts = list[ClientRound](), list[Tensor]()
        for job in jobs:
            client_rounds.append(self._start_round(*job))
            starts.append(self.weights.vector.clone())
        trained = VectorizedClients(client_rounds, starts, self.loss, self.losses, self.on_gradients)
        trained.run_epochs()
        replies = list[Message]()
        results = zip(client_rounds, states, trained.vectors, trained.losses.tolist(), strict=True)
        for client_round, client_state, vector, total_loss in results:
            self.weights.vector.copy_(vector)
            client_round.client.seed_torch()
            reply = self._end_round(client_round, client_state, total_loss)
            for tensors in (reply.tensors, client_state):  # the weights of the next client overwrite these
                tensors |= {name: t.clone() for name, t in tensors.items() if _share_storage(t, self.weights.vector)}
            replies.append(reply)
        return replies

    def _restrict(self, client: Client) -> Client:
        """The client as if its own classes were all classes, with a model of as many outputs (private labels)."""
        rows = own_rows(client.data.classes, client.owned)
        data = client.data.select_classes(rows.numpy())
        everything = torch.ones(len(rows), dtype=torch.bool)
        if self._restricted is None or self._restricted[0].head.out_features != len(rows):
            model = Classifier(copy.deepcopy(client.model.backbone), len(rows)).to(client.task.device)
            self._restricted = model, FlatWeights(model)
        model, weights = self._restricted
        task = replace(client.task, classes=data.classes, server_data=None)
        return replace(
            client, task=task, data=data, annotated=everything, owned=everything, model=model, weights=weights
        )

    def _start_round(self, client: Client, message: Message, client_state: Tensors) -> ClientRound:
        """Everything before the first step."""
        method = self.method
        method.receive(client.weights, message)
        client.seed_torch()
        names = [*(part.name for part in method.active_parts), OPTIMIZER]
        on_device = {name: tensor.to(self.task.device) for name, tensor in client_state.items()}
        states = {name: tensors_of(name, on_device) for name in names}
        client_round = ClientRound(client, message, states, image_transforms=self.image_transforms)
        client_round.batch_loss = partial(self.batch_loss, client_round)
        if method.exchange_in(client.round) is None:
            for part in method.active_parts:
                client_round.round_states[part.name] = part.on_round_start(client_round)
        return client_round

    def _end_round(self, client_round: ClientRound, client_state: Tensors, total_loss: float) -> Message:
        """The reply of a trained client. `total_loss` is the sum over its steps."""
        client, mean = client_round.client, total_loss / client_round.steps
        if not math.isfinite(mean):
            raise ClientError(
                f"The loss of client {client.name} became {mean} in round {client.round}. Lower training.lr "
                f"(now {self.task.experiment.training.lr:g}), or set training.clip = 1.0; also look at its data."
            )
        client_round.model_changed()
        states = client_round.round_states
        replies = {part: part.on_round_end(client_round, states[part.name]) for part in self.method.active_parts}
        return self._reply(client_round, client_state, replies, steps=client_round.steps, loss=mean)

    def _reply(
        self,
        client_round: ClientRound,
        client_state: Tensors,
        replies: dict[Part, Tensors],
        *,
        steps: int = 0,
        loss: float = 0.0,
    ) -> Message:
        client_state.clear()
        for name, own in client_round.client_states.items():
            client_state |= {f"{name}/{key}": tensor.cpu() for key, tensor in own.items()}
        numbers = {"samples": float(len(client_round.client.data)), "steps": float(steps), "loss": loss}
        return Message({name: tensor.cpu() for name, tensor in self.method.join(replies).items()}, numbers)

    def _training_mode(self, model: Network) -> None:
        """Reading the mode of all modules is much cheaper than setting it in every round."""
        if model is not self.model or not all(module.training for module in self.trained_modules):
            model.train()

    def _run_epochs(self, client_round: ClientRound) -> float:
        """The local epochs. Returns the sum of the losses."""
        client, states, training = client_round.client, client_round.round_states, self.task.experiment.training
        parameters, clip = client.weights.parameters, training.clip
        shared = client.weights is self.weights
        optimizer = self.optimizer if shared else ClientOptimizer(training, parameters)
        optimizer.reset(client_round.client_state(OPTIMIZER))
        losses = list[Tensor]()
        self._training_mode(client.model)
        for batch in client.batches():
            loss = self.batch_loss(client_round, batch)
            backward(loss)
            loss = loss.detach()
            for part in self.on_gradients:
                penalty = part.on_gradients(client_round, states[part.name])
                loss = loss if penalty is None else loss + penalty
            if clip is not None:
                nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            client_round.steps += 1
            for part in self.on_step_end:
                part.on_step_end(client_round, states[part.name])
            losses.append(loss)
        if training.optimizer_state == "kept":
            client_round.client_states[OPTIMIZER] = optimizer.state()
        return float(np.add.accumulate(torch.stack(losses).cpu().numpy())[-1])  # in this order, for the same bits

    def batch_loss(self, client_round: ClientRound, batch: Batch) -> Tensor:
        """The loss of a batch, as in a step of the round."""
        step = TrainStep(client_round, batch)
        for part in self.batch_transforms:
            part.transform_batch(step, client_round.round_states[part.name])
        return self.loss(step)

    def loss(self, step: TrainStep) -> Tensor:
        """The sum of the terms of all parts."""
        terms = [part.loss(step, step.client_round.round_states[part.name]) for part in self.losses]
        first, *others = [term for term in terms if term is not None]
        for term in others:
            first = first + term
        return first


def _parts(data: Federation) -> dict[str, Dataset]:
    return {name: getattr(data, name) for name in ("train", "test", "validation", "held_out", "source")}


def _share_storage(tensor: Tensor, other: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def frozen_features(task: Task, network: Network, parts: Mapping[str, Dataset | None]) -> dict[int, FrozenFeatures]:
    """The features of a frozen backbone for each store of images, by the identity of the store; else none."""
    model, backbone, found = task.experiment.model, network.backbone, dict[int, FrozenFeatures]()
    if model.freeze != WHOLE:
        return found
    for data in parts.values():
        if data is not None and data.is_images and len(data.store) and id(data.store) not in found:
            found[id(data.store)] = FrozenFeatures(
                backbone=backbone,
                store=data.store,
                augmentation=task.experiment.training.augment,
                views=model.views,
                seed=task.seed,
                normalise=task.normalise,
                scale=pixel_scale(model, task.sample_shape[0]),
                means=network.uses_mean_features and backbone.neck is None,
            )
    return found


def with_tokens(
    task: Task,
    network: Network,
    parts: Mapping[str, Dataset | None],
    progress: Progress,
    *,
    processes: int | None = None,
) -> dict[str, Any]:
    """The datasets with the tokens of a frozen backbone, computed once per store; unchanged for any other backbone.

    `processes` compute those that are not in the cache: by default one per core; 0: this process.
    """
    tokens = {
        store: features.load(progress, processes=processes)
        for store, features in frozen_features(task, network, parts).items()
    }
    found = {
        id(data): data if data is None or id(data.store) not in tokens else replace(data, tokens=tokens[id(data.store)])
        for data in parts.values()
    }
    return {name: found[id(data)] for name, data in parts.items()}  # datasets that were one object stay one
