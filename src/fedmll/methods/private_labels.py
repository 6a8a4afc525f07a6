"""Private label sets — Breitholtz, Listo Zec and Johansson, "Federated Learning with Heterogeneous and Private Label
Sets", 2025: FedAvg and FedProx by label (Section 4.1), central tuning of the classifier (Section 4.2, see _tuning.py).

`labels = private`: client k receives the encoder and the classifier rows of its own labels Y_k, as the weights of an
ordinary model with |Y_k| outputs, and returns the same. It never learns of another class: rows come in its own order
(its class names sorted), and a row's initial weights depend on the seed and the row's name, not on its place among the
others or on their number. The server averages the encoder over all, row y over {k : y ∈ Y_k}, both by size; a row that
nobody sent stays as it was.
`labels = public`: everybody knows all classes and sends all rows: FedAvg and FedProx themselves.

`loss = softmax` is for data with one label a sample, over the client's outputs; `sigmoid` for several.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedmll.data.images.unlabelled import image_files, read_images
from fedmll.errors import ClientError, ConfigError
from fedmll.message import Message, Tensors
from fedmll.methods.base import Local, Located, Method, Reply, WeightedMean
from fedmll.methods.fedprox import FedProx
from fedmll.methods.losses import masked_mean
from fedmll.methods.parts.rows import HeadRows, own_rows
from fedmll.methods.parts.tuning import Opinions, Tuning, one_thread
from fedmll.models.backbones import Classifier
from fedmll.models.flat import FlatWeights
from fedmll.seeding import torch_generator

if TYPE_CHECKING:
    from fedmll.client import Batch, Client, Peer
    from fedmll.experiment import Experiment

PREDICTED_AT_ONCE = 64
Positive = Annotated[int, Field(ge=1)]


class PrivateFedAvg(Method):
    name = "private-fedavg"
    summary = "FedAvg by label: a client sees and sends only the classifier rows of its own label set"
    server_only = frozenset(
        {"tuning", "tuning_images", "scope", "absent", "feedback", "tuning_steps", "tuning_batch", "tuning_lr"}
    )

    class Options(Method.Options):
        labels: Literal["private", "public"] = "private"
        loss: Literal["softmax", "sigmoid"] = "softmax"
        tuning: Literal["none", "mse", "pairwise"] = "none"  # of the classifier, on the server's unlabelled images
        tuning_images: Located | None = None  # a folder of images; default: the server's share (partition.server)
        scope: Literal["global", "restricted"] = "global"  # what h is normalised over: all classes, a client's own
        absent: Literal["omit", "naive", "penalise"] = "omit"  # pairwise: labels that no client of the round has
        feedback: bool = True  # the next round starts from the tuned classifier
        tuning_steps: Positive = 60
        tuning_batch: Positive = 256
        tuning_lr: Annotated[float, Field(gt=0)] = 5e-3

    options: Options

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        options = cls.Options(**experiment.method.options)
        if options.loss == "softmax" and experiment.data.composite:
            raise ConfigError(
                f"method.loss = 'softmax' is for data with one label a sample, and '{experiment.data.label}' has "
                "several; use method.loss = 'sigmoid'."
            )
        if options.tuning == "none":
            return
        if options.tuning_images is None and not experiment.partition.server:
            raise ConfigError(
                f"method.tuning = '{options.tuning}' needs unlabelled images at the server: let it hold a share of the "
                "training data (partition.server = 0.05), or name a folder of images (method.tuning_images)."
            )
        if options.tuning_images is not None and not any(image_files(options.tuning_images)):
            raise ConfigError(f"method.tuning_images = '{options.tuning_images}' is not a folder with images.")

    @property
    def private(self) -> bool:
        return self.options.labels == "private"

    # ---- the network

    def model(self) -> nn.Module:
        model = super().model()
        if self.private:
            assert isinstance(model, Classifier)
            bound = model.head.in_features**-0.5
            with torch.no_grad():
                for row, name in enumerate(self.task.classes):
                    generator = torch_generator(self.task.seed, "head", name)
                    model.head.weight[row].uniform_(-bound, bound, generator=generator)
                    model.head.bias[row].uniform_(-bound, bound, generator=generator)
        return model

    def predict(self, model: nn.Module, images: Tensor, known: Tensor | None = None) -> Tensor:
        return self.probabilities(model(images))

    def probabilities(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, 1) if self.options.loss == "softmax" else torch.sigmoid(logits)

    # ---- the client

    def train(self, client: Client, message: Message, memory: Tensors) -> Message:
        return super().train(self._narrowed(client) if self.private else client, message, memory)

    def _narrowed(self, client: Client) -> Client:
        """The client as if its own classes were all there are, with a model of as many outputs."""
        rows = own_rows(client.data.classes, client.owned)
        data = client.data.only(rows.numpy())
        everything = torch.ones(len(rows), dtype=torch.bool)
        if self._small is None or self._small[0].head.out_features != len(rows):
            assert isinstance(client.model, Classifier)
            model = Classifier(copy.deepcopy(client.model.backbone), len(rows)).to(client.task.device)
            self._small = model, FlatWeights(model)
        task = replace(client.task, classes=data.classes, server_data=None)
        model, weights = self._small
        return replace(
            client, task=task, data=data, annotated=everything, owned=everything, model=model, weights=weights
        )

    _small: tuple[Classifier, FlatWeights] | None = None  # a worker's model for clients, kept for the next one

    def prepare(self, client: Client, message: Message, memory: Tensors) -> Local:
        local = super().prepare(client, message, memory)
        if self.options.loss == "softmax":
            several = int(((client.targets == 1).sum(1) > 1).sum())
            if several:
                raise ClientError(
                    f"Client {client.name} has {several} samples with two or more labels, and method.loss = 'softmax' "
                    "is for one label a sample; use method.loss = 'sigmoid'."
                )
        return local

    def loss(self, model: nn.Module, batch: Batch, local: Local) -> Tensor:
        """Softmax over the model's outputs, samples without a known label left out; or sigmoids (private: over the
        known entries; public: as FedAvg)."""
        if self.options.loss == "softmax":
            entries = F.cross_entropy(model(batch.images), batch.present.argmax(1), reduction="none")
            return masked_mean(entries, batch.present.sum(1))
        if self.private:
            return masked_mean(self.entries(model(batch.images), batch, local), batch.known)
        return super().loss(model, batch, local)

    # ---- the server

    def begin(self, peers: Sequence[Peer]) -> None:
        empty = [peer.name for peer in peers if not bool(peer.owned.any())]
        if empty:
            raise ConfigError(
                f"{', '.join(empty[:5])}{f' and {len(empty) - 5} more' if len(empty) > 5 else ''} have no label of "
                "their own, so there is nothing they could train; leave them out."
            )

    @cached_property
    def _global(self) -> tuple[Classifier, FlatWeights]:
        """The server's own model: for the layout of its weights, and to predict with clients' weights."""
        model = self.model().to(self.task.device)
        assert isinstance(model, Classifier)
        return model, FlatWeights(model)

    @cached_property
    def _head(self) -> HeadRows:
        return HeadRows.of(self._global[1])

    def send(self, state: Tensors, client: Peer, round: int) -> Message:
        message = super().deploy(state)
        if self.private:
            front, rows, back = self._head.split(state["weights"], len(self.task.classes))
            own = rows[own_rows(self.task.classes, client.owned)]
            message.tensors["weights"] = self._head.join(front, own, back)
        return message

    def refuse(self, sent: Message, reply: Message, round: int) -> str | None:
        difference = len(reply.tensors.get("weights", sent["weights"])) - len(sent["weights"])
        rows, rest = divmod(abs(difference), self._head.width + 1)
        if rows and not rest:
            return f"it holds {rows} {'more' if difference > 0 else 'fewer'} classifier rows than its label set has"
        return super().refuse(sent, reply, round)

    def deploy(self, state: Tensors) -> Message:
        message = super().deploy(state)
        if "tuned" in state:
            message.tensors["weights"] = state["tuned"]
        return message

    def merge(self, state: Tensors, replies: Iterable[Reply], round: int) -> Tensors:
        coverage = torch.zeros(len(self.task.classes), dtype=torch.int64)
        predictions: list[Tensor] = []
        rows: list[Tensor] = []

        def watched() -> Iterator[Reply]:
            for peer, reply in replies:
                coverage.add_(peer.owned)
                if self.options.tuning != "none":
                    rows.append(own_rows(self.task.classes, peer.owned))
                    predictions.append(self._opinion(reply, rows[-1]))
                yield peer, reply

        merge = self._merge_by_label if self.private else super().merge
        merged = merge(state, watched(), round)
        self.records["coverage"] = coverage
        self.records["labels_absent"] = float((coverage == 0).sum())
        if self.options.tuning != "none":
            opinions = Opinions.gather(predictions, rows, len(self.task.classes))
            tuned = self._tuned(merged, opinions, round)
            merged |= {"weights": tuned} if self.options.feedback else {"tuned": tuned}
        return merged

    def _merge_by_label(self, state: Tensors, replies: Iterable[Reply], round: int) -> Tensors:
        """Encoder by size; row y over its owners by size, or as it was."""
        front, old, back = self._head.split(state["weights"], len(self.task.classes))
        mean, sums = WeightedMean(), torch.zeros_like(old, dtype=torch.float64)
        totals = torch.zeros(len(old), 1, dtype=torch.float64)
        for peer, reply in replies:
            rows, weight = own_rows(self.task.classes, peer.owned), self.weight(reply)
            front, own, back = self._head.split(reply["weights"], len(rows))
            counters = {name: tensor for name, tensor in reply.tensors.items() if name != "weights"}
            mean.add({"front": front, "back": back} | counters, weight)
            sums[rows] = sums[rows].add_(own, alpha=weight)
            totals[rows] += weight
        merged = mean.result()
        rows = torch.where(totals > 0, (sums / totals).float(), old)
        return state | {"weights": self._head.join(merged.pop("front"), rows, merged.pop("back"))} | merged

    # ---- central tuning

    @cached_property
    def _images(self) -> Tensor:
        """The server's unlabelled samples, as they are stored."""
        folder, data = self.options.tuning_images, self.task.server_data
        if folder is not None:
            return torch.from_numpy(read_images(folder, self.task.sample_shape))
        assert data is not None  # `check` has refused it
        return torch.from_numpy(data.samples(slice(None)))

    @torch.no_grad()
    def _features(self, tensors: Tensors) -> Tensor:
        """Of the tuning images, by the global network with these weights in it."""
        model, weights = self._global
        weights.load(tensors)
        model.eval()
        batches = self._images.split(PREDICTED_AT_ONCE)
        return torch.cat([model.features(self.task.inputs(batch.to(self.task.device))) for batch in batches])

    @one_thread()
    def _opinion(self, reply: Message, rows: Tensor) -> Tensor:
        """h_k(y|x) of the tuning images for y ∈ Y_k: what is kept of a reply."""
        count = len(self.task.classes)
        front, own, back = self._head.split(reply["weights"], len(rows) if self.private else count)
        anything = own.new_zeros(count, own.shape[1])  # the features do not need the head
        features = self._features(reply.tensors | {"weights": self._head.join(front, anything, back)})
        own = own.to(features.device)
        logits = F.linear(features, own[:, :-1], own[:, -1])
        if self.private:
            return self.probabilities(logits)
        if self.options.scope == "restricted":
            return self.probabilities(logits[:, rows])
        return self.probabilities(logits)[:, rows]

    @one_thread()
    def _tuned(self, merged: Tensors, opinions: Opinions, round: int) -> Tensor:
        """The merged weights with the tuned classifier."""
        o = self.options
        assert o.tuning != "none"
        tuning = Tuning(o.tuning, o.loss == "softmax", o.scope, o.absent, o.tuning_steps, o.tuning_batch, o.tuning_lr)
        front, rows, back = self._head.split(merged["weights"], len(self.task.classes))
        generator = torch_generator(self.task.seed, round, "tuning")
        return self._head.join(front, tuning.fit(rows, self._features(merged), opinions, generator), back)


class PrivateFedProx(PrivateFedAvg, FedProx):
    name = "private-fedprox"
    summary = "private-fedavg + μ/2‖w − w_g‖² over what the client received"

    class Options(PrivateFedAvg.Options, FedProx.Options): ...

    options: Options
