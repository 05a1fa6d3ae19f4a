"""The flat vector: a network's parameters and gradients are views of it, tensor by tensor."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedspa.core.errors import UserError
from fedspa.core.weights import ParameterSpace, all_finite, bind
from fedspa.models.small_cnn import SmallCNN


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
        assert space.count(mask) == tuple(space.counts_by_sums(mask.bool()).tolist()) == (2, 1, 1)
    dict(space.items(vector))["0.bias"].zero_()  # items are views
    assert vector[6:8].tolist() == [0, 0]


def test_bind_keeps_the_values():
    plain = SmallCNN(channels=1, image_size=8, classes=3)
    before = [parameter.detach().clone() for parameter in plain.parameters()]
    weights, _ = bind(plain)
    assert torch.equal(weights.detach(), flat(before))
    for parameter, old in zip(plain.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def test_writing_either_side_writes_the_other():
    bound = network()
    weights, _ = bind(bound)
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
    weights, _ = bind(bound)
    gradient = weights.grad
    inputs = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for times in (1, 2):
        bound(inputs).square().sum().backward()
        plain(inputs).square().sum().backward()
        assert weights.grad is gradient and gradient.abs().max() > 0
        assert torch.equal(gradient, flat(p.grad for p in plain.parameters())), times


def test_running_statistics_lie_behind_the_parameters():
    bound = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    space = ParameterSpace.of(bound)
    assert space.names[-2:] == ("1.running_mean", "1.running_var") and space.statistics == 2
    assert (space.trained, space.total) == (42, 46)
    assert space.parameters.names == space.names[:-2] and space.parameters.total == 42
    assert space.running.shapes == ((2,), (2,))
    weights, vector = bind(bound)
    assert weights.shape == weights.grad.shape == (42,) and vector.shape == (46,)
    assert vector[42:].tolist() == [0, 0, 1, 1]
    vector[42:] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert bound[1].running_mean.tolist() == [1, 2] and bound[1].running_var.tolist() == [3, 4]
    bound(torch.zeros(5, 1, 4, 4))  # zeros and the bias: the variance of a batch is 0
    assert vector[44:].tolist() == pytest.approx([2.7, 3.6]) and bound[1].num_batches_tracked is None


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Counter(), "keeps 1.calls beside its parameters"),
        (nn.InstanceNorm2d(2, track_running_stats=True), "keeps 1.running_mean beside its parameters"),
        (nn.BatchNorm2d(2, momentum=None), "layer 1 averages over all batches that it ever saw"),
    ],
)
def test_other_state_is_refused_by_its_name(layer, message):
    with pytest.raises(UserError, match=message):
        bind(nn.Sequential(nn.Conv2d(1, 2, 3), layer))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_found(value):
    vector = torch.linspace(-1, 1, 100)
    assert all_finite(vector) and all_finite(vector[:0])
    vector[37] = value
    assert not all_finite(vector)
