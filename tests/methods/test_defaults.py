"""Every option's default, every published setting and every limit of the methods, with where each comes from.

A method that grows an option or a published key without a row here fails: a default is a claim about a paper.
"""

from __future__ import annotations

from typing import Any

import pytest
from builders import options_of, own_methods, published_of

from fedmll.core.errors import ConfigError
from fedmll.methods import find

Rows = dict[str, tuple[Any, str]]  # option or setting: value, where it comes from

RIDGE: Rows = {
    "ridge": ("gcv", "ours: generalised cross-validation, from the same sums"),
    "ridge_balanced": (False, "ours: the plain ridge"),
}
LOGISTIC: Rows = {
    "logistic": ("held-out", "ours: the loss of samples that were not fitted"),
    "logistic_balanced": (False, "ours: the plain log-loss"),
    "logistic_rounds": (10, "ours: 1e-3 on COCO's 1,856 features, 1e-9 on 32"),
}
EXACT = ("fed-ridge", "fed-logistic")  # they do not train
START: Rows = (
    RIDGE
    | LOGISTIC
    | {
        "start": ("seed", "every paper starts its head at random"),
        "refit": ("none", "every paper predicts with the head that it trained"),
    }
)
FEDOPT: Rows = {
    "server_optimizer": ("none", "McMahan et al. 2017: the average is the new model"),
    "server_lr": ("auto", "1 for sgd: FedAvgM; ours for the others: Reddi et al. 2021 tune it for each task"),
    "server_beta1": ("auto", "Reddi et al. 2021, Section 5: 0.9, and 0 for FedAdagrad"),
    "server_beta2": (0.99, "Reddi et al. 2021, Section 5"),
    "server_tau": (1e-3, "Reddi et al. 2021, Section 5"),
}

AVERAGE: Rows = {"average": ("mean", "McMahan et al. 2017: the weighted mean"), "trim": (0.2, "ours, of trimmed-mean")}
OWN_AVERAGES = {
    "fed-ridge", "fed-logistic", "local-only", "fednova", "surgical", "fedharmony", "cbafed", "rscfed",
    "private-fedavg", "private-fedprox", "compose",
}  # fmt: skip
BY_SIZE: Rows = {"weighting": ("size", "McMahan et al. 2017, Alg. 1: n_k/n")}

CTRAN: Rows = {
    "weighting": ("size", "FedLGT, Local and Global Model Aggregation: FedAvg's, by |D_k|"),
    "known": (0.75, "C-Tran, Label Mask Training: at least a quarter of the labels is unknown"),
    "layers": (3, "C-Tran, Implementation Details; released code of FedLGT"),
    "heads": (4, "C-Tran, Implementation Details; released code of FedLGT"),
    "dropout": (0.1, "C-Tran, Implementation Details; released code of FedLGT"),
    "inducing": (None, "C-Tran: every label sees every label"),
}

PRIVATE: Rows = {
    "weighting": ("size", "Private label sets, Section 4.1: rows and encoder weighted by n_k"),
    "labels": ("private", "Private label sets: the setting that it is about"),
    "loss": ("softmax", "Private label sets, Section 4.1: one label per sample"),
    "tuning": ("none", "Private label sets, Section 4.2: on top of Section 4.1"),
    "tuning_images": (None, "ours: the server's share of the data"),
    "scope": ("global", "Private label sets, Section 4.2: h is over all classes"),
    "absent": ("omit", "ours: what Appendix B warns of does not happen"),
    "feedback": (True, "Private label sets, Section 4.2: the tuned classifier is the round's result"),
    "tuning_steps": (60, "ours: the paper gives none"),
    "tuning_batch": (256, "ours: the paper gives none"),
    "tuning_lr": (5e-3, "ours: the paper gives none"),
}

PROXIMAL: Rows = {"mu": (0.01, "Li et al. 2020 tune it in {0.001, …, 1}; 0.01 is FedNCA-ML's baseline's")}

DEFAULTS: dict[str, Rows] = {
    "fedavg": BY_SIZE,
    "fedavg-pl": BY_SIZE,
    "fed-ridge": BY_SIZE
    | RIDGE
    | {
        "lift": ("none", "ours: the features as they are"),
        "lift_width": (512, "ours: less than half of MobileNetV2's 1,280"),
        "calibrate": ("none", "ours: one exchange"),
    },
    "fed-logistic": BY_SIZE | LOGISTIC | {"products": (0, "ours: the features as they are")},
    "local-only": {},
    "fedprox": BY_SIZE | PROXIMAL,
    "fednova": {"weighting": ("size", "Wang et al. 2020, Section 3: p_i = n_i/n")},
    "scaffold": {
        "weighting": ("size", "NIID-Bench, by |D_k|; Karimireddy et al. 2020, Alg. 1 has equal clients"),
        "control_update": ("II", "Karimireddy et al. 2020, Section 4: all its experiments; NIID-Bench"),
    },
    "fedcurv": BY_SIZE | {"strength": (0.1, "released code of FedNCA-ML; Shoham et al. 2019 tune λ")},
    "spherefed": BY_SIZE
    | {
        "calibrated": (True, "Dong et al. 2022: the closed-form classifier; off is an ablation"),
        "eps": (1e-4, "ours: keeps features that are never active from being divided by 0"),
    },
    "fedrdn": BY_SIZE,
    "surgical": {
        "weighting": ("equal", "released code of Surgical Aggregation: np.mean over the owners"),
        "warmup_epochs": (15, "released code of Surgical Aggregation"),
        "warmup_lr": (1e-3, "released code of Surgical Aggregation"),
    },
    "fednca-ml": {
        "weighting": ("equal", "FedNCA-ML, Alg. 1: 1/K"),
        "etf": (True, "FedNCA-ML, Eq. 1–2; Table 5 switches it off"),
        "ladm": (True, "FedNCA-ML, Eq. 3–8; Table 5 switches it off"),
        "neg": (True, "FedNCA-ML, Eq. 12; Table 5 switches it off"),
        "pos": (True, "FedNCA-ML, Eq. 13; Table 5 switches it off"),
        "lambda_neg": (0.01, "FedNCA-ML, Implementation Details: 1 for CIFAR-10, 0.01 elsewhere"),
        "lambda_pos": (1.0, "FedNCA-ML, Implementation Details"),
        "tau": (0.3, "FedNCA-ML, after Eq. 12"),
        "query": ("fixed-etf", "FedNCA-ML, Section 4 (LADM); Table 6 has the others"),
        "heads": (4, "FedNCA-ML, Section 4 (LADM): 4-head cross-attention"),
        "positional": (True, "FedNCA-ML, Eq. 5"),
        "rejection": ("log", "FedNCA-ML, Eq. 12; hinge-topk is the released code's"),
        "contrast": ("dot", "FedNCA-ML, Eq. 13; cosine is the released code's"),
        "temperature": (0.07, "released code of FedNCA-ML"),
        "logit_scale": (None, "FedNCA-ML, Eq. 9 has none; 10 is the released code's"),
    },
    "condist": BY_SIZE
    | {
        "temperature": (2.0, "released code of ConDistFL"),
        "first_weight": (0.01, "ConDistFL: λ grows linearly; released code: from 0.01"),
        "last_weight": (1.0, "ConDistFL: λ grows linearly; released code: to 1"),
    },
    "fedvls": BY_SIZE
    | {
        "distill": (1.0, "released code of FedVLS: λ"),
        "suppress": (0.005, "released code of FedVLS"),
        "prior_shift": (True, "released code of FedVLS: cross-entropy of z + log π"),
    },
    "fedctran": CTRAN,
    "fedlgt": CTRAN
    | {
        "ule": (True, "FedLGT, Universal Label Embedding; Table 4 switches it off"),
        "ca_mle": (True, "FedLGT, Eq. 4; Table 4 switches it off"),
        "tau": (0.5, "FedLGT, Implementation Details"),
        "eps": (0.02, "FedLGT, Implementation Details; Table A1"),
        "encoder": ("wordllama", "ours: installs with its weights; the paper's is CLIP's"),
        "states": ("learned", "ours: for files of vectors without the words; the paper encodes them"),
        "prompt": ("The photo contains {class}.", "FedLGT, Implementation Details; full stop: released code"),
        "fine_names": (None, "FedLGT, Table A3: for FLAIR's coarse classes only"),
        "fine": ("concat", "FedLGT, Table A3: the better one"),
        "compat": ("none", "FedLGT, Eq. 4: every sample; first-sample is the released code's"),
    },
    "fedharmony": {
        "weighting": ("size", "FedHarmony, Eq. 10: n̄_k ∝ N_k"),
        "alignment": (True, "FedHarmony, Eq. 4; Table 3 switches it off"),
        "aggregation": (True, "FedHarmony, Eq. 9–10; Table 3 switches it off"),
        "blocks": (True, "FedHarmony, Eq. 8, Alg. 1; Table 5 switches it off"),
        "strength": (3.0, "ours: the paper leaves λ open; 1 was invisible, 30 softened predictions"),
        "consolidation": ("mean", "ours: the paper leaves the operator of Eq. 3 open"),
        "clusters": ("sqrt", "ours: ⌈√C⌉, the paper leaves G open"),
        "clustering": ("each", "FedHarmony, Alg. 1: of every client's R*"),
        "start_round": (2, "ours: round 1 has no matrices yet"),
        "gamma": ("median", "ours: 1/median(D) of the round before; the paper leaves γ of Eq. 9 to the user"),
        "horizon": (10.0, "ours: half of the (20) rounds; the paper leaves T0 of Eq. 10 to the user"),
        "quality": ("pure", "FedHarmony, Eq. 9"),
    },
    "fedmlp": {
        "weighting": ("size", "FedMLP, Section 2.1: FedAvg"),
        "tags": (True, "FedMLP, Eq. 5–9; Table 3 switches it off (MLD)"),
        "partial_loss": (True, "FedMLP, Eq. 3–4; Table 3 switches it off (WPC)"),
        "consistency": (True, "FedMLP, Eq. 11; Table 3 switches it off (CR)"),
        "adaptive": (True, "FedMLP, Eq. 10; Table 3 switches it off (ST)"),
        "first_stage": (2, "FedMLP, Implementation Details: 50 of 500 rounds, here a tenth of 20"),
        "negative_share": (0.005, "FedMLP, Implementation Details: T0 = 0.5 %"),
        "positive_share": (0.01, "FedMLP, Implementation Details: T1 = 1 %"),
        "low": (0.3, "FedMLP, Implementation Details: L"),
        "high": (0.7, "FedMLP, Implementation Details: R"),
        "difficulty": ("negative", "FedMLP, Self-adaptive Threshold: of the negative classes; active: Eq. 10"),
        "momentum": (0.0, "FedMLP, Eq. 6 has none"),
        "warmup_consistency": (False, "FedMLP, Section 2.1: L_WPC alone; true is the released code's"),
        "view": ("weak", "FedMLP, Section 2.1: data augmentation; which: released code"),
    },
    "rscfed": BY_SIZE
    | {
        "consistency": (True, "RSCFed: mean teacher at the clients"),
        "sub_consensus": (True, "RSCFed: distance-reweighted aggregation of random groups"),
        "decay": (0.999, "released code of RSCFed and of FedMLP's comparison"),
        "strength": (1.0, "released code of FedMLP's comparison; 0.02 in RSCFed's own"),
        "view": ("weak", "released code of FedMLP's comparison: two draws of the weak views"),
        "groups": (3, "released code of RSCFed: M = 3; of FedMLP's comparison on ICH"),
        "group_size": ("half", "released code of RSCFed: K = 5 of 10; 3 of 5 in FedMLP's comparison on ICH"),
        "sharpness": (0.01, "released code of FedMLP's comparison"),
    },
    "fedfixmatch": BY_SIZE
    | {
        "pseudo_labels": (True, "FixMatch"),
        "view": ("strong", "released code of FedMLP's comparison: weak, RandAugment and cutout"),
        "confidence": (0.8, "released code of FedMLP's comparison"),
        "select": ("sample", "released code of FedMLP's comparison: all missing classes are sure"),
        "strength": (1.0, "released code of FedMLP's comparison"),
    },
    "fedirm": BY_SIZE
    | {
        "relations": (True, "FedIRM: inter-client relation matching"),
        "consistency": (True, "FedIRM: mean teacher at the clients"),
        "both_views": (True, "released code of FedIRM and of FedMLP's comparison: the sum of two cross-entropies"),
        "first_stage": (1, "released code of FedMLP's comparison: 20 of 500 rounds, here 4 % of 20"),
        "ramp": (1, "released code of FedMLP's comparison: 30 of 500 rounds, here 6 % of 20"),
        "temperature": (2.0, "released code of FedMLP's comparison: T"),
        "confidence": (0.7, "released code of FedMLP's comparison"),
        "entropy": (0.25, "released code of FedMLP's comparison: 2.0 summed over 8 classes"),
        "decay": (0.99, "released code of FedMLP's comparison"),
        "view": ("weak", "released code of FedMLP's comparison: two draws of the weak views"),
    },
    "cbafed": BY_SIZE
    | {
        "pseudo_labels": (True, "CBAFed: class balanced adaptive thresholds"),
        "by_labels": (True, "released code of FedMLP's comparison: by the labels used, in the second stage"),
        "residual": (True, "CBAFed: residual weight connection"),
        "first_stage": (2, "released code of FedMLP's comparison: 50 of 500 rounds, here a tenth of 20"),
        "base": (0.45, "released code of FedMLP's comparison; 0.6 in its supplementary Table 1"),
        "over_classes": ("sum", "released code of FedMLP's comparison"),
        "lowest": (0.55, "released code of FedMLP's comparison"),
        "highest": (0.95, "released code of CBAFed and of FedMLP's comparison"),
        "every": (5, "released code of CBAFed and of FedMLP's comparison"),
        "early": (0.2, "released code of FedMLP's comparison"),
        "late": (0.5, "released code of CBAFed (1:1) and of FedMLP's comparison"),
    },
    "fedlsr": BY_SIZE
    | {
        "self_regularisation": (True, "FedLSR"),
        "view": ("weak", "released code of FedMLP's comparison: two draws of the weak views"),
        "sharpening": (2.0, "released code of FedMLP's comparison: σ(2 logit p)"),
        "strength": (0.4, "released code of FedMLP's comparison: γ"),
        "ramp": (2, "released code of FedMLP's comparison: 40 of 500 rounds, here 8 % of 20"),
        "scale": (3.0, "released code of FedMLP's comparison: σ(3 z)"),
        "divergence": ("positive", "released code of FedLSR and of FedMLP's comparison: KLDivLoss of p alone"),
        "double_sigmoid": (False, "FedLSR: cross-entropy; true is the released code's"),
    },
    "fednoro": BY_SIZE
    | {
        "logit_adjustment": (True, "FedNoRo; commented out in the released code of FedMLP's comparison"),
        "distillation": (True, "FedNoRo"),
        "temperature": (0.8, "released code of FedMLP's comparison"),
        "strength": (0.8, "released code of FedMLP's comparison: w(T)"),
        "ramp_start": (1, "released code of FedMLP's comparison: round 10 of 500, here 2 % of 20 (at least 1)"),
        "teacher_view": ("same", "released code of FedNoRo and of FedMLP's comparison: the same images"),
    },
    "compose": {
        "head": ("linear", "ours"),
        "parts": (("unknown-as-negative",), "ours"),
        "average": ("mean", "ours"),
        "mean": ({"weighting": "size"}, "McMahan et al. 2017, Alg. 1: n_k/n"),
    },
    "centralized": BY_SIZE | {"of": ("fedavg-pl", "ours: every known label, the plain head")},
    "private-fedavg": PRIVATE,
    "private-fedprox": PRIVATE | PROXIMAL,
}

LGT_SETTINGS: Rows = {
    "model.backbone": ("resnet18", "FedLGT, Implementation Details"),
    "training.rounds": (50, "FedLGT, Implementation Details: T"),
    "training.local_epochs": (5, "FedLGT, Implementation Details"),
    "training.batch_size": (16, "FedLGT, Implementation Details"),
    "training.optimizer": ("adam", "FedLGT, Implementation Details"),
    "training.lr": (1e-4, "FedLGT, Implementation Details"),
    "training.weight_decay": (0.0, "FedLGT names none; none in its released code"),
    "training.clip": (10.0, "released code of FedLGT"),
    "partition.clients": (50, "FedLGT, Implementation Details: as many as take part"),
    "participation.count": (50, "FedLGT, Implementation Details: a participation equivalent to 50 clients"),
    "participation.sampling": ("size", "FedLGT, Implementation Details; Table A5"),
}

PUBLISHED: dict[str, Rows] = {
    "fednova": {"training.optimizer": ("sgd", "Wang et al. 2020, Section 3: a_i is of SGD, with or without momentum")},
    "scaffold": {"training.optimizer": ("sgd", "Karimireddy et al. 2020, Alg. 1: plain steps")},
    "fedrdn": {
        "training.optimizer": ("sgd", "released code of FedRDN"),
        "training.lr": (0.01, "released code of FedRDN"),
        "training.momentum": (0.9, "released code of FedRDN"),
        "training.weight_decay": (1e-5, "released code of FedRDN"),
        "training.batch_size": (32, "released code of FedRDN"),
        "training.local_epochs": (5, "released code of FedRDN"),
    },
    "fednca-ml": {
        "model.backbone": ("resnet18", "FedNCA-ML, Implementation Details"),
        "training.rounds": (100, "FedNCA-ML, Implementation Details"),
        "training.local_epochs": (1, "FedNCA-ML, Implementation Details"),
        "training.batch_size": (32, "FedNCA-ML, Implementation Details"),
        "training.optimizer": ("adamw", "FedNCA-ML, Implementation Details"),
        "training.lr": (1e-4, "FedNCA-ML, Implementation Details"),
        "training.weight_decay": (0.01, "FedNCA-ML, Implementation Details"),
        "training.keep": ("best", "FedNCA-ML, Implementation Details: best validation performance"),
        "partition.kind": ("dirichlet", "FedNCA-ML, Task Setup"),
        "partition.clients": (10, "FedNCA-ML, Task Setup"),
        "participation.fraction": (1.0, "FedNCA-ML, Task Setup: full participation"),
    },
    "fedmlp": {
        "model.backbone": ("resnet18", "FedMLP, Implementation Details"),
        "training.rounds": (500, "FedMLP, Implementation Details"),
        "training.local_epochs": (1, "FedMLP, Implementation Details"),
        "training.batch_size": (32, "FedMLP, Implementation Details"),
        "training.optimizer": ("adamw", "FedMLP, Implementation Details: Adam, its decay decoupled (docs)"),
        "training.lr": (3e-5, "FedMLP, Implementation Details"),
        "training.weight_decay": (5e-4, "released code of FedMLP"),
        "training.keep": ("last", "FedMLP, Tables 1 and 2: the last model"),
        "partition.kind": ("iid", "FedMLP, Section 3.1"),
        "participation.fraction": (1.0, "FedMLP, Implementation Details: all clients"),
        "annotation.kind": ("missing", "FedMLP, Partial Label Generation"),
    },
    "fedctran": LGT_SETTINGS,
    "fedlgt": LGT_SETTINGS,
    "fedharmony": {
        "model.backbone": ("vit", "FedHarmony, Implementation Details: ViT-B/16"),
        "training.rounds": (50, "FedHarmony, Implementation Details: T"),
        "training.local_epochs": (5, "FedHarmony, Implementation Details"),
        "training.batch_size": (16, "FedHarmony, Implementation Details"),
        "training.optimizer": ("adam", "FedHarmony, Implementation Details"),
        "training.lr": (1e-4, "FedHarmony, Implementation Details"),
        "training.weight_decay": (0.0, "FedHarmony names none; torch's Adam has none"),
        "participation.sampling": ("size", "FedHarmony, Implementation Details"),
    },
}

# The values at a limit that are accepted, and those beyond it that are not. `just` is as near as a limit that does not
# belong to the range can be tried.
JUST = 1e-9
LIMITS: dict[tuple[str, str], tuple[list[Any], list[Any]]] = {
    ("fedavg", "trim"): ([0, 0.5 - JUST], [-JUST, 0.5]),
    ("fedavg", "server_lr"): ([JUST, 5.0], [0]),
    ("fedavg", "server_beta1"): ([0, 1 - JUST], [-JUST, 1]),
    ("fedavg", "server_beta2"): ([0, 1 - JUST], [-JUST, 1]),
    ("fedavg", "server_tau"): ([JUST, 5.0], [0]),
    ("surgical", "warmup_epochs"): ([0, 50], [-1]),
    ("surgical", "warmup_lr"): ([JUST, 5.0], [0]),
    ("fedprox", "mu"): ([0, 5.0], [-JUST]),
    ("fedcurv", "strength"): ([0, 5.0], [-JUST]),
    ("spherefed", "eps"): ([JUST, 5.0], [0]),
    ("private-fedprox", "mu"): ([0, 5.0], [-JUST]),
    ("fednca-ml", "lambda_neg"): ([0, 5.0], [-JUST]),
    ("fednca-ml", "lambda_pos"): ([0, 5.0], [-JUST]),
    ("fednca-ml", "tau"): ([JUST, 1 - JUST], [0, 1]),
    ("fednca-ml", "heads"): ([1, 8], [0]),
    ("fednca-ml", "temperature"): ([JUST, 5.0], [0]),
    ("fednca-ml", "logit_scale"): ([JUST, 50.0], [0]),
    ("condist", "temperature"): ([JUST, 9.0], [0]),
    ("condist", "first_weight"): ([0, 5.0], [-JUST]),
    ("condist", "last_weight"): ([0, 5.0], [-JUST]),
    ("fedvls", "distill"): ([0, 5.0], [-JUST]),
    ("fedvls", "suppress"): ([0, 5.0], [-JUST]),
    ("fedctran", "known"): ([0, 1], [-JUST, 1 + JUST]),
    ("fedctran", "layers"): ([1, 9], [0]),
    ("fedctran", "heads"): ([1, 8], [0]),
    ("fedctran", "dropout"): ([0, 1 - JUST], [-JUST, 1]),
    ("fedctran", "inducing"): ([1, 9], [0]),
    ("fedlgt", "tau"): ([JUST, 1 - JUST], [0, 1]),
    ("fedlgt", "eps"): ([0, 1], [-JUST, 1 + JUST]),
    ("fedharmony", "strength"): ([0, 50.0], [-JUST]),
    ("fedharmony", "clusters"): ([1, 9], [0]),
    ("fedharmony", "start_round"): ([2, 9], [1]),
    ("fedharmony", "gamma"): ([JUST, 50.0], [0]),
    ("fedharmony", "horizon"): ([JUST, 50.0], [0]),
    ("fedmlp", "first_stage"): ([1, 19], [0, 20]),
    ("fedmlp", "negative_share"): ([0, 1], [-JUST, 1 + JUST]),
    ("fedmlp", "positive_share"): ([0, 1], [-JUST, 1 + JUST]),
    ("fedmlp", "low"): ([0, 0.7], [-JUST, 0.7 + JUST]),
    ("fedmlp", "high"): ([0.3, 1], [0.3 - JUST, 1 + JUST]),
    ("fedmlp", "momentum"): ([0, 1 - JUST], [-JUST, 1]),
    ("rscfed", "decay"): ([0, 1 - JUST], [-JUST, 1]),
    ("rscfed", "strength"): ([0, 5.0], [-JUST]),
    ("rscfed", "groups"): ([1, 9], [0]),
    ("rscfed", "group_size"): ([1, 9], [0]),
    ("rscfed", "sharpness"): ([0, 5.0], [-JUST]),
    ("fedfixmatch", "confidence"): ([0.5, 1 - JUST], [0.5 - JUST, 1]),
    ("fedfixmatch", "strength"): ([0, 5.0], [-JUST]),
    ("fedirm", "first_stage"): ([1, 19], [0, 20]),
    ("fedirm", "ramp"): ([1, 99], [0]),
    ("fedirm", "temperature"): ([JUST, 5.0], [0]),
    ("fedirm", "confidence"): ([0.5, 1 - JUST], [0.5 - JUST, 1]),
    ("fedirm", "entropy"): ([JUST, 5.0], [0]),
    ("fedirm", "decay"): ([0, 1 - JUST], [-JUST, 1]),
    ("cbafed", "first_stage"): ([1, 19], [0, 20]),
    ("cbafed", "base"): ([0, 1], [-JUST, 1 + JUST]),
    ("cbafed", "lowest"): ([0.5, 0.95], [0.5 - JUST, 0.95 + JUST]),
    ("cbafed", "highest"): ([0.55, 1], [0.55 - JUST, 1 + JUST]),
    ("cbafed", "every"): ([1, 9], [0]),
    ("cbafed", "early"): ([0, 1], [-JUST, 1 + JUST]),
    ("cbafed", "late"): ([0, 1], [-JUST, 1 + JUST]),
    ("fedlsr", "sharpening"): ([JUST, 5.0], [0]),
    ("fedlsr", "strength"): ([0, 5.0], [-JUST]),
    ("fedlsr", "ramp"): ([1, 99], [0]),
    ("fedlsr", "scale"): ([JUST, 5.0], [0]),
    ("fednoro", "temperature"): ([JUST, 5.0], [0]),
    ("fednoro", "strength"): ([0, 1], [-JUST, 1 + JUST]),
    ("fednoro", "ramp_start"): ([0, 19], [-1, 20]),
    ("fed-ridge", "ridge"): ([JUST, 50.0], [0]),
    ("fed-logistic", "logistic"): ([JUST, 50.0], [0]),
    ("fed-logistic", "products"): ([0, 128], [-1, 129]),
    ("fed-logistic", "logistic_rounds"): ([1, 1000], [0, 1001]),
    ("fed-ridge", "lift_width"): ([1, 4096], [0, 4097]),
    ("private-fedavg", "tuning_steps"): ([1, 900], [0]),
    ("private-fedavg", "tuning_batch"): ([1, 900], [0]),
    ("private-fedavg", "tuning_lr"): ([JUST, 5.0], [0]),
}


# What the papers have and only the user can give.
UNPUBLISHED: dict[str, set[str]] = {
    "fednca-ml": {"model.weights", "partition.beta", "partition.presence"},
    "fedctran": {"model.weights"},
    "fedlgt": {"model.weights", "method.encoder"},
    "fedmlp": {"model.weights", "annotation.missing", "partition.clients"},
    "fedharmony": {"model.weights", "participation.count"},
}


def test_every_method_is_in_the_tables() -> None:
    assert own_methods() == DEFAULTS.keys()


@pytest.mark.parametrize("name", DEFAULTS)
def test_settings_that_only_the_user_can_give_are_named(name: str) -> None:
    assert find(name).unpublished.keys() == UNPUBLISHED.get(name, set())
    assert not find(name).unpublished.keys() & find(name).published.keys()


@pytest.mark.parametrize("name", DEFAULTS)
def test_option_defaults_are_those_of_the_papers(name: str) -> None:
    keep = "best" if name == "centralized" else "last"
    rows = DEFAULTS[name] | ({} if name in ("compose", *EXACT) else START)
    rows |= {} if name in ("compose", "local-only", *EXACT) else FEDOPT
    if name not in OWN_AVERAGES:
        rows |= AVERAGE
    expected = {"keep": keep} | {option: value for option, (value, _) in rows.items() if value is not None}
    found = options_of(name)
    assert found == expected
    assert {option: type(value) for option, value in found.items()} == {o: type(v) for o, v in expected.items()}


@pytest.mark.parametrize("name", DEFAULTS)
def test_published_settings_are_those_of_the_papers(name: str) -> None:
    assert published_of(name) == {key: value for key, (value, _) in PUBLISHED.get(name, {}).items()}


@pytest.mark.parametrize(("name", "option"), LIMITS)
def test_limits_of_options(name: str, option: str) -> None:
    inside, outside = LIMITS[name, option]
    for value in inside:
        assert options_of(name, **{option: value})[option] == value
    for value in outside:
        with pytest.raises(ConfigError, match=option):
            options_of(name, **{option: value})


@pytest.mark.parametrize("name", DEFAULTS)
def test_unknown_option_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        options_of(name, nonsense=1)
