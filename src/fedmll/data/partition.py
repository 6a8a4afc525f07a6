"""Who gets which samples: `iid`, `dirichlet` (β, presence ratio γ), `natural` (a group column), `labels-per-client`.

Samples with the same set of positive labels are alike to every rule here, so the work is done once for each distinct
set (a *combination*) and not once for each sample: the 112,120 images of ChestX-ray14 have 801 of them.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import logsumexp

from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN
from fedmll.errors import ConfigError, DataError, nearest
from fedmll.seeding import numpy_generator

KINDS = ("iid", "dirichlet", "natural", "labels-per-client")
OUTSIDE = ("drop", "withhold", "negative")
NOBODY = -1  # the owner of a dropped sample
BELOW_ONE = np.nextafter(1.0, 0.0)
CELLS_AT_ONCE = 1 << 20  # combinations × clients, or samples × classes, that are held in memory together


@dataclass(frozen=True)
class Partition:
    """Which client has which samples.

    clients  positions in the training data, sorted, of each client; no position twice
    names    of the clients: c000, c001, … or the groups' own names
    allowed  (K, C) the classes a client may show; all True (and read-only) where the kind does not restrict them
    labels   (N, C) the targets after the rule for samples that fit nowhere; the input itself when no target changed
    report   how many samples each rule touched, and how many (natural) clients are smaller than the minimum
    """

    clients: tuple[NDArray[np.int64], ...]
    names: tuple[str, ...]
    allowed: NDArray[np.bool_]
    labels: NDArray[np.int8]
    report: dict[str, int]


def partition(
    labels: NDArray[np.int8],
    kind: str,
    clients: int | None,
    seed: int,
    *,
    beta: float = 0.5,
    presence: float = 1.0,
    outside: str = "drop",
    labels_per_client: int = 2,
    minimum: int = 1,
    groups: NDArray[np.str_] | None = None,
) -> Partition:
    """Deal the N samples of `labels` (1 present, 0 absent, -1 unknown) to clients, the same way for the same seed.

    `minimum` is the smallest client: samples move from large clients to small ones until it holds, never to a client
    that may not show them. Natural clients are left as they are: a group's data does not become another group's.
    """
    _check(labels, kind, clients, outside, minimum)
    if kind == "natural":
        return _natural(labels, clients, minimum, groups)
    assert clients is not None  # _check has refused it
    rng = numpy_generator(seed, "partition", kind, "deal")
    if kind == "iid":
        parts = np.array_split(rng.permutation(len(labels)), clients)
        return Partition(
            tuple(np.sort(part) for part in parts), _names(clients), _all(clients, labels), labels, _report()
        )
    combinations = _combinations(labels)
    if kind == "dirichlet":
        most = _most_classes(presence, clients, labels.shape[1])
        allowed = _draw_allowed(combinations, clients, most, numpy_generator(seed, "partition", kind, "allowed"))
        log_share = _dirichlet(allowed, beta, numpy_generator(seed, "partition", kind, "share"))
    else:
        _check_labels_per_client(labels_per_client, clients, labels.shape[1])
        allowed = np.zeros((clients, labels.shape[1]), dtype=bool)
        room = np.full(clients, labels_per_client)
        _fill_evenly(allowed, room, numpy_generator(seed, "partition", kind, "allowed"))
        log_share = np.zeros(allowed.shape)
    deal = _hand_out(combinations, allowed, log_share, rng)
    return _finish(labels, deal, outside, minimum, rng)


def round_half_up(share: float, total: int) -> int:
    """share · total in decimal: 0.29 · 50 is 14.5 and gives 15, where binary floats give 14."""
    return int((Decimal(str(share)) * total).quantize(Decimal(1), ROUND_HALF_UP))


# What can be asked for


def _check(labels: NDArray[np.int8], kind: str, clients: int | None, outside: str, minimum: int) -> None:
    if kind not in KINDS:
        raise ConfigError(f"partition.kind = '{kind}' is unknown{nearest(kind, KINDS)}.")
    if outside not in OUTSIDE:
        raise ConfigError(f"partition.outside = '{outside}' is unknown{nearest(outside, OUTSIDE)}.")
    if minimum < 1:
        raise ConfigError(f"partition.minimum = {minimum} would let a client be empty; it must be 1 or more.")
    if clients is None and kind != "natural":
        raise ConfigError(f"partition.kind = '{kind}' needs partition.clients, the number of clients.")
    if clients is not None and clients < 1:
        raise ConfigError(f"partition.clients = {clients} is not possible; it must be 1 or more.")
    if kind == "natural" or clients is None:
        return
    if clients > len(labels):
        raise ConfigError(
            f"partition.clients = {clients} is more than the {len(labels)} training samples, so some clients would "
            "have no data. Lower partition.clients or use more data."
        )
    if clients * minimum > len(labels):
        raise ConfigError(
            f"partition.minimum = {minimum} for each of {clients} clients needs {clients * minimum} samples; there are "
            f"{len(labels)}. Lower partition.minimum to {len(labels) // clients} or less, or lower partition.clients."
        )


def _most_classes(presence: float, clients: int, classes: int) -> int:
    """The most classes a client may show: γC, rounded half up."""
    if not 0 < presence <= 1:
        raise ConfigError(f"partition.presence = {presence} is not a share of the classes; it must be in (0, 1].")
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


# Combinations of labels


@dataclass(frozen=True)
class _Combinations:
    """The distinct sets of positive labels in the data; unknown targets are not positive."""

    of_sample: NDArray[np.int64]  # (N,) which combination a sample has
    sets: csr_array  # (U, C) 1 where the combination has the class
    counts: NDArray[np.int64]  # (U,) samples

    def members(self, combination: int) -> NDArray[np.int32]:
        """The classes of one combination."""
        return self.sets.indices[self.sets.indptr[combination] : self.sets.indptr[combination + 1]]

    @property
    def sizes(self) -> NDArray[np.int32]:
        """(U,) how many labels each combination has."""
        return np.diff(self.sets.indptr)


def _combinations(labels: NDArray[np.int8]) -> _Combinations:
    samples, classes = labels.shape
    bits = np.zeros((samples, -(-classes // 64) * 8), dtype=np.uint8)
    step = max(1, CELLS_AT_ONCE // classes)
    for begin in range(0, samples, step):
        bits[begin : begin + step, : -(-classes // 8)] = np.packbits(labels[begin : begin + step] == PRESENT, axis=1)
    of_sample = np.zeros(samples, dtype=np.int64)
    # Big-endian, so that the order of combinations, and with it every draw, is the same on every machine.
    for word in bits.view(">u8").T:
        _, code = np.unique(word, return_inverse=True)
        _, first, of_sample = np.unique(of_sample * samples + code, return_index=True, return_inverse=True)
    return _Combinations(of_sample, csr_array(labels[first] == PRESENT).astype(np.int32), np.bincount(of_sample))


# Which classes a client may show


def _draw_allowed(combinations: _Combinations, clients: int, most: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """At most `most` classes a client, every class somewhere, and frequent combinations inside some client's set.

    Greedy, most frequent first: a combination that fits nowhere yet is added to the client that needs the fewest new
    classes for it. Room for the classes that no client has yet is never given away.
    """
    classes = combinations.sets.shape[1]
    allowed = np.zeros((clients, classes), dtype=bool)
    uncovered = np.ones(classes, dtype=bool)
    room = np.full(clients, most)
    shuffled = rng.permutation(len(combinations.counts))  # equally frequent ones come in an order drawn by the seed
    for combination in shuffled[np.argsort(-combinations.counts[shuffled], kind="stable")]:
        if not room.any():
            break
        wanted = combinations.members(combination)
        new = len(wanted) - allowed[:, wanted].sum(axis=1)
        if not new.all():
            continue
        spare = room.sum() - uncovered.sum() + uncovered[wanted].sum()
        possible = np.flatnonzero((new <= room) & (new <= spare))
        if len(possible):
            # Fewest new classes first, then the emptiest client, then by lot.
            client = possible[np.lexsort((rng.random(len(possible)), -room[possible], new[possible]))[0]]
            allowed[client, wanted] = True
            uncovered[wanted] = False
            room[client] -= new[client]
    _fill_evenly(allowed, room, rng)
    return allowed


def _fill_evenly(allowed: NDArray[np.bool_], room: NDArray[np.int64], rng: np.random.Generator) -> None:
    """Use up each client's room with the classes that the fewest clients have so far, ties by lot."""
    holders = allowed.sum(axis=0)
    for client in rng.permutation(len(allowed)):
        order = np.lexsort((rng.random(len(holders)), holders, allowed[client]))  # its own classes come last
        chosen = order[: room[client]]
        allowed[client, chosen] = True
        holders[chosen] += 1


def _dirichlet(allowed: NDArray[np.bool_], beta: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """(K, C) the log of each class's proportions over the clients that allow it, from Dir(β); 0 at the other clients.

    In logs, because a gamma variate of shape 0.01 is often too small for a float: Γ(β) = Γ(β+1) · U^(1/β).
    """
    if not (beta > 0 and np.isfinite(beta)):
        raise ConfigError(f"partition.beta = {beta} is not possible: Dir(β) needs β > 0 (small: skewed, large: even).")
    log_gamma = np.log(rng.standard_gamma(beta + 1, allowed.shape)) + np.log1p(-rng.random(allowed.shape)) / beta
    total = logsumexp(log_gamma, axis=0, b=allowed)
    return np.where(allowed, log_gamma - total, 0.0)


# Dealing


@dataclass(frozen=True)
class _Deal:
    """Who owns each sample, and what is needed to move it to another client that could own it as well."""

    combinations: _Combinations
    allowed: NDArray[np.bool_]
    misses: NDArray[np.int64]  # (U,) how many of a combination's labels even the best client cannot show
    owner: NDArray[np.int64]  # (N,) changed in place

    def movable(self, client: int) -> NDArray[np.bool_]:
        """(N,) the samples of other clients that this client could have been dealt."""
        suits = self.combinations.sets @ (~self.allowed[client]).astype(np.int32) == self.misses
        return suits[self.combinations.of_sample] & (self.owner != client) & (self.owner != NOBODY)

    def move(self, samples: NDArray[np.int64], amount: int, client: int, rng: np.random.Generator) -> None:
        """Give `amount` of `samples` to a client; those without a positive label, spread evenly, only if need be."""
        plain = self.combinations.sizes[self.combinations.of_sample[samples]] == 0
        self.owner[samples[np.lexsort((rng.random(len(samples)), plain))[:amount]]] = client


def _hand_out(
    combinations: _Combinations, allowed: NDArray[np.bool_], log_share: NDArray[np.float64], rng: np.random.Generator
) -> _Deal:
    """Deal each combination to the clients that miss fewest of its labels (none, if it fits), in proportion to the
    product of its classes' shares there; for samples without a positive label that is 1 everywhere: evenly."""
    clients, samples, counts = len(allowed), len(combinations.of_sample), combinations.counts
    order = rng.permutation(samples)
    order = order[np.argsort(combinations.of_sample[order], kind="stable")]
    hands = np.split(order, np.cumsum(counts)[:-1])
    start = rng.random(len(counts))
    owner = np.empty(samples, dtype=np.int64)
    misses = np.empty(len(counts), dtype=np.int64)
    step = max(1, CELLS_AT_ONCE // clients)
    for begin in range(0, len(counts), step):
        sets = combinations.sets[begin : begin + step]
        absent = sets @ (~allowed.T).astype(np.int32)
        fewest = absent.min(axis=1, keepdims=True)
        misses[begin : begin + step] = fewest[:, 0]
        weight = np.where(absent == fewest, sets @ log_share.T, -np.inf)
        upto = np.cumsum(np.exp(weight - weight.max(axis=1, keepdims=True)), axis=1)
        upto /= upto[:, -1:]
        for row, hand in enumerate(hands[begin : begin + step]):
            # Evenly spaced points from a random start: a client gets its proportion to within one sample, and one of
            # weight 0 gets nothing at all: its stretch of [0, 1) is empty (a multinomial's last entry may leak).
            points = (np.arange(len(hand)) + start[begin + row]) / len(hand)
            owner[hand] = np.searchsorted(upto[row], np.minimum(points, BELOW_ONE), side="right")
    return _Deal(combinations, allowed, misses, owner)


def _finish(labels: NDArray[np.int8], deal: _Deal, outside: str, minimum: int, rng: np.random.Generator) -> Partition:
    """Apply the rule for samples that fit no client, then fill up the clients that are too small."""
    owner, allowed = deal.owner, deal.allowed
    unplaceable = np.flatnonzero(deal.misses[deal.combinations.of_sample] > 0)
    if outside == "drop":
        owner[unplaceable] = NOBODY
    dealt = owner.copy()
    _fill_up(deal, minimum, rng)
    touched = {"drop": "dropped", "withhold": "withheld", "negative": "negative"}[outside]
    report = _report(**{touched: len(unplaceable), "moved_for_minimum": int((owner != dealt).sum())})
    if outside != "drop" and len(unplaceable):
        targets = labels[unplaceable]
        targets[(targets == PRESENT) & ~allowed[owner[unplaceable]]] = UNKNOWN if outside == "withhold" else ABSENT
        labels = labels.copy()
        labels[unplaceable] = targets
    kept = np.flatnonzero(owner != NOBODY)
    return Partition(_by_owner(kept, owner[kept], len(allowed)), _names(len(allowed)), allowed, labels, report)


def _fill_up(deal: _Deal, minimum: int, rng: np.random.Generator) -> None:
    """Move samples until every client has `minimum` of them; fails only where no way of dealing them could succeed."""
    kept = deal.owner[deal.owner != NOBODY]
    sizes = np.bincount(kept, minlength=len(deal.allowed))
    for client in np.argsort(sizes, kind="stable").tolist():
        while sizes[client] < minimum:
            path = _path_from_surplus(deal, sizes, client, minimum)
            if not path:
                raise ConfigError(
                    f"partition.minimum = {minimum} cannot be met: client {_names(len(sizes))[client]} can get no more "
                    f"than {sizes[client]} of the {len(kept)} samples that fit a client, because of the classes it may "
                    "show. Lower partition.minimum or partition.clients, allow more classes (partition.presence, "
                    "partition.labels_per_client), or keep what fits nowhere (partition.outside = 'withhold')."
                )
            links = [
                (taker, np.flatnonzero(deal.movable(taker) & (deal.owner == giver))) for giver, taker in pairwise(path)
            ]
            amount = min(minimum - sizes[client], sizes[path[0]] - minimum, *(len(samples) for _, samples in links))
            for taker, samples in links:
                deal.move(samples, amount, taker, rng)
            sizes[path[0]] -= amount
            sizes[client] += amount


def _path_from_surplus(deal: _Deal, sizes: NDArray[np.int64], client: int, minimum: int) -> list[int]:
    """Clients from one that can spare samples to `client`, each able to give to the next; empty if there is none.

    A breadth-first search, so usually one step: the largest client that has something suitable. Longer paths are what
    makes failure a proof: then all samples that suit the clients reached lie there already, and they are too few.
    """
    giver_to: dict[int, int] = {client: client}
    for taker in (queue := [client]):
        givers = np.unique(deal.owner[deal.movable(taker)])
        rich = givers[sizes[givers] > minimum]
        if len(rich):
            path = [int(rich[np.argmax(sizes[rich])]), taker]
            while path[-1] != client:
                path.append(giver_to[path[-1]])
            return path
        for giver in givers.tolist():
            if giver not in giver_to:
                giver_to[giver] = taker
                queue.append(giver)
    return []


def _natural(labels: NDArray[np.int8], clients: int | None, minimum: int, groups: NDArray[np.str_] | None) -> Partition:
    """A client a group; with fewer clients than groups, whole groups dealt to clients so that sizes are about even."""
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
    parts = _by_owner(np.arange(len(labels)), owner, len(names))
    small = sum(len(part) < minimum for part in parts)
    return Partition(parts, names, _all(len(names), labels), labels, _report(clients_below_minimum=small))


# Small things


def _by_owner(positions: NDArray[np.int64], owner: NDArray[np.int64], clients: int) -> tuple[NDArray[np.int64], ...]:
    """The positions of each client, ascending as they come in."""
    grouped = positions[np.argsort(owner, kind="stable")]
    return tuple(np.split(grouped, np.cumsum(np.bincount(owner, minlength=clients))[:-1]))


def _names(clients: int) -> tuple[str, ...]:
    digits = max(3, len(str(clients - 1)))
    return tuple(f"c{client:0{digits}d}" for client in range(clients))


def _all(clients: int, labels: NDArray[np.int8]) -> NDArray[np.bool_]:
    """Every class allowed everywhere, in one byte of memory."""
    return np.broadcast_to(np.True_, (clients, labels.shape[1]))


def _report(**counts: int) -> dict[str, int]:
    return dict.fromkeys(("dropped", "withheld", "negative", "moved_for_minimum", "clients_below_minimum"), 0) | counts
