"""Masks: exact selection, the DST step, annealing, packing and first masks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedspa.core.errors import UserError
from fedspa.core.packed_mask import PackedMask, packed_by_shifts, unpacked_by_shifts
from fedspa.core.weights import ParameterSpace
from fedspa.masks.dst import DST
from fedspa.masks.initial import InitialMasks, random_mask
from fedspa.masks.rsm import RSM
from fedspa.masks.search_input import SearchInput
from fedspa.masks.select import drop_and_grow, kth_by_topk, largest, smallest

relaxed = settings(deadline=None)

FEW_VALUES = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 1.0000001])
"""So that ties and exact zeros of both signs are the rule."""


def vectors(n: int, values=FEW_VALUES) -> st.SearchStrategy[torch.Tensor]:
    return arrays.arrays(np.float32, n, elements=values.map(np.float32)).map(torch.from_numpy)


def masks(n: int) -> st.SearchStrategy[torch.Tensor]:
    return vectors(n, st.sampled_from([0.0, 1.0]))


def lowest(scores: list[float], among: list[int], k: int) -> set[int]:
    """The k indices of lowest score, ties by index: the naive reference."""
    return set(sorted(among, key=lambda i: (scores[i], i))[:k])


def where(flags: torch.Tensor) -> set[int]:
    return set(flags.nonzero().flatten().tolist())


# Selection -----------------------------------------------------------------------------------------------


@relaxed
@given(st.data(), st.integers(1, 40))
def test_smallest_and_largest_agree_with_sorting(data, n):
    scores, k = data.draw(vectors(n)), data.draw(st.integers(0, n))
    everywhere, listed = list(range(n)), scores.tolist()
    assert where(smallest(scores, k)) == lowest(listed, everywhere, k)
    assert where(largest(scores, k)) == lowest([-score for score in listed], everywhere, k)


@relaxed
@given(st.data(), st.integers(1, 20), st.integers(1, 4))
def test_several_vectors_are_several_choices(data, n, count):
    masks_, drop, grow = (
        torch.stack([data.draw(kind(n)) for _ in range(count)]) for kind in (masks, vectors, vectors)
    )
    k = data.draw(st.integers(0, int(masks_.sum(1).min())))
    together = drop_and_grow(masks_, drop, grow, k)
    for found, *alone in zip(together, masks_, drop, grow, strict=True):
        assert torch.equal(found, drop_and_grow(*alone, k))
    if k:
        on_gpu = kth_by_topk(drop, k)
        assert torch.equal(on_gpu, torch.stack([kth_by_topk(one, k) for one in drop]))


@relaxed
@given(st.data(), st.integers(1, 40))
def test_the_threshold_on_a_gpu_is_kthvalues(data, n):
    scores, k = data.draw(vectors(n)), data.draw(st.integers(1, n))
    assert kth_by_topk(scores, k).tolist() == [scores.kthvalue(k).values.item()]


def test_vectors_too_long_to_be_sorted_on_the_way():
    """A partition sorts a short vector altogether; only of a long one it leaves most places in disorder."""
    scores = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    rank = scores.argsort(stable=True).argsort()
    for k in range(len(scores) + 1):
        assert torch.equal(smallest(scores, k), rank < k)


def test_ties_go_to_the_lowest_index():
    scores = torch.tensor([3.0, 1, 2, 1, 2, 1])
    assert where(smallest(scores, 2)) == {1, 3}
    assert where(smallest(scores, 4)) == {1, 2, 3, 5}
    assert where(largest(scores, 2)) == {0, 2}
    assert where(smallest(torch.zeros(5), 3)) == where(largest(torch.zeros(5), 3)) == {0, 1, 2}


@relaxed
@given(st.data(), st.integers(1, 40))
def test_drop_and_grow(data, n):
    mask, drop, grow = data.draw(masks(n)), data.draw(vectors(n)), data.draw(vectors(n))
    k = data.draw(st.integers(0, int(mask.sum())))
    before = mask.clone()
    after = drop_and_grow(mask, drop, grow, k)

    active = where(mask)
    kept = active - lowest(drop.tolist(), sorted(active), k)
    inactive = [i for i in range(n) if i not in kept]
    grown = lowest([-score for score in grow.tolist()], inactive, k)
    assert where(after) == kept | grown
    # Said once more, without the reference: the count stays, and what grew was inactive after pruning.
    assert after.sum() == mask.sum() and len(grown) == k and not grown & kept
    assert after.dtype == mask.dtype and torch.equal(mask, before)


def test_just_dropped_coordinates_can_return():
    mask = torch.tensor([1.0, 1, 1, 0, 0])
    drop, grow = torch.tensor([0.1, 5, 0.2, 0, 0]), torch.tensor([9.0, 0, 1, 3, 0])
    # 0 and 2 are dropped; of 0, 2, 3, 4 the largest to grow are 0, just dropped, and 3. 4 was never wanted.
    assert drop_and_grow(mask, drop, grow, 2).tolist() == [1, 1, 0, 1, 0]


# The DST step --------------------------------------------------------------------------------------------

SPACE = ParameterSpace(("conv", "bias", "fc"), ((3, 2, 2), (3,), (4, 5)))


def search(mask, weights, gradient=None, round=0, seed=0, space=SPACE) -> SearchInput:
    source = torch.Generator().manual_seed(seed)
    return SearchInput(space, mask, weights, gradient, round, source, space.count(mask))


@relaxed
@given(
    st.data(),
    st.floats(0, 1),
    st.integers(0, 12),
    st.sampled_from(["gradient", "random"]),
)
def test_dst_never_changes_the_count_of_a_tensor(data, alpha0, round, regrow):
    mask, gradient = data.draw(masks(SPACE.total)), data.draw(vectors(SPACE.total))
    weights = data.draw(vectors(SPACE.total)) * mask
    dst = DST(name="dst", alpha0=alpha0, anneal_rounds=10, regrow=regrow)
    after = dst.next_mask(search(mask, weights, gradient, round))
    assert SPACE.count(after) == SPACE.count(mask)
    assert set(after.tolist()) <= {0.0, 1.0} and after.dtype == mask.dtype
    for old, new, weight in zip(*(SPACE.split(v) for v in (mask, after, weights)), strict=True):
        k = math.ceil(dst.prune_rate(round) * int(old.sum()))
        gone = where(old * (1 - new))
        assert len(gone) <= k  # fewer only because a dropped one came back
        assert gone <= lowest(weight.abs().tolist(), sorted(where(old)), k)


@pytest.mark.parametrize(
    ("active", "alpha0", "exchanged"),
    # 0.07 * 100 is 7.000000000000001 in binary, and still 7 of 100.
    [(100, 0.07, 7), (10, 0.31, 4), (7, 0.5, 4), (1, 0.01, 1), (10, 0.0, 0), (100, 1.0, 100)],
)
def test_dst_exchanges_the_ceiling_of_alpha_times_active(active, alpha0, exchanged):
    index = torch.arange(200.0)
    mask = (index < active).float()
    growth = 1 - mask  # whatever is dropped stays out
    space = ParameterSpace(("fc",), ((10, 20),))
    after = DST(name="dst", alpha0=alpha0).next_mask(search(mask, (index + 1) * mask, growth, space=space))
    assert where(after) == set(range(exchanged, active + exchanged))


def test_dst_drops_by_magnitude_and_grows_by_magnitude_of_the_gradient():
    mask, weights, gradient = torch.zeros(SPACE.total), torch.zeros(SPACE.total), torch.zeros(SPACE.total)
    fc = slice(15, 35)
    mask[fc][:4], weights[fc][:4] = 1, torch.tensor([-9.0, 1, -2, 0])  # an exact zero counts as active
    gradient[fc][4:7] = torch.tensor([1.0, -8, 3])
    after = DST(name="dst", alpha0=0.5).next_mask(search(mask, weights, gradient))
    assert where(after[fc]) == {0, 2, 5, 6}


@relaxed
@given(vectors(SPACE.total), vectors(SPACE.total))
def test_dense_and_empty_tensors_stay_as_they_are(weights, gradient):
    mask = torch.cat([torch.ones(12), torch.zeros(3), torch.ones(20)])
    for regrow in ("gradient", "random"):
        after = DST(name="dst", alpha0=1.0, regrow=regrow).next_mask(search(mask, weights * mask, gradient))
        assert torch.equal(after, mask)


def test_random_regrowth_asks_for_no_gradient_and_is_drawn_from_its_generator():
    dst = DST(name="dst", regrow="random")
    mask = random_mask(SPACE, (6, 2, 10), torch.Generator().manual_seed(0))
    weights = torch.arange(1.0, SPACE.total + 1) * mask
    drawn = [dst.next_mask(search(mask, weights, gradient=None, seed=seed)) for seed in (1, 1, 2, 3)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert not dst.needs_gradient and dst.searching(0) and DST(name="dst").needs_gradient
    grew = torch.stack(
        [dst.next_mask(search(mask, weights, None, seed=seed))[mask == 0] for seed in range(200)]
    )
    assert (grew.sum(0) > 0).all()  # any inactive coordinate may come back


def test_rsm_gives_back_the_very_mask_and_looks_at_nothing():
    mask = torch.ones(SPACE.total)
    rsm = RSM(name="rsm")
    assert rsm.next_mask(search(mask, mask)) is mask
    assert not rsm.searching(0) and not rsm.needs_gradient and rsm.describe(0) == {}


# Annealing -----------------------------------------------------------------------------------------------

ROOT = math.sqrt(2)


@pytest.mark.parametrize(
    ("horizon", "divisor", "rates"),
    # alpha_t = 0.25 (1 + cos x) with cos of pi/4, pi/3, pi/2 = 1/sqrt 2, 1/2, 0. Past the horizon it stays 0.
    [
        (1, "rounds_minus_one", [0.5]),
        (2, "rounds_minus_one", [0.5, 0, 0]),
        (3, "rounds_minus_one", [0.5, 0.25, 0, 0]),
        (5, "rounds_minus_one", [0.5, 0.25 + 0.125 * ROOT, 0.25, 0.25 - 0.125 * ROOT, 0, 0, 0]),
        (1, "rounds", [0.5, 0]),
        (2, "rounds", [0.5, 0.25, 0]),
        (3, "rounds", [0.5, 0.375, 0.125, 0, 0]),
        (4, "rounds", [0.5, 0.25 + 0.125 * ROOT, 0.25, 0.25 - 0.125 * ROOT, 0, 0]),
    ],
)
def test_cosine_annealing(horizon, divisor, rates):
    dst = DST(name="dst", alpha0=0.5, anneal_rounds=horizon, anneal_divisor=divisor)
    assert [dst.prune_rate(t) for t in range(len(rates))] == pytest.approx(rates, abs=1e-15)
    assert dst.describe(0) == {"prune_rate": 0.5}
    assert all(dst.prune_rate(t) >= 0 for t in range(3 * horizon))


# Masks at rest, and first masks --------------------------------------------------------------------------


@relaxed
@given(st.integers(1, 70).flatmap(masks), st.sampled_from([torch.bool, torch.float32, torch.float64]))
def test_packing_loses_nothing(mask, dtype):
    packed = PackedMask.pack(mask.to(dtype))
    assert packed.bits.dtype == torch.uint8 and len(packed.bits) == math.ceil(len(mask) / 8)
    assert torch.equal(packed.unpack(like=torch.zeros(1, dtype=torch.float64)), mask.double())
    assert packed.active == mask.sum() and torch.equal(packed.flags, mask.bool())
    assert packed == PackedMask.pack(mask)
    assert torch.equal(packed_by_shifts(mask.bool()), packed.bits)  # as on a GPU
    assert torch.equal(unpacked_by_shifts(packed.bits, len(mask)), mask.to(torch.uint8))
    flipped = mask.clone()
    flipped[-1] = 1 - flipped[-1]
    assert packed != PackedMask.pack(flipped)


def test_bits_lie_from_the_highest_to_the_lowest():
    assert PackedMask.pack(torch.tensor([1.0, 0, 1, 0, 0, 0, 0, 0, 1, 1])).bits.tolist() == [160, 192]


@relaxed
@given(st.integers(0, 12), st.integers(0, 3), st.integers(0, 20), st.integers(0, 2**32))
def test_random_masks_have_exactly_the_counts(conv, bias, fc, seed):
    mask = random_mask(SPACE, (conv, bias, fc), torch.Generator().manual_seed(seed))
    assert SPACE.count(mask) == (conv, bias, fc) and set(mask.tolist()) <= {0.0, 1.0}


def test_every_coordinate_of_a_random_mask_is_as_likely():
    source = torch.Generator().manual_seed(0)
    share = sum(random_mask(SPACE, (6, 3, 5), source) for _ in range(2000)) / 2000
    conv, bias, fc = SPACE.split(share)
    assert (conv - 0.5).abs().max() < 0.05 and (bias == 1).all() and (fc - 0.25).abs().max() < 0.05


def test_same_first_masks_are_one_object_and_different_ones_are_reproducible():
    def first_masks(shared: bool, seed: int = 0) -> list[PackedMask]:
        initial = InitialMasks(SPACE, (6, 3, 5), shared=shared, seed=seed)
        return [initial(client) for client in (0, 1, 2, 0)]

    same, different = first_masks(shared=True), first_masks(shared=False)
    assert all(mask is same[0] for mask in same)
    assert same[0] == first_masks(shared=True)[0] and same[0] != first_masks(shared=True, seed=1)[0]
    assert different[0] == different[3] and different == first_masks(shared=False)
    assert different[0] != different[1] != different[2] != different[0]
    assert different != first_masks(shared=False, seed=1)
    like = torch.zeros(1)
    assert all(SPACE.count(mask.unpack(like)) == (6, 3, 5) for mask in same + different)


def test_masks_drawn_ahead_are_those_drawn_when_asked_for(monkeypatch):
    ahead, later = (InitialMasks(SPACE, (6, 3, 5), shared=False, seed=0) for _ in range(2))
    ahead.draw_ahead(3)
    expected = [later(client) for client in range(3)]
    monkeypatch.delattr("fedspa.masks.initial.random_mask")  # nothing can be drawn now
    assert [ahead(client) for client in range(3)] == expected


@pytest.mark.parametrize("option", ["initial", "anneal_divisor", "regrow"])
def test_dst_knows_its_options(option):
    with pytest.raises(UserError, match=f"mask.{option}=other is not known"):
        DST(name="dst", **{option: "other"})
