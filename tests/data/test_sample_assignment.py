"""The steps of the assignment, compared with values worked out by hand or by a plain algorithm."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_labels import synthetic
from numpy.typing import NDArray

from fedmll.core.errors import ConfigError
from fedmll.data import sample_assignment

NAMES = ("c000", "c001", "c002")
quick = settings(max_examples=40, deadline=None)


@pytest.mark.parametrize("cells", [1, 1000, 1 << 20])
@pytest.mark.parametrize("classes", [3, 64, 65, 200])
def test_combinations_are_the_distinct_rows(monkeypatch: pytest.MonkeyPatch, classes: int, cells: int) -> None:
    monkeypatch.setattr(sample_assignment, "CELLS_AT_ONCE", cells)
    labels = synthetic(1, 300, classes, density=1.2 / classes, unknown=0.1)
    found = sample_assignment.find_combinations(labels)
    rows, counts = np.unique(labels == 1, axis=0, return_counts=True)
    assert (found.sets.toarray() == rows).all()  # in lexical order, on every machine
    assert (found.counts == counts).all()
    assert (found.sets.toarray()[found.of_sample] == (labels == 1)).all()
    assert (found.sizes == rows.sum(1)).all()
    for place in (0, len(counts) // 2, len(counts) - 1):
        assert found.members(place).tolist() == np.flatnonzero(rows[place]).tolist()


@pytest.mark.parametrize("cells", [1, 30, 1 << 20])
def test_assignment_is_proportional_to_within_one_sample(monkeypatch: pytest.MonkeyPatch, cells: int) -> None:
    """Twelve clients, shares written down here: a combination goes by the product of its classes' shares."""
    monkeypatch.setattr(sample_assignment, "CELLS_AT_ONCE", cells)
    rng = np.random.default_rng(0)
    labels = np.repeat(np.array([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1], [0, 0, 0]], dtype=np.int8), 501, axis=0)
    allowed = np.ones((12, 3), dtype=bool)
    allowed[:5, 0] = allowed[8:, 1] = False  # classes 0 and 1 together: clients 5, 6 and 7
    share = rng.random((12, 3)) * allowed
    share /= share.sum(0)
    log_share = np.where(allowed, np.log(np.where(allowed, share, 1)), 0)
    deal = sample_assignment.assign_samples(
        sample_assignment.find_combinations(labels), allowed, log_share, np.random.default_rng(1)
    )
    both = share[:, 0] * share[:, 1]
    expected = np.stack([share[:, 0], share[:, 1], both / both.sum(), share[:, 2], np.full(12, 1 / 12)])
    for owner, shares in zip(np.split(deal.owner, 5), expected, strict=True):
        counts = np.bincount(owner, minlength=12)
        assert (np.abs(counts - 501 * shares) < 1).all()
        assert (counts[shares == 0] == 0).all()
    assert (deal.unplaced_labels == 0).all()
    order = [owner.tolist() for owner in np.split(deal.owner, 5)]
    assert all(part != sorted(part) for part in order)  # which of the samples is drawn by lot


def test_assignment_counts_labels_that_fit_no_client() -> None:
    labels = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=np.int8)
    allowed = np.array([[True, False, False], [False, True, False], [False, False, True]])
    deal = sample_assignment.assign_samples(
        sample_assignment.find_combinations(labels), allowed, np.zeros((3, 3)), np.random.default_rng(0)
    )
    assert deal.unplaced_labels[deal.combinations.of_sample].tolist() == [2, 1, 0, 0]
    assert deal.owner[2] == 0 and deal.owner[1] in (0, 1)


def test_shares_are_over_the_clients_that_allow_a_class() -> None:
    allowed = np.random.default_rng(0).random((12, 40)) < 0.4
    allowed[3] = True
    log_share = sample_assignment.draw_dirichlet_shares(allowed, 0.3, np.random.default_rng(1))
    assert np.allclose(np.where(allowed, np.exp(log_share), 0).sum(axis=0), 1)
    assert (log_share[~allowed] == 0).all() and (log_share[allowed] < 0).mean() > 0.99


def sets(allowed: NDArray[np.bool_]) -> list[list[int]]:
    return sorted(np.flatnonzero(row).tolist() for row in allowed)


def test_places_for_classes_without_a_client_stay_reserved() -> None:
    """Two clients with two of four classes each. After {0, 1} two places are free and two classes have no client: the
    frequent {0, 2} would leave one of them without a client."""
    labels = np.repeat(np.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]], dtype=np.int8), [9, 8, 7], axis=0)
    for seed in range(5):
        allowed = sample_assignment.draw_allowed_classes(
            sample_assignment.find_combinations(labels), 2, 2, np.random.default_rng(seed)
        )
        assert sets(allowed) == [[0, 1], [2, 3]]


def test_a_combination_goes_where_it_needs_the_fewest_new_classes() -> None:
    """{0, 1} and {4, 5} go to empty clients. {0, 2} then needs one new class at the client of {0, 1}, and {4, 6} one at
    the client of {4, 5}; at other clients they would need two."""
    rows = np.zeros((4, 7), dtype=np.int8)
    rows[[0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 4, 5, 0, 2, 4, 6]] = 1
    labels = np.repeat(rows, [9, 8, 7, 6], axis=0)
    for seed in range(5):
        allowed = sample_assignment.draw_allowed_classes(
            sample_assignment.find_combinations(labels), 3, 3, np.random.default_rng(seed)
        )
        assert [0, 1, 2] in sets(allowed) and [4, 5, 6] in sets(allowed)
        assert allowed.any(axis=0).all() and (allowed.sum(axis=1) == 3).all()


def test_ties_go_to_the_emptiest_client_and_then_to_a_random_one() -> None:
    labels = np.repeat(np.kron(np.eye(12, dtype=np.int8), np.ones((1, 2), dtype=np.int8)), range(30, 18, -1), axis=0)
    opened = set()
    for seed in range(20):
        allowed = sample_assignment.draw_allowed_classes(
            sample_assignment.find_combinations(labels), 12, 4, np.random.default_rng(seed)
        )
        pairs = allowed.reshape(12, 12, 2).all(axis=2)
        assert pairs.any(axis=0).all() and pairs.any(axis=1).all()  # twelve pairs, a client each
        opened.add(tuple(np.flatnonzero(pairs[:, 0])))
    assert len(opened) > 5


@quick
@given(seed=st.integers(0, 10**6), size=st.integers(1, 40))
def test_lexicographic_argmin_equals_the_first_of_a_sort(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    first, second, third = rng.integers(0, 3, size), rng.integers(0, 3, size), rng.random(size)
    assert sample_assignment._lexicographic_argmin(first, second, third) == np.lexsort((third, second, first))[0]


def test_shares_have_the_variance_of_a_dirichlet() -> None:
    """Var = (1/K)(1 − 1/K)/(Kβ + 1), mean 1/K: over 20,000 classes, for β from skewed to even."""
    allowed = np.ones((5, 20_000), dtype=bool)
    for beta in (0.05, 0.5, 5.0):
        share = np.exp(sample_assignment.draw_dirichlet_shares(allowed, beta, np.random.default_rng(0)))
        assert np.allclose(share.sum(axis=0), 1)
        assert np.allclose(share.mean(axis=1), 0.2, atol=0.01)
        assert np.allclose(share.var(axis=1), 0.16 / (5 * beta + 1), rtol=0.06)


# The minimum


def a_b_deal(b_samples: int) -> sample_assignment.Assignment:
    """Clients of {a}, {a, b} and {b}: the second has two a, the third all b, the first nothing."""
    labels = np.array([[1, 0]] * 2 + [[0, 1]] * b_samples, dtype=np.int8)
    allowed = np.array([[True, False], [True, True], [False, True]])
    owner = np.array([1, 1] + [2] * b_samples)
    return sample_assignment.Assignment(
        sample_assignment.find_combinations(labels), allowed, np.zeros(2, dtype=np.int64), owner
    )


def test_samples_move_through_a_client_without_spare_samples() -> None:
    deal = a_b_deal(b_samples=4)
    sample_assignment.enforce_minimum(deal, 2, NAMES, np.random.default_rng(0))
    assert sorted(deal.owner[:2]) == [0, 0]
    assert sorted(deal.owner[2:]) == [1, 1, 2, 2]


def test_minimum_that_no_assignment_can_meet_is_rejected() -> None:
    deal = a_b_deal(b_samples=20)
    with pytest.raises(ConfigError, match=r"partition\.minimum = 3 cannot be met: client c000") as error:
        sample_assignment.enforce_minimum(deal, 3, NAMES, np.random.default_rng(0))
    assert "\n" not in str(error.value)


def test_no_more_samples_move_than_needed() -> None:
    """Sizes 0, 5 and 5 with a minimum of 3: both large clients give samples, and neither falls below the minimum."""
    combinations = sample_assignment.find_combinations(np.ones((10, 1), dtype=np.int8))
    before = np.repeat([1, 2], 5)
    deal = sample_assignment.Assignment(
        combinations, np.ones((3, 1), dtype=bool), np.zeros(1, dtype=np.int64), before.copy()
    )
    sample_assignment.enforce_minimum(deal, 3, NAMES, np.random.default_rng(0))
    assert (deal.owner != before).sum() == 3
    assert sorted(np.bincount(deal.owner)) == [3, 3, 4]


def test_samples_without_a_positive_move_last() -> None:
    labels = np.array([[1]] * 5 + [[0]] * 5, dtype=np.int8)
    deal = sample_assignment.Assignment(
        sample_assignment.find_combinations(labels),
        np.ones((2, 1), dtype=bool),
        np.zeros(2, dtype=np.int64),
        np.zeros(10, np.int64),
    )
    sample_assignment.enforce_minimum(deal, 4, NAMES, np.random.default_rng(0))
    assert deal.owner[:5].sum() == 4 and deal.owner[5:].sum() == 0


def filled_up_plainly(
    deal: sample_assignment.Assignment, minimum: int, rng: np.random.Generator
) -> NDArray[np.int64] | None:
    """The same as enforce_minimum, but all samples are searched in every step: the smallest client first, from the
    largest client with suitable samples, directly or through others; None if it is impossible."""
    owner, clients = deal.owner.copy(), len(deal.allowed)
    labels = deal.combinations.sets.toarray()[deal.combinations.of_sample]
    missing = labels @ (~deal.allowed).astype(int).T
    suits, plain = missing == missing.min(1, keepdims=True), ~labels.any(1)

    def given(giver: int, taker: int) -> NDArray[np.int64]:
        return np.flatnonzero((owner == giver) & suits[:, taker])

    sizes = [int((owner == client).sum()) for client in range(clients)]
    for client in sorted(range(clients), key=sizes.__getitem__):
        while (owner == client).sum() < minimum:
            sizes = [int((owner == c).sum()) for c in range(clients)]
            after: dict[int, int] = {client: client}
            path: list[int] = []
            for taker in (queue := [client]):
                givers = [c for c in range(clients) if c != taker and len(given(c, taker))]
                rich = [c for c in givers if sizes[c] > minimum]
                if rich:
                    path = [max(rich, key=sizes.__getitem__), taker]
                    break
                fresh = [c for c in givers if c not in after]
                after |= dict.fromkeys(fresh, taker)
                queue += fresh
            if not path:
                return None
            while path[-1] != client:
                path.append(after[path[-1]])
            pools = [(taker, given(giver, taker)) for giver, taker in itertools.pairwise(path)]
            amount = min([minimum - sizes[client], sizes[path[0]] - minimum, *(len(pool) for _, pool in pools)])
            for taker, pool in pools:
                lots = rng.random(len(pool))
                owner[sorted(pool, key=lambda s, p=pool, q=lots: (plain[s], q[np.searchsorted(p, s)]))[:amount]] = taker
    return owner


@quick
@given(
    seed=st.integers(0, 10**6),
    classes=st.integers(2, 8),
    clients=st.integers(2, 14),
    most=st.integers(1, 8),
    fullness=st.floats(0.2, 1),
    dropped=st.booleans(),
)
def test_enforce_minimum_equals_a_plain_search(
    seed: int, classes: int, clients: int, most: int, fullness: float, dropped: bool
) -> None:
    rng = np.random.default_rng(seed)
    allowed = np.zeros((clients, classes), dtype=bool)
    sample_assignment.fill_evenly(allowed, np.full(clients, min(most, classes)), rng)
    combinations = sample_assignment.find_combinations(synthetic(seed, 60, classes, density=0.25))
    deal = sample_assignment.assign_samples(
        combinations, allowed, sample_assignment.draw_dirichlet_shares(allowed, 0.1, rng), rng
    )
    if dropped:
        deal.owner[deal.unplaced_labels[combinations.of_sample] > 0] = sample_assignment.UNASSIGNED
    minimum = max(1, int(fullness * (60 // clients)))
    expected = filled_up_plainly(deal, minimum, np.random.default_rng(seed))
    if expected is None:
        with pytest.raises(ConfigError, match="cannot be met"):
            sample_assignment.enforce_minimum(
                deal, minimum, tuple(f"c{i}" for i in range(clients)), np.random.default_rng(seed)
            )
    else:
        sample_assignment.enforce_minimum(
            deal, minimum, tuple(f"c{i}" for i in range(clients)), np.random.default_rng(seed)
        )
        assert (deal.owner == expected).all()


@pytest.mark.parametrize("wanted", [255, 256, 257])
def test_members_of_large_combinations_are_counted(wanted: int) -> None:
    """An 8-bit counter would be 0 again after 255."""
    columns = np.ones((300, 2), dtype=np.uint8)
    columns[0, 1] = 0  # the second client does not have the first class
    found = sample_assignment._count_members(columns, np.arange(wanted, dtype=np.int32))
    assert found.tolist() == [wanted, wanted - 1]


def test_the_largest_suitable_client_gives_first() -> None:
    """Minimum 3: clients 1, 3 and 4 can give. Ties are ordered by client number, and old sizes are forgotten."""
    sizes = np.array([3, 7, 1, 9, 9])
    donors = sample_assignment._Donors(sizes, 3)
    assert donors.first(lambda client: True) == 3
    assert donors.first(lambda client: client != 3) == 4
    assert donors.first(lambda client: client in (0, 1, 2)) == 1
    assert donors.first(lambda client: client in (0, 2)) is None  # neither has more than the minimum
    sizes[3] = 5
    donors.update(3)
    assert [donors.first(lambda client: client != 4), donors.first(lambda client: client in (0, 3))] == [1, 3]
    sizes[3] = 3
    donors.update(3)
    assert donors.first(lambda client: client == 3) is None
