"""Partitions: which client gets which training samples.

Here: `iid`, `dirichlet` (concentration β, presence ratio γ), `labels-per-client`, `natural` (by a client column) and
`feature-skew` (clients whose images look different). `file` is in `partition_file`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from fedmll.core import registry
from fedmll.core.errors import ConfigError, DataError
from fedmll.core.registry import register
from fedmll.core.seeding import numpy_generator
from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN, Dataset
from fedmll.data.images.cache import Progress, content_key, in_memory_or_cached, no_progress, store_key
from fedmll.data.sample_assignment import (
    UNASSIGNED,
    LabelCombinations,
    assign_samples,
    draw_allowed_classes,
    draw_dirichlet_shares,
    enforce_minimum,
    fill_evenly,
    find_combinations,
    group_by_owner,
)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Which client has which samples.

    Attributes:
        clients: for each client its positions in the training data, sorted; no position occurs twice.
        names: names of the clients: c000, c001, … or the names of the groups.
        allowed: (K, C) the classes that a client may hold; all True (and read-only) if the kind does not restrict them.
        labels: (N, C) the targets after the rule for samples that fit no client; the input itself if nothing changed.
        report: how many samples each rule affected: dropped, withheld, negative, moved_for_minimum.
        annotated: (K, C) the classes that each client annotates, if a partition file says so.
        held_out: the samples that each client holds out for validation, if a partition file says so.
        appearances: (K,) `feature-skew`: index into `APPEARANCES` for each client.
    """

    clients: tuple[NDArray[np.int64], ...]
    names: tuple[str, ...]
    allowed: NDArray[np.bool_]
    labels: NDArray[np.int8]
    report: dict[str, int]
    annotated: NDArray[np.bool_] | None = None
    held_out: tuple[NDArray[np.int64], ...] | None = None
    appearances: NDArray[np.int64] | None = None


@dataclass(frozen=True, kw_only=True)
class PartitionRequest:
    """The argument of a partition function (`@register("partition", NAME)`).

    Attributes:
        labels: (N, C) targets of the samples to divide: 1 present, 0 absent, -1 unknown.
        clients: the number of clients; None for `natural`: one client per group.
        groups: (N,) the client that each sample comes from, if the data has this column.
        classes: names of the columns of `labels`.
        minimum: the number of samples of the smallest client.

    The other attributes are settings of the experiment's section [partition].
    """

    labels: NDArray[np.int8]
    kind: str
    clients: int | None
    seed: int
    beta: float = 0.5
    presence: float = 1.0
    unassignable: str = "drop"
    labels_per_client: int = 2
    minimum: int = 1
    groups: NDArray[np.str_] | None = None
    classes: tuple[str, ...] = ()
    file: Path | None = None

    def generator(self, purpose: str) -> np.random.Generator:
        """A generator that depends only on the seed, the kind of partition and the purpose."""
        return numpy_generator(self.seed, "partition", self.kind, purpose)


def partition(labels: NDArray[np.int8], kind: str, clients: int | None, seed: int, **settings: Any) -> Partition:
    """Divide the samples of `labels` (N, C) among clients; the same seed gives the same partition.

    `settings` are further attributes of `PartitionRequest`.
    """
    divide = registry.find("partition", kind)
    result: Partition = divide(PartitionRequest(labels=labels, kind=kind, clients=clients, seed=seed, **settings))
    rows = np.concatenate(result.clients)
    if len(result.names) != len(result.clients) or len(np.unique(rows)) != len(rows):
        raise ConfigError(
            f"partition.kind = '{kind}' assigns a sample to two clients, or returns more or fewer names than clients. "
            "Correct its plug-in."
        )
    return result


@register("partition", "iid")
def iid(request: PartitionRequest) -> Partition:
    """Clients of equal size, drawn at random."""
    clients = _check_clients(request)
    parts = np.array_split(request.generator("deal").permutation(len(request.labels)), clients)
    return Partition(
        clients=tuple(np.sort(part) for part in parts),
        names=_names(clients),
        allowed=_all_allowed(clients, request.labels),
        labels=request.labels,
        report=rule_counts(),
    )


@register("partition", "dirichlet")
def dirichlet(request: PartitionRequest) -> Partition:
    """Shares of each class drawn from Dir(β); each client may hold at most the fraction γ of the classes."""
    clients, combinations = _check_clients(request), find_combinations(request.labels)
    most = _most_classes(request.presence, clients, request.labels.shape[1])
    allowed = draw_allowed_classes(combinations, clients, most, request.generator("allowed"))
    shares = draw_dirichlet_shares(allowed, request.beta, request.generator("share"))
    return _assign(request, combinations, allowed, shares)


@register("partition", "labels-per-client")
def labels_per_client(request: PartitionRequest) -> Partition:
    """Each client may hold a fixed number of classes."""
    clients, classes, count = _check_clients(request), request.labels.shape[1], request.labels_per_client
    if not 1 <= count <= classes:
        raise ConfigError(
            f"partition.labels_per_client = {count} is not possible with {classes} classes; use 1 to {classes}."
        )
    if clients * count < classes:
        raise ConfigError(
            f"partition.labels_per_client = {count} with partition.clients = {clients} leaves some of the {classes} "
            f"classes without a client. Raise partition.labels_per_client to {-(-classes // clients)} or more, or "
            f"partition.clients to {-(-classes // count)} or more."
        )
    allowed = np.zeros((clients, classes), dtype=bool)
    fill_evenly(allowed, np.full(clients, count), request.generator("allowed"))
    return _assign(request, find_combinations(request.labels), allowed, np.zeros(allowed.shape))


def round_half_up(share: float, total: int) -> int:
    """share · total, rounded in decimal: 0.29 · 50 is 14.5 and gives 15, where binary floats give 14."""
    return int((Decimal(str(share)) * total).quantize(Decimal(1), ROUND_HALF_UP))


def _check_clients(request: PartitionRequest) -> int:
    """The number of clients; raises ConfigError if there are too few samples for them."""
    clients, samples, minimum = request.clients, len(request.labels), request.minimum
    if clients is None:
        raise ConfigError(f"partition.kind = '{request.kind}' needs partition.clients, the number of clients.")
    if clients > samples:
        raise ConfigError(
            f"partition.clients = {clients} is more than the {samples} training samples: some clients would "
            "have no data. Lower partition.clients or use more data."
        )
    if clients * minimum > samples:
        raise ConfigError(
            f"partition.minimum = {minimum} for each of {clients} clients needs {clients * minimum} samples; there are "
            f"{samples}. Lower partition.minimum to {samples // clients} or less, or lower partition.clients."
        )
    return clients


def _most_classes(presence: float, clients: int, classes: int) -> int:
    """The largest number of classes per client: γC, rounded half up."""
    if Decimal(str(presence)) * classes < 1:
        raise ConfigError(
            f"partition.presence = {presence} allows fewer than one of the {classes} classes per client. Raise "
            f"partition.presence to {np.ceil(1000 / classes) / 1000:g} or more."
        )
    most = round_half_up(presence, classes)
    if clients * most < classes:
        raise ConfigError(
            f"partition.clients = {clients} with partition.presence = {presence} (at most {most} classes per client) "
            f"leaves some of the {classes} classes without a client. Raise partition.presence to "
            f"{np.ceil(-(-classes // clients) / classes * 1000) / 1000:g} or more, or partition.clients to "
            f"{-(-classes // most)} or more."
        )
    return most


def _assign(
    request: PartitionRequest,
    combinations: LabelCombinations,
    allowed: NDArray[np.bool_],
    log_share: NDArray[np.float64],
) -> Partition:
    """Assign the samples, apply the rule for samples that fit no client, then enforce the minimum size.

    Samples move from large clients to clients below the minimum, but never to a client that may not hold them.
    """
    labels, unassignable, rng = request.labels, request.unassignable, request.generator("deal")
    assignment = assign_samples(combinations, allowed, log_share, rng)
    owner, allowed = assignment.owner, assignment.allowed
    unplaceable = np.flatnonzero(assignment.unplaced_labels[assignment.combinations.of_sample] > 0)
    if unassignable == "drop":
        owner[unplaceable] = UNASSIGNED
    before = owner.copy()
    enforce_minimum(assignment, request.minimum, _names(len(allowed)), rng)
    touched = {"drop": "dropped", "withhold": "withheld", "negative": "negative"}[unassignable]
    report = rule_counts(**{touched: len(unplaceable), "moved_for_minimum": int((owner != before).sum())})
    if unassignable != "drop" and len(unplaceable):
        targets = labels[unplaceable]
        targets[(targets == PRESENT) & ~allowed[owner[unplaceable]]] = UNKNOWN if unassignable == "withhold" else ABSENT
        labels = labels.copy()
        labels[unplaceable] = targets
    return Partition(
        clients=tuple(assignment.samples_by_client()),
        names=_names(len(allowed)),
        allowed=allowed,
        labels=labels,
        report=report,
    )


@register("partition", "natural")
def natural(request: PartitionRequest) -> Partition:
    """One client per group of the data; with fewer clients than groups, several groups form one client.

    Groups are then combined so that the clients have similar sizes. A group is never divided, so small clients stay
    small.
    """
    labels, clients, groups = request.labels, request.clients, request.groups
    if groups is None:
        raise ConfigError(
            "partition.kind = 'natural' needs data with the client of each sample (for example a `client` column in "
            "the CSV), and this data has none. Choose another partition.kind or add the column."
        )
    blank = np.flatnonzero(groups == "")
    if len(blank):
        raise DataError(
            f"partition.kind = 'natural': {len(blank)} of the {len(groups)} training samples have no client, the first "
            f"at position {blank[0]}. Fill in the `client` column or leave these samples out."
        )
    unique, owner = np.unique(groups, return_inverse=True)
    names = tuple(unique.tolist())
    if clients is not None and clients > len(names):
        raise ConfigError(
            f"partition.clients = {clients} is more than the {len(names)} groups in the data, and a group is never "
            "divided. Lower partition.clients, or leave it out for one client per group."
        )
    if clients is not None and clients < len(names):
        # Largest group first, to the client with the fewest samples so far.
        client_of = np.empty(len(names), dtype=np.int64)
        load = [(0, client) for client in range(clients)]
        sizes = np.bincount(owner)
        for group in np.argsort(-sizes, kind="stable").tolist():
            size, client = heapq.heappop(load)
            client_of[group] = client
            heapq.heappush(load, (size + int(sizes[group]), client))
        owner, names = client_of[owner], _names(clients)
    return Partition(
        clients=tuple(group_by_owner(owner, len(names))),
        names=names,
        allowed=_all_allowed(len(names), labels),
        labels=labels,
        report=rule_counts(),
    )


# Feature skew: all clients have the same label distribution, but their images look different, as from other scanners.
# FedHarmony's third axis of heterogeneity. Test data is not changed.

APPEARANCES = ("plain", "dark", "bright", "flat", "blurred", "coarse")
VALUES = np.arange(256)
CURVES = {  # pixel value → new pixel value
    "dark": np.rint(255 * (VALUES / 255) ** 2).astype(np.uint8),
    "bright": np.rint(255 * (VALUES / 255) ** 0.5).astype(np.uint8),
    "flat": np.rint(64 + VALUES / 2).astype(np.uint8),
}
COARSE = 4  # side of the square of pixels that become one


@register("partition", "feature-skew")
def feature_skew(request: PartitionRequest) -> Partition:
    """Clients of equal size; the images of each client look different (dark, bright, flat, blurred, coarse)."""
    assigned = iid(request)
    appearances = np.resize(np.arange(len(APPEARANCES)), len(assigned.clients))
    return replace(assigned, appearances=request.generator("look").permutation(appearances))


def change_appearance(images: NDArray[np.uint8], appearance: str) -> NDArray[np.uint8]:
    """Images (N, channels, height, width) with this appearance."""
    if appearance == "plain":
        return images
    if appearance in CURVES:
        return CURVES[appearance][images]
    changed = np.empty_like(images)
    for place in np.ndindex(images.shape[:2]):
        plane = Image.fromarray(np.ascontiguousarray(images[place]))
        if appearance == "blurred":
            changed_plane = plane.filter(ImageFilter.BoxBlur(1))
        else:
            small = (max(1, plane.width // COARSE), max(1, plane.height // COARSE))
            changed_plane = plane.resize(small, Image.Resampling.BOX).resize(plane.size, Image.Resampling.NEAREST)
        changed[place] = np.asarray(changed_plane)
    return changed


def apply_feature_skew(
    train: Dataset,
    clients: Sequence[NDArray[np.int64]],
    appearances: NDArray[np.int64],
    progress: Progress = no_progress,
) -> Dataset:
    """The training data with each client's images changed; they are prepared once and cached."""
    if not train.is_images:
        raise ConfigError("partition.kind = 'feature-skew' changes images, and this data has feature vectors.")
    appearance_of = np.zeros(len(train), dtype=np.int64)
    for rows, appearance in zip(clients, appearances.tolist(), strict=True):
        appearance_of[rows] = appearance

    what = "changing the appearance of images"

    def fill(images: NDArray[np.uint8]) -> None:
        for start in range(0, len(train), 256):
            part = np.arange(start, min(start + 256, len(train)))
            found = np.array(train.samples(part))
            for appearance in np.unique(appearance_of[part]):
                selected = appearance_of[part] == appearance
                found[selected] = change_appearance(found[selected], APPEARANCES[appearance])
            images[part] = found
            progress(int(part[-1]) + 1, len(train), what)

    def key() -> str:
        return content_key("looks", store_key(train.store), train.rows, appearance_of)  # type: ignore[arg-type]

    store = in_memory_or_cached(key, (len(train), *train.store.shape[1:]), fill, progress, what)
    files = None if train.files is None else train.files[train.rows]
    return replace(train, store=store, rows=np.arange(len(train), dtype=np.int64), files=files)


# Shared


def _names(clients: int) -> tuple[str, ...]:
    digits = max(3, len(str(clients - 1)))
    return tuple(f"c{client:0{digits}d}" for client in range(clients))


def _all_allowed(clients: int, labels: NDArray[np.int8]) -> NDArray[np.bool_]:
    """Every class is allowed at every client; needs one byte of memory."""
    return np.broadcast_to(np.True_, (clients, labels.shape[1]))


def rule_counts(**counts: int) -> dict[str, int]:
    return dict.fromkeys(("dropped", "withheld", "negative", "moved_for_minimum"), 0) | counts
