"""FedNCA-ML — Peng et al., "Neural Collapse-Inspired Multi-Label Federated Learning under Label-Distribution Skew".

All clients use the same fixed queries for class-wise features h_c, and the same fixed classifier, a simplex ETF
M = [m_c] (Eq. 1–9). So their classifiers cannot drift apart: z_c = h_cᵀ m_c. Loss (Eq. 10–14):

    BCE + λ1 L_neg + λ2 L_pos
    L_neg = −mean_i mean_{c∈C⁻_i} 1/(C−1) Σ_{r≠c} 1[ŝ_icr > τ] log(1 − ŝ_icr),   ŝ_icr = σ(h_icᵀ m_r)     (12)
    L_pos = −mean_i mean_{c∈C⁺_i} log softmax_r(h_icᵀ m_r)[c]                                             (13)

Unknown targets are in no term. The server averages with equal weights 1/K (Alg. 1). λ1 = "auto" is the paper's value: 1
for CIFAR-10, 0.01 elsewhere. The released code has rejection = "hinge-topk", contrast = "cosine" and logit_scale = 10.
With ladm = false there is one pooled feature h for all classes, h_c = h.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedmll.config.experiment import Experiment
from fedmll.methods.framework.base import AUTO, Part, PartOptions, Resolved, option
from fedmll.methods.framework.client_round import TrainStep
from fedmll.methods.framework.method import Method, switch
from fedmll.methods.heads import EtfLadmHead
from fedmll.methods.losses import MaskedLoss


class PrototypeRejection(Part):
    """λ1 L_neg: pushes the feature of an absent class away from all other prototypes."""

    name = "rejection"
    requires = frozenset({"prototypes"})

    class Options(PartOptions):
        lambda_neg: Annotated[float, Field(ge=0)] | Literal["auto"] = option("auto", "λ1: weight of L_neg (Eq. 14)")
        tau: float = option(0.3, "τ: only similarities above it are penalised (Eq. 12)", gt=0, lt=1)
        rejection: Literal["log", "hinge-topk"] = option("log", "Eq. 12, or hinge-topk as in the released code")

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> Resolved:
        strength = 1.0 if experiment.data.source == "cifar10" else 0.01
        return {"lambda_neg": (strength, "1 for CIFAR-10, 0.01 elsewhere")} if options.lambda_neg == AUTO else {}

    def loss(self, step: TrainStep, round_state: None) -> Tensor | None:
        option, prototypes = self.options, step.prototypes
        if option.lambda_neg == 0:
            return None
        similarity = step.features @ prototypes.T
        if similarity.dim() == 2:  # one feature for all classes
            similarity = similarity[:, None].expand(-1, len(prototypes), -1)
        if option.rejection == "log":
            return option.lambda_neg * log_rejection(similarity, step.targets == 0, option.tau)
        return option.lambda_neg * hinge_rejection(similarity, step.targets, option.tau)


class PrototypeContrast(Part):
    """λ2 L_pos: pulls the feature of a present class to its own prototype."""

    name = "contrast"
    requires = frozenset({"prototypes"})

    class Options(PartOptions):
        lambda_pos: float = option(1.0, "λ2: weight of L_pos (Eq. 14)", ge=0)
        contrast: Literal["dot", "cosine"] = option("dot", "Eq. 13, or cosine as in the released code")
        temperature: float = option(0.07, "temperature of contrast = cosine", gt=0)

    def loss(self, step: TrainStep, round_state: None) -> Tensor | None:
        option, prototypes = self.options, step.prototypes
        if option.lambda_pos == 0:
            return None
        temperature = option.temperature if option.contrast == "cosine" else None
        return option.lambda_pos * contrast(step.features, prototypes, step.targets == 1, temperature)


class FedNcaMl(Method):
    name = "fednca-ml"
    summary = "class-wise features, a fixed simplex-ETF classifier, rejection and contrast losses; equal weights"
    paper = "Peng et al., 2025"
    head = EtfLadmHead
    parts = (MaskedLoss, switch("neg", PrototypeRejection, "use L_neg"), switch("pos", PrototypeContrast, "use L_pos"))
    published: ClassVar[dict[str, Any]] = {
        "model.backbone": "resnet18", "training.rounds": 100, "training.local_epochs": 1, "training.batch_size": 32,
        "training.optimizer": "adamw", "training.lr": 1e-4, "training.weight_decay": 0.01, "training.keep": "best",
        "partition.kind": "dirichlet", "partition.clients": 10, "participation.fraction": 1.0,
    }  # fmt: skip
    unpublished: ClassVar[dict[str, str]] = {
        "model.weights": "ImageNet weights of ResNet-18 in torchvision's format, except for CIFAR-10",
        "partition.beta": "0.5 or 0.1, depending on the table", "partition.presence": "0.5; 0.71 for DermaMNIST",
    }  # fmt: skip

    class Options(PartOptions):
        weighting: Literal["size", "equal"] = option(
            "equal", "weight of a client: its number of samples, or 1/K (Alg. 1)"
        )


def log_rejection(similarity: Tensor, negative: Tensor, tau: float) -> Tensor:
    """L_neg (Eq. 12) of the similarities h_cᵀ m_r (batch, C, C) and the mask of the negatives (batch, C). −log(1 − ŝ)
    is softplus(h_cᵀ m_r). The indicator has no gradient. A sample without a negative counts as 0."""
    batch, classes = negative.shape
    itself = torch.eye(classes, dtype=torch.bool, device=similarity.device)
    counted = (similarity > math.log(tau / (1 - tau))) & ~itself
    penalty = torch.where(counted, F.softplus(similarity), 0.0).sum(-1) / max(1, classes - 1)
    chosen = negative.to(similarity.dtype)
    share = chosen / chosen.sum(1, keepdim=True).clamp(min=1)
    return (penalty * share).sum() / batch


def hinge_rejection(similarity: Tensor, targets: Tensor, tau: float) -> Tensor:
    """As in the released code: among all negative (sample, class) pairs those with the K highest max_r h_cᵀ m_r, where
    K is the number of positives in the batch. The sum of max(0, σ − τ), divided by the batch size."""
    score = similarity.amax(-1)[targets == 0]
    count = min(int((targets == 1).sum()), len(score))
    return F.relu(torch.sigmoid(score.topk(count).values) - tau).sum() / len(targets)


def contrast(features: Tensor, prototypes: Tensor, positive: Tensor, temperature: float | None) -> Tensor:
    """L_pos (Eq. 13); with a temperature, of cosines instead of products. A sample without a positive counts as 0."""
    sample, label = positive.nonzero(as_tuple=True)
    chosen = features[sample, label] if features.dim() == 3 else features[sample]
    if temperature is None:
        scores = chosen @ prototypes.T
    else:
        scores = F.normalize(chosen, dim=-1) @ F.normalize(prototypes, dim=-1).T / temperature
    losses = F.cross_entropy(scores, label, reduction="none")
    return (losses / positive.sum(1)[sample]).sum() / len(positive)
