"""Costs of a network: by hand and by PyTorch's counter. The paper's tables are in test_cost_report.py."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedspa.core.errors import UserError
from fedspa.core.records import Costs
from fedspa.core.weights import ParameterSpace
from fedspa.costs.network import NetworkCosts
from fedspa.models.lenet5 import LeNet5
from fedspa.models.resnet18 import ResNet18
from fedspa.models.small_cnn import SmallCNN
from fedspa.models.vgg11 import VGG11

LENET_5, VGG_11, RESNET_18 = LeNet5(1, 28, 26), VGG11(3, 32, 10), ResNet18(3, 32, 100)


@pytest.mark.parametrize(
    ("network", "input_shape", "parameters", "flops"),
    [
        (LENET_5, (1, 28, 28), 439_096, 4_617_246),
        (VGG_11, (3, 32, 32), 9_231_114, 305_690_634),
        (RESNET_18, (3, 32, 32), 11_220_132, 1_110_937_700),
    ],
    ids=["lenet5", "vgg11", "resnet18"],
)
def test_dense_networks_of_the_paper(network, input_shape, parameters, flops):
    costs = NetworkCosts.of(network, input_shape)
    assert (costs.parameters, costs.forward_flops()) == (parameters, flops)


GROUPED = nn.Sequential(
    nn.Conv2d(4, 8, 3, stride=2, groups=2), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(72, 5)
)


@pytest.mark.parametrize(
    ("network", "input_shape"),
    [
        (LENET_5, (1, 28, 28)),
        (LeNet5(3, 32, 10), (3, 32, 32)),
        (VGG_11, (3, 32, 32)),
        (RESNET_18, (3, 32, 32)),
        (SmallCNN(1, 8, 10), (1, 8, 8)),
        (GROUPED.eval(), (4, 8, 8)),
    ],
    ids=["lenet5", "lenet5_rgb", "vgg11", "resnet18", "small_cnn", "grouped"],
)
def test_weights_agree_with_pytorchs_counter_which_leaves_biases_out(network, input_shape):
    shapes = ParameterSpace.of(network).shapes
    without_biases = [math.prod(shape) if len(shape) >= 2 else 0 for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, *input_shape))
    assert NetworkCosts.of(network, input_shape).forward_flops(without_biases) == counter.get_total_flops()


def test_by_hand():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    costs = NetworkCosts.of(network, (1, 4, 4))  # the convolution has 2 x 2 output positions
    assert costs.sizes == (18, 2, 2, 2, 24, 3)
    assert costs.forward_flops() == (2 * 18 + 2) * 4 + 2 * 24 + 3
    active = [10, 1, 2, 2, 5, 3]
    assert costs.forward_flops(active) == (2 * 10 + 1) * 4 + 2 * 5 + 3
    assert costs.training_flops(active, 7) == 3 * 97 * 7
    assert costs.search_flops(7) == 3 * 203 * 7
    assert costs.value_bytes(active) == 4 * 23
    assert costs.value_bytes() == 4 * 51


@pytest.mark.parametrize(("convention", "wanted"), [("honest", 6), ("paper", 0)])
def test_mask_bits_travel_for_tensors_that_are_neither_full_nor_empty(convention, wanted):
    costs = NetworkCosts(sizes=(18, 2, 24), flops_per_active=(0, 0, 0), convention=convention)
    assert costs.mask_bytes([10, 2, 5]) == wanted  # 42 bits
    assert costs.mask_bytes([0, 2, 24]) == 0


def test_a_shared_layer_counts_for_each_use():
    shared = nn.Linear(4, 4)
    network = nn.Sequential(nn.Flatten(), shared, nn.ReLU(), shared)
    assert NetworkCosts.of(network, (1, 2, 2)).forward_flops() == 2 * (2 * 16 + 4)
    tied = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 4))
    tied[2].weight = tied[1].weight
    costs = NetworkCosts.of(tied, (1, 2, 2))
    assert costs.sizes == (16, 4, 4)
    assert costs.forward_flops() == 2 * (2 * 16 + 4)


def test_counting_leaves_the_network_as_it_was():
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(), nn.Flatten(), nn.Linear(8, 3)
    )
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    rng = torch.get_rng_state()
    NetworkCosts.of(network.double(), (1, 4, 4))
    assert network.training and all(layer.training for layer in network)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.float().state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert not any(layer._forward_hooks for layer in network)


def test_a_layer_that_cannot_be_counted_leaves_flops_open_and_bytes_exact():
    network = nn.Sequential(nn.Identity(), nn.Sequential(nn.ConvTranspose2d(1, 1, 3)), nn.Flatten())
    costs = NetworkCosts.of(network, (1, 2, 2))
    assert (
        len(costs.uncounted) == 1 and "1.0" in costs.uncounted[0] and "ConvTranspose2d" in costs.uncounted[0]
    )
    assert costs.forward_flops() is None and costs.training_flops(None, 5) is None
    assert costs.value_bytes() == 4 * (9 + 1)


def test_a_layer_whose_weight_is_used_behind_its_back_is_named():
    class Sly(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return x.flatten(1) @ self.fc.weight.T

    costs = NetworkCosts.of(Sly(), (1, 2, 2))
    assert costs.forward_flops() is None and "fc" in costs.uncounted[0]


def test_an_unknown_convention_is_refused():
    with pytest.raises(UserError, match="costs.convention=papr is not known: did you mean paper?"):
        NetworkCosts.of(nn.Linear(2, 1), (2,), "papr")


AMOUNTS = st.builds(Costs, *[st.integers(0, 10**18)] * 5)


@given(a=AMOUNTS, b=AMOUNTS, c=AMOUNTS)
def test_costs_add_up_exactly_in_any_order(a, b, c):
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + Costs() == a
    assert (a + b).flops == a.flops + b.flops
    assert (a + b).traffic_bytes == a.traffic_bytes + b.traffic_bytes
