"""C-Tran against torch's own transformer encoder."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedmll.models.backbones import ConvNet, Mlp
from fedmll.models.ctran import CTran, EncoderLayer, LabelEmbeddings
from fedmll.models.flat import FlatWeights

CLASSES, WIDTH = 5, 16


def backbone() -> ConvNet:
    return ConvNet(1, 8, (8, WIDTH), "group")


def model(seed: int = 0, embeddings: LabelEmbeddings | None = None) -> CTran:
    torch.manual_seed(seed)
    return CTran(backbone(), CLASSES, embeddings)


def as_torchs(layer: EncoderLayer) -> nn.TransformerEncoderLayer:
    width = layer.norm1.normalized_shape[0]
    attention, hidden = layer.attention, layer.hidden.out_features
    reference = nn.TransformerEncoderLayer(width, attention.heads, hidden, layer.dropout, batch_first=True).eval()
    with torch.no_grad():
        reference.self_attn.in_proj_weight.copy_(torch.cat([attention.query.weight, attention.key_value.weight]))
        reference.self_attn.in_proj_bias.copy_(torch.cat([attention.query.bias, attention.key_value.bias]))
    pairs = [
        (reference.self_attn.out_proj, attention.out),
        (reference.linear1, layer.hidden),
        (reference.linear2, layer.out),
        (reference.norm1, layer.norm1),
        (reference.norm2, layer.norm2),
    ]
    for theirs, ours in pairs:
        theirs.load_state_dict(ours.state_dict())
    return reference


def randomised(network: nn.Module) -> None:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))


def test_model_is_torchs_encoder_over_image_and_label_tokens() -> None:
    net = model().eval()
    randomised(net)
    images, states = torch.randn(3, 1, 8, 8), torch.tensor([[1, 0, -1, -1, 0], [-1] * 5, [1, 1, 1, 0, 0]])
    table = {-1: torch.zeros(WIDTH), 0: net.states[0], 1: net.states[1]}
    labels = torch.stack(
        [torch.stack([net.labels[c] + table[s] for c, s in enumerate(row)]) for row in states.tolist()]
    )
    map_ = net.backbone(images)
    image_tokens = torch.stack([map_[:, :, i, j] for i in range(map_.shape[2]) for j in range(map_.shape[3])], 1)
    tokens = net.norm(torch.cat([image_tokens, labels], 1))
    for layer in net.layers:
        tokens = as_torchs(layer)(tokens)
    head = nn.Linear(WIDTH, CLASSES)
    head.weight, head.bias = net.weight, net.bias
    expected = head(tokens[:, -CLASSES:]).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(net(images, states), expected, atol=2e-5, rtol=1e-4)
    assert len(net.layers) == 3
    assert net.layers[0].hidden.out_features == WIDTH  # FFN width d
    assert net.layers[0].attention.heads == 4


def test_no_states_means_all_unknown() -> None:
    net = model().eval()
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(net(images), net(images, torch.full((2, CLASSES), -1, dtype=torch.int8)))


def test_a_known_label_changes_the_others() -> None:
    net = model().eval()
    images = torch.randn(1, 1, 8, 8)
    states = torch.tensor([[1, -1, -1, -1, -1]])
    assert not torch.isclose(net(images)[0, 1:], net(images, states)[0, 1:], atol=1e-5).any()


def test_dropout_is_on_in_training_only_and_comes_from_torchs_seed() -> None:
    net = model()
    images = torch.randn(2, 1, 8, 8)
    torch.manual_seed(3)
    first = net(images)
    second = net(images)
    torch.manual_seed(3)
    assert torch.equal(first, net(images))
    assert not torch.equal(first, second)
    net.eval()
    assert torch.equal(net(images), net(images))


def test_frozen_embeddings_are_not_sent_and_the_rest_starts_the_same() -> None:
    given = LabelEmbeddings(torch.randn(CLASSES, WIDTH), torch.randn(2, WIDTH))
    frozen, learned = model(1, given), model(1)
    assert torch.equal(frozen.labels, given.labels)
    assert torch.equal(frozen.states, given.states)
    assert not {"labels", "states"} & set(FlatWeights(frozen).layout)
    assert {"labels", "states"} <= set(FlatWeights(learned).layout)
    for name, parameter in frozen.named_parameters():
        assert torch.equal(parameter, learned.get_parameter(name)), name


@pytest.mark.parametrize("classes", [1, 3])
def test_one_token_and_few_classes(classes: int) -> None:
    net = CTran(Mlp(4, (8,)), classes, heads=2)
    logits = net(torch.randn(2, 4), torch.zeros(2, classes, dtype=torch.int8))
    logits.sum().backward()
    assert logits.shape == (2, classes)
    assert net.states.grad is not None
    assert net.states.grad[0].any()
    assert not net.states.grad[1].any()  # nothing was positive
