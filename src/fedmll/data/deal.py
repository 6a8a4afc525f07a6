"""Dealing samples to clients that may show only some classes: allowed sets, Dirichlet shares, minimum sizes.

Samples with the same set of positive labels are alike to every rule here, so the work is done once for each distinct
set (a *combination*) and not once for each sample: the 112,120 images of ChestX-ray14 have 801 of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import logsumexp

from fedmll.data.dataset import PRESENT
from fedmll.errors import ConfigError

NOBODY = -1  # the owner of a dropped sample
BELOW_ONE = np.nextafter(1.0, 0.0)
CELLS_AT_ONCE = 1 << 20  # samples × classes that are held in memory together


# Combinations of labels


@dataclass(frozen=True)
class Combinations:
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


def combinations_of(labels: NDArray[np.int8]) -> Combinations:
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
    return Combinations(of_sample, csr_array(labels[first] == PRESENT).astype(np.int32), np.bincount(of_sample))


# Which classes a client may show


def draw_allowed(combinations: Combinations, clients: int, most: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """At most `most` classes a client, every class somewhere, and frequent combinations inside some client's set.

    Greedy, most frequent first: a combination that fits nowhere yet is added to the client that needs the fewest new
    classes for it. Room for the classes that no client has yet is never given away.
    """
    classes = combinations.sets.shape[1]
    if most == classes:
        return np.ones((clients, classes), dtype=bool)
    allowed = np.zeros((clients, classes), dtype=bool, order="F")  # whole columns are read below
    columns = allowed.T.view(np.uint8)
    uncovered = np.ones(classes, dtype=bool)
    room, left = np.full(clients, most), clients * most
    shuffled = rng.permutation(len(combinations.counts))  # equally frequent ones come in an order drawn by the seed
    for combination in shuffled[np.argsort(-combinations.counts[shuffled], kind="stable")]:
        if not left:
            break
        wanted = combinations.members(combination)
        has = _sum_of(columns, wanted)
        if not len(wanted) or has.max() == len(wanted):  # it fits somewhere
            continue
        new = len(wanted) - has.astype(np.int64)
        spare = left - uncovered.sum() + uncovered[wanted].sum()
        possible = np.flatnonzero((new <= room) & (new <= spare))
        if len(possible):
            # Fewest new classes first, then the emptiest client, then by lot.
            client = possible[_least(new[possible], -room[possible], rng.random(len(possible)))]
            allowed[client, wanted] = True
            uncovered[wanted] = False
            room[client] -= new[client]
            left -= int(new[client])
    fill_evenly(allowed, room, rng)
    return allowed


def _sum_of(columns: NDArray[np.uint8], wanted: NDArray[np.int32]) -> NDArray[np.integer]:
    """How many of the wanted classes each client has, of columns (C, K) with 1 and 0."""
    narrow = np.uint8 if len(wanted) < 256 else np.int32
    return columns[wanted].sum(axis=0, dtype=narrow)


def _least(*keys: NDArray[np.number]) -> int:
    """Where the first key is least, among these the second, and so on: the beginning of a sort, without the sort."""
    places = np.arange(len(keys[0]))
    for key in keys:
        left = key[places]
        places = places[left == left.min()]
    return int(places[0])


def fill_evenly(allowed: NDArray[np.bool_], room: NDArray[np.int64], rng: np.random.Generator) -> None:
    """Use up each client's room with the classes that the fewest clients have so far, ties by lot."""
    holders = allowed.sum(axis=0)
    for client in rng.permutation(len(allowed)):
        order = np.lexsort((rng.random(len(holders)), holders, allowed[client]))  # its own classes come last
        chosen = order[: room[client]]
        allowed[client, chosen] = True
        holders[chosen] += 1


def dirichlet(allowed: NDArray[np.bool_], beta: float, rng: np.random.Generator) -> NDArray[np.float64]:
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
class Deal:
    """Who owns each sample, and what is needed to move it to another client that could own it as well."""

    combinations: Combinations
    allowed: NDArray[np.bool_]
    misses: NDArray[np.int64]  # (U,) how many of a combination's labels even the best client cannot show
    owner: NDArray[np.int64]  # (N,) changed in place

    @cached_property
    def plain(self) -> NDArray[np.bool_]:
        """(U,) the combination without a label."""
        return self.combinations.sizes == 0

    def suits(self, client: int) -> NDArray[np.bool_]:
        """(U,) the combinations that this client could have been dealt."""
        suits: NDArray[np.bool_] = self.combinations.sets @ (~self.allowed[client]).astype(np.int32) == self.misses
        return suits

    def hands(self) -> list[NDArray[np.int64]]:
        """The samples of each client, ascending."""
        return by_owner(self.owner, len(self.allowed))


def by_owner(owner: NDArray[np.int64], clients: int) -> list[NDArray[np.int64]]:
    """The positions that each client owns, ascending."""
    kept = np.flatnonzero(owner != NOBODY)
    grouped = kept[np.argsort(owner[kept], kind="stable")]
    ends = [0, *np.cumsum(np.bincount(owner[kept], minlength=clients)).tolist()]
    return [grouped[begin:end] for begin, end in pairwise(ends)]


def hand_out(
    combinations: Combinations, allowed: NDArray[np.bool_], log_share: NDArray[np.float64], rng: np.random.Generator
) -> Deal:
    """Deal each combination to the clients that miss fewest of its labels (none, if it fits), in proportion to the
    product of its classes' shares there; for samples without a positive label that is 1 everywhere: evenly."""
    samples, counts = len(combinations.of_sample), combinations.counts
    order = rng.permutation(samples)
    order = order[np.argsort(combinations.of_sample[order], kind="stable")]
    hands = np.split(order, np.cumsum(counts)[:-1])
    start = rng.random(len(counts))
    owner = np.empty(samples, dtype=np.int64)
    misses = np.empty(len(counts), dtype=np.int64)
    has = np.ascontiguousarray(allowed.T).view(np.uint8)
    for combination, hand in enumerate(hands):
        members = combinations.members(combination)
        found = _sum_of(has, members)
        most = found.max()
        misses[combination] = len(members) - int(most)
        able = np.flatnonzero(found == most)  # the others have weight 0
        weight = log_share[able[:, None], members].sum(axis=1)
        upto = np.cumsum(np.exp(weight - weight.max()))
        upto /= upto[-1]
        # Evenly spaced points from a random start: a client gets its proportion to within one sample, and one of
        # weight 0 gets nothing at all: its stretch of [0, 1) is empty (a multinomial's last entry may leak).
        points = (np.arange(len(hand)) + start[combination]) / len(hand)
        owner[hand] = able[np.searchsorted(upto, np.minimum(points, BELOW_ONE), side="right")]
    return Deal(combinations, allowed, misses, owner)


def fill_up(deal: Deal, minimum: int, names: tuple[str, ...], rng: np.random.Generator) -> None:
    """Move samples until every client has `minimum` of them; fails only where no way of dealing them could succeed."""
    hands = deal.hands()
    sizes = np.array([len(hand) for hand in hands])
    rich, suits = _Rich(sizes, minimum), lru_cache(maxsize=64)(deal.suits)  # asked again while a client is filled up
    for client in np.argsort(sizes, kind="stable").tolist():
        while sizes[client] < minimum:
            path = _path_from_surplus(deal, hands, sizes, client, rich, suits)
            if not path:
                raise ConfigError(
                    f"partition.minimum = {minimum} cannot be met: client {names[client]} can get no more "
                    f"than {sizes[client]} of the {sizes.sum()} samples that fit a client, because of the classes it "
                    "may show. Lower partition.minimum or partition.clients, allow more classes (partition.presence, "
                    "partition.labels_per_client), or keep what fits nowhere (partition.outside = 'withhold')."
                )
            links = [(giver, taker, _common(deal, hands[giver], suits(taker))) for giver, taker in pairwise(path)]
            amount = min(minimum - sizes[client], sizes[path[0]] - minimum, *(len(common) for *_, common in links))
            for giver, taker, common in links:
                moved = _draw(deal, common, amount, rng)
                deal.owner[moved] = taker
                hands[giver] = hands[giver][deal.owner[hands[giver]] == giver]
                hands[taker] = np.sort(np.append(hands[taker], moved))
            sizes[path[0]] -= amount
            sizes[client] += amount
            rich.put(path[0])


class _Rich:
    """The clients that can spare samples, the largest first, then by number, while their sizes change."""

    def __init__(self, sizes: NDArray[np.int64], minimum: int) -> None:
        self.sizes, self.minimum = sizes, minimum
        self.heap = [(-int(sizes[client]), int(client)) for client in np.flatnonzero(sizes > minimum)]
        heapq.heapify(self.heap)

    def put(self, client: int) -> None:
        """Its size has changed; what the heap says of its old size is passed over."""
        if self.sizes[client] > self.minimum:
            heapq.heappush(self.heap, (-int(self.sizes[client]), client))

    def first(self, gives: Callable[[int], bool]) -> int | None:
        """The largest that gives something."""
        seen: list[tuple[int, int]] = []
        found = None
        while self.heap and found is None:
            entry = heapq.heappop(self.heap)
            if -entry[0] == self.sizes[entry[1]]:
                seen.append(entry)
                found = entry[1] if gives(entry[1]) else None
        for entry in seen:
            heapq.heappush(self.heap, entry)
        return found


def _common(deal: Deal, hand: NDArray[np.int64], suits: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The samples of a hand that a client could have been dealt as well, whom these combinations suit."""
    return hand[suits[deal.combinations.of_sample[hand]]]


def _draw(deal: Deal, samples: NDArray[np.int64], amount: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`amount` of the samples by lot; those without a positive label, spread evenly, only if need be."""
    plain = deal.plain[deal.combinations.of_sample[samples]]
    return samples[np.lexsort((rng.random(len(samples)), plain))[:amount]]


def _path_from_surplus(
    deal: Deal,
    hands: list[NDArray[np.int64]],
    sizes: NDArray[np.int64],
    client: int,
    rich: _Rich,
    suits: Callable[[int], NDArray[np.bool_]],
) -> list[int]:
    """Clients from one that can spare samples to `client`, each able to give to the next; empty if there is none.

    A breadth-first search, so usually one step: the largest client that has something suitable. Longer paths are what
    makes failure a proof: then all samples that suit the clients reached lie there already, and they are too few.
    """
    wanted, of_sample = suits(client), deal.combinations.of_sample
    giver = rich.first(lambda other: bool(wanted[of_sample[hands[other]]].any()))
    if giver is not None:
        return [giver, client]  # nearly always; only otherwise are all the samples looked through
    giver_to: dict[int, int] = {client: client}
    for taker in (queue := [client]):
        gives = np.zeros(len(sizes) + 1, dtype=bool)  # one more, for NOBODY
        gives[deal.owner[suits(taker)[of_sample]]] = True
        gives[[taker, NOBODY]] = False
        givers = np.flatnonzero(gives)
        able = givers[sizes[givers] > rich.minimum]
        if len(able):
            path = [int(able[np.argmax(sizes[able])]), taker]
            while path[-1] != client:
                path.append(giver_to[path[-1]])
            return path
        for other in givers.tolist():
            if other not in giver_to:
                giver_to[other] = taker
                queue.append(other)
    return []
