"""Plausibility checks of the sums that a client sends: could they be the sums of its number of samples? Each bound
holds for any features and targets. Invented sums within all bounds are still possible."""

from __future__ import annotations

import torch
from torch import Tensor

from fedmll.core.message import Tensors

LARGEST_FEATURE = 1e4  # larger features are rejected
LARGEST_SQUARE = 1e16  # accepted for 10⁸ samples with features up to 10⁴
MOST_CLASSES = 10**6
LARGEST_SCORE = 1e4  # larger logits are rejected
ROUNDING = 1e-6  # relative rounding error of a sum over many samples


def refuse_moments(sums: Tensors, samples: float, unit: bool = False) -> str | None:
    """Why the sums of a ridge head cannot be those of `samples` samples, or None. `unit`: all features have norm 1."""
    reason = _refuse_totals(sums["all"], samples, unit)
    if reason is not None:
        return reason
    squares = sums["all"][2]
    gram, group, cross = sums["gram"], sums["group"], sums["cross"]
    known = gram[:, -1, -1]
    if not _counts(known, samples) or int(group.max()) >= len(gram):
        return "its matrices have impossible numbers of samples, or it refers to a matrix that it did not send"
    if bool((gram.diagonal(dim1=1, dim2=2)[:, :-1] > _up(squares)).any()):
        return "the squares of some samples are larger than those of all samples"
    if not _positive(gram):
        return "its matrices are not sums of squares"
    own_squares = gram.diagonal(dim1=1, dim2=2)[group.clamp(min=0)] * (group >= 0)[:, None]  # (C, D+1)
    reason = _refuse_cross(cross, own_squares)
    if reason is None and "positive" in sums:
        of = gram[group.clamp(min=0)] * (group >= 0)[:, None, None]  # (C, D+1, D+1), as large as the positives' sums
        reason = _refuse_positive(sums["positive"], cross, of)
    return reason


def refuse_statistics(sums: Tensors, samples: float) -> str | None:
    """Why the statistics for standardisation cannot be those of `samples` samples, or None."""
    reason = _refuse_totals(sums["moments"], samples) if "moments" in sums else None
    if reason is None and "moments" in sums and not are_moments(sums["moments"]):
        reason = "its sums and sums of squares do not fit together"
    if reason is None and "labels" in sums:
        known, positive = sums["labels"]
        total = known.numel() == 1  # of all classes together
        if not _counts(known, MOST_CLASSES * samples if total else samples) or not _counts(positive, known):
            reason = "it has more known labels than samples, or more positives than known labels"
    return reason


def are_moments(moments: Tensor) -> bool:
    """At least one sample, and squares of sums within the Cauchy–Schwarz bound."""
    count, total, squares = moments
    bounded = bool((count >= 1).all()) and float(squares.max()) <= LARGEST_SQUARE
    return bounded and bool((total.square() <= count * squares * (1 + ROUNDING) + ROUNDING).all())


def _refuse_totals(moments: Tensor, samples: float, unit: bool = False) -> str | None:
    """Numbers of samples and squares of features that cannot be those of `samples` samples."""
    count, _, squares = moments
    if not bool((count == samples).all()):
        return f"its sums are of {float(count.max()):g} samples, and it has {samples:g}"
    if float(squares.max()) > samples * LARGEST_FEATURE**2 or (unit and float(squares.sum()) > _up(samples)):
        return f"its features are larger than {'1' if unit else f'{LARGEST_FEATURE:g}'}"
    return None


def _refuse_cross(cross: Tensor, squares: Tensor) -> str | None:
    """(Σ_{y=1} f_i)² ≤ Σ f_i² · Σ y (Cauchy–Schwarz). `squares` (C, D+1) are the sums of squares of a class."""
    positives = cross[:, -1]
    if not _counts(positives, squares[:, -1]):
        return "it has more positives than samples"
    if bool((cross.square() > _up(squares * positives[:, None])).any()):
        return "the sum over a class's positives is larger than its features allow"
    return None


def _refuse_positive(positive: Tensor, cross: Tensor, gram: Tensor) -> str | None:
    """The matrices of the positives must agree with their sums, and be a part of the matrices of all samples."""
    if not torch.allclose(positive[:, -1], cross, rtol=ROUNDING, atol=ROUNDING):
        return "the matrices of its positives do not agree with the sums over its positives"
    if not _positive(positive) or not _positive(gram - positive, gram):
        return "the matrices of its positives are not a part of those of its samples"
    return None


def refuse_losses(sums: Tensor, tried: Tensor, samples: float) -> str | None:
    """Why sums for Platt calibration (tried, 6, C) at the given a and b (tried, 2, C) are implausible, or None."""
    loss, ga, gb, haa, _, hbb = sums.unbind(1)
    a, b = tried.abs().unbind(1)
    if bool((hbb > _up(samples / 4)).any() or (gb.abs() > _up(samples)).any()):
        return f"its sums are too large for its {samples:g} samples"
    score, most = LARGEST_SCORE, samples * (a * LARGEST_SCORE + b + 1)
    if bool((ga.abs() > samples * score).any() or (haa > samples * score**2 / 4).any() or (loss > most).any()):
        return f"its scores are larger than {score:g}"
    step = tried[None] - tried[:, None]  # from the first to the second
    tangent = loss[:, None] + ga[:, None] * step[:, :, 0] + gb[:, None] * step[:, :, 1]
    below = tangent - loss[None] > ROUNDING * (1 + loss[None] + tangent.abs())
    return "its losses are not those of one convex function" if bool(below.any()) else None


def refuse_logistic_start(sums: Tensors, samples: float) -> str | None:
    """Why the sums of the opening exchange of a logistic head cannot be those of `samples` samples, or None."""
    gram, known, positive, folds = sums["gram"], sums["known"], sums["positive"], sums["folds"]
    squares = gram[0].diagonal()
    if float(squares[-1]) != samples:
        return f"its sums are of {float(squares[-1]):g} samples, and it has {samples:g}"
    if float(squares.max()) > samples * LARGEST_FEATURE**2:
        return f"its features are larger than {LARGEST_FEATURE:g}"
    if not _positive(gram):
        return "its matrix is not a sum of squares"
    counts = known[:, -1]
    if not _counts(counts, samples) or not _counts(positive[:, -1], counts):
        return "it has more positives than known targets, or more known targets than samples"
    if not _counts(folds.sum(0)[1], positive[:, -1]) or not _counts(folds.sum(0)[0], counts - positive[:, -1]):
        return "it holds out targets that it does not have"
    for some in (positive, known - positive):  # Cauchy–Schwarz
        if bool((some.square() > _up(squares * some[:, -1:])).any()):
            return "the sum over a class's targets is larger than its features allow"
    return None


def refuse_logistic(sums: Tensors, rows: Tensor, samples: float) -> str | None:
    """Why the sums of a round of a logistic head at these rows (K, C, width + 1) are implausible, or None. `samples` is
    the largest total weight that the client's samples can have.

    |p − y| and p (1 − p) are at most 1 and ¼, and at most the loss. The losses are those of a convex function: none
    lies below a tangent.
    """
    loss, gradient, curvature = sums["loss"], sums["gradient"], sums["curvature"]
    slope, bend = gradient[..., -1].abs(), curvature[..., -1]  # the bias is the last
    if bool((slope > _up(samples)).any() or (bend > _up(samples / 4)).any()):
        return f"its sums are too large for its {samples:g} samples"
    if bool((slope > _up(loss)).any() or (bend > _up(loss)).any() or (bend < 0).any()):
        return "its derivatives do not agree with its losses"
    if float(gradient.abs().max()) > samples * LARGEST_FEATURE:
        return f"its features are larger than {LARGEST_FEATURE:g}"
    size = int((2 * curvature.shape[-1]) ** 0.5)
    first, second = torch.triu_indices(size, size)
    matrices = curvature.new_zeros(curvature[..., 0].numel(), size, size)
    matrices[:, first, second] = matrices[:, second, first] = curvature.flatten(0, 1)
    if not _positive(matrices):
        return "its second derivatives are not sums of squares"
    for one in range(len(rows)):
        tangent = loss[one] + (gradient[one] * (rows - rows[one])).sum(-1)
        if bool((tangent - loss > ROUNDING * (1 + loss + tangent.abs())).any()):
            return "its losses are not those of one convex function"
    return None


def _up(bound: Tensor | float) -> Tensor | float:
    return bound * (1 + ROUNDING) + ROUNDING


def _counts(counts: Tensor, most: Tensor | float) -> bool:
    return bool((counts == counts.round()).all() and (counts >= 0).all() and (counts <= most).all())


def _positive(matrices: Tensor, beside: Tensor | None = None) -> bool:
    """Whether matrices are positive semi-definite, up to rounding relative to `beside` (default: the matrices)."""
    traces = (matrices if beside is None else beside).diagonal(dim1=1, dim2=2).sum(1).abs()
    shift = (ROUNDING * traces + 1e-12)[:, None, None] * torch.eye(matrices.shape[1], dtype=matrices.dtype)
    return not bool(torch.linalg.cholesky_ex(matrices + shift).info.any())
