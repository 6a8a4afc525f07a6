"""Partitions: what must hold for any labels (hypothesis, synthetic and real), and what each kind is for."""

from __future__ import annotations

import csv
import gzip
import itertools
import time
from fractions import Fraction
from functools import cache
from math import floor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from fedmll.data import deal as dealing
from fedmll.data.partition import Partition, partition, round_half_up
from fedmll.errors import ConfigError, DataError
from fedmll.seeding import numpy_generator

SHARED = Path(__file__).parents[3] / "shared" / "data"
NAMES = ("c000", "c001", "c002")
Labels = NDArray[np.int8]
quick = settings(max_examples=40, deadline=None)
few = settings(max_examples=8, deadline=None)


def read(name: str, skip_columns: int) -> NDArray[np.int8]:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{path} is not here: real labels are for development only")
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        rows = list(csv.reader(file))[1:]
    return np.array([row[skip_columns:] for row in rows], dtype=np.int8)


@cache
def voc() -> Labels:
    """VOC2007 trainval; objects that are only difficult to see are unknown."""
    codes = read("voc2007_trainval_labels.csv", 1)
    return np.where(codes == 1, 1, np.where(codes == 0, -1, 0)).astype(np.int8)


@cache
def chest() -> Labels:
    return read("chestxray14_labels.csv.gz", 3)


def synthetic(seed: int, samples: int, classes: int, density: float = 0.15, unknown: float = 0.0) -> Labels:
    """Labels of very different frequencies, some samples without any, some targets unknown."""
    rng = np.random.default_rng(seed)
    rates = density * 2 * rng.random(classes)
    labels = (rng.random((samples, classes)) < rates).astype(np.int8)
    labels[rng.random(labels.shape) < unknown] = -1
    return labels


def singles_and_pairs(classes: int, singles: int, pairs: int) -> Labels:
    """As multi-label CIFAR-10: so many samples of each class alone and of each pair of classes."""
    one = np.eye(classes, dtype=np.int8)
    rows = [np.repeat(one, singles, axis=0)]
    rows += [np.repeat((one[a] + one[b])[None], pairs, axis=0) for a, b in itertools.combinations(range(classes), 2)]
    return np.concatenate(rows)


def owners(result: Partition) -> NDArray[np.int64]:
    """The client of each sample, -1 for nobody; fails when a sample has two."""
    owner = np.full(len(result.labels), -1)
    for client, positions in enumerate(result.clients):
        assert (owner[positions] == -1).all(), "a sample has two clients"
        assert len(np.unique(positions)) == len(positions), "a client has a sample twice"
        owner[positions] = client
    return owner


def fewest_missing(labels: Labels, allowed: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(N, K) how many of a sample's positives a client may not show, and the least of them (N,)."""
    missing = (labels == 1).astype(np.int64) @ (~allowed).astype(np.int64).T
    return missing, missing.min(axis=1)


def check_restricted(labels: Labels, result: Partition, most: int, outside: str, minimum: int) -> None:
    """Everything that dirichlet and labels-per-client promise."""
    assert (result.allowed.sum(axis=1) <= most).all()
    assert result.allowed.any(axis=0).all()
    owner = owners(result)
    missing, least = fewest_missing(labels, result.allowed)
    kept = owner >= 0
    assert (kept == ((least == 0) | (outside != "drop"))).all()
    rows = np.flatnonzero(kept)
    assert (missing[rows, owner[rows]] == least[rows]).all()
    assert not ((result.labels[rows] == 1) & ~result.allowed[owner[rows]]).any()
    expected = labels.copy()
    if outside != "drop":
        expected[(labels == 1) & ~result.allowed[owner]] = {"withhold": -1, "negative": 0}[outside]
    assert (result.labels == expected).all()
    assert (result.labels is labels) == (expected == labels).all()
    touched = {"drop": "dropped", "withhold": "withheld", "negative": "negative"}
    assert {key: result.report[key] for key in touched.values()} == {
        key: int((least > 0).sum()) if rule == outside else 0 for rule, key in touched.items()
    }
    for positions in result.clients:
        assert positions.dtype == np.int64
        assert (np.diff(positions) > 0).all()
        assert len(positions) >= minimum


def can_be_met(labels: Labels, allowed: NDArray[np.bool_], outside: str, minimum: int) -> bool:
    """Whether any deal gives each client `minimum` samples that it could own: a matching of seats to samples."""
    missing, least = fewest_missing(labels, allowed)
    suits = (missing == least[:, None]) & ((least == 0) | (outside != "drop"))[:, None]
    seats = np.repeat(suits.T, minimum, axis=0)
    return bool((maximum_bipartite_matching(csr_array(seats), perm_type="column") >= 0).all())


# What holds for any labels


@settings(max_examples=150, deadline=None)
@given(
    data_seed=st.integers(0, 10**6),
    seed=st.integers(0, 10**6),
    samples=st.integers(40, 150),
    classes=st.integers(2, 12),
    density=st.floats(0.02, 0.4),
    clients=st.integers(1, 12),
    presence=st.sampled_from([0.25, 0.3, 0.5, 0.71, 1.0]),
    beta=st.sampled_from([0.001, 0.1, 1.0, 1000.0]),
    outside=st.sampled_from(["drop", "withhold", "negative"]),
    fullness=st.floats(0, 1),
    plain=st.booleans(),
)
def test_dirichlet_on_any_labels(
    data_seed: int,
    seed: int,
    samples: int,
    classes: int,
    density: float,
    clients: int,
    presence: float,
    beta: float,
    outside: str,
    fullness: float,
    plain: bool,
) -> None:
    most = floor(Fraction(str(presence)) * classes + Fraction(1, 2))
    assume(Fraction(str(presence)) * classes >= 1 and clients * most >= classes)
    labels = synthetic(data_seed, samples, classes, density, unknown=0.1)
    if not plain:  # without samples that suit everybody the minimum is hard to meet, or impossible
        labels[~(labels == 1).any(axis=1), data_seed % classes] = 1
    before = labels.copy()
    minimum = max(1, int(fullness * (samples // clients)))
    try:
        result = partition(
            labels, "dirichlet", clients, seed, beta=beta, presence=presence, outside=outside, minimum=minimum
        )
    except ConfigError as error:
        # It may only give up where it is truly impossible. The allowed sets do not depend on the minimum.
        assert "partition.minimum" in str(error)
        combinations = dealing.combinations_of(labels)
        rng = numpy_generator(seed, "partition", "dirichlet", "allowed")
        allowed = dealing.draw_allowed(combinations, clients, most, rng)
        assert not can_be_met(labels, allowed, outside, minimum)
        return
    check_restricted(labels, result, most, outside, minimum)
    assert (labels == before).all()


@quick
@given(
    data_seed=st.integers(0, 10**6),
    samples=st.integers(60, 200),
    classes=st.integers(2, 12),
    clients=st.integers(2, 15),
    per_client=st.integers(1, 12),
    outside=st.sampled_from(["drop", "withhold", "negative"]),
)
def test_labels_per_client_on_any_labels(
    data_seed: int, samples: int, classes: int, clients: int, per_client: int, outside: str
) -> None:
    assume(per_client <= classes <= clients * per_client)
    labels = synthetic(data_seed, samples, classes)
    labels[:clients] = 0  # samples that every client may have, so that none must stay empty
    result = partition(labels, "labels-per-client", clients, 3, labels_per_client=per_client, outside=outside)
    check_restricted(labels, result, per_client, outside, 1)
    assert (result.allowed.sum(axis=1) == per_client).all()
    coverage = result.allowed.sum(axis=0)
    assert coverage.max() - coverage.min() <= 1


@few
@given(seed=st.integers(0, 10**6), outside=st.sampled_from(["drop", "withhold", "negative"]))
def test_dirichlet_on_voc(seed: int, outside: str) -> None:
    result = partition(voc(), "dirichlet", 10, seed, beta=0.1, presence=0.3, outside=outside, minimum=32)
    check_restricted(voc(), result, 6, outside, 32)
    assert (result.allowed.sum(axis=1) == 6).all()


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), outside=st.sampled_from(["drop", "withhold", "negative"]))
def test_dirichlet_on_chest_x_rays(seed: int, outside: str) -> None:
    result = partition(chest(), "dirichlet", 10, seed, beta=0.5, presence=0.5, outside=outside, minimum=32)
    check_restricted(chest(), result, 7, outside, 32)


@few
@given(seed=st.integers(0, 10**6), clients=st.integers(4, 60))
def test_labels_per_client_on_voc(seed: int, clients: int) -> None:
    result = partition(voc(), "labels-per-client", clients, seed, labels_per_client=5, outside="withhold", minimum=4)
    check_restricted(voc(), result, 5, "withhold", 4)


@quick
@given(samples=st.integers(1, 300), clients=st.integers(1, 300), seed=st.integers(0, 10**6))
def test_iid_is_an_equal_split_of_everything(samples: int, clients: int, seed: int) -> None:
    assume(clients <= samples)
    labels = synthetic(0, samples, 3)
    result = partition(labels, "iid", clients, seed)
    assert (owners(result) >= 0).all()
    sizes = [len(positions) for positions in result.clients]
    assert max(sizes) - min(sizes) <= 1
    assert all((np.diff(positions) > 0).all() for positions in result.clients)
    assert result.labels is labels
    assert result.allowed.shape == (clients, 3) and result.allowed.all()


# One seed, one result


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "labels-per-client"])
def test_the_seed_decides(kind: str) -> None:
    labels = synthetic(1, 600, 8)
    first, again, other = (partition(labels, kind, 6, seed, presence=0.5, labels_per_client=4) for seed in (5, 5, 6))
    assert (owners(first) == owners(again)).all() and (first.allowed == again.allowed).all()
    assert (owners(first) != owners(other)).mean() > 0.3
    if kind != "iid":
        assert (first.allowed != other.allowed).any()


def test_beta_does_not_change_who_may_show_what_and_the_rule_does_not_move_what_fits() -> None:
    labels = synthetic(2, 800, 10, density=0.3)
    base = partition(labels, "dirichlet", 8, 0, beta=0.1, presence=0.4)
    even = partition(labels, "dirichlet", 8, 0, beta=10, presence=0.4)
    assert (base.allowed == even.allowed).all()
    withheld = partition(labels, "dirichlet", 8, 0, beta=0.1, presence=0.4, outside="withhold")
    assert base.report["dropped"] == withheld.report["withheld"] > 0
    assert base.report["moved_for_minimum"] == withheld.report["moved_for_minimum"] == 0
    fits = owners(base) >= 0
    assert (owners(base)[fits] == owners(withheld)[fits]).all()


# What dirichlet is for


@pytest.mark.parametrize(
    ("presence", "classes", "expected"),
    # The settings of the FedNCA-ML paper, then halves that binary floats would round down.
    [(0.5, 10, 5), (0.71, 7, 5), (0.5, 20, 10), (0.5, 14, 7), (0.5, 7, 4), (0.29, 50, 15), (0.1, 5, 1), (1.0, 3, 3)],
)
def test_presence_is_rounded_half_up(presence: float, classes: int, expected: int) -> None:
    assert round_half_up(presence, classes) == expected


@pytest.mark.parametrize("beta", [1e-3, 0.1, 1.0, 1e5])
def test_small_beta_is_skewed_and_large_beta_is_even(beta: float) -> None:
    """The largest client's share of a class, 1 to 0.1 over 10 clients, is on average what numpy's Dirichlet gives."""
    labels = np.repeat(np.eye(10, dtype=np.int8), 200, axis=0)
    shares = [
        np.bincount(of_class, minlength=10).max() / 200
        for seed in range(20)
        for of_class in np.split(owners(partition(labels, "dirichlet", 10, seed, beta=beta)), 10)
    ]
    reference = np.random.default_rng(0).dirichlet([beta] * 10, 20_000).max(axis=1)
    assert abs(np.mean(shares) - reference.mean()) < 0.005 + 4 * reference.std() / np.sqrt(len(shares))


def test_proportions_have_the_variance_of_a_dirichlet() -> None:
    """Var = (1/K)(1 − 1/K)/(Kβ + 1), mean 1/K: over 20,000 classes, for β from skewed to even."""
    allowed = np.ones((5, 20_000), dtype=bool)
    for beta in (0.05, 0.5, 5.0):
        share = np.exp(dealing.dirichlet(allowed, beta, np.random.default_rng(0)))
        assert np.allclose(share.sum(axis=0), 1)
        assert np.allclose(share.mean(axis=1), 0.2, atol=0.01)
        assert np.allclose(share.var(axis=1), 0.16 / (5 * beta + 1), rtol=0.06)


def test_a_sample_goes_by_the_product_of_its_classes_proportions() -> None:
    labels = np.repeat(np.array([[1, 0], [0, 1], [1, 1]], dtype=np.int8), 20_000, axis=0)
    result = partition(labels, "dirichlet", 3, 4, beta=2.0)
    first, second, both = (np.bincount(part, minlength=3) / 20_000 for part in np.split(owners(result), 3))
    product = first * second
    assert np.allclose(both, product / product.sum(), atol=0.001)
    assert abs(both - (first + second) / 2).max() > 0.01  # the test would see another rule


def test_samples_without_a_positive_are_spread_evenly() -> None:
    labels = synthetic(3, 5_000, 14, density=0.05, unknown=0.05)
    result = partition(labels, "dirichlet", 7, 0, beta=0.1, presence=0.5)
    assert result.report["moved_for_minimum"] == 0
    plain = ~(labels == 1).any(axis=1)
    counts = np.bincount(owners(result)[plain], minlength=7)
    assert counts.sum() == plain.sum() > 1_000
    assert counts.max() - counts.min() <= 1


def test_no_finding_is_spread_evenly() -> None:
    result = partition(chest(), "dirichlet", 100, 0, beta=0.1, presence=0.5)
    assert result.report["moved_for_minimum"] == 0
    counts = np.bincount(owners(result)[~chest().any(axis=1)], minlength=100)
    assert counts.sum() == 60_361  # as published
    assert counts.max() - counts.min() <= 1


def test_frequent_combinations_fit_somewhere() -> None:
    """Four blocks of three classes, all three together in most samples; rare pairs across the blocks must give way."""
    blocks = np.repeat(np.kron(np.eye(4, dtype=np.int8), np.ones(3, dtype=np.int8)), 50, axis=0)
    across = np.zeros((3, 12), dtype=np.int8)
    across[[0, 0, 1, 1, 2, 2], [0, 3, 4, 7, 8, 11]] = 1
    result = partition(np.concatenate([across, blocks]), "dirichlet", 4, 9, presence=0.25)
    assert result.report["dropped"] == 3
    assert (owners(result)[:3] == -1).all()


def test_the_papers_cifar_setting_drops_no_pair() -> None:
    """10 clients of 5 of 10 classes can hold all 45 pairs; sets drawn blindly lose 3.6 of them on average."""
    labels = singles_and_pairs(10, singles=31, pairs=2)
    for seed in range(20):
        result = partition(labels, "dirichlet", 10, seed, presence=0.5)
        assert result.report["dropped"] == 0
        assert (result.allowed.sum(axis=1) == 5).all()


@pytest.mark.parametrize("real", [False, True], ids=["synthetic", "chest-x-ray"])
def test_112120_samples_and_100_clients_take_less_than_5_seconds(real: bool) -> None:
    labels = chest() if real else synthetic(0, 112_120, 14, density=0.05)
    begin = time.perf_counter()
    result = partition(labels, "dirichlet", 100, 0, beta=0.1, presence=0.5, minimum=32)
    assert time.perf_counter() - begin < 5
    assert len(labels) == 112_120 and len(result.clients) == 100


def test_a_client_a_user_of_flair_takes_less_than_10_seconds() -> None:
    """51,414 clients, many of them too small at first: each is filled up without a look at all samples."""
    rng = np.random.default_rng(0)
    labels = singles_and_pairs(17, singles=1, pairs=1)[rng.integers(0, 153, 400_000)]
    begin = time.process_time()
    result = partition(labels, "dirichlet", 51_414, 0, beta=0.5, minimum=3)
    assert time.process_time() - begin < 10
    assert result.report["moved_for_minimum"] > 5_000
    assert min(map(len, result.clients)) == 3 and sum(map(len, result.clients)) == 400_000


def test_many_classes_and_many_clients_do_not_need_a_table_of_clients_and_samples() -> None:
    labels = np.zeros((45_000, 1_628), dtype=np.int8)
    result = partition(labels, "iid", 41_131, 0)
    assert len(result.clients) == 41_131 and result.names[-1] == "c41130"
    assert result.allowed.strides == (0, 0)  # one value seen 67 million times
    more_than_64 = synthetic(5, 500, 200, density=0.02)
    check_restricted(more_than_64, partition(more_than_64, "dirichlet", 5, 0, presence=0.5), 100, "drop", 1)


# The minimum


def test_small_clients_are_filled_up() -> None:
    labels = np.repeat(np.eye(4, dtype=np.int8), 100, axis=0)
    bare = partition(labels, "dirichlet", 8, 0, beta=0.01)
    full = partition(labels, "dirichlet", 8, 0, beta=0.01, minimum=30)
    assert min(map(len, bare.clients)) < 30 <= min(map(len, full.clients))
    assert 0 < bare.report["moved_for_minimum"] < full.report["moved_for_minimum"]
    check_restricted(labels, full, 4, "drop", 30)


def a_b_deal(b_samples: int) -> dealing.Deal:
    """Clients of {a}, {a, b} and {b}: the second has two a, the third all b, the first nothing."""
    labels = np.array([[1, 0]] * 2 + [[0, 1]] * b_samples, dtype=np.int8)
    allowed = np.array([[True, False], [True, True], [False, True]])
    owner = np.array([1, 1] + [2] * b_samples)
    return dealing.Deal(dealing.combinations_of(labels), allowed, np.zeros(2, dtype=np.int64), owner)


def test_samples_pass_through_a_client_that_can_spare_none() -> None:
    deal = a_b_deal(b_samples=4)
    dealing.fill_up(deal, 2, NAMES, np.random.default_rng(0))
    assert sorted(deal.owner[:2]) == [0, 0]
    assert sorted(deal.owner[2:]) == [1, 1, 2, 2]


def test_a_minimum_that_no_deal_can_meet_is_refused() -> None:
    deal = a_b_deal(b_samples=20)
    with pytest.raises(ConfigError, match=r"partition\.minimum = 3 cannot be met: client c000") as error:
        dealing.fill_up(deal, 3, NAMES, np.random.default_rng(0))
    assert "\n" not in str(error.value)


def test_no_more_samples_move_than_are_lacking() -> None:
    """Sizes 0, 5 and 5 with a minimum of 3: both large clients give, and neither has to be filled up again."""
    combinations = dealing.combinations_of(np.ones((10, 1), dtype=np.int8))
    before = np.repeat([1, 2], 5)
    deal = dealing.Deal(combinations, np.ones((3, 1), dtype=bool), np.zeros(1, dtype=np.int64), before.copy())
    dealing.fill_up(deal, 3, NAMES, np.random.default_rng(0))
    assert (deal.owner != before).sum() == 3
    assert sorted(np.bincount(deal.owner)) == [3, 3, 4]


def test_samples_without_a_positive_move_only_if_need_be() -> None:
    labels = np.array([[1]] * 5 + [[0]] * 5, dtype=np.int8)
    deal = dealing.Deal(
        dealing.combinations_of(labels),
        np.ones((2, 1), dtype=bool),
        np.zeros(2, dtype=np.int64),
        np.zeros(10, np.int64),
    )
    dealing.fill_up(deal, 4, NAMES, np.random.default_rng(0))
    assert deal.owner[:5].sum() == 4 and deal.owner[5:].sum() == 0


def filled_up_plainly(deal: dealing.Deal, minimum: int, rng: np.random.Generator) -> NDArray[np.int64] | None:
    """What fill_up promises, looked up in all samples at every step: the smallest client first, from the largest that
    has something suitable, directly or through others; None if there is no way."""
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
def test_filling_up_is_the_plain_search(
    seed: int, classes: int, clients: int, most: int, fullness: float, dropped: bool
) -> None:
    rng = np.random.default_rng(seed)
    allowed = np.zeros((clients, classes), dtype=bool)
    dealing.fill_evenly(allowed, np.full(clients, min(most, classes)), rng)
    combinations = dealing.combinations_of(synthetic(seed, 60, classes, density=0.25))
    deal = dealing.hand_out(combinations, allowed, dealing.dirichlet(allowed, 0.1, rng), rng)
    if dropped:
        deal.owner[deal.misses[combinations.of_sample] > 0] = dealing.NOBODY
    minimum = max(1, int(fullness * (60 // clients)))
    expected = filled_up_plainly(deal, minimum, np.random.default_rng(seed))
    if expected is None:
        with pytest.raises(ConfigError, match="cannot be met"):
            dealing.fill_up(deal, minimum, tuple(f"c{i}" for i in range(clients)), np.random.default_rng(seed))
    else:
        dealing.fill_up(deal, minimum, tuple(f"c{i}" for i in range(clients)), np.random.default_rng(seed))
        assert (deal.owner == expected).all()


# Natural


def test_natural_is_a_client_a_group() -> None:
    labels = synthetic(0, 6, 2)
    groups = np.array(["ward", "clinic", "ward", "user 7", "clinic", "ward"])
    result = partition(labels, "natural", None, 0, groups=groups, minimum=2)
    assert result.names == ("clinic", "user 7", "ward")
    assert [positions.tolist() for positions in result.clients] == [[1, 4], [3], [0, 2, 5]]
    assert result.labels is labels and result.allowed.all()
    assert set(result.report.values()) == {0}  # "user 7" is below the minimum and stays as it is
    assert partition(labels, "natural", 3, 0, groups=groups).names == result.names


@quick
@given(groups=st.lists(st.integers(0, 30), min_size=10, max_size=200), clients=st.integers(1, 8))
def test_more_groups_than_clients_are_dealt_whole_and_evenly(groups: list[int], clients: int) -> None:
    names = np.array([f"g{group}" for group in groups])
    assume(len(set(groups)) > clients)
    result = partition(synthetic(0, len(groups), 2), "natural", clients, 0, groups=names)
    owner = owners(result)
    assert (owner >= 0).all() and len(result.clients) == len(result.names) == clients
    assert all(len(set(owner[names == name])) == 1 for name in set(names.tolist()))
    sizes = np.bincount(owner)
    assert sizes.max() - sizes.min() <= np.unique(names, return_counts=True)[1].max()


def test_large_groups_are_dealt_first() -> None:
    groups = np.array(["a", "b", "c", "z", "z", "z"])
    result = partition(synthetic(0, 6, 2), "natural", 2, 0, groups=groups)
    assert [positions.tolist() for positions in result.clients] == [[3, 4, 5], [0, 1, 2]]


# Labels per client


def test_single_labels_are_never_dropped_and_shared_evenly_by_their_owners() -> None:
    labels = np.repeat(np.eye(10, dtype=np.int8), 60, axis=0)
    result = partition(labels, "labels-per-client", 10, 0, labels_per_client=2)
    assert result.report["dropped"] == 0
    counts = np.stack([labels[positions].sum(axis=0, dtype=np.int64) for positions in result.clients])
    assert (counts == 30 * result.allowed).all()


# Bad input


@pytest.mark.parametrize(
    ("changes", "key", "hint"),
    [
        ({"presence": 0.05}, "partition.presence", "less than one of the 10 classes"),
        ({"presence": 1.5}, "partition.presence", "must be in (0, 1]"),
        ({"presence": 0.0}, "partition.presence", "must be in (0, 1]"),
        ({"clients": 51}, "partition.clients", "more than the 50 training samples"),
        ({"clients": 0}, "partition.clients", "1 or more"),
        ({"clients": None}, "partition.clients", "needs"),
        ({"clients": 3, "presence": 0.3}, "partition.presence", "to 0.4 or more, or partition.clients to 4 or more"),
        ({"beta": 0.0}, "partition.beta", "β > 0"),
        ({"beta": float("nan")}, "partition.beta", "β > 0"),
        ({"minimum": 11}, "partition.minimum", "to 10 or less"),
        ({"minimum": 0}, "partition.minimum", "1 or more"),
        ({"outside": "dorp"}, "partition.outside", "did you mean 'drop'?"),
        ({"kind": "dirichelet"}, "partition.kind", "did you mean 'dirichlet'?"),
        ({"kind": "labels-per-client", "labels_per_client": 11}, "partition.labels_per_client", "use 1 to 10"),
        ({"kind": "labels-per-client", "labels_per_client": 1}, "partition.labels_per_client", "to 2 or more"),
        ({"kind": "natural"}, "partition.kind", "`client` column"),
        ({"kind": "natural", "groups": np.array(["a"] * 50)}, "partition.clients", "more than the 1 groups"),
    ],
)
def test_what_is_impossible_is_refused_in_one_paragraph(changes: dict[str, object], key: str, hint: str) -> None:
    asked = {"kind": "dirichlet", "clients": 5, "seed": 0} | changes
    with pytest.raises(ConfigError) as error:
        partition(synthetic(0, 50, 10), **asked)  # type: ignore[arg-type]
    assert key in str(error.value) and hint in str(error.value)
    assert "\n" not in str(error.value)


def test_the_advice_given_is_enough() -> None:
    """1/3 rounded to the nearest thousandth, 0.333, would be refused again."""
    labels = np.eye(3, dtype=np.int8)
    with pytest.raises(ConfigError, match=r"to 0\.334 or more"):
        partition(labels, "dirichlet", 3, 0, presence=0.1)
    assert partition(labels, "dirichlet", 3, 0, presence=0.334).allowed.sum() == 3


def test_a_sample_without_a_group_is_refused() -> None:
    with pytest.raises(DataError, match="1 of the 3 training samples have no client, the first at position 1"):
        partition(synthetic(0, 3, 2), "natural", None, 0, groups=np.array(["a", "", "b"]))
