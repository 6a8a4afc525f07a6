"""Small groups: which counts, sums, means and metrics may leave a client.

A statistic of one patient describes that patient. Every function here takes `min_size`, the smallest group of samples
whose statistics may leave. With `min_size = 1`, as in a simulation, nothing is withheld. This module is the only place
that decides; methods/, evaluation/ and deploy/ call it. docs/small-groups.md lists everything that leaves a site and
what this policy does not cover.

Policy:
  sums, means     `releasable_classes` and `mask_small_groups`: no released sum, and no difference of two released sums,
                  is over a small group
  counts          `censor_small_counts`: small counts become 0, and counts of almost all samples become all
  label counts    `release_label_counts`: rounded; small counts, and counts from which they follow, are withheld
  scores, metrics `find_small_classes`: nothing leaves for a class with few positive or few negative samples

Targets are (N, C): 1 present, 0 absent, −1 unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

MIN_GROUP_SIZE = 5  # samples, at a real site
COMMON_SHARE = 0.05  # a set of known classes is common if at least this share of the samples has it
CHUNK = 4096  # samples that are counted at a time
ROUNDED_TO = 5  # label counts are rounded to a multiple of this, so that one sample more or less does not show
FEW, WITHHELD = -1, -2  # instead of a label count: small, but not 0; withheld because of another count

Bools = NDArray[np.bool_]


def is_small(counts: NDArray[Any], min_size: int) -> Bools:
    """Where a group has members, but fewer than `min_size`. An empty group describes nobody, so it is not small."""
    return (counts > 0) & (counts < min_size)


def releasable_classes(targets: Tensor, min_size: int) -> Tensor:
    """bool (C,): the classes whose sums may leave. The rules are those of `releasable_columns`."""
    found = targets.new_ones(targets.shape[1]).bool()
    if min_size > 1:
        found[np.flatnonzero(~releasable_columns(targets.cpu().numpy(), min_size)).tolist()] = False
    return found


def mask_small_groups(targets: Tensor, min_size: int) -> Tensor:
    """The targets (N, C) for sums that leave: −1 where a sum must not include a label. See `mask_columns`."""
    return targets if min_size <= 1 else targets.new_tensor(mask_columns(targets.cpu().numpy(), min_size))


def censor_small_counts(counts: Tensor, total: int | Tensor, min_size: int) -> Tensor:
    """Counts among `total` samples: fewer than `min_size` become 0, and all but fewer than `min_size` become all."""
    if min_size <= 1:
        return counts
    return counts.masked_fill(counts < min_size, 0).where(total - counts >= min_size, total)


def round_counts(counts: NDArray[np.int64] | np.int64) -> NDArray[np.int64]:
    """Round to the nearest multiple of ROUNDED_TO."""
    return np.asarray((counts + ROUNDED_TO // 2) // ROUNDED_TO * ROUNDED_TO)


def min_released_count(min_count: int) -> int:
    """The smallest label count, other than 0, that leaves a site with this minimum."""
    return max(min_count, ROUNDED_TO)


def release_label_counts(counts: NDArray[np.int64], samples: int, min_count: int) -> NDArray[np.int64]:
    """The counts (C, 3) of present, absent and unknown labels among `samples` samples, as they may leave.

    0 is released as 0. The largest count of a class is the rounded number of samples minus the two others: rounded by
    itself, it would reveal the others more exactly than their own rounding. A small count is replaced by FEW. For a
    class with a small count, and for a site with few samples, all counts except 0 are withheld.
    """
    least, some = min_released_count(min_count), counts > 0
    few = is_small(counts, least)
    released = round_counts(counts)
    largest = counts.argmax(axis=1)[:, None]
    np.put_along_axis(released, largest, 0, axis=1)
    rest = round_counts(np.int64(samples)) - released.sum(axis=1)
    np.put_along_axis(released, largest, rest[:, None], axis=1)
    released[few.any(axis=1, keepdims=True) & some] = WITHHELD
    released[few] = FEW
    if samples <= 3 * least:  # three counts of at least `least`, or fewer, would follow from their sum
        released[some] = WITHHELD
    return released


def find_small_classes(targets: NDArray[np.integer], min_size: int) -> Bools:
    """bool (C,): the classes whose score histograms and metrics must not leave.

    These are the classes with few positive or few negative samples. Differences between classes reveal nothing,
    because scores of different classes are different numbers.
    """
    counts = np.stack([(targets == label).sum(axis=0) for label in (0, 1)])
    return np.logical_or(*is_small(counts, min_size))


def releasable_columns(targets: NDArray[np.integer], min_size: int) -> Bools:
    """bool (C,): the classes whose sums may leave.

    Sums are over these groups of samples: all samples U, and for every class c the known K_c, the present P_c and the
    absent N_c. For every two groups A and B whose sums leave,

    - A and B are each empty, or have `min_size` members or more;
    - of U, K and P: A without B, and B without A, are each empty, or have `min_size` members or more;
    - of N and any other group: A without B and B without A do not both have fewer than `min_size` members, unless
      A = B.

    So no difference of two sums is a sum over fewer than `min_size` samples, or a difference of two such sums. The
    third rule is weaker because a rare class has few members outside the absent of another class, which no difference
    of two sums isolates. Classes are considered in their order. A class that breaks a rule with itself, with U or with
    an earlier class is withheld: nothing about it leaves.

    Not covered: combinations of three or more sums, and differences between rounds or runs with different data.
    """
    count = targets.shape[1]
    found = np.ones(count, dtype=np.bool_)
    if min_size <= 1:
        return found
    overlaps = _group_overlaps(targets)
    size = overlaps.diagonal()
    beyond = size[:, None] - overlaps  # |A without B|
    small = is_small(beyond, min_size)
    conflict = small | small.T
    absent = np.arange(len(size)) > 2 * count
    both = small & np.less(beyond, min_size).T
    weaker = absent[:, None] | absent
    conflict[weaker] = (both | both.T)[weaker]
    chosen = [0]
    for c in range(count):
        groups = [1 + c, 1 + count + c, 1 + 2 * count + c]
        found[c] = not is_small(size[groups], min_size).any() and not conflict[np.ix_(groups, chosen + groups)].any()
        if found[c]:
            chosen += groups
    return found


def _group_overlaps(targets: NDArray[np.integer]) -> NDArray[np.int64]:
    """(1 + 3 C, 1 + 3 C): how many samples every two of the groups U, K_1 …, P_1 …, N_1 … have in common."""
    total = np.zeros((1 + 3 * targets.shape[1],) * 2)
    for start in range(0, len(targets), CHUNK):
        some = targets[start : start + CHUNK]
        groups = np.concatenate([np.ones((len(some), 1), dtype=np.bool_), some >= 0, some == 1, some == 0], axis=1)
        members = groups.astype(np.float32)
        total += members.T @ members
    return total.astype(np.int64)


def mask_columns(targets: NDArray[np.integer], min_size: int) -> NDArray[np.integer]:
    """The targets (N, C), with −1 for the classes that `releasable_columns` withholds.

    Scattered unknown labels make many groups that differ by a few samples, and most classes would be withheld. So
    samples with an uncommon set of known classes (less than COMMON_SHARE of the samples have it) are left out of every
    class, if more classes can be released without them.
    """
    releasable = releasable_columns(targets, min_size)
    if not releasable.all():
        common = _without_uncommon_samples(targets)
        releasable_then = releasable_columns(common, min_size)
        if (releasable_then & (common >= 0).any(axis=0)).sum() > (releasable & (targets >= 0).any(axis=0)).sum():
            targets, releasable = common, releasable_then
    return np.where(releasable, targets, -1).astype(targets.dtype)


def _without_uncommon_samples(targets: NDArray[np.integer]) -> NDArray[np.integer]:
    packed = np.packbits(targets >= 0, axis=1)
    _, number, counts = np.unique(packed, axis=0, return_inverse=True, return_counts=True)
    rare = counts < COMMON_SHARE * len(targets)
    return np.where(rare[number.reshape(-1, 1)], -1, targets)


def describe_membership_risk(samples: int, width: int) -> str | None:
    """The warning for a person who approves an experiment that sends sums of features; None: no warning is needed.

    The Gram matrix of n samples spans at most n of the width + 1 directions of a feature vector with its constant 1. If
    n is not larger than the width, another sample lies outside of that span and a member lies inside.
    """
    if samples > width:
        return None
    return (
        f"the server gets sums of features of {samples} images, {width} numbers each. With no more images than numbers "
        "these sums tell exactly whether an image that the server has is one of yours"
    )
