"""A model as one vector, with BatchNorm: its running statistics are in the vector, its counters beside it."""

import torch
from torch import Tensor, nn

from fedmll.models.flat_weights import FlatWeights


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    model.register_buffer("frozen", torch.arange(4.0), persistent=False)
    model[3].bias.requires_grad = False
    return model


def deep_model() -> nn.Module:
    """Twelve BatchNorm layers of different widths, so that names and counters cross a digit; a buffer of its own."""
    layers: list[nn.Module] = []
    for width in range(1, 13):
        layers += [nn.Linear(width, width + 1), nn.BatchNorm1d(width + 1)]
    model = nn.Sequential(*layers)
    model.register_buffer("seen", torch.tensor([[3, 1], [4, 1]]))
    return model


def trained(model: nn.Module, batches: int) -> list[Tensor]:
    """The state that training gives, taken before anything is bound."""
    model.train()
    for batch in range(batches):
        model(torch.randn(6, 1) + batch)
    return [value.clone() for value in model.state_dict().values()]


def test_vector_holds_parameters_then_float_buffers() -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flat = FlatWeights(model)
    expected = [before[n].flatten() for n in ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight")]
    expected += [before[n].flatten() for n in ("1.running_mean", "1.running_var")]
    assert torch.equal(flat.vector, torch.cat(expected))
    assert flat.parameter_end == 18 + 2 + 2 + 2 + 24
    assert flat.counters.tolist() == [0]
    assert set(flat.named(flat.dump())) == set(before) - {"3.bias"}  # frozen: neither sent nor averaged


def test_training_and_loading_go_through_the_vector() -> None:
    model = make_model()
    flat = FlatWeights(model)
    start = flat.dump()
    optimizer = torch.optim.SGD(flat.parameters, 0.1)
    model(torch.randn(5, 1, 4, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(flat.vector, start["weights"])
    assert flat.counters.tolist() == [1]  # BatchNorm counted its batch, in the vector
    assert not torch.equal(model[1].running_mean, torch.zeros(2))
    flat.load(start)
    assert torch.equal(flat.vector, start["weights"])
    assert flat.counters.tolist() == [0]
    assert torch.equal(model[1].running_mean, torch.zeros(2))
    assert torch.equal(model[0].weight.flatten(), start["weights"][:18])


def test_named_gives_what_load_state_dict_takes() -> None:
    first, second = make_model(), make_model()
    flat = FlatWeights(first)
    second.load_state_dict(flat.named(flat.dump()), strict=False)
    assert torch.equal(second[3].weight, first[3].weight)
    assert torch.equal(second[0].bias, first[0].bias)


def test_binding_changes_no_value_and_every_tensor_keeps_its_name() -> None:
    model = deep_model()
    before = dict(zip(model.state_dict(), trained(model, 3), strict=True))
    flat = FlatWeights(model)
    named = flat.named(flat.dump())
    assert named.keys() == before.keys()
    for name, value in before.items():
        told = torch.zeros_like(value) if name.endswith("num_batches_tracked") else value  # nobody's business
        assert torch.equal(named[name], told), name
        assert torch.equal(model.state_dict()[name], value), name
    assert flat.counters.tolist() == [3, 1, 4, 1, *[3] * 12]  # the model's own buffer, then each layer's batches
    assert flat.parameter_end == sum((w + 1) * w + 3 * (w + 1) for w in range(1, 13))
    assert len(flat.vector) == flat.parameter_end + sum(2 * (w + 1) for w in range(1, 13))


def test_another_model_that_loads_the_vector_predicts_the_same_in_eval_mode() -> None:
    """Running statistics travel too: without them BatchNorm would still be that of the start."""
    first, second = deep_model(), deep_model()
    trained(first, 4)
    sent, received = FlatWeights(first), FlatWeights(second)
    received.load(sent.dump())
    x = torch.randn(5, 1)
    fresh = deep_model()
    fresh.load_state_dict(dict(first.named_parameters()), strict=False)
    assert torch.equal(first.eval()(x), second.eval()(x))
    assert not torch.allclose(first(x), fresh.eval()(x))
    assert received.counters.tolist() == [3, 1, 4, 1, *[0] * 12]  # how many batches it saw is not told


def test_batch_counts_that_are_used_are_sent() -> None:
    """Without a momentum the statistics are means over all batches: the count belongs to them."""
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=None), nn.BatchNorm1d(2))
    trained(model[:1], 0)
    for _ in range(3):
        model(torch.randn(4, 2))
    assert FlatWeights(model).dump()["counters"].tolist() == [3, 0]


def test_variances_are_found_in_a_vector_that_lacks_rows() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 5), nn.BatchNorm1d(5))
    flat = FlatWeights(model)
    model[0].running_var.fill_(7)
    model[2].running_var.fill_(7)
    whole = flat.dump()["weights"]
    assert [whole[place].tolist() for place in flat.variances(len(whole))] == [[7] * 2, [7] * 5]
    assert sum(place.stop - place.start for place in flat.variances(len(whole))) == int((whole == 7).sum())
    assert flat.buffer_count == 2 * (2 + 5)
    short = torch.cat([whole[:4], whole[7:]])  # three parameters fewer
    assert [short[place].tolist() for place in flat.variances(len(short))] == [[7] * 2, [7] * 5]


def test_dump_is_a_copy() -> None:
    model = deep_model()
    flat = FlatWeights(model)
    dumped = flat.dump()
    model.train()(torch.randn(6, 1))
    flat.vector.add_(1)
    assert dumped["counters"].tolist() == [3, 1, 4, 1, *[0] * 12]
    assert torch.equal(flat.dump()["weights"][: flat.parameter_end], dumped["weights"][: flat.parameter_end] + 1)


def test_no_counters_are_sent_if_there_are_none() -> None:
    model = nn.Linear(2, 3)
    flat = FlatWeights(model)
    dumped = flat.dump()
    assert set(dumped) == {"weights"}
    model.weight.data.zero_()
    flat.load(dumped)
    assert torch.equal(model.weight.flatten(), dumped["weights"][:6])
    assert set(flat.named(dumped)) == {"weight", "bias"}
