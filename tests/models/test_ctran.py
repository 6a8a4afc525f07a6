"""C-Tran against torch's own transformer encoder."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedmll.models import class_attention, ctran
from fedmll.models.backbones.convolutional import ConvNet
from fedmll.models.backbones.mlp import Mlp
from fedmll.models.ctran import CTran, EncoderLayer, LabelEmbeddings
from fedmll.models.flat_weights import FlatWeights

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


def test_attention_is_the_last_layers_from_labels_to_the_image() -> None:
    """As torch's own attention gives it, after all layers but the last."""
    net = model().eval()
    randomised(net)
    images = torch.randn(2, 1, 8, 8)
    rows, columns = net.tokens(images).shape[2:]
    image_tokens = net.tokens(images).flatten(2).transpose(1, 2)
    tokens = net.norm(torch.cat([image_tokens, net.labels.expand(2, -1, -1)], 1))
    for layer in net.layers[:-1]:
        tokens = as_torchs(layer)(tokens)
    torchs = as_torchs(net.layers[-1]).self_attn
    _, weights = torchs(tokens, tokens, tokens, need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    expected = weights[:, :, -CLASSES:, : rows * columns].reshape(2, 4, CLASSES, rows, columns)
    found = net.class_maps(images)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    to_labels = weights[:, :, -CLASSES:, rows * columns :].sum(-1)
    torch.testing.assert_close(found.sum((-1, -2)) + to_labels, torch.ones(2, 4, CLASSES))


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


def test_dropout_is_in_four_places_of_a_layer_at_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's layer has it: attention weights, attention output, hidden units, output. If all is dropped, what
    is left of a layer are its two norms, whose input is the residual."""
    rates: list[tuple[str, float]] = []

    def drops_all(where: str) -> Callable[[Tensor, float], Tensor]:
        def dropout(x: Tensor, p: float) -> Tensor:
            rates.append((where, p))
            return torch.zeros_like(x)

        return dropout

    monkeypatch.setattr(ctran, "dropout", drops_all("layer"))
    monkeypatch.setattr(class_attention, "dropout", drops_all("attention"))
    net = model().train()
    randomised(net)
    tokens = torch.randn(2, 9, WIDTH)
    layer = net.layers[0]
    found = layer(tokens[:, 4:], tokens)
    torch.testing.assert_close(found, layer.norm2(layer.norm1(tokens[:, 4:])))
    assert rates == [("attention", 0.1), ("layer", 0.1), ("layer", 0.1), ("layer", 0.1)]
    rates.clear()
    net(torch.randn(2, 1, 8, 8))
    assert len(rates) == 3 * 4
    torch.manual_seed(0)
    none = CTran(backbone(), CLASSES, dropout=0.0).train()
    rates.clear()
    none(torch.randn(2, 1, 8, 8))
    assert rates == []


def test_in_training_without_dropout_it_is_the_same_network() -> None:
    """GroupNorm and LayerNorm have one mode, so only dropout tells training from evaluation."""
    torch.manual_seed(0)
    net = CTran(backbone(), CLASSES, dropout=0.0)
    images, states = torch.randn(3, 1, 8, 8), torch.randint(-1, 2, (3, CLASSES))
    torch.testing.assert_close(net.train()(images, states), net.eval()(images, states), atol=1e-5, rtol=1e-5)


def test_batch_norm_in_the_backbone_follows_the_mode() -> None:
    torch.manual_seed(0)
    net = CTran(ConvNet(1, 8, (8, WIDTH), "batch"), CLASSES, dropout=0.0)
    images = torch.randn(4, 1, 8, 8) * 3 + 1
    net.eval()
    alone = torch.cat([net(image[None]) for image in images])
    torch.testing.assert_close(net(images), alone, atol=1e-5, rtol=1e-4)  # in eval mode a batch does not matter
    assert not torch.allclose(net.train()(images), alone, atol=1e-3)


def test_what_is_learned_starts_as_torchs_linear_layers_do() -> None:
    """U(±1/√d): the head's weights and bias, label and state embeddings."""
    torch.manual_seed(0)
    net = CTran(Mlp(4, (256,)), 40)
    for tensor in (net.weight, net.bias, net.labels, net.states):
        assert 0.85 / 16 < tensor.abs().max().item() <= 1 / 16
        assert abs(tensor.mean().item()) < 0.02
        assert tensor.std().item() == pytest.approx(1 / 16 / 3**0.5, rel=0.3)
    assert net.weight.shape == net.labels.shape == (40, 256)
    assert net.states.shape == (2, 256) and net.bias.shape == (40,)


def test_more_than_nine_classes_keep_their_own_tokens_and_rows() -> None:
    """Twelve labels: what is known of one changes its own token only, and a row of the head reads its own label."""
    torch.manual_seed(0)
    net = CTran(backbone(), 12).eval()
    states = torch.full((2, 12), -1)
    states[0, 10], states[1, 11] = 1, 0
    tokens = net.label_tokens(states, 2)
    expected = net.labels.detach().expand(2, -1, -1).clone()
    expected[0, 10] += net.states[1].detach()
    expected[1, 11] += net.states[0].detach()
    torch.testing.assert_close(tokens, expected)
    images = torch.randn(1, 1, 8, 8)
    before = net(images).detach()
    with torch.no_grad():
        net.bias[11] += 1
        net.weight[2] += torch.randn(WIDTH)
    changed = (net(images) - before).abs()[0] > 1e-4
    assert changed.nonzero().flatten().tolist() == [2, 11]
