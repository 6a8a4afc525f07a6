import numpy as np
import torch

from fedmll.methods import losses

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
    expected = -(TARGETS * (1 - p) ** 1 * np.log(p) + (1 - TARGETS) * pm**4 * np.log(1 - pm))
    np.testing.assert_allclose(of("asl"), expected, atol=1e-12)
    easy = losses.asymmetric(torch.tensor([[-4.0]]), torch.tensor([[0.0]]))
    assert easy.item() == 0  # p = 0.018 < clip: an easy negative counts nothing


def test_asymmetric_loss_is_safe_when_saturated() -> None:
    logits = torch.tensor([[100.0, -100.0, 100.0, -100.0]], requires_grad=True)
    losses.asymmetric(logits, torch.tensor([[1.0, 0.0, 0.0, 1.0]])).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_masked_mean() -> None:
    values, mask = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert losses.masked_mean(values, mask).item() == 2.5
    assert losses.masked_mean(values, torch.zeros(2, 2)).item() == 0


def test_positive_weights_count_known_entries_only() -> None:
    labels = torch.tensor([[1, 1, -1], [0, 1, -1], [0, 1, 0], [0, -1, 0]], dtype=torch.int8)
    assert losses.positive_weights(labels).tolist() == [3.0, 1.0, 2.0]  # 3/1; 0/3 → at least 1; 2/0 → 2/1
    many = torch.tensor([[1], *[[0]] * 50], dtype=torch.int8)
    assert losses.positive_weights(many).tolist() == [20.0]
