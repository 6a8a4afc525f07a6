import torch
from torch import nn

from fedmll.models.flat import FlatWeights


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    model.register_buffer("frozen", torch.arange(4.0), persistent=False)
    model[3].bias.requires_grad = False
    return model


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
