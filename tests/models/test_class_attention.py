"""ETF, positions, attention and LADM against values worked out by hand, in NumPy or by torch's own attention."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from fedmll.core.errors import ConfigError
from fedmll.models.backbones.convolutional import ConvNet
from fedmll.models.backbones.mlp import Mlp
from fedmll.models.class_attention import (
    Attention,
    Ladm,
    PrototypeClassifier,
    dropout,
    orthonormal,
    per_label,
    positional_encoding,
    simplex_etf,
)
from fedmll.models.flat_weights import FlatWeights

CPU = torch.device("cpu")


@pytest.mark.parametrize(("classes", "width"), [(2, 2), (10, 128), (80, 512), (17, 17)])
def test_etf_gram_matrix(classes: int, width: int) -> None:
    m = simplex_etf(width, classes, seed=3).double().numpy()
    assert m.shape == (classes, width)
    expected = np.full((classes, classes), -1 / (classes - 1))
    np.fill_diagonal(expected, 1.0)
    np.testing.assert_allclose(m @ m.T, expected, atol=2e-7)
    np.testing.assert_allclose(m.sum(0), 0, atol=1e-6)


def test_etf_is_its_formula() -> None:
    """M = √(C/(C−1)) U (I − 11ᵀ/C), with the matrices written out."""
    u = orthonormal(12, 5, 7, "etf")
    np.testing.assert_allclose(u.T @ u, np.eye(5), atol=1e-14)
    m = np.sqrt(5 / 4) * u @ (np.eye(5) - np.ones((5, 1)) @ np.ones((1, 5)) / 5)
    np.testing.assert_allclose(simplex_etf(12, 5, 7).numpy(), m.T, atol=1e-7)


def test_etf_comes_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = simplex_etf(16, 10, 0)
    torch.manual_seed(2)
    assert torch.equal(first, simplex_etf(16, 10, 0))
    assert not torch.equal(first, simplex_etf(16, 10, 1))


def test_orthonormal_has_fixed_signs() -> None:
    """The factor R of the drawn matrix has a positive diagonal, whatever signs LAPACK's QR gives."""
    from fedmll.core.seeding import numpy_generator

    drawn = numpy_generator(5, "purpose").standard_normal((9, 4))
    r = orthonormal(9, 4, 5, "purpose").T @ drawn
    assert (np.diag(r) > 0).all()
    np.testing.assert_allclose(np.tril(r, -1), 0, atol=1e-12)


def test_etf_rejects_too_few_classes_and_too_small_widths() -> None:
    with pytest.raises(ConfigError, match=r"80 classes needs features of width 80 or more; the backbone's width is 64"):
        simplex_etf(64, 80, 0)
    with pytest.raises(ConfigError, match="at least 2 classes"):
        simplex_etf(64, 1, 0)


def test_positional_encoding_by_hand() -> None:
    """Width 8: two frequencies an axis, 1 and 10000^(-2/4) = 0.01; channels sin, cos, sin, cos of row, then column."""
    found = positional_encoding(8, 3, 5, CPU)
    assert found.shape == (8, 3, 5)
    for row in range(3):
        for column in range(5):
            axis = [f(x * frequency) for x in (row, column) for frequency in (1.0, 0.01) for f in (math.sin, math.cos)]
            np.testing.assert_allclose(found[:, row, column].numpy(), axis, atol=1e-7)


def test_positional_encoding_cached_in_evaluation_works_in_training() -> None:
    positional_encoding.cache_clear()
    ladm = Ladm(simplex_etf(8, 3, 0), heads=2)
    tokens = torch.randn(2, 8, 2, 3)
    with torch.inference_mode():
        ladm(tokens)
    ladm(tokens.requires_grad_()).sum().backward()
    assert tokens.grad is not None


def test_positional_encoding_needs_a_width_that_four_divides() -> None:
    with pytest.raises(ConfigError, match=r"positional = false"):
        positional_encoding(6, 2, 2, CPU)


def as_torchs(attention: Attention) -> nn.MultiheadAttention:
    width = attention.query.in_features
    reference = nn.MultiheadAttention(width, attention.heads, batch_first=True).eval()
    with torch.no_grad():
        reference.in_proj_weight.copy_(torch.cat([attention.query.weight, attention.key_value.weight]))
        reference.in_proj_bias.copy_(torch.cat([attention.query.bias, attention.key_value.bias]))
        reference.out_proj.weight.copy_(attention.out.weight)
        reference.out_proj.bias.copy_(attention.out.bias)
    return reference


def randomised(attention: Attention) -> Attention:
    """The biases start at zero and would hide a mistake."""
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return attention


@pytest.mark.parametrize("shared", [True, False])
def test_attention_is_torchs(shared: bool) -> None:
    torch.manual_seed(0)
    attention = randomised(Attention(16, 4)).eval()
    queries = torch.randn(5, 16) if shared else torch.randn(3, 5, 16)
    tokens = torch.randn(3, 7, 16)
    batched = queries.expand(3, 5, 16)
    expected, weights = as_torchs(attention)(batched, tokens, tokens, average_attn_weights=False)
    torch.testing.assert_close(attention(queries, tokens), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(attention.weights(queries, tokens), weights, atol=1e-5, rtol=1e-5)


def test_attention_starts_like_torchs() -> None:
    torch.manual_seed(0)
    ours = Attention(64, 4)
    bound = nn.MultiheadAttention(64, 4).in_proj_weight.abs().max().item()
    assert ours.key_value.weight.abs().max().item() == pytest.approx(bound, rel=1e-2)
    assert ours.query.weight.abs().max().item() == pytest.approx(bound, rel=1e-2)
    assert not any(linear.bias.any() for linear in (ours.query, ours.key_value, ours.out))


def test_attention_with_dropout_has_the_right_mean() -> None:
    torch.manual_seed(0)
    attention = randomised(Attention(8, 2, dropout=0.3))
    queries, tokens = torch.randn(4, 8), torch.randn(1, 6, 8)
    mean = attention(queries, tokens.expand(20_000, -1, -1)).mean(0)
    attention.eval()
    torch.testing.assert_close(mean, attention(queries, tokens)[0], atol=0.03, rtol=0)


def test_dropout() -> None:
    x = torch.randn(101, 1003, requires_grad=True)  # not a multiple of 4 elements
    torch.manual_seed(5)
    y = dropout(x, 0.1)
    torch.manual_seed(5)
    assert torch.equal(y, dropout(x, 0.1))
    dropped = y == 0
    count = x.numel()
    assert abs(dropped.sum().item() - 0.1 * count) < 5 * math.sqrt(0.09 * count)
    torch.testing.assert_close(y[~dropped], x[~dropped] / 0.9)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (~dropped) / 0.9)


def test_ladm_reads_tokens_with_positions() -> None:
    """h_c = MultiHeadAttn(m_c, Z + P, Z + P), Eq. 3–8."""
    torch.manual_seed(1)
    etf = simplex_etf(16, 5, 0)
    ladm = Ladm(etf, heads=4).eval()
    randomised(ladm.attention)
    maps = torch.randn(3, 16, 2, 4)
    z = maps.permute(0, 2, 3, 1).reshape(3, 8, 16)
    p = positional_encoding(16, 2, 4, CPU).permute(1, 2, 0).reshape(8, 16)
    expected, weights = as_torchs(ladm.attention)(etf.expand(3, 5, 16), z + p, z + p, average_attn_weights=False)
    torch.testing.assert_close(ladm(maps), expected, atol=1e-5, rtol=1e-5)
    looked = ladm.maps(maps)
    torch.testing.assert_close(looked, weights.reshape(3, 4, 5, 2, 4), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(looked.sum((-1, -2)), torch.ones(3, 4, 5))
    without = Ladm(etf, heads=4, positional=False).eval()
    without.attention = ladm.attention
    expected, _ = as_torchs(ladm.attention)(etf.expand(3, 5, 16), z, z)
    torch.testing.assert_close(without(maps), expected, atol=1e-5, rtol=1e-5)


def test_attention_refuses_heads_that_do_not_divide_the_width() -> None:
    with pytest.raises(ConfigError, match="4 heads"):
        Attention(10, 4)


def test_per_label_is_the_diagonal_of_a_full_linear_layer() -> None:
    torch.manual_seed(0)
    full = nn.Linear(6, 4)
    features = torch.randn(5, 4, 6)
    expected = full(features).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(per_label(features, full.weight, full.bias), expected)
    torch.testing.assert_close(per_label(features, full.weight, None), expected - full.bias)


def test_prototype_classifier_with_and_without_its_parts() -> None:
    torch.manual_seed(0)
    backbone, etf = Mlp(3, (16,)), simplex_etf(16, 5, 0)
    x = torch.randn(4, 3)
    pooled = backbone(x)
    only_etf = PrototypeClassifier(backbone, 5, etf)
    torch.testing.assert_close(only_etf(x), pooled @ etf.T)
    torch.testing.assert_close(only_etf(x).sum(1), torch.zeros(4), atol=1e-5, rtol=0)  # Σ m_c = 0
    neither = PrototypeClassifier(backbone, 5)
    torch.testing.assert_close(neither(x), pooled @ neither.prototypes.T + neither.bias)
    both = PrototypeClassifier(backbone, 5, etf, Ladm(etf))
    h = both.ladm(backbone(x)[:, :, None, None])
    torch.testing.assert_close(both(x), torch.einsum("bcd,cd->bc", h, etf))
    assert both.attention(x).shape == (4, 4, 5, 1, 1)
    scaled = PrototypeClassifier(backbone, 5, etf, both.ladm, logit_scale=10.0)
    torch.testing.assert_close(scaled(x), 10 * both(x))
    assert torch.equal(both.class_maps(x), both.attention(x)) and neither.class_maps(x) is None
    with pytest.raises(ConfigError, match=r"ladm = false"):
        neither.attention(x)


def test_class_vectors() -> None:
    """What is fixed and the same is said once."""
    backbone, etf = Mlp(3, (16,)), simplex_etf(16, 5, 0)
    learned = Ladm(torch.randn(5, 16), learnable=True)
    found = {
        "fixed": PrototypeClassifier(backbone, 5, etf, Ladm(etf)),
        "learned queries": PrototypeClassifier(backbone, 5, etf, learned),
        "linear": PrototypeClassifier(backbone, 5, None, Ladm(etf)),
    }
    vectors = {name: network.class_vectors() for name, network in found.items()}
    assert list(vectors["fixed"]) == ["classifier rows"]
    assert torch.equal(vectors["fixed"]["classifier rows"], etf)
    assert vectors["learned queries"]["queries"] is learned.queries
    assert vectors["linear"]["classifier rows"] is found["linear"].prototypes
    assert torch.equal(vectors["linear"]["queries"], etf)


def test_etf_is_not_sent() -> None:
    etf = simplex_etf(16, 5, 0)
    fixed = PrototypeClassifier(Mlp(3, (16,)), 5, etf, Ladm(etf))
    assert not {"prototypes", "ladm.queries"} & set(FlatWeights(fixed).layout)
    learned = PrototypeClassifier(Mlp(3, (16,)), 5, etf, Ladm(etf, learnable=True), logit_scale=1.0)
    assert {"ladm.queries", "scale"} <= set(FlatWeights(learned).layout)
    assert torch.equal(learned.ladm.queries, etf)


def test_no_dropout_by_default() -> None:
    torch.manual_seed(0)
    etf = simplex_etf(16, 12, 0)
    tokens = torch.randn(3, 16, 2, 2)
    ladm = Ladm(etf).train()
    torch.testing.assert_close(ladm(tokens), ladm.eval()(tokens), atol=1e-6, rtol=1e-5)
    asked = Attention(16, 4, dropout=0.5).train()
    x = torch.randn(3, 7, 16)
    assert not torch.allclose(asked(etf, x), asked(etf, x))
    assert torch.equal(asked.eval()(etf, x), asked(etf, x))


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 0.9])
def test_dropout_drops_its_share(p: float) -> None:
    x = torch.ones(400_001)
    torch.manual_seed(0)
    y = dropout(x, p)
    share = (y == 0).double().mean().item()
    assert share == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / len(x)))
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))
    half = len(x) // 2  # places are independent: each half drops the same share, and neighbours not together
    assert (y[:half] == 0).double().mean().item() == pytest.approx(p, abs=6 * math.sqrt(p * (1 - p) / half))
    both = ((y[:-1] == 0) & (y[1:] == 0)).double().mean().item()
    assert both == pytest.approx(p * p, abs=0.005)


def test_features_with_batch_norm_do_not_depend_on_the_batch_in_eval_mode() -> None:
    torch.manual_seed(0)
    etf = simplex_etf(16, 12, 0)
    images = torch.randn(6, 1, 8, 8) * 2 + 1
    for ladm in (None, Ladm(etf)):
        net = PrototypeClassifier(ConvNet(1, 8, (8, 16), "batch"), 12, etf, ladm)
        net.train()(images)  # the running statistics leave their start
        training = net.features(images)
        net.eval()
        alone = torch.cat([net.features(image[None]) for image in images])
        torch.testing.assert_close(net.features(images), alone, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(training, alone, atol=1e-2)
        assert alone.shape == ((6, 16) if ladm is None else (6, 12, 16))


def test_pooled_features_are_the_mean_over_the_tokens() -> None:
    torch.manual_seed(0)
    net = PrototypeClassifier(ConvNet(1, 16, (8, 16), "group"), 12, simplex_etf(16, 12, 0))
    images = torch.randn(3, 1, 16, 16)
    tokens = net.backbone(images).detach().numpy()
    assert tokens.shape[2:] == (4, 4)
    np.testing.assert_allclose(net.features(images).detach().numpy(), tokens.reshape(3, 16, 16).mean(2), atol=1e-6)


def test_learned_scale_is_one_number_and_bias_one_number_per_class() -> None:
    net = PrototypeClassifier(Mlp(3, (16,)), 12, simplex_etf(16, 12, 0), logit_scale=4)
    assert net.scale.tolist() == [4.0] and net.bias is None
    linear = PrototypeClassifier(Mlp(3, (16,)), 12)
    assert linear.scale is None and linear.bias.shape == (12,) and linear.prototypes.shape == (12, 16)
    assert {"prototypes", "bias"} <= set(FlatWeights(linear).layout)
