"""Layer sparsity: the published densities to the last parameter, and what holds for any network."""

from __future__ import annotations

import logging
from fractions import Fraction
from math import floor, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspa.errors import UserError
from fedspa.layer_sparsity.er import ErdosRenyi
from fedspa.layer_sparsity.erk import ErdosRenyiKernel
from fedspa.layer_sparsity.uniform import Uniform
from fedspa.models.lenet5 import LeNet5
from fedspa.models.resnet18 import ResNet18
from fedspa.models.vgg11 import VGG11

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


def test_an_empty_tensor_is_named(caplog):
    with caplog.at_level(logging.WARNING):
        make("uniform").active_counts([(4, 4), (1,)], HALF, names=["fc.weight", "fc.bias"])
        make("uniform").active_counts([(4, 4), (1,)], HALF)
    assert [record.getMessage() for record in caplog.records] == [
        "uniform at density 0.5 leaves no active parameter in tensor fc.bias of shape (1,).",
        "uniform at density 0.5 leaves no active parameter in tensor 1 of shape (1,).",
    ]


def test_an_unknown_scope_is_refused():
    with pytest.raises(
        UserError, match="layer_sparsity.mask_scope=weight is not known: did you mean weights?"
    ):
        make("erk", mask_scope="weight")
