"""Impossible sums are rejected; sums of real samples are accepted."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders import small

from fedmll.core.message import Message, Tensors
from fedmll.methods.framework.allowed_replies import find_class_problem
from fedmll.methods.parts import platt_calibration, ridge_head, sum_checks
from fedmll.methods.parts.sum_checks import refuse_losses, refuse_moments, refuse_statistics
from fedmll.testing import experiment, make_client, make_client_info, make_trainer

LABELS = np.array([[1, -1, 0], [0, 1, 0], [0, -1, 1], [1, 0, 0]])


def sums(seed: int = 0, count: int = 30, balanced: bool = True) -> Tensors:
    """Of samples of which some entries, and all of one class, are unknown."""
    rng = np.random.default_rng(seed)
    features = torch.from_numpy(rng.normal(size=(count, 5)) * rng.uniform(1e-3, 1e3, 5) + rng.normal(size=5))
    targets = torch.from_numpy(rng.integers(-1, 2, (count, 4)))
    targets[:, 1] = -1
    return ridge_head.sums_of(features, targets, balanced)


@pytest.mark.parametrize("count", [1, 3, 30, 500])
@pytest.mark.parametrize("seed", range(4))
def test_sums_of_real_samples_are_accepted(seed: int, count: int) -> None:
    for balanced in (False, True):
        assert refuse_moments(sums(seed, count, balanced), count) is None


def changed(key: str, change: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda found: found | {key: change({name: tensor.clone() for name, tensor in found.items()})}


def put(key: str, *place: int, value: float) -> Callable[[Tensors], Tensors]:
    def change(found: Tensors) -> torch.Tensor:
        found[key][place] = value
        return found[key]

    return changed(key, change)


def no_square(found: Tensors) -> torch.Tensor:
    """An entry beside the diagonal that the diagonal does not allow; symmetric."""
    gram = found["gram"]
    gram[0, 0, 1] = gram[0, 1, 0] = 3 * (gram[0, 0, 0] * gram[0, 1, 1]).sqrt()
    return gram


LIES = {
    "its sums are of 31 samples, and it has 30": changed("all", lambda f: f["all"] + torch.tensor([[1.0], [0], [0]])),
    "its features are larger than 10000": changed("all", lambda f: f["all"] * torch.tensor([[1.0], [1], [1e9]])),
    "impossible numbers of samples": put("gram", 0, -1, -1, value=31.0),
    "or it refers to a matrix that it did not send": put("group", 0, value=3),
    "larger than those of all samples": put("gram", 0, 0, 0, value=1e9),
    "are not sums of squares": changed("gram", no_square),
    "more positives than samples": put("cross", 0, -1, value=29.5),
    "larger than its features allow": put("cross", 2, 0, value=1e6),
    "larger than its features allow ": put("cross", 1, 0, value=1.0),  # of a class that it knows nothing of
    "do not agree with the sums over its positives": put("positive", 0, -1, 0, value=1e5),
    "not a part of those of its samples": changed(
        "positive", lambda f: f["positive"] + 1e7 * torch.eye(6).double()[0].diag()
    ),
}


@pytest.mark.parametrize("reason", LIES)
def test_impossible_sums_are_rejected(reason: str) -> None:
    assert reason.strip() in str(refuse_moments(LIES[reason](sums()), 30))


def test_sums_of_unit_features_are_bounded() -> None:
    features = torch.nn.functional.normalize(torch.randn(20, 4, generator=torch.manual_seed(1)).double(), dim=1)
    targets = torch.ones(20, 2, dtype=torch.int8)
    assert refuse_moments(ridge_head.sums_of(features, targets), 20, unit=True) is None
    assert "larger than 1" in str(refuse_moments(ridge_head.sums_of(1.01 * features, targets), 20, unit=True))
    assert refuse_moments(ridge_head.sums_of(1.01 * features, targets), 20) is None


def test_features_and_scores_up_to_the_bound_are_accepted() -> None:
    features = torch.full((3, 2), sum_checks.LARGEST_FEATURE, dtype=torch.float64)
    targets = torch.tensor([[1], [0], [-1]], dtype=torch.int8)
    assert refuse_moments(ridge_head.sums_of(features, targets), 3) is None
    assert "larger than 10000" in str(refuse_moments(ridge_head.sums_of(1.001 * features, targets), 3))
    tried = torch.zeros(1, 2, 1, dtype=torch.float64)
    score = sum_checks.LARGEST_SCORE
    sums = torch.tensor([2 * np.log(2), 2 * score, 0, 2 * score**2 / 4, 0, 0.5]).double().view(1, 6, 1)
    assert refuse_losses(sums, tried, 2) is None
    assert "scores are larger" in str(
        refuse_losses(sums * torch.tensor([1, 1.001, 1, 1, 1, 1]).view(1, 6, 1), tried, 2)
    )
    assert "scores are larger" in str(
        refuse_losses(sums * torch.tensor([1, 1, 1, 1.001, 1, 1]).view(1, 6, 1), tried, 2)
    )


def test_a_loss_is_at_most_that_of_the_largest_score() -> None:
    """With p = ½ everywhere (a = b = 0) the loss of a sample is log 2, so that of two samples is below 2."""
    tried = torch.zeros(1, 2, 1, dtype=torch.float64)
    for loss, reason in ((2.0, "None"), (2.1, "scores are larger")):
        sums = torch.tensor([loss, 0, 0, 0, 0, 0.5]).double().view(1, 6, 1)
        assert reason in str(refuse_losses(sums, tried, 2))


@pytest.mark.parametrize(
    ("loss", "difference", "possible"),
    [(0.0, 0.9e-6, True), (0.0, 1.1e-6, False), (1000.0, 0.0019, True), (1000.0, 0.0021, False)],
)
def test_convexity_is_checked_up_to_rounding(loss: float, difference: float, possible: bool) -> None:
    """Both gradients are 0, so both candidates are minima and have one loss, up to 1e-6 (1 + loss + tangent)."""
    tried = torch.tensor([[0.0, 0.0], [0.0, 1.0]]).double()[:, :, None]
    sums = torch.zeros(2, 6, 1, dtype=torch.float64)
    sums[:, 0, 0] = torch.tensor([loss, loss + difference]).double()
    found = refuse_losses(sums, tried, 5000)
    assert found is None if possible else "one convex function" in str(found)


@pytest.mark.parametrize(
    ("counts", "possible"), [([0.0, 3.0], True), ([1.0, 1.5], False), ([1.0, -1.0], False), ([1.0, 4.0], False)]
)
def test_every_count_must_be_possible(counts: list[float], possible: bool) -> None:
    assert sum_checks._counts(torch.tensor(counts), 3) == possible


def test_statistics_of_features_and_labels() -> None:
    """Zeros are features, several classes together have more labels than samples, and every count is checked."""
    moments = torch.tensor([[1000.0, 1000.0], [0, 0], [0, 0]]).double()
    together = torch.tensor([[2000.0], [10.0]]).double()
    assert refuse_statistics({"moments": moments, "labels": together}, 1000) is None
    by_class = together.expand(2, 2)
    assert "more known labels than samples" in str(refuse_statistics({"labels": by_class}, 1000))
    moments[0, 1] = 1001
    assert "its sums are of 1001 samples" in str(refuse_statistics({"moments": moments}, 1000))


# ---- Platt's


def test_hessians_are_positive_semi_definite() -> None:
    """Equal scores have a singular Hessian, which is accepted; a determinant below 0 is not."""
    singular = torch.tensor([1.0, 0, 0, 4, 2, 1]).double().view(1, 6, 1)
    assert platt_calibration._convex(singular)
    for place, value in ((0, -1.0), (3, -4.0), (4, 2.1), (5, -1.0)):
        wrong = singular.clone()
        wrong[0, place] = value
        assert not platt_calibration._convex(wrong)


def test_large_singular_hessians_are_accepted_up_to_rounding() -> None:
    """haa = hbb = 1e6: hab² may exceed their product by 1e-9 of it, which is 1000."""
    sums = torch.tensor([1.0, 0, 0, 1e6, 0, 1e6]).double().view(1, 6, 1)
    for excess, possible in ((900.0, True), (1100.0, False)):
        sums[0, 4, 0] = (1e12 + excess) ** 0.5
        assert platt_calibration._convex(sums) == possible


def test_a_candidate_with_the_same_loss_is_not_an_improvement() -> None:
    tried = torch.ones(1, 2, 1).double()
    best = torch.tensor([[0.25], [0.5], [10.0]]).double()
    found = platt_calibration.better(tried, best, torch.tensor([10.0, -6, -2, 2, 0, 2]).double().view(1, 6, 1))
    assert torch.equal(found["best"], best)
    assert torch.equal(found["tried"], best[:2].expand(4, 2, 1))  # no further step


def test_platt_starts_from_the_counts() -> None:
    """Three positives and seven negatives: targets 4/5 and 1/9, a = 0 and b = log(4/8)."""
    counts = torch.tensor([[7.0], [3.0]]).double()
    ridge = SimpleNamespace(counts=counts, leverage=torch.tensor([[0.1], [0.2]]).double())
    start = platt_calibration.PlattStartAggregator(ridge, {})  # type: ignore[arg-type]
    state, _ = start.result({})
    torch.testing.assert_close(state["targets"], torch.tensor([[1 / 9], [4 / 5]]).double())
    torch.testing.assert_close(state["tried"], torch.tensor([[[0.0], [np.log(0.5)]]]).double())


def test_newton_steps_and_fractions_of_them_are_tried() -> None:
    """The loss (a − 3)² + (b − 1)² at a = b = 0: the Newton step leads to its minimum."""
    tried, best = torch.zeros(1, 2, 1).double(), torch.full((3, 1), torch.inf).double()
    found = platt_calibration.better(tried, best, torch.tensor([10.0, -6, -2, 2, 0, 2]).double().view(1, 6, 1))
    expected = torch.tensor([1.0, 0.5, 0.1, 0.01]).double()[:, None] * torch.tensor([3.0, 1.0]).double()
    torch.testing.assert_close(found["tried"][:, :, 0], expected, rtol=1e-6, atol=0)
    assert found["best"].flatten().tolist() == [0, 0, 10]


def losses(tried: torch.Tensor, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    z, targets = torch.from_numpy(rng.normal(size=(25, 3)) * 20), torch.from_numpy(rng.integers(-1, 2, (25, 3)))
    return platt_calibration.sums_of(z, targets, torch.tensor([[0.05], [0.9]]).double().expand(2, 3), tried)


@pytest.mark.parametrize("seed", range(5))
def test_sums_of_real_losses_are_accepted(seed: int) -> None:
    tried = torch.from_numpy(np.random.default_rng(seed + 9).normal(size=(4, 2, 3)) * 3)
    assert refuse_losses(losses(tried, seed), tried, 25) is None
    assert refuse_losses(losses(tried[:1], seed), tried[:1], 25) is None


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (0, 1e9, "scores are larger"), (1, -1e6, "scores are larger"), (2, 26.0, "too large for its 25 samples"),
        (3, 1e10, "scores are larger"), (5, 6.5, "too large for its 25 samples"), (0, 0.0, "not those of one convex"),
        (1, 1e4, "not those of one convex"),
    ],
)  # fmt: skip
def test_impossible_sums_of_losses_are_rejected(place: int, value: float, reason: str) -> None:
    tried = torch.from_numpy(np.random.default_rng(9).normal(size=(4, 2, 3)))
    found = losses(tried)
    found[1, place, 2] = value
    assert reason in str(refuse_losses(found, tried, 25))


# ---- as the server hears them


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (
            {
                "method__name": "fed-ridge",
                "model__freeze": "backbone",
                "model__weights": "random",
                "model__channels": (6, 10),
                "model__standardise": False,
                "model__bias": "zero",
            },
            "ridge",
        ),
        ({"method__name": "spherefed", "model__channels": (6, 10)}, "calibration"),
    ],
    ids=["fed-ridge", "spherefed"],
)
def test_invented_reply_is_rejected(settings: dict[str, object], part: str) -> None:
    trainer = make_trainer((experiment if part == "ridge" else small)(**settings))
    method, number = trainer.method, 0 if part == "ridge" else trainer.task.rounds + 1
    sent = method.send(method.initial_state(), make_client_info(0, 3), number)
    good = trainer.train(make_client(trainer, LABELS, round=number), sent, {})
    assert method.find_problem(sent, good, number) is None
    for times in (0.5, 1000.0):  # as if it had fewer, or many more samples
        lie = Message({k: t if t.dtype == torch.int64 else times * t for k, t in good.tensors.items()}, good.numbers)
        assert f"{part}: its sums are of" in str(method.find_problem(sent, lie, number))
    head = good[f"{part}/cross"].clone()
    head[0, :-1] = 50 * head[0, :-1].abs() + 50
    lie = Message(good.tensors | {f"{part}/cross": head}, good.numbers)
    assert f"{part}: the sum over a class's positives" in str(method.find_problem(sent, lie, number))
    expected, owned = method.reply_spec(sent, number), torch.tensor([True, True, True])
    assert find_class_problem(expected, good, owned) is None
    assert f"{part}/group has values for classes" in str(
        find_class_problem(expected, good, torch.tensor([False, True, True]))
    )


def test_votes_for_other_classes_are_rejected() -> None:
    trainer = make_trainer(small(method__name="fedirm", method__first_stage=1))
    expected = trainer.method.reply_spec(
        trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1), 1
    )
    owned = torch.tensor([True, False, True])
    reply = {name: torch.zeros(like.shape, dtype=like.dtype) for name, like in expected.items()}  # type: ignore[arg-type]
    assert find_class_problem(expected, Message(reply), owned) is None
    reply["relation-matching/votes"] = torch.tensor([False, True, False])
    reason = find_class_problem(expected, Message(reply), owned)
    assert str(reason) == "relation-matching/votes has values for classes that the client does not annotate"
