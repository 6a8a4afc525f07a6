"""Heads by name, with their options. A head turns a backbone into a network; the networks are in models/."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.core.seeding import torch_generator
from fedmll.methods.framework.base import Head, PartOptions, option
from fedmll.models.backbones import Backbone
from fedmll.models.class_attention import Ladm, PrototypeClassifier, simplex_etf
from fedmll.models.ctran import CTran, LabelEmbeddings
from fedmll.models.network import Classifier, Lift, LiftedClassifier
from fedmll.models.products import ProductClassifier


class LinearHead(Head):
    """A linear classifier on the mean of the backbone's tokens, with one row of weights per class."""

    name = "linear"
    provides = frozenset({"class-rows"})

    @property
    def pools_tokens(self) -> bool:
        return True

    def build(self, backbone: Backbone) -> Classifier:
        return Classifier(backbone, len(self.task.classes))


class LinearHeadByName(LinearHead):
    """A linear classifier. The initial weights of a row depend only on the seed and the name of its class."""

    name = "linear-by-name"

    def build(self, backbone: Backbone) -> Classifier:
        model = super().build(backbone)
        bound = model.head.in_features**-0.5
        with torch.no_grad():
            for row, name in enumerate(self.task.classes):
                generator = torch_generator(self.task.seed, "head", name)
                model.head.weight[row].uniform_(-bound, bound, generator=generator)
                model.head.bias[row].uniform_(-bound, bound, generator=generator)
        return model


class LiftedLinearHead(LinearHead):
    """A linear classifier on the features and, with `lift`, on fixed functions of them."""

    name = "linear-lifted"

    class Options(PartOptions):
        lift: Literal["none", "relu", "fourier", "second"] = option(
            "none", "features to add: random ReLU features, random Fourier features, or second-order products"
        )
        lift_width: int = option(512, "number of features to add; messages grow with its square", ge=1, le=4096)

    def build(self, backbone: Backbone) -> Classifier:
        option = self.options
        if option.lift == "none":
            return super().build(backbone)
        lift = Lift(option.lift, backbone.width, option.lift_width, self.task.seed)
        return LiftedClassifier(backbone, len(self.task.classes), lift)


class ProductsHead(LinearHead):
    """A linear classifier on the features and, with `products`, on products of a few directions of them."""

    name = "linear-products"

    class Options(PartOptions):
        products: int = option(
            0, "number of directions of the features whose products are added; 0: none; 48 adds 1,176", ge=0, le=128
        )

    def build(self, backbone: Backbone) -> Classifier:
        count = min(self.options.products, backbone.width)
        return ProductClassifier(backbone, len(self.task.classes), count) if count else super().build(backbone)


class EtfLadmHead(Head):
    """Class-wise features by label-aware disentanglement (LADM), and a fixed simplex-ETF classifier (Eq. 1–9)."""

    name = "etf-ladm"
    provides = frozenset({"prototypes"})

    class Options(PartOptions):
        etf: bool = option(True, "fixed simplex-ETF classifier (Eq. 1–2); off: a learned linear classifier")
        ladm: bool = option(True, "class-wise features (Eq. 3–8); off: pooled features, as in FedAvg")
        query: Literal["fixed-etf", "learnable-etf", "learnable-random"] = option("fixed-etf", "LADM queries (Table 6)")
        heads: int = option(4, "number of attention heads of the LADM", ge=1)
        positional: bool = option(True, "positional encoding (Eq. 5)")
        logit_scale: Annotated[float, Field(gt=0)] | None = option(
            None, "initial value of a learned factor of the logits; none: no factor"
        )

    @property
    def pools_tokens(self) -> bool:
        return not self.options.ladm

    def build(self, backbone: Backbone) -> PrototypeClassifier:
        option, classes = self.options, len(self.task.classes)
        fixed_query = option.query != "learnable-random"
        if option.etf or (option.ladm and fixed_query):
            etf = simplex_etf(backbone.width, classes, self.task.seed)
        ladm = None
        if option.ladm:
            queries = etf if fixed_query else torch.randn(classes, backbone.width) / math.sqrt(backbone.width)
            learnable = option.query != "fixed-etf"
            ladm = Ladm(queries, option.heads, learnable=learnable, positional=option.positional)
        return PrototypeClassifier(backbone, classes, etf if option.etf else None, ladm, option.logit_scale)


class CTranHead(Head):
    """A transformer (C-Tran) over image tokens and learned label tokens."""

    name = "ctran"
    provides = frozenset({"label-states"})

    class Options(PartOptions):
        layers: int = option(3, "number of encoder layers", ge=1)
        heads: int = option(4, "number of attention heads", ge=1)
        dropout: float = option(0.1, "dropout rate", ge=0, lt=1)
        inducing: Annotated[int, Field(ge=1)] | None = option(
            None, "for thousands of labels: labels attend to this many extra tokens; none: to each other (the paper)"
        )

    def build(self, backbone: Backbone) -> CTran:
        option, classes = self.options, len(self.task.classes)
        if option.inducing is not None and option.inducing >= classes:
            raise ConfigError(
                f"inducing = {option.inducing} for {classes} labels: with so many inducing tokens attention costs more "
                f"than between the labels directly. Use fewer than {classes}, or leave it out."
            )
        embeddings = self.embeddings(backbone.width)
        return CTran(
            backbone, classes, embeddings, option.layers, option.heads, option.dropout, inducing=option.inducing
        )

    def embeddings(self, width: int) -> LabelEmbeddings | None:
        """Fixed embeddings of labels and states, or None if they are learned."""
        return None


class TextQueryHead(CTranHead):
    """C-Tran with label tokens from a frozen text encoder, which are the same at every client."""

    name = "text-query"

    class Options(CTranHead.Options):
        ule: bool = option(True, "universal label embeddings; off: learned embeddings")
        encoder: str = option("wordllama", "the text encoder, or file:NAME.npz with embeddings (docs: label queries)")
        states: str = option(
            "learned", "where the embeddings of the states come from if the file has none: learned, or an encoder"
        )
        prompt: str = option("The photo contains {class}.", "the text that is embedded for a class")
        fine_names: str | None = option(None, "a file with more specific names of abstract classes (Table A3)")
        fine: Literal["concat", "average"] = option("concat", "how several names become one embedding (Table A3)")

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        if "{class}" not in options.prompt:
            raise ConfigError(
                f"{prefix}prompt = '{options.prompt}' has no place for the name of the class: write {{class}} there."
            )

    def embeddings(self, width: int) -> LabelEmbeddings | None:
        from fedmll.models import label_embeddings

        option, finished = self.options, self.task.finished
        if not option.ule or option.encoder == label_embeddings.LEARNED:
            return None
        if finished is not None:
            return LabelEmbeddings(finished.frozen.get("labels"), finished.frozen.get("states"))
        root = self.task.experiment.data.root
        fine = {} if option.fine_names is None else label_embeddings.read_fine_names(option.fine_names, root)
        return label_embeddings.label_embeddings(
            option.encoder,
            self.task.classes,
            option.prompt,
            width,
            self.task.seed,
            fine,
            option.fine == "average",
            option.states,
        )
