"""The flat vector: a network's parameters and gradients are views of it, tensor by tensor."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedspa.errors import UserError
from fedspa.models.small_cnn import SmallCNN
from fedspa.weights import ParameterSpace, all_finite, bind


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2, bias=False)).double()


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def test_space_lists_the_tensors_in_the_networks_order():
    space = ParameterSpace.of(network())
    assert space.names == ("0.weight", "0.bias", "2.weight")
    assert space.shapes == ((2, 3), (2,), (2, 2))
    assert (space.sizes, space.total) == ((6, 2, 4), 12)


def test_split_items_and_count():
    space, vector = ParameterSpace.of(network()), torch.arange(12.0)
    assert [piece.tolist() for piece in space.split(vector)] == [[0, 1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11]]
    assert {name: tensor.tolist() for name, tensor in space.items(vector)} == {
        "0.weight": [[0, 1, 2], [3, 4, 5]],
        "0.bias": [6, 7],
        "2.weight": [[8, 9], [10, 11]],
    }
    for mask in (vector % 3 == 0, (vector % 3 == 0).double()):
        assert space.count(mask) == space.count_by_sums(mask) == (2, 1, 1)
    dict(space.items(vector))["0.bias"].zero_()  # items are views
    assert vector[6:8].tolist() == [0, 0]


def test_bind_keeps_the_values():
    plain = SmallCNN(channels=1, image_size=8, classes=3)
    before = [parameter.detach().clone() for parameter in plain.parameters()]
    weights = bind(plain)
    assert torch.equal(weights.detach(), flat(before))
    for parameter, old in zip(plain.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def test_writing_either_side_writes_the_other():
    bound = network()
    weights = bind(bound)
    with torch.no_grad():
        weights.copy_(torch.arange(12.0))
        assert bound[0].bias.tolist() == [6, 7]
        bound[2].weight[1, 0] = -1
        assert weights[10] == -1
        weights.grad[7] = 5
        assert bound[0].bias.grad.tolist() == [0, 5]


def test_backward_accumulates_in_the_flat_gradient():
    bound, plain = network(), network()
    plain.load_state_dict(bound.state_dict())
    weights = bind(bound)
    gradient = weights.grad
    inputs = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for times in (1, 2):
        bound(inputs).square().sum().backward()
        plain(inputs).square().sum().backward()
        assert weights.grad is gradient and gradient.abs().max() > 0
        assert torch.equal(gradient, flat(p.grad for p in plain.parameters())), times


def test_a_network_with_buffers_is_refused_by_their_name():
    with pytest.raises(UserError, match="keeps 1.running_mean beside its parameters"):
        bind(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_found(value):
    vector = torch.linspace(-1, 1, 100)
    assert all_finite(vector) and all_finite(vector[:0])
    vector[37] = value
    assert not all_finite(vector)
