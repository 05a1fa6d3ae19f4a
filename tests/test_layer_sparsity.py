"""Layer sparsity: the published densities to the last parameter, and what holds for any network."""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from math import floor, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspa.core.errors import UserError
from fedspa.layer_sparsity.er import ErdosRenyi
from fedspa.layer_sparsity.erk import ErdosRenyiKernel
from fedspa.layer_sparsity.flow import counts_with_flow
from fedspa.layer_sparsity.uniform import Uniform
from fedspa.models.lenet5 import LeNet5
from fedspa.models.resnet18 import ResNet18
from fedspa.models.vgg11 import VGG11
from fedspa.runs.experiment import run

RULES = {"erk": ErdosRenyiKernel, "er": ErdosRenyi, "uniform": Uniform}
SHAPES = st.lists(st.lists(st.integers(1, 40), max_size=4).map(tuple), max_size=12)
DENSITIES = st.fractions(0, 1, max_denominator=1000)
HALF = Fraction(1, 2)


def make(rule, **options):
    return RULES[rule](name=rule, **options)


@pytest.mark.parametrize(
    ("network", "sparse"),
    [
        (LeNet5(1, 28, 26), {"conv2.weight": 11_910, "fc3.weight": 193_541}),
        (
            VGG11(3, 32, 10),
            {
                "features.conv4.weight": 500_245,
                "features.conv5.weight": 747_470,
                "features.conv6.weight": 994_695,
                "features.conv7.weight": 994_695,
                "features.conv8.weight": 994_695,
            },
        ),
        (
            ResNet18(3, 32, 100),
            {
                "layer3.0.conv2.weight": 422_291,
                "layer3.1.conv1.weight": 422_291,
                "layer3.1.conv2.weight": 422_291,
                "layer4.0.conv1.weight": 630_991,
                "layer4.0.conv2.weight": 839_691,
                "layer4.1.conv1.weight": 839_691,
                "layer4.1.conv2.weight": 839_691,
            },
        ),
    ],
    ids=["lenet5", "vgg11", "resnet18"],
)
def test_erk_at_half_gives_the_papers_count_in_every_tensor(network, sparse):
    tensors = dict(network.named_parameters())
    counts = make("erk").active_counts([tuple(p.shape) for p in tensors.values()], HALF)
    assert dict(zip(tensors, counts, strict=True)) == {
        name: sparse.get(name, p.numel()) for name, p in tensors.items()
    }


def test_erk_by_hand():
    # raw: 13/40, 1 (bias), 10/24. The budget is 37; without the bias, 32 = eps x (13 + 10).
    eps = Fraction(32, 23)
    shapes = [(5, 8), (5,), (4, 6)]
    assert make("erk").densities(shapes, Fraction(37, 69)) == [
        eps * Fraction(13, 40),
        1,
        eps * Fraction(10, 24),
    ]
    assert make("erk").active_counts(shapes, Fraction(37, 69)) == [18, 5, 13]


def test_er_is_blind_to_the_kernel():
    # raw: (4 + 2) / 8 for both; 28 = eps x (6 x 9 + 6) and eps x 6 / 8 < 1.
    assert make("er").densities([(4, 2, 3, 3), (4, 2)], Fraction(28, 80)) == [Fraction(7, 20)] * 2
    assert make("er").raw((4, 2)) == make("erk").raw((4, 2))
    # raw: 1 for the bias, whatever its length, and 6 / 8; 11 = eps x (5 + 6).
    assert make("er").densities([(5,), (4, 2)], Fraction(11, 13)) == [1, Fraction(6, 8)]


def test_all_tensors_at_the_maximum_become_dense_together():
    densities = make("erk").densities([(2, 2), (2, 2), (100, 100)], Fraction(1, 4))
    assert densities == [1, 1, (Fraction(10_008, 4) - 8) / 10_000]


def test_the_density_is_an_exact_decimal():
    """floor(0.2 x 10) is 2, while 1 - 0.8 in binary gives 1.9999999999999996."""
    assert make("uniform").active_counts([(10,)], 1 - Fraction("0.8")) == [2]


@given(shapes=SHAPES, density=DENSITIES, rule=st.sampled_from(list(RULES)))
def test_the_budget_is_spent_but_for_the_rounding_and_never_exceeded(shapes, density, rule):
    counts = make(rule).active_counts(shapes, density)
    budget = density * sum(map(prod, shapes))
    assert all(0 <= count <= prod(shape) for count, shape in zip(counts, shapes, strict=True))
    assert sum(counts) <= budget
    assert not shapes or budget - sum(counts) < len(shapes)


@given(shapes=SHAPES, rule=st.sampled_from(list(RULES)))
def test_density_one_is_dense_and_zero_is_empty(shapes, rule):
    assert make(rule).active_counts(shapes, Fraction(1)) == [prod(shape) for shape in shapes]
    assert make(rule).active_counts(shapes, Fraction(0)) == [0] * len(shapes)


@given(shapes=SHAPES, density=DENSITIES)
def test_uniform_rounds_every_tensor_down(shapes, density):
    assert make("uniform").active_counts(shapes, density) == [
        floor(density * prod(shape)) for shape in shapes
    ]


@given(shapes=SHAPES, density=DENSITIES, rule=st.sampled_from(list(RULES)))
def test_scope_weights_leaves_small_tensors_dense_and_out_of_the_budget(shapes, density, rule):
    counts = make(rule, mask_scope="weights").active_counts(shapes, density)
    weights = [shape for shape in shapes if len(shape) >= 2]
    alone = iter(make(rule).active_counts(weights, density))
    assert counts == [next(alone) if len(shape) >= 2 else prod(shape) for shape in shapes]


@given(shapes=SHAPES, density=DENSITIES, rule=st.sampled_from(list(RULES)), order=st.randoms())
def test_the_order_of_tensors_does_not_matter(shapes, density, rule, order):
    counts = make(rule).active_counts(shapes, density)
    shuffled = list(range(len(shapes)))
    order.shuffle(shuffled)
    again = make(rule).active_counts([shapes[i] for i in shuffled], density)
    assert again == [counts[i] for i in shuffled]


@given(shapes=SHAPES, density=DENSITIES, rule=st.sampled_from(list(RULES)), least=st.integers(1, 50))
def test_each_tensor_keeps_its_minimum_within_the_budget_where_that_can_be(shapes, density, rule, least):
    sizes = [prod(shape) for shape in shapes]
    minima = [min(size, least) for size in sizes]
    counts = make(rule, min_active=least).active_counts(shapes, density)
    assert all(low <= count <= size for low, count, size in zip(minima, counts, sizes, strict=True))
    budget = density * sum(sizes)
    if budget < sum(minima):
        assert counts == minima
    else:
        assert sum(counts) <= budget and (not shapes or budget - sum(counts) < len(shapes))
    free = make(rule).active_counts(shapes, density)
    if all(count >= low for count, low in zip(free, minima, strict=True)):
        assert counts == free


def test_a_minimum_by_hand():
    # 240 / 11: uniform gives 18, 2 and 0. The last gets 1; what is left is 0.0905 of the other 230: again 18 and 2.
    assert make("uniform", min_active=1).active_counts([(10, 20), (3, 10), (5, 2)], Fraction(1, 11)) == [
        18,
        2,
        1,
    ]
    assert make("uniform").active_counts([(10, 20), (3, 10), (5, 2)], Fraction(1, 11)) == [18, 2, 0]
    # 9 of 120: 2 for each of the small ones leave 5 of 100.
    assert make("uniform", min_active=2).active_counts([(10, 10), (10,), (10,)], Fraction(9, 120)) == [
        5,
        2,
        2,
    ]


def test_with_a_minimum_the_papers_counts_stay():
    shapes = [tuple(p.shape) for p in VGG11(3, 32, 10).parameters()]
    assert make("erk", min_active=1).active_counts(shapes, HALF) == make("erk").active_counts(shapes, HALF)


NAMES, SHAPES_OF_TWO = (
    ["conv.weight", "conv.bias", "fc.weight", "fc.bias"],
    [(4, 1, 5, 5), (4,), (10, 40), (10,)],
)


def test_a_network_through_which_nothing_can_flow_is_refused_with_what_would_work():
    with pytest.raises(UserError) as caught:
        counts_with_flow(make("uniform"), NAMES, SHAPES_OF_TWO, 0.999)
    told = str(caught.value)
    assert (
        "sparsity=0.999 " in told
        and "layer_sparsity=uniform" in told
        and "layer_sparsity.min_active=1" in told
    )
    assert "conv.weight" in told and "fc.weight" not in told
    assert "sparsity=0.99 " in told  # 1 of 100
    assert counts_with_flow(make("uniform"), NAMES, SHAPES_OF_TWO, 0.99) == [1, 0, 4, 0]
    assert counts_with_flow(make("uniform", min_active=1), NAMES, SHAPES_OF_TWO, 0.999) == [1, 1, 1, 1]


@pytest.mark.parametrize("rule", RULES)
def test_the_largest_sparsity_that_is_told_works_and_the_next_does_not(rule):
    network = dict(LeNet5(1, 28, 26).named_parameters())
    shapes = [tuple(p.shape) for p in network.values()]
    with pytest.raises(UserError) as caught:
        counts_with_flow(make(rule), list(network), shapes, 0.99999)
    largest = re.search(r"above sparsity=([\d.]+) ", str(caught.value))
    assert largest
    assert all(counts_with_flow(make(rule), list(network), shapes, float(largest[1]))[::2])
    with pytest.raises(UserError):
        counts_with_flow(make(rule), list(network), shapes, float(largest[1]) + 2e-6)


def test_the_scale_of_a_norm_is_a_layer_too():
    names, shapes = ["fc.weight", "norm.weight", "norm.bias"], [(100, 100), (8,), (8,)]
    with pytest.raises(UserError, match="no active parameter in norm.weight"):
        counts_with_flow(make("uniform"), names, shapes, 0.9)


def test_a_searcher_of_its_own_counts_needs_an_active_parameter_a_layer():
    assert sum(counts_with_flow(make("uniform"), NAMES, SHAPES_OF_TWO, 0.994, by_tensor=False)) == 2
    with pytest.raises(UserError, match="leaves 0 active parameters for 2 layers"):
        counts_with_flow(make("uniform"), NAMES, SHAPES_OF_TWO, 0.999, by_tensor=False)


def test_of_all_empty_tensors_there_is_one_warning(caplog):
    with caplog.at_level(logging.WARNING):
        counts_with_flow(make("uniform"), NAMES, SHAPES_OF_TWO, 0.95)
    (record,) = caplog.records
    assert "2 of 4 tensors" in record.getMessage() and "conv.bias, fc.bias" in record.getMessage()


def test_an_unknown_scope_is_refused():
    with pytest.raises(
        UserError, match="layer_sparsity.mask_scope=weight is not known: did you mean weights?"
    ):
        make("erk", mask_scope="weight")


def test_a_first_mask_that_leaves_no_path_is_refused_before_training(plan, tmp_path):
    """Each layer has an active weight, and yet no path leads from an image to a class."""
    small = ("dataset=digits", "federation.rounds=1", "training.epochs=1", "logger=none", "mask=rsm")
    with pytest.raises(UserError, match="sparsity=0.995 .*no path through the network"):
        run(plan(*small, "sparsity=0.995"), tmp_path)
    assert not (tmp_path / "rounds.csv").exists()
    assert run(plan(*small, "sparsity=0.8"), tmp_path)["rounds"] == 1
