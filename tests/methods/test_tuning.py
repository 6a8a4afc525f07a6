"""The losses and the steps of central tuning, against hand-worked cases and loops; in a run: test_private_rounds.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax

from fedmll.core.processes import single_thread
from fedmll.methods.parts.central_tuning import ClientPredictions, TuningObjective, mse, pairwise


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Tiny tensors: threads would only wait for each other."""
    with single_thread():
        yield


# Tuning losses: h = (0.5, 0.3, 0.2), one client with the labels 0 and 1 and h_k = (0.6, 0.4)

H, P = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([[0.6, 0.4]])
CASES = [
    ("mse", "global", "omit", 0.1**2 + 0.1**2),
    ("mse", "restricted", "omit", 2 * 0.025**2),  # h over {0, 1} is (0.625, 0.375)
    ("pairwise", "global", "naive", 2 * (0.6 * 0.3 - 0.4 * 0.5) ** 2),
    ("pairwise", "global", "omit", 2 * (0.6 * 0.375 - 0.4 * 0.625) ** 2),  # label 2 is absent: h over {0, 1}
    ("pairwise", "restricted", "naive", 2 * (0.6 * 0.375 - 0.4 * 0.625) ** 2),
    ("pairwise", "global", "penalise", 2 * (0.02**2 + (0.6 * 0.2) ** 2 + (0.4 * 0.2) ** 2)),
]


@pytest.mark.parametrize(("loss", "scope", "absent", "expected"), CASES)
def test_tuning_losses_worked_out_by_hand(loss: Any, scope: Any, absent: Any, expected: float) -> None:
    opinions = ClientPredictions.gather([P], [torch.tensor([0, 1])], 3)
    objective = TuningObjective(loss, True, scope, absent, 1, 1, 1.0).objective(opinions)
    value = objective(H.log()[None], torch.tensor([0]))
    np.testing.assert_allclose(value.item(), expected, rtol=1e-4)


def test_tuning_losses_of_many_clients_against_loops() -> None:
    rng = np.random.default_rng(8)
    h = softmax(rng.normal(size=(9, 5)), 1)
    sets = [[0, 2, 3], [4, 1], [2], [0, 1, 2, 3, 4]]
    predictions = [softmax(rng.normal(size=(9, len(rows))), 1) for rows in sets]
    opinions = ClientPredictions.gather([torch.from_numpy(p) for p in predictions], [torch.tensor(s) for s in sets], 5)
    squares = pairs = 0.0
    for p, rows in zip(predictions, sets, strict=True):
        for i, y in enumerate(rows):
            squares += ((p[:, i] - h[:, y]) ** 2).mean()
            pairs += sum(((p[:, i] * h[:, v] - p[:, j] * h[:, y]) ** 2).mean() for j, v in enumerate(rows) if j != i)
    full = torch.from_numpy(h)[None]
    np.testing.assert_allclose(mse(opinions.p, full, opinions.own).item(), squares)
    np.testing.assert_allclose(pairwise(opinions.p, full, opinions.own).item(), pairs)
    assert not opinions.absent.any()


def test_sigmoid_probabilities_are_not_normalised() -> None:
    opinions = ClientPredictions.gather([P], [torch.tensor([0, 1])], 3)
    logits = torch.log(H / (1 - H))[None]
    for scope in ("global", "restricted"):
        value = TuningObjective("mse", False, scope, "omit", 1, 1, 1.0).objective(opinions)(logits, torch.tensor([0]))
        np.testing.assert_allclose(value.item(), 0.02, rtol=1e-4)


@pytest.mark.parametrize("absent", ["omit", "naive", "penalise"])
def test_label_that_no_client_has(absent: Any) -> None:
    """Three separable classes; the global classifier is right about all, the round's only client has the labels 0 and
    1. `naive` gives everything to label 2, `penalise` takes it away from all; by default nothing is lost."""
    truth = torch.arange(300) % 3
    noise = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    features = 2 * torch.eye(3)[truth] + 0.3 * noise
    rows = torch.cat([torch.eye(3), torch.zeros(3, 1)], 1)
    logits = features @ rows[:, :-1].T
    assert (logits.argmax(1) == truth).all()
    opinions = ClientPredictions.gather([torch.softmax(0.3 * logits[:, :2], 1)], [torch.tensor([0, 1])], 3)
    tuning = TuningObjective("pairwise", True, "global", absent, 150, 100, 0.1)
    tuned = tuning.fit(rows, features, opinions, torch.Generator().manual_seed(1))
    found = (features @ tuned[:, :-1].T + tuned[:, -1]).argmax(1)
    right = [(found[truth == label] == label).float().mean().item() for label in range(3)]
    if absent == "omit":
        assert min(right) > 0.95
        assert torch.equal(tuned[2], rows[2])
    elif absent == "naive":
        assert right[2] == 1
        assert max(right[:2]) < 0.05
    else:
        assert right[2] < 0.05
        assert min(right[:2]) > 0.95


@pytest.mark.parametrize("loss", ["mse", "pairwise"])
def test_tuned_classifier_agrees_with_the_clients(loss: Any) -> None:
    """Two clients that each know half: with their help a random classifier learns to tell all four classes apart."""
    truth = torch.arange(400) % 4
    features = 2 * torch.eye(4)[truth] + 0.3 * torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    sets = [torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3])]
    opinions = ClientPredictions.gather([torch.softmax(3 * features[:, s], 1) for s in sets], sets, 4)
    rows = 0.3 * torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    tuning = TuningObjective(loss, True, "restricted", "omit", 300, 128, 0.05)
    tuned = tuning.fit(rows, features, opinions, torch.Generator().manual_seed(1))
    right = [((features @ r[:, :-1].T + r[:, -1]).argmax(1) == truth).float().mean().item() for r in (rows, tuned)]
    assert right[0] < 0.6
    assert right[1] > 0.9


@pytest.mark.parametrize(("batch", "seen"), [(5, [5, 10, 10]), (4, [4, 8, 8]), (1, [1, 2, 3]), (10, [10]), (99, [10])])
def test_tuning_uses_all_images_before_repeating(batch: int, seen: list[int]) -> None:
    """Every image is a feature of its own here, so a weight changes exactly when its image has been in a batch. With
    batches of 4 the third begins a new order (the two images that are left do not make a batch)."""
    opinions = ClientPredictions.gather([torch.full((10, 2), 0.5)], [torch.tensor([0, 1])], 2)
    rows = torch.randn(2, 11, generator=torch.Generator().manual_seed(0))
    for steps, expected in enumerate(seen, start=1):
        tuned = TuningObjective("mse", True, "global", "omit", steps, batch, 0.1).fit(
            rows, torch.eye(10), opinions, torch.Generator().manual_seed(2)
        )
        changed = int((tuned != rows)[0, :-1].sum())
        assert changed == expected or (batch == 4 and steps == 3 and changed > expected)
    orders = {
        tuple((TuningObjective("mse", True, "global", "omit", 1, 3, 0.1)
        .fit(rows, torch.eye(10), opinions, torch.Generator().manual_seed(seed)) != rows)[0].tolist())
        for seed in range(4)
    }  # fmt: skip
    assert len(orders) > 1


def test_client_with_zero_probabilities_adds_no_loss() -> None:
    """Sigmoids can all be 0: the pairwise loss is 0 then, and so is its gradient."""
    h = torch.tensor([[[0.2, 0.7]]], requires_grad=True)
    loss = pairwise(torch.zeros(1, 1, 2), h, torch.ones(1, 1, 2, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0
    assert h.grad.tolist() == [[[0.0, 0.0]]]


def test_server_work_uses_one_thread() -> None:
    torch.set_num_threads(2)
    with pytest.raises(KeyError), single_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 2
