"""Heads by name: what makes a network of a backbone, with its options. The networks themselves are in models/."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field

from fedmll.core.errors import ConfigError
from fedmll.core.seeding import torch_generator
from fedmll.methods.base import Head, PartOptions, option
from fedmll.models.backbones import Backbone
from fedmll.models.class_attention import Ladm, PrototypeClassifier, simplex_etf
from fedmll.models.ctran import CTran, LabelEmbeddings
from fedmll.models.network import Classifier, Lift, LiftedClassifier

if TYPE_CHECKING:
    from fedmll.config.experiment import Experiment


class LinearHead(Head):
    """Mean over the tokens, one row of weights a class."""

    name = "linear"
    provides = frozenset({"class-rows"})

    def build(self, backbone: Backbone) -> Classifier:
        return Classifier(backbone, len(self.task.classes))


class LinearHeadByName(LinearHead):
    """A row's initial weights depend on the seed and the class's name, not on its place or on the other classes."""

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
    """A linear head on the features and, with `lift`, on fixed functions of them (models/network.py)."""

    name = "linear-lifted"

    class Options(PartOptions):
        lift: Literal["none", "relu", "fourier", "second"] = option(
            "none", "features added to the features: random ReLU or Fourier ones, or second-order forms"
        )
        lift_width: int = option(512, "how many `lift` adds; the sums grow with its square", ge=1, le=4096)

    def build(self, backbone: Backbone) -> Classifier:
        option = self.options
        if option.lift == "none":
            return super().build(backbone)
        lift = Lift(option.lift, backbone.width, option.lift_width, self.task.seed)
        return LiftedClassifier(backbone, len(self.task.classes), lift)


class EtfLadmHead(Head):
    """Class-wise features by label-aware disentanglement, scored by a fixed simplex ETF (Eq. 1–9)."""

    name = "etf-ladm"
    provides = frozenset({"prototypes"})

    class Options(PartOptions):
        etf: bool = option(True, "the fixed classifier (Eq. 1–2); off: a learned linear one")
        ladm: bool = option(True, "label-aware disentanglement (Eq. 3–8); off: pooled features, as FedAvg")
        query: Literal["fixed-etf", "learnable-etf", "learnable-random"] = option("fixed-etf", "of the LADM (Table 6)")
        heads: int = option(4, "heads of the LADM's attention", ge=1)
        positional: bool = option(True, "the positional encoding (Eq. 5)")
        logit_scale: Annotated[float, Field(gt=0)] | None = option(None, "start of a learned scale of z_c; none: 1")

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
    """Image tokens and learned label tokens in a transformer."""

    name = "ctran"
    provides = frozenset({"label-states"})

    class Options(PartOptions):
        layers: int = option(3, "encoder layers of C-Tran", ge=1)
        heads: int = option(4, "heads of its attention", ge=1)
        dropout: float = option(0.1, "dropout in its layers", ge=0, lt=1)
        inducing: Annotated[int, Field(ge=1)] | None = option(
            None, "labels see each other through so many tokens, for thousands of labels; none: directly (the paper)"
        )

    def build(self, backbone: Backbone) -> CTran:
        option, classes = self.options, len(self.task.classes)
        if option.inducing is not None and option.inducing >= classes:
            raise ConfigError(
                f"{option.inducing} inducing tokens (inducing) for {classes} labels: that many would cost more than "
                f"labels that see each other. Use fewer than {classes}, or leave it out."
            )
        embeddings = self.embeddings(backbone.width)
        return CTran(
            backbone, classes, embeddings, option.layers, option.heads, option.dropout, inducing=option.inducing
        )

    def embeddings(self, width: int) -> LabelEmbeddings | None:
        """Fixed embeddings of labels and states, or None: they are learned."""
        return None


class TextQueryHead(CTranHead):
    """C-Tran whose label tokens are a frozen text encoder's: the same at every client."""

    name = "text-query"

    class Options(CTranHead.Options):
        ule: bool = option(True, "universal label embeddings; off: learned ones")
        encoder: str = option("wordllama", "the text encoder, or file:NAME.npz (docs: label queries)")
        states: str = option(
            "learned", "of encoder = file:…, where it has no positive and negative: learned, or an encoder"
        )
        prompt: str = option("The photo contains {class}.", "what is embedded of a class")
        fine_names: str | None = option(None, "a file of finer names of abstract classes (Table A3)")
        fine: Literal["concat", "average"] = option("concat", "how finer names make one embedding (Table A3)")

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        if "{class}" not in options.prompt:
            raise ConfigError(
                f"{prefix}prompt = '{options.prompt}' does not say where the class's name goes: write {{class}} there."
            )

    def embeddings(self, width: int) -> LabelEmbeddings | None:
        from fedmll.models import label_embeddings

        option, finished = self.options, self.task.finished
        if not option.ule or option.encoder == label_embeddings.LEARNED:
            return None
        if finished is not None:
            return LabelEmbeddings(finished.frozen.get("labels"), finished.frozen.get("states"))
        fine = {} if option.fine_names is None else label_embeddings.read_fine_names(option.fine_names)
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
