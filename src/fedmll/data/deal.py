"""Dealing samples to clients that may show only some classes: allowed sets, Dirichlet shares, minimum sizes.

Samples with the same set of positive labels are alike to every rule here, so the work is done once for each distinct
set (a *combination*) and not once for each sample: the 112,120 images of ChestX-ray14 have 801 of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import logsumexp

from fedmll.data.dataset import PRESENT
from fedmll.errors import ConfigError

NOBODY = -1  # the owner of a dropped sample
BELOW_ONE = np.nextafter(1.0, 0.0)
CELLS_AT_ONCE = 1 << 20  # combinations × clients, or samples × classes, that are held in memory together


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
            client = possible[_least(new[possible], -room[possible], rng.random(len(possible)))]
            allowed[client, wanted] = True
            uncovered[wanted] = False
            room[client] -= new[client]
    fill_evenly(allowed, room, rng)
    return allowed


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
    return np.split(grouped, np.cumsum(np.bincount(owner[kept], minlength=clients))[:-1])


def hand_out(
    combinations: Combinations, allowed: NDArray[np.bool_], log_share: NDArray[np.float64], rng: np.random.Generator
) -> Deal:
    """Deal each combination to the clients that miss fewest of its labels (none, if it fits), in proportion to the
    product of its classes' shares there; for samples without a positive label that is 1 everywhere: evenly."""
    clients, samples, counts = len(allowed), len(combinations.of_sample), combinations.counts
    order = rng.permutation(samples)
    order = order[np.argsort(combinations.of_sample[order], kind="stable")]
    hands = np.split(order, np.cumsum(counts)[:-1])
    start = rng.random(len(counts))
    owner = np.empty(samples, dtype=np.int64)
    misses = np.empty(len(counts), dtype=np.int64)
    lacks, share = np.ascontiguousarray(~allowed.T, dtype=np.int32), np.ascontiguousarray(log_share.T)
    step = max(1, CELLS_AT_ONCE // clients)
    for begin in range(0, len(counts), step):
        sets = combinations.sets[begin : begin + step]
        absent = sets @ lacks
        fewest = absent.min(axis=1, keepdims=True)
        misses[begin : begin + step] = fewest[:, 0]
        weight = sets @ share
        weight[absent != fewest] = -np.inf
        weight -= weight.max(axis=1, keepdims=True)
        upto = np.cumsum(np.exp(weight, out=weight), axis=1, out=weight)
        upto /= upto[:, -1:]
        for row, hand in enumerate(hands[begin : begin + step]):
            # Evenly spaced points from a random start: a client gets its proportion to within one sample, and one of
            # weight 0 gets nothing at all: its stretch of [0, 1) is empty (a multinomial's last entry may leak).
            points = (np.arange(len(hand)) + start[begin + row]) / len(hand)
            owner[hand] = np.searchsorted(upto[row], np.minimum(points, BELOW_ONE), side="right")
    return Deal(combinations, allowed, misses, owner)


def fill_up(deal: Deal, minimum: int, names: tuple[str, ...], rng: np.random.Generator) -> None:
    """Move samples until every client has `minimum` of them; fails only where no way of dealing them could succeed."""
    hands = deal.hands()
    sizes = np.array([len(hand) for hand in hands])
    for client in np.argsort(sizes, kind="stable").tolist():
        while sizes[client] < minimum:
            path = _path_from_surplus(deal, hands, sizes, client, minimum)
            if not path:
                raise ConfigError(
                    f"partition.minimum = {minimum} cannot be met: client {names[client]} can get no more "
                    f"than {sizes[client]} of the {sizes.sum()} samples that fit a client, because of the classes it "
                    "may show. Lower partition.minimum or partition.clients, allow more classes (partition.presence, "
                    "partition.labels_per_client), or keep what fits nowhere (partition.outside = 'withhold')."
                )
            links = [(giver, taker, _common(deal, hands[giver], taker)) for giver, taker in pairwise(path)]
            amount = min(minimum - sizes[client], sizes[path[0]] - minimum, *(len(common) for *_, common in links))
            for giver, taker, common in links:
                moved = _draw(deal, common, amount, rng)
                deal.owner[moved] = taker
                hands[giver] = hands[giver][deal.owner[hands[giver]] == giver]
                hands[taker] = np.sort(np.append(hands[taker], moved))
            sizes[path[0]] -= amount
            sizes[client] += amount


def _common(deal: Deal, hand: NDArray[np.int64], taker: int) -> NDArray[np.int64]:
    """The samples of a hand that `taker` could have been dealt as well."""
    return hand[deal.suits(taker)[deal.combinations.of_sample[hand]]]


def _draw(deal: Deal, samples: NDArray[np.int64], amount: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`amount` of the samples by lot; those without a positive label, spread evenly, only if need be."""
    plain = deal.combinations.sizes[deal.combinations.of_sample[samples]] == 0
    return samples[np.lexsort((rng.random(len(samples)), plain))[:amount]]


def _path_from_surplus(
    deal: Deal, hands: list[NDArray[np.int64]], sizes: NDArray[np.int64], client: int, minimum: int
) -> list[int]:
    """Clients from one that can spare samples to `client`, each able to give to the next; empty if there is none.

    A breadth-first search, so usually one step: the largest client that has something suitable. Longer paths are what
    makes failure a proof: then all samples that suit the clients reached lie there already, and they are too few.
    """
    largest = int(sizes.argmax())
    if sizes[largest] > minimum and len(_common(deal, hands[largest], client)):
        return [largest, client]  # nearly always; only otherwise are all the samples looked through
    giver_to: dict[int, int] = {client: client}
    for taker in (queue := [client]):
        gives = np.zeros(len(sizes) + 1, dtype=bool)  # one more, for NOBODY
        gives[deal.owner[deal.suits(taker)[deal.combinations.of_sample]]] = True
        gives[[taker, NOBODY]] = False
        givers = np.flatnonzero(gives)
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
