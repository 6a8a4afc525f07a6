"""Assign samples to clients that may hold only some classes: allowed classes, Dirichlet shares, minimum sizes.

Every rule here treats samples with the same set of positive labels alike. The work is therefore done once per distinct
set (a *combination*) and not once per sample: the 112,120 images of ChestX-ray14 have 801 combinations.
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

from fedmll.core.errors import ConfigError
from fedmll.data.dataset import PRESENT

UNASSIGNED = -1  # the owner of a dropped sample
BELOW_ONE = np.nextafter(1.0, 0.0)
CELLS_AT_ONCE = 1 << 20  # samples × classes that are unpacked at the same time


@dataclass(frozen=True)
class LabelCombinations:
    """The distinct sets of positive labels in the data. Unknown targets do not count as positive."""

    of_sample: NDArray[np.int64]  # (N,) the combination of each sample
    sets: csr_array  # (U, C) 1 where the combination contains the class
    counts: NDArray[np.int64]  # (U,) samples per combination

    def members(self, combination: int) -> NDArray[np.int32]:
        """The classes of one combination."""
        return self.sets.indices[self.sets.indptr[combination] : self.sets.indptr[combination + 1]]

    @property
    def sizes(self) -> NDArray[np.int32]:
        """(U,) the number of labels of each combination."""
        return np.diff(self.sets.indptr)


def find_combinations(labels: NDArray[np.int8]) -> LabelCombinations:
    samples, classes = labels.shape
    bits = np.zeros((samples, -(-classes // 64) * 8), dtype=np.uint8)
    step = max(1, CELLS_AT_ONCE // classes)
    for begin in range(0, samples, step):
        bits[begin : begin + step, : -(-classes // 8)] = np.packbits(labels[begin : begin + step] == PRESENT, axis=1)
    of_sample = np.zeros(samples, dtype=np.int64)
    # Big-endian, so that the order of combinations, and with it every random draw, is the same on every machine.
    for word in bits.view(">u8").T:
        _, code = np.unique(word, return_inverse=True)
        _, first, of_sample = np.unique(of_sample * samples + code, return_index=True, return_inverse=True)
    return LabelCombinations(of_sample, csr_array(labels[first] == PRESENT).astype(np.int32), np.bincount(of_sample))


# Which classes a client may hold


def draw_allowed_classes(
    combinations: LabelCombinations, clients: int, most: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Draw the classes that each client may hold, (K, C).

    Each client gets at most `most` classes, each class belongs to some client, and frequent combinations fit into the
    set of at least one client. Greedy, most frequent combination first: a combination that fits nowhere yet is added to
    the client that needs the fewest new classes for it. Places for classes that no client has yet stay reserved.
    """
    classes = combinations.sets.shape[1]
    if most == classes:
        return np.ones((clients, classes), dtype=bool)
    allowed = np.zeros((clients, classes), dtype=bool, order="F")  # whole columns are read below
    columns = allowed.T.view(np.uint8)
    uncovered = np.ones(classes, dtype=bool)
    room, left = np.full(clients, most), clients * most
    shuffled = rng.permutation(len(combinations.counts))  # ties are broken at random
    for combination in shuffled[np.argsort(-combinations.counts[shuffled], kind="stable")]:
        if not left:
            break
        wanted = combinations.members(combination)
        has = _count_members(columns, wanted)
        if not len(wanted) or has.max() == len(wanted):  # it fits somewhere
            continue
        new = len(wanted) - has.astype(np.int64)
        spare = left - uncovered.sum() + uncovered[wanted].sum()
        possible = np.flatnonzero((new <= room) & (new <= spare))
        if len(possible):
            # Fewest new classes first, then the emptiest client, then at random.
            client = possible[_lexicographic_argmin(new[possible], -room[possible], rng.random(len(possible)))]
            allowed[client, wanted] = True
            uncovered[wanted] = False
            room[client] -= new[client]
            left -= int(new[client])
    fill_evenly(allowed, room, rng)
    return allowed


def _count_members(columns: NDArray[np.uint8], wanted: NDArray[np.int32]) -> NDArray[np.integer]:
    """How many of the wanted classes each client has; `columns` is (C, K) with 1 and 0."""
    narrow = np.uint8 if len(wanted) < 256 else np.int32
    return columns[wanted].sum(axis=0, dtype=narrow)


def _lexicographic_argmin(*keys: NDArray[np.number]) -> int:
    """The position of the smallest first key; ties are broken by the second key, and so on."""
    places = np.arange(len(keys[0]))
    for key in keys:
        left = key[places]
        places = places[left == left.min()]
    return int(places[0])


def fill_evenly(allowed: NDArray[np.bool_], room: NDArray[np.int64], rng: np.random.Generator) -> None:
    """Fill the free places of each client with the classes that the fewest clients have; ties are broken at random."""
    holders = allowed.sum(axis=0)
    for client in rng.permutation(len(allowed)):
        # classes that the client has already come last
        chosen = np.lexsort((rng.random(len(holders)), holders, allowed[client]))[: room[client]]
        allowed[client, chosen] = True
        holders[chosen] += 1


def draw_dirichlet_shares(allowed: NDArray[np.bool_], beta: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """(K, C) the logarithm of each class's shares among the clients that allow it, drawn from Dir(β); 0 elsewhere.

    Logarithms, because a gamma variate of shape 0.01 is often too small for a float: Γ(β) = Γ(β+1) · U^(1/β).
    """
    if not (beta > 0 and np.isfinite(beta)):
        raise ConfigError(f"partition.beta = {beta} is not possible: Dir(β) needs β > 0 (small: skewed, large: even).")
    log_gamma = np.log(rng.standard_gamma(beta + 1, allowed.shape)) + np.log1p(-rng.random(allowed.shape)) / beta
    total = logsumexp(log_gamma, axis=0, b=allowed)
    return np.where(allowed, log_gamma - total, 0.0)


# Assignment of samples


@dataclass(frozen=True)
class Assignment:
    """The owner of each sample, and what is needed to move samples to other clients that may hold them."""

    combinations: LabelCombinations
    allowed: NDArray[np.bool_]
    unplaced_labels: NDArray[np.int64]  # (U,) labels of each combination that even the best client may not hold
    owner: NDArray[np.int64]  # (N,) changed in place

    @cached_property
    def without_labels(self) -> NDArray[np.bool_]:
        """(U,) True for the combination without any label."""
        return self.combinations.sizes == 0

    def possible_for(self, client: int) -> NDArray[np.bool_]:
        """(U,) the combinations whose samples may be assigned to this client."""
        possible: NDArray[np.bool_] = (
            self.combinations.sets @ (~self.allowed[client]).astype(np.int32) == self.unplaced_labels
        )
        return possible

    def samples_by_client(self) -> list[NDArray[np.int64]]:
        """The samples of each client, in ascending order."""
        return group_by_owner(self.owner, len(self.allowed))


def group_by_owner(owner: NDArray[np.int64], clients: int) -> list[NDArray[np.int64]]:
    """The positions that each client owns, in ascending order."""
    kept = np.flatnonzero(owner != UNASSIGNED)
    grouped = kept[np.argsort(owner[kept], kind="stable")]
    ends = [0, *np.cumsum(np.bincount(owner[kept], minlength=clients)).tolist()]
    return [grouped[begin:end] for begin, end in pairwise(ends)]


def assign_samples(
    combinations: LabelCombinations,
    allowed: NDArray[np.bool_],
    log_share: NDArray[np.float64],
    rng: np.random.Generator,
) -> Assignment:
    """Assign each sample to a client.

    The samples of a combination go to the clients that allow the most of its labels (all of them, if it fits), in
    proportion to the product of its classes' shares there. For samples without a positive label this product is 1
    everywhere, so they are spread evenly.
    """
    samples, counts = len(combinations.of_sample), combinations.counts
    order = rng.permutation(samples)
    order = order[np.argsort(combinations.of_sample[order], kind="stable")]
    groups = np.split(order, np.cumsum(counts)[:-1])
    start = rng.random(len(counts))
    owner = np.empty(samples, dtype=np.int64)
    unplaced_labels = np.empty(len(counts), dtype=np.int64)
    has = np.ascontiguousarray(allowed.T).view(np.uint8)
    for combination, group in enumerate(groups):
        members = combinations.members(combination)
        found = _count_members(has, members)
        most = found.max()
        unplaced_labels[combination] = len(members) - int(most)
        able = np.flatnonzero(found == most)  # all others have weight 0
        weight = log_share[able[:, None], members].sum(axis=1)
        upto = np.cumsum(np.exp(weight - weight.max()))
        upto /= upto[-1]
        # Evenly spaced points from a random start: each client gets its proportion to within one sample, and a client
        # of weight 0 gets none, because its part of [0, 1) is empty (a multinomial draw may give it the last sample).
        points = (np.arange(len(group)) + start[combination]) / len(group)
        owner[group] = able[np.searchsorted(upto, np.minimum(points, BELOW_ONE), side="right")]
    return Assignment(combinations, allowed, unplaced_labels, owner)


def enforce_minimum(assignment: Assignment, minimum: int, names: tuple[str, ...], rng: np.random.Generator) -> None:
    """Move samples until each client has at least `minimum`; fails only if no assignment could achieve it."""
    held = assignment.samples_by_client()
    sizes = np.array([len(samples) for samples in held])
    donors, possible_for = _Donors(sizes, minimum), lru_cache(maxsize=64)(assignment.possible_for)
    for client in np.argsort(sizes, kind="stable").tolist():
        while sizes[client] < minimum:
            path = _path_from_donor(assignment, held, sizes, client, donors, possible_for)
            if not path:
                raise ConfigError(
                    f"partition.minimum = {minimum} cannot be met: client {names[client]} can get no more "
                    f"than {sizes[client]} of the {sizes.sum()} samples that fit a client, because of the classes it "
                    "may hold. Lower partition.minimum or partition.clients, allow more classes (partition.presence, "
                    "partition.labels_per_client), or keep samples that fit no client (partition.unassignable = "
                    "'withhold')."
                )
            links = [
                (giver, taker, _common(assignment, held[giver], possible_for(taker))) for giver, taker in pairwise(path)
            ]
            amount = min(minimum - sizes[client], sizes[path[0]] - minimum, *(len(common) for *_, common in links))
            for giver, taker, common in links:
                moved = _draw(assignment, common, amount, rng)
                assignment.owner[moved] = taker
                held[giver] = held[giver][assignment.owner[held[giver]] == giver]
                held[taker] = np.sort(np.append(held[taker], moved))
            sizes[path[0]] -= amount
            sizes[client] += amount
            donors.update(path[0])


class _Donors:
    """The clients with more than the minimum, largest first, while sizes change; ties are ordered by client number."""

    def __init__(self, sizes: NDArray[np.int64], minimum: int) -> None:
        self.sizes, self.minimum = sizes, minimum
        self.heap = [(-int(sizes[client]), int(client)) for client in np.flatnonzero(sizes > minimum)]
        heapq.heapify(self.heap)

    def update(self, client: int) -> None:
        """Register a changed size; the heap's entry with the old size is skipped later."""
        if self.sizes[client] > self.minimum:
            heapq.heappush(self.heap, (-int(self.sizes[client]), client))

    def first(self, has_suitable: Callable[[int], bool]) -> int | None:
        """The largest client for which `has_suitable` is true."""
        seen: list[tuple[int, int]] = []
        found = None
        while self.heap and found is None:
            entry = heapq.heappop(self.heap)
            if -entry[0] == self.sizes[entry[1]]:
                seen.append(entry)
                found = entry[1] if has_suitable(entry[1]) else None
        for entry in seen:
            heapq.heappush(self.heap, entry)
        return found


def _common(assignment: Assignment, samples: NDArray[np.int64], possible: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The samples whose combination is marked in `possible`."""
    return samples[possible[assignment.combinations.of_sample[samples]]]


def _draw(
    assignment: Assignment, samples: NDArray[np.int64], amount: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw `amount` of the samples at random; samples without a positive label only if the others do not suffice."""
    unlabelled = assignment.without_labels[assignment.combinations.of_sample[samples]]
    return samples[np.lexsort((rng.random(len(samples)), unlabelled))[:amount]]


def _path_from_donor(
    assignment: Assignment,
    held: list[NDArray[np.int64]],
    sizes: NDArray[np.int64],
    client: int,
    donors: _Donors,
    possible_for: Callable[[int], NDArray[np.bool_]],
) -> list[int]:
    """A path of clients from one with spare samples to `client`; each can give samples to the next. Empty if none
    exists.

    A breadth-first search, so the path usually has one step: from the largest client with a suitable sample. Because
    longer paths are searched too, failure is a proof: all samples that suit the visited clients are there already, and
    they are too few.
    """
    wanted, of_sample = possible_for(client), assignment.combinations.of_sample
    giver = donors.first(lambda other: bool(wanted[of_sample[held[other]]].any()))
    if giver is not None:
        return [giver, client]  # nearly always; otherwise all samples must be searched
    giver_to: dict[int, int] = {client: client}
    for taker in (queue := [client]):
        gives = np.zeros(len(sizes) + 1, dtype=bool)  # one more, for UNASSIGNED
        gives[assignment.owner[possible_for(taker)[of_sample]]] = True
        gives[[taker, UNASSIGNED]] = False
        givers = np.flatnonzero(gives)
        able = givers[sizes[givers] > donors.minimum]
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
