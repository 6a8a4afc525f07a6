"""Label correlations against their formulas in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmll.methods.parts.label_correlation import (
    EPSILON,
    BlockAlignmentLoss,
    Consolidation,
    LeaveOneOutConsensus,
    StreamedCorrelation,
    batch_correlation,
    default_clusters,
    discrepancy,
    label_correlation,
    spectral_blocks,
)


def scores_of(samples: int, classes: int, seed: int = 0) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    latent = rng.normal(size=(samples, 2)) @ rng.normal(size=(2, classes))
    return 1 / (1 + np.exp(-latent - rng.normal(size=(samples, classes))))


def eq_2(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Eq. 1–2 of the paper, entry by entry."""
    classes = scores.shape[1]
    p = scores.mean(0)
    result = np.empty((classes, classes))
    for c in range(classes):
        for d in range(classes):
            joint = (scores[:, c] * scores[:, d]).mean()
            result[c, d] = (joint - p[c] * p[d]) / np.sqrt(p[c] * (1 - p[c]) * p[d] * (1 - p[d]) + 1e-6)
    return result


def streamed(scores: torch.Tensor, batch: int) -> torch.Tensor:
    stream = StreamedCorrelation(scores.shape[1])
    for part in scores.split(batch):
        stream.add(part)
    return stream.matrix()


# Eq. 1–2


def test_batch_correlation_is_eq_2() -> None:
    scores = scores_of(50, 6)
    assert np.allclose(batch_correlation(torch.tensor(scores)), eq_2(scores), atol=1e-12)


@pytest.mark.parametrize("batch", [1, 7, 64, 1000])
def test_streamed_correlation_equals_that_of_all_scores(batch: int) -> None:
    scores = scores_of(200, 5)
    found = streamed(torch.tensor(scores), batch)
    assert np.allclose(found, eq_2(scores), atol=1e-7)
    assert torch.equal(found, found.T)


def test_hard_predictions_give_the_phi_coefficient() -> None:
    """Two binary labels with the 2×2 table 30, 10 / 20, 40: φ = (30·40 − 10·20)/√(40·60·50·50)."""
    pairs = [(1, 1)] * 30 + [(1, 0)] * 10 + [(0, 1)] * 20 + [(0, 0)] * 40
    phi = (30 * 40 - 10 * 20) / np.sqrt(40 * 60 * 50 * 50)
    assert batch_correlation(torch.tensor(pairs, dtype=torch.float64))[0, 1].item() == pytest.approx(phi, abs=1e-5)


def test_correlation_is_precise_near_one() -> None:
    """Scores 1 − δ, δ ~ 1e-6: in float32 the uncentred p_cc' − p_c p_c' is rounding noise, the streamed one is not."""
    gaps = np.random.default_rng(0).uniform(0, 1e-4, (400, 1)) * np.array([[1.0, 2.0]])
    scores = torch.tensor(1 - gaps, dtype=torch.float32)
    exact = eq_2(scores.numpy().astype(np.longdouble))
    assert streamed(scores, 32)[0, 1].item() == pytest.approx(float(exact[0, 1]), rel=1e-3)
    p = scores.mean(0)
    naive = (scores[:, 0] * scores[:, 1]).mean() - p[0] * p[1]
    assert abs(naive.item() / np.sqrt(EPSILON) - float(exact[0, 1])) > 10 * abs(float(exact[0, 1]))


@pytest.mark.parametrize("logits", [[100.0, -100.0, 0.0], [-100.0, -100.0, -100.0], [100.0, 100.0, 3.0]])
def test_saturated_predictions_have_finite_values(logits: list[float]) -> None:
    z = torch.tensor([logits, [*logits[:2], 1.0]], requires_grad=True)
    found = batch_correlation(torch.sigmoid(z))
    found.square().sum().backward()
    assert torch.isfinite(found).all()
    assert z.grad is not None and torch.isfinite(z.grad).all()
    assert torch.isfinite(streamed(torch.sigmoid(z.detach()), 1)).all()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 10_000))
def test_correlations_are_at_most_one(samples: int, classes: int, seed: int) -> None:
    scores = torch.tensor(scores_of(samples, classes, seed), dtype=torch.float32).round(decimals=1)
    assert streamed(scores, 4).abs().max() <= 1 + 1e-6


def test_label_correlation_leaves_unknown_targets_out() -> None:
    labels = np.array([[1, 1, -1], [0, 0, 1], [1, 0, -1], [0, 1, -1], [1, -1, 0], [-1, 1, -1]], dtype=np.int8)
    found = label_correlation(labels)
    known = labels[:4, :2].astype(float)  # the samples that know the first two
    assert found[0, 1] == pytest.approx(eq_2(known)[0, 1], abs=1e-12)
    pair = labels[[1, 4]][:, [0, 2]].astype(float)
    assert found[0, 2] == pytest.approx(eq_2(pair)[0, 1], abs=1e-12)
    assert found[2, 0] == found[0, 2]
    assert np.isnan(label_correlation(np.array([[1, -1], [-1, 0]], dtype=np.int8))[0, 1])


def test_label_correlation_of_complete_labels_is_eq_2() -> None:
    labels = (scores_of(80, 5) > 0.6).astype(np.int8)
    assert np.allclose(label_correlation(labels), eq_2(labels.astype(float)), atol=1e-12)


# Eq. 3


@pytest.mark.parametrize("kind", ["mean", "size-weighted", "median"])
@pytest.mark.parametrize("clients", [2, 3, 4, 7])
@pytest.mark.parametrize("decimals", [8, 1])  # 1: many ties
def test_leave_one_out_equals_the_naive_consolidation(kind: Consolidation, clients: int, decimals: int) -> None:
    rng = np.random.default_rng(clients)
    matrices = rng.uniform(-1, 1, (clients, 4, 4)).round(decimals).astype(np.float32)
    sizes = rng.integers(1, 1000, clients).astype(float)
    names = rng.permutation(100)[:clients].tolist()
    consensus = LeaveOneOutConsensus.of(kind, names, [torch.tensor(m) for m in matrices], sizes.tolist())
    consensus = LeaveOneOutConsensus.from_tensors(consensus.tensors(), kind)  # as a checkpoint gives it back

    def naive(keep: NDArray[np.bool_]) -> NDArray[np.float64]:
        if kind == "median":
            return np.median(matrices[keep].astype(float), axis=0)
        return np.average(
            matrices[keep].astype(float), axis=0, weights=sizes[keep] if kind == "size-weighted" else None
        )

    assert np.allclose(consensus.everyone(), naive(np.ones(clients, bool)), atol=1e-6)
    for place, name in enumerate(names):
        others = consensus.without(name)
        assert others is not None and np.allclose(others, naive(np.arange(clients) != place), atol=1e-6)
    assert consensus.without(1000) is None


# Algorithm 1


def planted(sizes: list[int], seed: int, noise: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A block matrix with signs, its labels shuffled; and the blocks, numbered by their first label."""
    rng = np.random.default_rng(seed)
    block = np.repeat(np.arange(len(sizes)), sizes)[rng.permutation(sum(sizes))]
    same = block[:, None] == block
    matrix = same * rng.choice([-1, 1], same.shape) * rng.uniform(0.3, 0.9, same.shape) + noise * rng.uniform(
        -1, 1, same.shape
    )
    matrix = np.triu(matrix, 1)
    order = {name: number for number, name in enumerate(dict.fromkeys(block.tolist()))}
    return torch.tensor(matrix + matrix.T + np.eye(len(block))), torch.tensor([order[b] for b in block.tolist()])


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(3))
def test_planted_blocks_are_recovered_exactly(seed: int, noise: float) -> None:
    matrix, blocks = planted([6, 5, 4, 9], seed, noise)
    assert torch.equal(spectral_blocks(matrix, 4, seed=1), blocks)


def test_labels_without_correlation_are_blocks_of_their_own() -> None:
    matrix, blocks = planted([4, 5, 6], 0)
    alone = [0, 7, 14]
    keep = torch.ones(15)
    keep[alone] = 0
    found = spectral_blocks(matrix * keep * keep[:, None], 6, seed=0)  # three blocks and the three that are alone
    for label in range(15):
        expected = {label} if label in alone else {o for o in range(15) if blocks[o] == blocks[label]} - set(alone)
        assert set((found == found[label]).nonzero().flatten().tolist()) == expected
    assert spectral_blocks(torch.zeros(6, 6), 3, seed=0).tolist() == [0, 1, 2, 3, 4, 5]
    assert spectral_blocks(torch.eye(6), 3, seed=0).tolist() == [0, 1, 2, 3, 4, 5]


def count(blocks: torch.Tensor) -> int:
    return len(set(blocks.tolist()))


def test_isolated_labels_are_some_of_the_g_blocks() -> None:
    """L of a graph with isolated vertices has an eigenvector of eigenvalue 0 for each of them, written out here; the
    G smallest are theirs first, so the others share the rest."""
    rng = np.random.default_rng(0)
    matrix = np.zeros((14, 14))
    matrix[:12, :12] = rng.uniform(0.05, 0.9, (12, 12))  # one component of twelve, and two labels alone
    matrix = (matrix + matrix.T) / 2
    np.fill_diagonal(matrix, 0)
    degree = matrix.sum(1)
    root = np.divide(1, np.sqrt(degree), out=np.zeros(14), where=degree > 0)
    values, vectors = np.linalg.eigh(np.diag(root) @ (np.diag(degree) - matrix) @ np.diag(root))
    assert (values[:3] < 1e-12).all() and values[3] > 0.1
    null = vectors[:, :3] @ vectors[:, :3].T  # the projection on eigenvalue 0: e_12, e_13 and the component's
    assert np.allclose(null[12:, 12:], np.eye(2)) and np.allclose(null[:12, 12:], 0)
    for clusters in (3, 4, 5, 8):
        found = spectral_blocks(torch.tensor(matrix), clusters, seed=0)
        assert count(found) == clusters
        assert [int((found == found[label]).sum()) for label in (12, 13)] == [1, 1]
        without = spectral_blocks(torch.tensor(matrix[:12, :12]), clusters - 2, seed=0)
        assert torch.equal(found[:12], without)


def test_more_isolated_labels_than_blocks() -> None:
    """They stay alone, and the others are one block: a pair of labels without correlation is nothing to align."""
    matrix, _ = planted([4, 4], 0)
    grown = torch.zeros(14, 14, dtype=torch.float64)
    grown[:8, :8] = matrix
    for clusters in (1, 3, 6, 7):
        assert spectral_blocks(grown, clusters, seed=0).tolist() == [0] * 8 + [1, 2, 3, 4, 5, 6]
    assert count(spectral_blocks(grown, 8, seed=0)) == 8
    for clusters in (14, 15):
        assert spectral_blocks(grown, clusters, seed=0).tolist() == list(range(14))


def test_one_label_and_links_too_weak_to_count() -> None:
    assert spectral_blocks(torch.ones(1, 1), 1, seed=0).tolist() == [0]
    assert spectral_blocks(torch.ones(1, 1), 4, seed=0).tolist() == [0]
    # Two stars of such links: each sum is above what one link must be, and yet nobody has a neighbour.
    faint = torch.zeros(6, 6, dtype=torch.float64)
    faint[0, [2, 3]] = faint[1, [4, 5]] = 8e-7
    assert spectral_blocks(faint + faint.T, 1, seed=0).tolist() == [0, 1, 2, 3, 4, 5]
    assert spectral_blocks((faint + faint.T) * 2, 1, seed=0).tolist() == [0] * 6  # and these count


def test_numbers_of_blocks() -> None:
    matrix, blocks = planted([3, 3], 0)
    assert spectral_blocks(matrix, 1, seed=0).tolist() == [0] * 6
    assert spectral_blocks(matrix, 6, seed=0).tolist() == [0, 1, 2, 3, 4, 5]
    assert spectral_blocks(matrix, 9, seed=0).tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(spectral_blocks(matrix, 2, seed=0), blocks)
    assert [default_clusters(c) for c in (1, 16, 17, 20, 80, 1628)] == [1, 4, 5, 5, 9, 41]


def test_rows_are_normalised_before_k_means() -> None:
    """Half of each block's labels have weak links. Their rows lie near the origin, where without normalisation they
    are a cluster of their own, whatever their block."""
    matrix, blocks = planted([10, 10, 10], 5)
    scale = torch.ones(30)
    for block in range(3):
        scale[(blocks == block).nonzero().flatten()[5:]] = 0.01
    assert torch.equal(spectral_blocks(matrix * scale * scale[:, None], 3, seed=0), blocks)


# Eq. 4, 8, 9


def psi(first: NDArray[np.float64], second: NDArray[np.float64], blocks: NDArray[np.int64]) -> float:
    """One mean over all pairs of different labels in the same block."""
    values = [
        (first[c, d] - second[c, d]) ** 2
        for c in range(len(blocks))
        for d in range(len(blocks))
        if c != d and blocks[c] == blocks[d]
    ]
    return float(np.mean(values)) if values else 0.0


BLOCKS = {
    "even": [0, 1, 0, 1, 2, 2, 0],
    "singles": [0, 1, 2, 2, 3, 2, 4],
    "one": [0] * 7,
}


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_alignment_and_discrepancy_are_psi(blocks: list[int]) -> None:
    scores, aim = scores_of(16, 7), eq_2(scores_of(90, 7, seed=4))
    names = torch.tensor(blocks)
    expected = psi(eq_2(scores), aim, np.array(blocks))
    assert expected > 1e-3
    alignment = BlockAlignmentLoss(torch.tensor(aim), names)
    assert alignment(torch.tensor(scores)).item() == pytest.approx(expected, rel=1e-9)
    assert discrepancy(torch.tensor(eq_2(scores)), torch.tensor(aim), names) == pytest.approx(expected, rel=1e-12)


def test_blocks_of_very_different_sizes() -> None:
    """In several buckets, with little padding, and the same result."""
    sizes = [120, 60, 20, 20, *[4] * 40, 1, 1]
    names = torch.tensor(np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes)))
    scores, aim = torch.tensor(scores_of(16, len(names))), torch.tensor(eq_2(scores_of(20, len(names), seed=1)))
    alignment = BlockAlignmentLoss(aim, names)
    square = sum(size**2 for size in sizes)
    assert len(alignment.buckets) > 1
    assert alignment.pairs == square - sum(sizes)
    assert alignment.padded < 1.8 * square  # one bucket for all would be 31 times as much
    assert alignment(scores).item() == pytest.approx(psi(eq_2(scores.numpy()), aim.numpy(), names.numpy()), rel=1e-9)


def test_without_a_pair_there_is_nothing_to_align() -> None:
    alignment = BlockAlignmentLoss(torch.zeros(3, 3), torch.arange(3))
    assert alignment.pairs == 0
    assert alignment(torch.rand(4, 3)).item() == 0
    assert discrepancy(torch.ones(3, 3), torch.zeros(3, 3), torch.arange(3)) == 0


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_gradient_by_finite_differences(blocks: list[int]) -> None:
    aim = eq_2(scores_of(90, 7, seed=4))
    alignment = BlockAlignmentLoss(torch.tensor(aim), torch.tensor(blocks))
    logits = np.random.default_rng(1).normal(size=(6, 7))
    z = torch.tensor(logits, requires_grad=True)
    alignment(torch.sigmoid(z)).backward()
    assert z.grad is not None

    def loss(values: NDArray[np.float64]) -> float:
        return psi(eq_2(1 / (1 + np.exp(-values))), aim, np.array(blocks))

    for place in np.ndindex(*logits.shape):
        step = np.zeros_like(logits)
        step[place] = 1e-5
        numeric = (loss(logits + step) - loss(logits - step)) / 2e-5
        assert z.grad[place].item() == pytest.approx(numeric, rel=1e-4, abs=1e-8)
