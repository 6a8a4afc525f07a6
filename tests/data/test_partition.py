"""Partitions: properties for any labels (hypothesis, synthetic and real data), and what each kind gives."""

from __future__ import annotations

import csv
import gzip
import hashlib
import time
from fractions import Fraction
from functools import cache
from math import floor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from made_labels import Labels, singles_and_pairs, synthetic
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from fedmll.core.errors import ConfigError, DataError
from fedmll.core.seeding import numpy_generator
from fedmll.data import sample_assignment
from fedmll.data.partition import Partition, partition, round_half_up

SHARED = Path(__file__).parents[3] / "shared" / "data"
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
def voc2012() -> Labels:
    return read("voc2012_labels.csv.gz", 1)


@cache
def chest() -> Labels:
    return read("chestxray14_labels.csv.gz", 3)


def owners(result: Partition) -> NDArray[np.int64]:
    """The client of each sample, -1 for no client; fails if a sample has two."""
    owner = np.full(len(result.labels), -1)
    for client, positions in enumerate(result.clients):
        assert (owner[positions] == -1).all(), "a sample has two clients"
        assert len(np.unique(positions)) == len(positions), "a client has a sample twice"
        owner[positions] = client
    return owner


def fewest_missing(labels: Labels, allowed: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(N, K) how many of a sample's positives a client may not hold, and the minimum over clients (N,)."""
    missing = (labels == 1).astype(np.int64) @ (~allowed).astype(np.int64).T
    return missing, missing.min(axis=1)


def check_restricted(labels: Labels, result: Partition, most: int, unassignable: str, minimum: int) -> None:
    """Everything that dirichlet and labels-per-client promise."""
    assert (result.allowed.sum(axis=1) <= most).all()
    assert result.allowed.any(axis=0).all()
    owner = owners(result)
    missing, least = fewest_missing(labels, result.allowed)
    kept = owner >= 0
    assert (kept == ((least == 0) | (unassignable != "drop"))).all()
    rows = np.flatnonzero(kept)
    assert (missing[rows, owner[rows]] == least[rows]).all()
    assert not ((result.labels[rows] == 1) & ~result.allowed[owner[rows]]).any()
    expected = labels.copy()
    if unassignable != "drop":
        expected[(labels == 1) & ~result.allowed[owner]] = {"withhold": -1, "negative": 0}[unassignable]
    assert (result.labels == expected).all()
    assert (result.labels is labels) == (expected == labels).all()
    touched = {"drop": "dropped", "withhold": "withheld", "negative": "negative"}
    assert {key: result.report[key] for key in touched.values()} == {
        key: int((least > 0).sum()) if rule == unassignable else 0 for rule, key in touched.items()
    }
    for positions in result.clients:
        assert positions.dtype == np.int64
        assert (np.diff(positions) > 0).all()
        assert len(positions) >= minimum


def can_be_met(labels: Labels, allowed: NDArray[np.bool_], unassignable: str, minimum: int) -> bool:
    """Whether some assignment gives each client `minimum` samples that it may hold: a bipartite matching."""
    missing, least = fewest_missing(labels, allowed)
    suits = (missing == least[:, None]) & ((least == 0) | (unassignable != "drop"))[:, None]
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
    unassignable=st.sampled_from(["drop", "withhold", "negative"]),
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
    unassignable: str,
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
            labels, "dirichlet", clients, seed, beta=beta, presence=presence, unassignable=unassignable, minimum=minimum
        )
    except ConfigError as error:
        # It may only give up where it is truly impossible. The allowed sets do not depend on the minimum.
        assert "partition.minimum" in str(error)
        combinations = sample_assignment.find_combinations(labels)
        rng = numpy_generator(seed, "partition", "dirichlet", "allowed")
        allowed = sample_assignment.draw_allowed_classes(combinations, clients, most, rng)
        assert not can_be_met(labels, allowed, unassignable, minimum)
        return
    check_restricted(labels, result, most, unassignable, minimum)
    assert (labels == before).all()


@quick
@given(
    data_seed=st.integers(0, 10**6),
    samples=st.integers(60, 200),
    classes=st.integers(2, 12),
    clients=st.integers(2, 15),
    per_client=st.integers(1, 12),
    unassignable=st.sampled_from(["drop", "withhold", "negative"]),
)
def test_labels_per_client_on_any_labels(
    data_seed: int, samples: int, classes: int, clients: int, per_client: int, unassignable: str
) -> None:
    assume(per_client <= classes <= clients * per_client)
    labels = synthetic(data_seed, samples, classes)
    labels[:clients] = 0  # samples that every client may have, so that none must stay empty
    result = partition(labels, "labels-per-client", clients, 3, labels_per_client=per_client, unassignable=unassignable)
    check_restricted(labels, result, per_client, unassignable, 1)
    assert (result.allowed.sum(axis=1) == per_client).all()
    coverage = result.allowed.sum(axis=0)
    assert coverage.max() - coverage.min() <= 1


@few
@given(seed=st.integers(0, 10**6), unassignable=st.sampled_from(["drop", "withhold", "negative"]))
def test_dirichlet_on_voc(seed: int, unassignable: str) -> None:
    result = partition(voc(), "dirichlet", 10, seed, beta=0.1, presence=0.3, unassignable=unassignable, minimum=32)
    check_restricted(voc(), result, 6, unassignable, 32)
    assert (result.allowed.sum(axis=1) == 6).all()


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), unassignable=st.sampled_from(["drop", "withhold", "negative"]))
def test_dirichlet_on_chest_x_rays(seed: int, unassignable: str) -> None:
    result = partition(chest(), "dirichlet", 10, seed, beta=0.5, presence=0.5, unassignable=unassignable, minimum=32)
    check_restricted(chest(), result, 7, unassignable, 32)


@few
@given(seed=st.integers(0, 10**6), clients=st.integers(4, 60))
def test_labels_per_client_on_voc(seed: int, clients: int) -> None:
    result = partition(
        voc(), "labels-per-client", clients, seed, labels_per_client=5, unassignable="withhold", minimum=4
    )
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
def test_partition_depends_on_the_seed(kind: str) -> None:
    labels = synthetic(1, 600, 8)
    first, again, other = (partition(labels, kind, 6, seed, presence=0.5, labels_per_client=4) for seed in (5, 5, 6))
    assert (owners(first) == owners(again)).all() and (first.allowed == again.allowed).all()
    assert (owners(first) != owners(other)).mean() > 0.3
    if kind != "iid":
        assert (first.allowed != other.allowed).any()


def test_beta_does_not_change_allowed_classes_and_unassignable_rule_does_not_move_other_samples() -> None:
    labels = synthetic(2, 800, 10, density=0.3)
    base = partition(labels, "dirichlet", 8, 0, beta=0.1, presence=0.4)
    even = partition(labels, "dirichlet", 8, 0, beta=10, presence=0.4)
    assert (base.allowed == even.allowed).all()
    withheld = partition(labels, "dirichlet", 8, 0, beta=0.1, presence=0.4, unassignable="withhold")
    assert base.report["dropped"] == withheld.report["withheld"] > 0
    assert base.report["moved_for_minimum"] == withheld.report["moved_for_minimum"] == 0
    fits = owners(base) >= 0
    assert (owners(base)[fits] == owners(withheld)[fits]).all()


def test_default_partition_settings() -> None:
    labels = synthetic(4, 400, 12, density=0.2)
    bare = partition(labels, "dirichlet", 12, 0)
    full = partition(labels, "dirichlet", 12, 0, beta=0.5, presence=1.0, unassignable="drop", minimum=1)
    assert (owners(bare) == owners(full)).all() and bare.allowed.all()
    assert (owners(bare) != owners(partition(labels, "dirichlet", 12, 0, beta=1.0))).any()
    two = partition(labels, "labels-per-client", 12, 0)
    assert (two.allowed.sum(axis=1) == 2).all() and two.report["dropped"] > 0
    # 24 samples for 24 clients: a minimum of one moves some, and one of two would be refused
    tight = partition(np.ones((24, 1), dtype=np.int8), "dirichlet", 24, 0)
    assert [len(positions) for positions in tight.clients] == [1] * 24


@pytest.mark.parametrize(
    ("clients", "first", "last"),
    [(1, "c000", "c000"), (12, "c000", "c011"), (1000, "c000", "c999"), (1001, "c0000", "c1000")],
)
def test_client_names_have_equal_length(clients: int, first: str, last: str) -> None:
    names = partition(np.zeros((1001, 2), dtype=np.int8), "iid", clients, 0).names
    assert (names[0], names[-1], len(set(names))) == (first, last, clients)


def test_largest_and_smallest_allowed_values_work() -> None:
    labels = np.repeat(np.eye(4, dtype=np.int8), 6, axis=0)
    assert len(partition(labels, "iid", 24, 0).clients) == 24  # as many clients as samples
    full = partition(labels, "dirichlet", 12, 0, minimum=2)  # every sample is needed for the minimum
    assert [len(positions) for positions in full.clients] == [2] * 12
    assert partition(labels, "dirichlet", 4, 0, presence=0.25).allowed.sum() == 4  # just one class a client
    assert partition(labels, "labels-per-client", 2, 0, labels_per_client=2).allowed.sum() == 4
    assert partition(labels, "labels-per-client", 3, 0, labels_per_client=4).allowed.all()
    groups = np.array(["a", "b"] * 12)
    assert partition(labels, "natural", 2, 0, groups=groups).names == ("a", "b")
    assert partition(labels, "natural", 1, 0, groups=groups).names == ("c000",)


def test_report_counts_affected_samples() -> None:
    """Clients of one class each: {0, 1} fits no client, so its two samples are affected."""
    labels = np.array([[1, 0]] * 5 + [[0, 1]] * 5 + [[1, 1]] * 2, dtype=np.int8)
    reports = {
        rule: partition(labels, "labels-per-client", 2, 0, labels_per_client=1, unassignable=rule).report
        for rule in ("drop", "withhold", "negative")
    }
    nothing = {"dropped": 0, "withheld": 0, "negative": 0, "moved_for_minimum": 0}
    assert reports == {
        "drop": nothing | {"dropped": 2},
        "withhold": nothing | {"withheld": 2},
        "negative": nothing | {"negative": 2},
    }
    moved = partition(labels[:5], "labels-per-client", 2, 0, labels_per_client=2, minimum=1).report
    assert moved == nothing


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


def test_sample_is_assigned_by_the_product_of_its_classes_shares() -> None:
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


@pytest.mark.parametrize("beta", [0.05, 0.01])
def test_voc2012_partition_matches_figure_11_of_fednca_ml(beta: float) -> None:
    """γ = 0.5: at most 10 of the 20 classes per client; with this small β nearly all of a class is at two clients."""
    result = partition(voc2012(), "dirichlet", 10, 0, beta=beta, presence=0.5, minimum=32)
    check_restricted(voc2012(), result, 10, "drop", 32)
    counts = np.array([(voc2012()[rows] == 1).sum(axis=0) for rows in result.clients])
    assert (counts > 0).sum(axis=1).max() <= 10
    assert (counts > 0).any(axis=0).all()  # no class is lost
    assert np.median(np.sort(counts, axis=0)[-2:].sum(axis=0) / counts.sum(axis=0)) > 0.9
    assert result.report["dropped"] < 0.01 * len(voc2012())


@pytest.mark.parametrize("beta", [0.5, 0.1])
def test_chest_x_ray_partition_matches_figure_12_of_fednca_ml(beta: float) -> None:
    """γ = 0.5: at most 7 of the 14 findings per client; the healthy images, over half of all, are spread evenly."""
    result = partition(chest(), "dirichlet", 10, 0, beta=beta, presence=0.5, minimum=32)
    check_restricted(chest(), result, 7, "drop", 32)
    counts = np.array([(chest()[rows] == 1).sum(axis=0) for rows in result.clients])
    assert (counts > 0).sum(axis=1).max() <= 7 and (counts > 0).any(axis=0).all()
    healthy = [int((~chest()[rows].any(axis=1)).sum()) for rows in result.clients]
    assert max(healthy) - min(healthy) <= 1 and sum(healthy) == 60_361


def test_frequent_combinations_fit_some_client() -> None:
    """Four blocks of three classes, together in most samples; rare pairs across blocks have lower priority."""
    blocks = np.repeat(np.kron(np.eye(4, dtype=np.int8), np.ones(3, dtype=np.int8)), 50, axis=0)
    across = np.zeros((3, 12), dtype=np.int8)
    across[[0, 0, 1, 1, 2, 2], [0, 3, 4, 7, 8, 11]] = 1
    result = partition(np.concatenate([across, blocks]), "dirichlet", 4, 9, presence=0.25)
    assert result.report["dropped"] == 3
    assert (owners(result)[:3] == -1).all()


def test_the_papers_cifar_setting_drops_no_pair() -> None:
    """10 clients of 5 of 10 classes can hold all 45 pairs; randomly drawn sets lose 3.6 of them on average."""
    labels = singles_and_pairs(10, singles=31, pairs=2)
    for seed in range(20):
        result = partition(labels, "dirichlet", 10, seed, presence=0.5)
        assert result.report["dropped"] == 0
        assert (result.allowed.sum(axis=1) == 5).all()


@pytest.mark.parametrize("real", [False, True], ids=["synthetic", "chest-x-ray"])
def test_112120_samples_and_100_clients_take_less_than_5_seconds(real: bool) -> None:
    labels = chest() if real else synthetic(0, 112_120, 14, density=0.05)
    begin = time.process_time()
    result = partition(labels, "dirichlet", 100, 0, beta=0.1, presence=0.5, minimum=32)
    assert time.process_time() - begin < 5
    assert len(labels) == 112_120 and len(result.clients) == 100


def pin(labels: Labels, **settings: object) -> str:
    """A hash of each client's samples and allowed classes."""
    found = partition(labels, "dirichlet", 200, 3, **settings)
    digest = hashlib.sha256()
    for rows in found.clients:
        digest.update(rows.astype("<i8").tobytes() + b"|")
    digest.update(np.ascontiguousarray(found.allowed).tobytes())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize(
    ("settings", "few_classes", "many_classes"),
    [
        ({"presence": 0.5, "beta": 0.5, "minimum": 5}, "a1601cf630be3c48", "5684cdb53b21eee2"),
        ({"presence": 1.0, "beta": 0.1, "minimum": 3}, "77ae0d1851dd780b", "8e02095a86c9a7e3"),
        (
            {"presence": 0.3, "beta": 0.05, "unassignable": "withhold", "minimum": 10},
            "b6613510aef6cf41",
            "34cf19f8953f9f93",
        ),
    ],
)
def test_partition_of_two_hundred_clients_did_not_change(
    settings: dict[str, object], few_classes: str, many_classes: str
) -> None:
    """The hashes come from the slower code that examined every client for every combination."""
    assert pin(synthetic(1, 6_000, 12), **settings) == few_classes
    assert pin(synthetic(2, 9_000, 70, density=0.02), **settings) == many_classes


@pytest.mark.parametrize("presence", [1.0, 0.5])
def test_one_client_per_flair_user_takes_less_than_10_seconds(presence: float) -> None:
    """51,414 clients, many of them too small at first: each gets more samples without a search through all samples."""
    rng = np.random.default_rng(0)
    labels = singles_and_pairs(17, singles=1, pairs=1)[rng.integers(0, 153, 400_000)]
    begin = time.process_time()
    result = partition(labels, "dirichlet", 51_414, 0, beta=0.5, minimum=3, presence=presence)
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


# Natural


def test_natural_has_one_client_per_group() -> None:
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
def test_groups_are_combined_into_clients_of_similar_size(groups: list[int], clients: int) -> None:
    names = np.array([f"g{group}" for group in groups])
    assume(len(set(groups)) > clients)
    result = partition(synthetic(0, len(groups), 2), "natural", clients, 0, groups=names)
    owner = owners(result)
    assert (owner >= 0).all() and len(result.clients) == len(result.names) == clients
    assert all(len(set(owner[names == name])) == 1 for name in set(names.tolist()))
    sizes = np.bincount(owner)
    assert sizes.max() - sizes.min() <= np.unique(names, return_counts=True)[1].max()


def test_large_groups_are_assigned_first() -> None:
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
        ({"presence": 0.05}, "partition.presence", "fewer than one of the 10 classes"),
        ({"clients": 51}, "partition.clients", "more than the 50 training samples"),
        ({"clients": None}, "partition.clients", "needs"),
        ({"clients": 3, "presence": 0.3}, "partition.presence", "to 0.4 or more, or partition.clients to 4 or more"),
        ({"beta": 0.0}, "partition.beta", "β > 0"),
        ({"beta": float("nan")}, "partition.beta", "β > 0"),
        ({"minimum": 11}, "partition.minimum", "needs 55 samples; there are 50. Lower partition.minimum to 10 or less"),
        ({"kind": "dirichelet"}, "There is no partition 'dirichelet'", "did you mean 'dirichlet'?"),
        ({"kind": "labels-per-client", "labels_per_client": 11}, "partition.labels_per_client", "use 1 to 10"),
        ({"kind": "labels-per-client", "labels_per_client": 1}, "partition.labels_per_client", "to 2 or more"),
        ({"kind": "natural"}, "partition.kind", "`client` column"),
        ({"kind": "natural", "groups": np.array(["a"] * 50)}, "partition.clients", "more than the 1 groups"),
    ],
)
def test_impossible_partition_is_rejected_in_one_paragraph(changes: dict[str, object], key: str, hint: str) -> None:
    asked = {"kind": "dirichlet", "clients": 5, "seed": 0} | changes
    with pytest.raises(ConfigError) as error:
        partition(synthetic(0, 50, 10), **asked)  # type: ignore[arg-type]
    assert key in str(error.value) and hint in str(error.value)
    assert "\n" not in str(error.value)


def test_following_the_advice_works() -> None:
    """1/3 rounded to the nearest thousandth, 0.333, would be rejected again."""
    labels = np.eye(3, dtype=np.int8)
    with pytest.raises(ConfigError, match=r"to 0\.334 or more"):
        partition(labels, "dirichlet", 3, 0, presence=0.1)
    assert partition(labels, "dirichlet", 3, 0, presence=0.334).allowed.sum() == 3


def test_sample_without_a_client_is_rejected() -> None:
    with pytest.raises(DataError, match="1 of the 3 training samples have no client, the first at position 1"):
        partition(synthetic(0, 3, 2), "natural", None, 0, groups=np.array(["a", "", "b"]))
