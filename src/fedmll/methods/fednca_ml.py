"""FedNCA-ML — Peng et al., "Neural Collapse-Inspired Multi-Label Federated Learning under Label-Distribution Skew".

Every client reads class-wise features h_c with the same fixed queries and scores them with the same fixed classifier,
a simplex ETF M = [m_c] (Eq. 1–9), so local models cannot drift apart: z_c = h_cᵀ m_c. Loss (Eq. 10–14):

    BCE + λ1 L_neg + λ2 L_pos
    L_neg = −mean_i mean_{c∈C⁻_i} 1/(C−1) Σ_{r≠c} 1[ŝ_icr > τ] log(1 − ŝ_icr),   ŝ_icr = σ(h_icᵀ m_r)     (12)
    L_pos = −mean_i mean_{c∈C⁺_i} log softmax_r(h_icᵀ m_r)[c]                                             (13)

Unknown targets are in no term. The server averages with equal weights 1/K (Alg. 1). λ1 = "auto" is the paper's: 1 for
CIFAR-10, 0.01 elsewhere. Options of the released code: rejection = "hinge-topk", contrast = "cosine", logit_scale = 10.
With ladm = false there is one pooled feature h for all classes, h_c = h.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedmll.methods.base import AUTO, Local, Method
from fedmll.methods.losses import masked_mean
from fedmll.models.backbones import Backbone
from fedmll.models.heads import Ladm, PrototypeClassifier, simplex_etf

if TYPE_CHECKING:
    from fedmll.client import Batch
    from fedmll.experiment import Experiment


class FedNcaMl(Method):
    name = "fednca-ml"
    summary = "class-wise features, fixed simplex-ETF classifier, rejection and contrast losses; equal weights"
    published: ClassVar[dict[str, Any]] = {
        "model.backbone": "resnet18",
        "training.rounds": 100,
        "training.local_epochs": 1,
        "training.batch_size": 32,
        "training.optimizer": "adamw",
        "training.lr": 1e-4,
        "training.weight_decay": 0.01,
        "training.keep": "best",
        "partition.kind": "dirichlet",
        "partition.clients": 10,
        "participation.fraction": 1.0,
    }
    unpublished: ClassVar[dict[str, str]] = {
        "model.weights": "ImageNet weights of ResNet-18 in torchvision's format, but for CIFAR-10",
        "partition.beta": "0.5 and 0.1, by table",
        "partition.presence": "0.5; 0.71 for DermaMNIST",
    }

    class Options(Method.Options):
        weights: Literal["size", "equal"] = "equal"
        etf: bool = True  # off: a learned linear classifier
        ladm: bool = True  # off: pooled features, as FedAvg
        neg: bool = True  # L_neg
        pos: bool = True  # L_pos
        lambda_neg: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
        lambda_pos: Annotated[float, Field(ge=0)] = 1.0
        tau: Annotated[float, Field(gt=0, lt=1)] = 0.3
        query: Literal["fixed-etf", "learnable-etf", "learnable-random"] = "fixed-etf"
        heads: Annotated[int, Field(ge=1)] = 4
        positional: bool = True
        rejection: Literal["log", "hinge-topk"] = "log"
        contrast: Literal["dot", "cosine"] = "dot"
        temperature: Annotated[float, Field(gt=0)] = 0.07  # of contrast = "cosine"
        logit_scale: Annotated[float, Field(gt=0)] | None = None  # start of a learned scale of z_c; None: no scale

    options: Options

    def network(self, backbone: Backbone) -> nn.Module:
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

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> dict[str, tuple[Any, str]]:
        if options.lambda_neg != AUTO:
            return {}
        return {"lambda_neg": (1.0 if experiment.data.source == "cifar10" else 0.01, "1 for CIFAR-10, 0.01 elsewhere")}

    def loss(self, model: nn.Module, batch: Batch, local: Local) -> Tensor:
        """Eq. 14."""
        assert isinstance(model, PrototypeClassifier)
        option, prototypes = self.options, model.prototypes
        features = model.features(batch.images)
        loss = masked_mean(self.entries(model.logits(features), batch, local), batch.known)
        lambda_neg = float(option.lambda_neg)  # `resolve` has seen to it
        if option.neg and lambda_neg > 0:
            similarity = features @ prototypes.T
            if similarity.dim() == 2:  # one feature for all classes
                similarity = similarity[:, None].expand(-1, len(prototypes), -1)
            if option.rejection == "log":
                rejection = log_rejection(similarity, batch.targets == 0, option.tau)
            else:
                rejection = hinge_rejection(similarity, batch.targets, option.tau)
            loss = loss + lambda_neg * rejection
        if option.pos and option.lambda_pos > 0:
            temperature = option.temperature if option.contrast == "cosine" else None
            loss = loss + option.lambda_pos * contrast(features, prototypes, batch.targets == 1, temperature)
        return loss


def log_rejection(similarity: Tensor, negative: Tensor, tau: float) -> Tensor:
    """L_neg (Eq. 12) of h_cᵀ m_r (batch, C, C) and where a class is negative (batch, C). −log(1 − ŝ) is softplus of
    the product; the indicator carries no gradient; a sample without a negative counts as 0."""
    batch, classes = negative.shape
    itself = torch.eye(classes, dtype=torch.bool, device=similarity.device)
    counted = (similarity > math.log(tau / (1 - tau))) & ~itself
    penalty = torch.where(counted, F.softplus(similarity), 0.0).sum(-1) / max(1, classes - 1)
    chosen = negative.to(similarity.dtype)
    share = chosen / chosen.sum(1, keepdim=True).clamp(min=1)
    return (penalty * share).sum() / batch


def hinge_rejection(similarity: Tensor, targets: Tensor, tau: float) -> Tensor:
    """The released code's: of all negative (sample, class) pairs the K with the highest max_r h_cᵀ m_r, K the number
    of positives in the batch; max(0, σ − τ), summed a sample, mean over the batch."""
    score = similarity.amax(-1)[targets == 0]
    count = min(int((targets == 1).sum()), len(score))
    return F.relu(torch.sigmoid(score.topk(count).values) - tau).sum() / len(targets)


def contrast(features: Tensor, prototypes: Tensor, positive: Tensor, temperature: float | None) -> Tensor:
    """L_pos (Eq. 13); with a temperature on cosines instead of products. A sample without a positive counts as 0."""
    sample, label = positive.nonzero(as_tuple=True)
    chosen = features[sample, label] if features.dim() == 3 else features[sample]
    if temperature is None:
        scores = chosen @ prototypes.T
    else:
        scores = F.normalize(chosen, dim=-1) @ F.normalize(prototypes, dim=-1).T / temperature
    losses = F.cross_entropy(scores, label, reduction="none")
    return (losses / positive.sum(1)[sample]).sum() / len(positive)
