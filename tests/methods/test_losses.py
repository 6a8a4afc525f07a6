from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small

from fedmll.core.errors import ConfigError
from fedmll.core.registry import all_of, register
from fedmll.methods import losses
from fedmll.testing import first_step, make_client, make_trainer, start_round

LOGITS = np.array([[2.0, -1.0, 0.5], [-3.0, 0.0, 4.0]])
TARGETS = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def of(name: str, weight: torch.Tensor | None = None) -> np.ndarray:
    return losses.entrywise(name, torch.tensor(LOGITS), torch.tensor(TARGETS), weight).numpy()


def test_bce_and_weighted() -> None:
    p = sigmoid(LOGITS)
    bce = -(TARGETS * np.log(p) + (1 - TARGETS) * np.log(1 - p))
    np.testing.assert_allclose(of("bce"), bce, atol=1e-12)
    w = np.array([2.0, 3.0, 5.0])
    weighted = -(w * TARGETS * np.log(p) + (1 - TARGETS) * np.log(1 - p))
    np.testing.assert_allclose(of("weighted", torch.tensor(w)), weighted, atol=1e-12)
    np.testing.assert_allclose(of("bce", torch.tensor(w)), bce, atol=1e-12)  # plain BCE has no weights


def test_asymmetric_loss_by_its_formula() -> None:
    p = sigmoid(LOGITS)
    pm = np.maximum(p - 0.05, 0)
    expected = -(TARGETS * np.log(p) + (1 - TARGETS) * pm**4 * np.log(1 - pm))  # γ⁺ = 0
    np.testing.assert_allclose(of("asl"), expected, atol=1e-12)
    pm = np.maximum(p - 0.1, 0)
    expected = -(TARGETS * (1 - p) * np.log(p) + (1 - TARGETS) * pm**2 * np.log(1 - pm))
    np.testing.assert_allclose(of("asl:gamma_positive=1:gamma_negative=2:clip=0.1"), expected, atol=1e-12)
    easy = losses.asymmetric(torch.tensor([[-4.0]]), torch.tensor([[0.0]]))
    assert easy.item() == 0  # p = 0.018 < clip: an easy negative counts nothing


def test_focusing_factors_of_asl_carry_a_gradient_only_if_asked() -> None:
    """With p_m = p − 0.05: d(p_m⁴ log(1−p_m))/dz = p(1−p) (4 p_m³ log(1−p_m) − p_m⁴/(1−p_m))."""
    p = sigmoid(np.array([0.5]))
    pm = p - 0.05
    last = p * (1 - p) * pm**4 / (1 - pm)
    expected = {"asl": last, "asl:focusing_gradient=1": last - p * (1 - p) * 4 * pm**3 * np.log(1 - pm)}
    for setting, gradient in expected.items():
        logits = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)
        losses.entrywise(setting, logits, torch.tensor([[0]])).sum().backward()
        assert logits.grad is not None
        np.testing.assert_allclose(logits.grad.numpy()[0], gradient, rtol=1e-12)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("asl:gama=2", "has no option 'gama'. Its options are gamma_negative, gamma_positive, clip, focusing_gradient"),
        ("bce:gamma=2", "has no option 'gamma'. It has no options"),
        ("em:alpha=high", "options of a loss are numbers"),
        ("em:alpha", "options of a loss are numbers"),
        ("asll:clip=0", "There is no loss 'asll'"),
    ],
)
def test_wrong_option_of_a_loss_is_refused_before_training(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(training__loss=setting)


def test_options_of_losses_for_missing_labels() -> None:
    p = sigmoid(LOGITS)
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    entries, _ = for_missing("em:alpha=0.2")
    np.testing.assert_allclose(entries[STATES == -1], -0.2 * entropy[STATES == -1], atol=1e-12)
    assert np.array_equal(for_missing("splc:threshold=0.9", round=2)[0], for_missing("splc")[0])  # nothing is found
    assert not np.array_equal(for_missing("splc", round=2)[0], for_missing("splc")[0])


def test_asymmetric_loss_is_finite_for_saturated_logits() -> None:
    logits = torch.tensor([[100.0, -100.0, 100.0, -100.0]], requires_grad=True)
    losses.asymmetric(logits, torch.tensor([[1.0, 0.0, 0.0, 1.0]])).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_masked_mean() -> None:
    values, mask = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert losses.masked_mean(values, mask).item() == 2.5
    assert losses.masked_mean(values, torch.zeros(2, 2)).item() == 0
    assert losses.masked_mean(values, torch.tensor([[0.0, 0.0], [1.0, 0.0]])).item() == 3  # a single entry


@pytest.mark.parametrize("loss", ["bce", "weighted"])
def test_only_the_weighted_loss_weights_positives(loss: str) -> None:
    """Class 0: three negatives and one positive. Class 1: the opposite. Class 2: unknown."""
    targets = np.array([[1, 1, -1], [0, 1, -1], [0, 1, -1], [0, 0, -1]])
    trainer = make_trainer(small(training__loss=loss, method__name="fedavg-pl"), ("a", "b", "c"))
    step = first_step(trainer, start_round(trainer, make_client(trainer, targets)))
    p, y = sigmoid(step.logits.detach().double().numpy()), step.targets.numpy()
    weight = np.array([4.0, 4 / 3, 1.0]) if loss == "weighted" else np.ones(3)
    entries = -np.where(y == 1, weight * np.log(p), np.log(1 - p))
    assert trainer.loss(step).item() == pytest.approx(entries[y >= 0].mean(), rel=1e-5)


def test_positive_weights_count_known_entries_only() -> None:
    labels = torch.tensor([[1, 1, -1], [0, 1, -1], [0, 1, 0], [0, -1, 0]], dtype=torch.int8)
    assert losses.positive_weights(labels).tolist() == [4.0, 1.0, 2.0]  # N/n⁺: 4/1, 3/3; no positive: 2/1
    many = torch.tensor([[1], *[[0]] * 50, [-1]], dtype=torch.int8)
    assert losses.positive_weights(many).tolist() == [51.0]


# ---- for missing labels

STATES = torch.tensor([[1, 0, -1], [-1, -1, 0]], dtype=torch.int8)


def for_missing(name: str, round: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Entries and, by entry, their gradient."""
    logits = torch.tensor(LOGITS, requires_grad=True)
    entries = losses.entrywise(name, logits, STATES, None, round)
    (gradient,) = torch.autograd.grad(entries.sum(), logits)
    return entries.detach().numpy(), gradient.numpy()


def by_differences(entries: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Of entries that each depend on their own logit alone."""
    return (entries(LOGITS + 1e-6) - entries(LOGITS - 1e-6)) / 2e-6


def test_which_losses_are_for_missing_labels() -> None:
    assert {name for name in all_of("loss") if losses.is_for_missing_labels(name)} == {"hill", "splc", "em"}
    for name in ("bce", "asl"):  # unknown is as 0 to the others
        as_zero = losses.entrywise(name, torch.tensor(LOGITS), STATES.clamp(min=0))
        assert torch.equal(losses.entrywise(name, torch.tensor(LOGITS), STATES), as_zero)


def test_hill_by_its_formula() -> None:
    def by_hand(z: np.ndarray) -> np.ndarray:
        p, moved = sigmoid(z), sigmoid(z - 1)
        return np.where(STATES == 1, -((1 - moved) ** 2) * np.log(moved), (1.5 - p) * p**2)

    entries, gradient = for_missing("hill")
    np.testing.assert_allclose(entries, by_hand(LOGITS), atol=1e-12)
    np.testing.assert_allclose(gradient, by_differences(by_hand), atol=1e-8)
    p = sigmoid(LOGITS)  # dL/dz = (2λp − 3p²) p (1−p) = 3p²(1−p)²: largest at ½, none where the model is sure
    np.testing.assert_allclose(gradient[STATES != 1], (3 * p**2 * (1 - p) ** 2)[STATES != 1], atol=1e-12)


def test_splc_teaches_unknown_targets_as_present_from_the_second_round() -> None:
    def by_hand(z: np.ndarray, present: np.ndarray) -> np.ndarray:
        p = sigmoid(np.where(STATES == 1, z - 1, z))
        return np.where(present, -((1 - p) ** 2) * np.log(p), -(p**2) * np.log(1 - p))

    before, after = np.array([[1, 0, 0], [0, 0, 0]]), np.array([[1, 0, 1], [0, 0, 0]])  # σ(0.5) = 0.62 > 0.6
    for round, present in ((1, before), (2, after), (9, after)):
        entries, gradient = for_missing("splc", round)
        np.testing.assert_allclose(entries, by_hand(LOGITS, present), atol=1e-12)
        np.testing.assert_allclose(gradient, by_differences(lambda z: by_hand(z, present)), atol=1e-8)  # noqa: B023
    below = torch.tensor([[0.4]])  # σ = 0.599
    assert losses.self_paced(below, torch.tensor([[-1]]), 2) == losses.self_paced(below, torch.tensor([[0]]), 2)
    sure = torch.tensor([[5.0]])
    assert losses.self_paced(sure, torch.tensor([[0]]), 2) > 4  # a known 0 stays 0, however sure the model is


def test_em_maximises_the_entropy_of_unknown_targets() -> None:
    def by_hand(z: np.ndarray) -> np.ndarray:
        p = sigmoid(z)
        entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p))
        return np.where(STATES == 1, -np.log(p), np.where(STATES == 0, -np.log(1 - p), -0.1 * entropy))

    entries, gradient = for_missing("em")
    np.testing.assert_allclose(entries, by_hand(LOGITS), atol=1e-12)
    np.testing.assert_allclose(gradient, by_differences(by_hand), atol=1e-8)
    assert gradient[1, 1] == 0  # at p = ½
    assert entries[1, 1] == pytest.approx(-0.1 * np.log(2))


@pytest.mark.parametrize("name", ["hill", "splc", "em"])
def test_losses_for_missing_labels_are_finite_for_saturated_logits(name: str) -> None:
    logits = torch.tensor([[200.0, -200.0] * 3], requires_grad=True)
    losses.entrywise(name, logits, torch.tensor([[1, 1, 0, 0, -1, -1]]), None, 2).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


TARGETS_OF_A_BATCH = [[1, -1, 0], [-1, -1, 1]]


@pytest.mark.parametrize("name", ["hill", "splc", "em"])
def test_all_entries_count_with_a_loss_for_missing_labels(name: str) -> None:
    """Also the one that otherwise leaves unknown ones out; in the second round."""
    found = {}
    for method in ("fedavg", "fedavg-pl", "fedctran"):
        trainer = make_trainer(small(method__name=method, training__loss=name))
        client_round = start_round(trainer, make_client(trainer, np.array(TARGETS_OF_A_BATCH), round=2))
        step = first_step(trainer, client_round)
        step.logits = torch.tensor(LOGITS, dtype=torch.float32)[step.rows]
        if method == "fedctran":
            step.states = torch.tensor([[-1, -1, 0], [-1, -1, -1]])[step.rows]
        found[method] = trainer.loss(step).item()
    entries = losses.entrywise(name, torch.tensor(LOGITS), torch.tensor(TARGETS_OF_A_BATCH), None, 2)
    assert found["fedavg"] == pytest.approx(entries.mean().item(), abs=1e-6)
    assert found["fedavg-pl"] == pytest.approx(entries.mean().item(), abs=1e-6)
    assert found["fedctran"] == pytest.approx(entries.sum().item() - entries[0, 2].item(), abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method__name": "fedmlp", "training__loss": "em"}, "'em'.*so does the part 'prior-adjusted'"),
        ({"method__name": "condist", "training__loss": "hill"}, "'hill'.*so does the part 'distillation'"),
        ({"method__name": "private-fedavg", "training__loss": "asl", "data__name": "digits"}, "'softmax' has its own"),
        ({"method__name": "fed-ridge", "training__loss": "asl"}, "'asl'.*fed-ridge solves"),
        ({"training__loss": "splc", "training__rounds": 1}, "'splc'.*round 2.*training.rounds is 1"),
        ({"method__name": "centralized", "method__of": "condist", "training__loss": "splc"}, "'distillation'"),
    ],
)
def test_error_names_a_loss_that_cannot_be_used(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        small(**changes)


def test_ordinary_losses_work_with_parts_for_unknown_targets() -> None:
    assert small(method__name="condist", training__loss="asl").training.loss == "asl"
    assert small(method__name="fedmlp", training__loss="weighted").training.loss == "weighted"
    assert small(training__loss="splc").training.loss == "splc"


WRONG_LOSSES = {
    "mean": (lambda z, y, w: ((torch.sigmoid(z) - y) ** 2).mean(), r"returns a tensor of the shape \(\) for logits"),
    "per-class": (lambda z, y, w: ((torch.sigmoid(z) - y) ** 2).mean(0), r"returns a tensor of the shape \(3,\)"),
    "float": (lambda z, y, w: 0.5, "returns float"),
    "detached": (lambda z, y, w: (z.detach() - y) ** 2, "returns a tensor without a gradient"),
    "two-arguments": (lambda z, y: (z - y) ** 2, "fails with TypeError"),
    "module": (torch.nn.BCEWithLogitsLoss(), "fails with TypeError"),
}


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_loss_that_does_not_return_one_value_per_entry_is_refused_before_training(name: str) -> None:
    """A mean over the batch would silently teach unknown targets as absent."""
    function, problem = WRONG_LOSSES[name]
    register("loss", f"wrong-{name}")(function)
    with pytest.raises(ConfigError, match=rf"The loss 'wrong-{name}' {problem}.*It must .*\(batch, classes\)"):
        small(training__loss=f"wrong-{name}", method__name="fedavg-pl")


def test_own_loss_leaves_unknown_targets_out() -> None:
    register("loss", "own-squared")(lambda z, y, w: (torch.sigmoid(z) - y) ** 2)
    trainer = make_trainer(small(training__loss="own-squared", method__name="fedavg-pl"), ("a", "b", "c"))
    found = []
    for unknown in (-1, 1):
        client = make_client(trainer, np.array([[1, 0, unknown], [0, 1, -1]]))
        found.append(trainer.loss(first_step(trainer, start_round(trainer, client))).item())
    assert found[0] != found[1]
    step = first_step(trainer, start_round(trainer, make_client(trainer, np.array([[1, 0, -1], [0, 1, -1]]))))
    known = (torch.sigmoid(step.logits) - step.present).square()[:, :2]
    assert trainer.loss(step).item() == pytest.approx(known.mean().item())
