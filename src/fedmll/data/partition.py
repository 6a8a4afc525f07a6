"""Who gets which samples: `iid`, `dirichlet` (β, presence ratio γ), `natural` (a group column), `labels-per-client`.

`file` is in fedmll.data.freeze, `feature-skew` in fedmll.data.skew."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll import registry
from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN
from fedmll.data.deal import (
    NOBODY,
    Combinations,
    by_owner,
    combinations_of,
    dirichlet,
    draw_allowed,
    fill_evenly,
    fill_up,
    hand_out,
)
from fedmll.errors import ConfigError, DataError
from fedmll.registry import register
from fedmll.seeding import numpy_generator


@dataclass(frozen=True)
class Partition:
    """Which client has which samples.

    clients  positions in the training data, sorted, of each client; no position twice
    names    of the clients: c000, c001, … or the groups' own names
    allowed  (K, C) the classes a client may show; all True (and read-only) where the kind does not restrict them
    labels   (N, C) the targets after the rule for samples that fit nowhere; the input itself when no target changed
    report   how many samples each rule touched: dropped, withheld, negative, moved_for_minimum
    annotated, held_out   of a frozen federation: (K, C) what each client annotates, and what it holds out
    looks    (K,) of `feature-skew`: how the images of each client look
    """

    clients: tuple[NDArray[np.int64], ...]
    names: tuple[str, ...]
    allowed: NDArray[np.bool_]
    labels: NDArray[np.int8]
    report: dict[str, int]
    annotated: NDArray[np.bool_] | None = None
    held_out: tuple[NDArray[np.int64], ...] | None = None
    looks: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Request:
    """What a partition (`@register("partition", NAME)`) is asked.

    labels   (N, C) targets of the samples to divide: 1 present, 0 absent, -1 unknown
    clients  how many; of `natural` None is a client a group
    groups   (N,) the client that each sample comes from, if the data says
    classes  names of the columns of `labels`
    minimum  the smallest client, in samples
    The rest is the experiment's [partition] (settings.Partition, which checks it).
    """

    labels: NDArray[np.int8]
    kind: str
    clients: int | None
    seed: int
    beta: float = 0.5
    presence: float = 1.0
    outside: str = "drop"
    labels_per_client: int = 2
    minimum: int = 1
    groups: NDArray[np.str_] | None = None
    classes: tuple[str, ...] = ()
    file: Path | None = None

    def generator(self, purpose: str) -> np.random.Generator:
        """Random draws that depend on the seed, the kind and the purpose alone."""
        return numpy_generator(self.seed, "partition", self.kind, purpose)


def partition(labels: NDArray[np.int8], kind: str, clients: int | None, seed: int, **settings: Any) -> Partition:
    """Deal the N samples of `labels` to clients, the same way for the same seed; `settings` are those of a Request."""
    divide = registry.find("partition", kind)
    asked = Request(labels, kind, clients, seed, **settings)
    found: Partition = divide(asked)
    rows = np.concatenate(found.clients)
    if len(found.names) != len(found.clients) or len(np.unique(rows)) != len(rows):
        raise ConfigError(
            f"partition.kind = '{kind}' gives a sample to two clients, or another number of names than of clients. "
            "Correct its plug-in."
        )
    return found


@register("partition", "iid")
def iid(asked: Request) -> Partition:
    """Equal shares at random."""
    clients = _enough(asked)
    parts = np.array_split(asked.generator("deal").permutation(len(asked.labels)), clients)
    everything = _all(clients, asked.labels)
    return Partition(tuple(np.sort(part) for part in parts), _names(clients), everything, asked.labels, _report())


@register("partition", "dirichlet")
def by_dirichlet(asked: Request) -> Partition:
    """Shares of each class drawn from Dir(β); a client may show at most a share γ of the classes."""
    clients, combinations = _enough(asked), combinations_of(asked.labels)
    most = _most_classes(asked.presence, clients, asked.labels.shape[1])
    allowed = draw_allowed(combinations, clients, most, asked.generator("allowed"))
    return _dealt(asked, combinations, allowed, dirichlet(allowed, asked.beta, asked.generator("share")))


@register("partition", "labels-per-client")
def by_labels(asked: Request) -> Partition:
    """Each client may show so many classes."""
    clients, classes = _enough(asked), asked.labels.shape[1]
    _check_labels_per_client(asked.labels_per_client, clients, classes)
    allowed = np.zeros((clients, classes), dtype=bool)
    fill_evenly(allowed, np.full(clients, asked.labels_per_client), asked.generator("allowed"))
    return _dealt(asked, combinations_of(asked.labels), allowed, np.zeros(allowed.shape))


def round_half_up(share: float, total: int) -> int:
    """share · total in decimal: 0.29 · 50 is 14.5 and gives 15, where binary floats give 14."""
    return int((Decimal(str(share)) * total).quantize(Decimal(1), ROUND_HALF_UP))


# What can be asked for


def _enough(asked: Request) -> int:
    """The number of clients, if there are samples for so many."""
    clients, samples, minimum = asked.clients, len(asked.labels), asked.minimum
    if clients is None:
        raise ConfigError(f"partition.kind = '{asked.kind}' needs partition.clients, the number of clients.")
    if clients > samples:
        raise ConfigError(
            f"partition.clients = {clients} is more than the {samples} training samples, so some clients would "
            "have no data. Lower partition.clients or use more data."
        )
    if clients * minimum > samples:
        raise ConfigError(
            f"partition.minimum = {minimum} for each of {clients} clients needs {clients * minimum} samples; there are "
            f"{samples}. Lower partition.minimum to {samples // clients} or less, or lower partition.clients."
        )
    return clients


def _most_classes(presence: float, clients: int, classes: int) -> int:
    """The most classes a client may show: γC, rounded half up."""
    if Decimal(str(presence)) * classes < 1:
        raise ConfigError(
            f"partition.presence = {presence} allows a client less than one of the {classes} classes. Raise "
            f"partition.presence to {np.ceil(1000 / classes) / 1000:g} or more."
        )
    most = round_half_up(presence, classes)
    if clients * most < classes:
        raise ConfigError(
            f"partition.clients = {clients} with partition.presence = {presence} (at most {most} classes a client) "
            f"leaves some of the {classes} classes to nobody. Raise partition.presence to "
            f"{np.ceil(-(-classes // clients) / classes * 1000) / 1000:g} or more, or partition.clients to "
            f"{-(-classes // most)} or more."
        )
    return most


def _check_labels_per_client(count: int, clients: int, classes: int) -> None:
    if not 1 <= count <= classes:
        raise ConfigError(
            f"partition.labels_per_client = {count} is not possible with {classes} classes; use 1 to {classes}."
        )
    if clients * count < classes:
        raise ConfigError(
            f"partition.labels_per_client = {count} with partition.clients = {clients} leaves some of the {classes} "
            f"classes to nobody. Raise partition.labels_per_client to {-(-classes // clients)} or more, or "
            f"partition.clients to {-(-classes // count)} or more."
        )


def _dealt(
    asked: Request, combinations: Combinations, allowed: NDArray[np.bool_], log_share: NDArray[np.float64]
) -> Partition:
    """Hand the samples out, apply the rule for those that fit no client, then fill up the clients that are too small:
    samples move there from large ones, never to a client that may not show them."""
    labels, outside, rng = asked.labels, asked.outside, asked.generator("deal")
    deal = hand_out(combinations, allowed, log_share, rng)
    owner, allowed = deal.owner, deal.allowed
    unplaceable = np.flatnonzero(deal.misses[deal.combinations.of_sample] > 0)
    if outside == "drop":
        owner[unplaceable] = NOBODY
    dealt = owner.copy()
    fill_up(deal, asked.minimum, _names(len(allowed)), rng)
    touched = {"drop": "dropped", "withhold": "withheld", "negative": "negative"}[outside]
    report = _report(**{touched: len(unplaceable), "moved_for_minimum": int((owner != dealt).sum())})
    if outside != "drop" and len(unplaceable):
        targets = labels[unplaceable]
        targets[(targets == PRESENT) & ~allowed[owner[unplaceable]]] = UNKNOWN if outside == "withhold" else ABSENT
        labels = labels.copy()
        labels[unplaceable] = targets
    return Partition(tuple(deal.hands()), _names(len(allowed)), allowed, labels, report)


@register("partition", "natural")
def natural(asked: Request) -> Partition:
    """A client a group; with fewer clients than groups, whole groups dealt to clients so that sizes are about even.
    The clients are left as they are, however small: a group's data does not become another group's."""
    labels, clients, groups = asked.labels, asked.clients, asked.groups
    if groups is None:
        raise ConfigError(
            "partition.kind = 'natural' needs data that says where each sample comes from (a `client` column in the "
            "CSV, for example), and this data does not. Choose another partition.kind or add the column."
        )
    blank = np.flatnonzero(groups == "")
    if len(blank):
        raise DataError(
            f"partition.kind = 'natural': {len(blank)} of the {len(groups)} training samples have no client, the first "
            f"at position {blank[0]}. Fill in the `client` column or leave these samples out."
        )
    found, owner = np.unique(groups, return_inverse=True)
    names = tuple(found.tolist())
    if clients is not None and clients > len(names):
        raise ConfigError(
            f"partition.clients = {clients} is more than the {len(names)} groups in the data, and a group is never "
            "divided. Lower partition.clients, or leave it out for a client a group."
        )
    if clients is not None and clients < len(names):
        # Largest group first, to the client with the least so far.
        client_of = np.empty(len(names), dtype=np.int64)
        load = [(0, client) for client in range(clients)]
        sizes = np.bincount(owner)
        for group in np.argsort(-sizes, kind="stable").tolist():
            size, client = heapq.heappop(load)
            client_of[group] = client
            heapq.heappush(load, (size + int(sizes[group]), client))
        owner, names = client_of[owner], _names(clients)
    return Partition(tuple(by_owner(owner, len(names))), names, _all(len(names), labels), labels, _report())


# Small things


def _names(clients: int) -> tuple[str, ...]:
    digits = max(3, len(str(clients - 1)))
    return tuple(f"c{client:0{digits}d}" for client in range(clients))


def _all(clients: int, labels: NDArray[np.int8]) -> NDArray[np.bool_]:
    """Every class allowed everywhere, in one byte of memory."""
    return np.broadcast_to(np.True_, (clients, labels.shape[1]))


def _report(**counts: int) -> dict[str, int]:
    return dict.fromkeys(("dropped", "withheld", "negative", "moved_for_minimum"), 0) | counts
