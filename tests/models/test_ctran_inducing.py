"""C-Tran whose labels see each other through inducing tokens, against NumPy; and attention that is not kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedmll.models import class_attention
from fedmll.models.backbones.convolutional import ConvNet
from fedmll.models.backbones.mlp import Mlp
from fedmll.models.class_attention import Attention
from fedmll.models.ctran import CTran, EncoderLayer
from fedmll.models.flat_weights import FlatWeights

CLASSES, WIDTH, INDUCING = 7, 16, 3


def model(inducing: int | None = INDUCING, classes: int = CLASSES, dropout: float = 0.1) -> CTran:
    torch.manual_seed(0)
    return CTran(ConvNet(1, 8, (8, WIDTH), "group"), classes, dropout=dropout, inducing=inducing)


def randomised(network: nn.Module) -> None:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))


# ---- one sample in NumPy, loops over queries, in float64


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def affine(linear: nn.Linear, x: np.ndarray) -> np.ndarray:
    return x @ array(linear.weight).T + array(linear.bias)


def normed(norm: nn.LayerNorm, x: np.ndarray) -> np.ndarray:
    spread = np.sqrt(x.var(-1, keepdims=True) + norm.eps)
    return (x - x.mean(-1, keepdims=True)) / spread * array(norm.weight) + array(norm.bias)


def shares(attention: Attention, queries: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """(heads, queries, seen): each row e^(q·k/√d), divided by its sum."""
    q, k = affine(attention.query, queries), affine(attention.key_value, seen)[:, :WIDTH]
    size = WIDTH // attention.heads
    found = np.zeros((attention.heads, len(queries), len(seen)))
    for head in range(attention.heads):
        part = slice(head * size, (head + 1) * size)
        for row, query in enumerate(q):
            power = np.array([np.exp(query[part] @ key[part] / np.sqrt(size)) for key in k])
            found[head, row] = power / power.sum()
    return found


def encoded(layer: EncoderLayer, queries: np.ndarray, seen: np.ndarray) -> np.ndarray:
    weights, v = shares(layer.attention, queries, seen), affine(layer.attention.key_value, seen)[:, WIDTH:]
    size = WIDTH // layer.attention.heads
    read = np.concatenate([w @ v[:, h * size : (h + 1) * size] for h, w in enumerate(weights)], axis=1)
    x = normed(layer.norm1, queries + affine(layer.attention.out, read))
    return normed(layer.norm2, x + affine(layer.out, np.maximum(affine(layer.hidden, x), 0)))


def by_hand(net: CTran, image_tokens: np.ndarray, states: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and the shares of the last layer: labels (rows) over image and inducing tokens."""
    table = {-1: np.zeros(WIDTH), 0: array(net.states[0]), 1: array(net.states[1])}
    image = normed(net.norm, image_tokens)
    labels = normed(net.norm, np.stack([array(net.labels[c]) + table[s] for c, s in enumerate(states)]))
    assert net.inducing is not None
    inducing = normed(net.norm, array(net.inducing))
    for layer in net.layers:
        assert isinstance(layer, EncoderLayer)
        inducing = encoded(layer, inducing, labels)  # first they read the labels, and nothing else
        seen = np.concatenate([image, inducing])  # then everybody sees the image and them
        last = shares(layer.attention, labels, seen)
        image, labels = encoded(layer, image, seen), encoded(layer, labels, seen)
    return (labels * array(net.weight)).sum(1) + array(net.bias), last


def test_every_token_sees_the_image_and_what_the_inducing_tokens_read_of_the_labels() -> None:
    net = model().eval()
    randomised(net)
    images, states = torch.randn(2, 1, 8, 8), torch.tensor([[1, 0, -1, -1, 0, 1, 1], [-1, -1, 0, -1, 1, -1, -1]])
    map_ = net.tokens(images)
    found = net(images, states)
    for sample in range(2):
        tokens = array(map_[sample]).reshape(WIDTH, -1).T
        expected, _ = by_hand(net, tokens, states[sample].tolist())
        np.testing.assert_allclose(array(found[sample]), expected, atol=2e-5, rtol=1e-4)


def test_class_maps_are_the_attention_of_labels_to_the_image() -> None:
    net = model().eval()
    randomised(net)
    images = torch.randn(1, 1, 8, 8)
    map_ = net.tokens(images)
    _, expected = by_hand(net, array(map_[0]).reshape(WIDTH, -1).T, [-1] * CLASSES)
    found = net.class_maps(images)
    assert found.shape == (1, 4, CLASSES, *map_.shape[2:])
    np.testing.assert_allclose(array(found[0]).reshape(4, CLASSES, -1), expected[..., :-INDUCING], atol=1e-5)
    assert (found.sum((-1, -2)) < 1).all()  # the rest goes to the inducing tokens


def test_a_known_label_changes_the_others_through_the_inducing_tokens() -> None:
    net = model().eval()
    randomised(net)
    images, states = torch.randn(1, 1, 8, 8), torch.tensor([[1, *[-1] * (CLASSES - 1)]])
    change = (net(images, states) - net(images))[0, 1:].abs()
    assert (change > 1e-5).all()


def test_without_inducing_tokens_the_model_is_the_paper_s_and_other_weights_start_the_same() -> None:
    full, induced = model(None), model()
    assert full.inducing is None
    assert set(FlatWeights(induced).layout) - set(FlatWeights(full).layout) == {"inducing"}
    for name, parameter in full.named_parameters():
        assert torch.equal(parameter, induced.get_parameter(name)), name
    assert induced.inducing is not None and induced.inducing.shape == (INDUCING, WIDTH)
    assert induced.inducing.abs().max() <= WIDTH**-0.5


def test_inducing_tokens_are_learned_also_with_one_token_of_the_image() -> None:
    torch.manual_seed(0)
    net = CTran(Mlp(4, (8,)), 5, heads=2, inducing=1)
    net(torch.randn(2, 4), torch.zeros(2, 5, dtype=torch.int8)).square().sum().backward()
    assert net.inducing is not None and net.inducing.grad is not None
    assert net.inducing.grad.any()


def operations(inducing: int | None, classes: int) -> int:
    """Of matrix products, in a step's way there and back, as torch counts them."""
    net = model(inducing, classes).train()
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(2, 1, 8, 8), torch.zeros(2, classes, dtype=torch.int8)).sum().backward()
    return int(counter.get_total_flops())


def test_operations_grow_with_the_labels_and_not_with_their_square() -> None:
    linear, full = ([operations(m, c) for c in (40, 80, 120, 160)] for m in (INDUCING, None))
    assert np.diff(linear, 2).tolist() == [0, 0]
    # 2 samples, 3 layers, q·k and weights·v, 2 a multiply-add, three times: there and for two gradients
    assert np.diff(full, 2).tolist() == [2 * 3 * 2 * 2 * WIDTH * 3 * 2 * 40**2] * 2


# ---- attention with dropout, of matrices that are too large to be kept


def gradients(read: Callable[..., Tensor], inputs: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    torch.manual_seed(5)
    out = read(*leaves, **options)
    out.square().sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def test_large_attention_matrices_are_recomputed_with_the_same_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    inputs = tuple(torch.randn(3, 4, length, 8) for length in (6, 10, 10))
    kept = gradients(class_attention._read_with_dropout, inputs, p=0.3)
    shapes: list[tuple[int, ...]] = []
    weights = class_attention._weights
    monkeypatch.setattr(class_attention, "_weights", lambda q, k: (shapes.append(tuple(q.shape)), weights(q, k))[1])
    monkeypatch.setattr(class_attention, "MAX_STORED_WEIGHTS", 3 * 4 * 6 * 10)
    assert all(map(torch.equal, gradients(class_attention._read_with_dropout, inputs, p=0.3), kept))
    assert shapes == [(3, 4, 6, 8)]
    shapes.clear()
    monkeypatch.setattr(class_attention, "MAX_STORED_WEIGHTS", 3 * 4 * 6 * 10 - 1)
    again = gradients(class_attention._read_with_dropout, inputs, p=0.3)
    torch.testing.assert_close(again, kept)
    assert shapes == [(1, 4, 6, 8)] * 6  # each sample there and back
