"""The searchers with schedules, moving counts or a forward mask: each by numbers that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import CLIENTS, LRS, W0, loss_and_gradient, merge
from hypothesis import given
from hypothesis import strategies as st
from test_masks import vectors, where
from test_more_searchers import TINY, fitted, relaxed, search
from test_rounds_by_hand import tiny_federation

from fedspa.core.errors import UserError
from fedspa.core.records import Costs
from fedspa.core.weights import ParameterSpace
from fedspa.data.examples import Batch
from fedspa.masks.deepr import DeepR
from fedspa.masks.dsr import DSR, THRESHOLD
from fedspa.masks.dst import DST
from fedspa.masks.dynamic import GROWN
from fedspa.masks.gmp import GMP
from fedspa.masks.granet import GraNet
from fedspa.masks.nm import NM
from fedspa.masks.select import share_out
from fedspa.masks.snfs import MOMENTUM, SNFS
from fedspa.masks.topkast import TopKAST
from fedspa.methods.fedspa import FedSpa
from fedspa.training.local_training import LocalTraining

FEDSPA = FedSpa(name="fedspa")
TWO = ParameterSpace(("first", "second", "bias"), ((2, 4), (1, 4), (2,)))
"""8, 4 and 2 parameters."""


def ones(*places: int, total: int = 14) -> torch.Tensor:
    mask = torch.zeros(total)
    mask[list(places)] = 1
    return mask


# Sharing out ---------------------------------------------------------------------------------------------


def test_a_total_is_shared_out_in_proportion():
    assert share_out(10, [1, 1, 2], [9, 9, 9]) == [3, 2, 5]  # 2.5, 2.5, 5: the tie goes to the first
    assert share_out(10, [1, 1, 2], [9, 9, 3]) == [4, 3, 3]  # 7 are left for two alike
    assert share_out(5, [0, 0, 1], [9, 9, 2]) == [2, 1, 2]  # nobody else has a share
    assert share_out(0, [1, 2], [3, 3]) == [0, 0] and share_out(0, [], []) == []


@relaxed
@given(st.data(), st.integers(1, 6))
def test_what_is_shared_out_is_the_total_within_the_limits(data, count):
    limits = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    shares = data.draw(st.lists(st.floats(0, 1e6), min_size=count, max_size=count))
    total = data.draw(st.integers(0, sum(limits)))
    counts = share_out(total, shares, limits)
    assert sum(counts) == total and all(0 <= c <= most for c, most in zip(counts, limits, strict=True))


# Top-KAST ------------------------------------------------------------------------------------------------


def top(w, counts, within=None):
    """The largest of the 12 weights and of the 3 biases: zeros and ones [15]."""
    size = abs(w) if within is None else np.where(within == 1, abs(w), -1)
    mask = np.zeros(15)
    for first, last, count in ((0, 12, counts[0]), (12, 15, counts[1])):
        mask[first + np.argsort(-size[first:last])[:count]] = 1
    return mask


class OwnTraining(LocalTraining):
    """A module with its own step."""

    def training_step(self, batch: Batch, batch_idx: int = 0) -> torch.Tensor:
        return self.objective.loss(self.network(batch.inputs), batch.targets)


class OwnStep(FedSpa):
    training_class = OwnTraining


@pytest.mark.parametrize("wire", [None, "fp32"])
@pytest.mark.parametrize("method", [FEDSPA, OwnStep(name="own")], ids=["fedspa", "own step"])
def test_two_rounds_of_topkast(method, wire):
    """D is 6 of the weights and 2 of the biases, M a quarter of each tensor: 3 weights and no bias."""
    run = tiny_federation(
        method, TopKAST(name="topkast", explore=0.25), active=(6, 2), wire=wire, weight_decay=0.1
    )
    exact = {"rtol": 0, "atol": 1e-12 if wire is None else 1e-6}
    w, bodies = W0, [top(W0, (9, 2))] * 2
    for t, record in enumerate(run.loop.rounds()):
        starts, ends = [mask * w for mask in bodies], []
        for start, mask, client in zip(starts, bodies, CLIENTS, strict=True):
            seen, point = top(start, (6, 2), mask), start
            for _ in range(2):  # the gradient is that of the network that is seen; it moves all of the mask
                gradient = loss_and_gradient(seen * point, client.x, client.y)[1]
                point = point - LRS[t] * (mask * gradient + 0.1 * point)
            ends.append(point)
        for k, (_, update) in enumerate(run.updates[2 * t :]):
            np.testing.assert_allclose(update.local, top(ends[k], (6, 2), bodies[k]) * ends[k], **exact)
        before = w
        w = merge(w, [s - e for s, e in zip(starts, ends, strict=True)], bodies)
        if t:  # the first mask was found in round 1, where nothing else is searched for
            dense = [np.where(m == 1, e, before) for m, e in zip(bodies, ends, strict=True)]
            bodies = [top(point, (9, 2)) for point in dense]
        np.testing.assert_allclose(run.weights, w, **exact)
        for k, mask in enumerate(bodies):
            state = run.loop.state.clients[k]
            assert state.mask.unpack(like=torch.zeros(1)).tolist() == mask.tolist()
            personal = run.loop._method.personal(run.weights, state)
            np.testing.assert_allclose(personal, top(mask * w, (6, 2), mask) * w, **exact)
        # Forward and the gradient of the inputs under 6 and 2, the gradient of the weights under 9 and 2.
        train = (2 * (2 * 6 + 2) + (2 * 9 + 2)) * 2 * (3 + 5)
        costs = replace(record.costs, encoded_bytes=0)
        assert costs == Costs(train_flops=train, down_bytes=2 * 60, up_bytes=2 * 44, mask_bytes=2 * 2)
    assert any((one != other).any() for one, other in zip(bodies, [top(W0, (9, 2))] * 2, strict=True))


def test_topkast_never_trained_has_the_largest_weights_and_asks_for_dense_ones_where_it_searches():
    kast = fitted(TopKAST(name="topkast", interval=2), (3, 1), TINY)
    dense = torch.tensor([1.0, -2, 3, 0.5, 0, 4, 1, -5])
    assert kast.model(dense, torch.ones(8)).tolist() == [0, -2, 3, 0, 0, 4, 0, -5]
    assert [kast.receives_dense(t) for t in range(4)] == [True, False, True, False]
    still = search(ones(0, 1, 2, 3, 6, total=8), dense, None, round=1)
    assert kast.next_mask(still) is still.mask


# GMP and GraNet ------------------------------------------------------------------------------------------


def test_the_counts_of_gmp_fall_along_a_cubic_curve_and_reach_the_target():
    gmp = fitted(
        GMP(name="gmp", anneal_rounds=8, end=0.5), (200, 10), ParameterSpace(("w", "b"), ((10, 100), (10,)))
    )
    # 200 + 800 (1 - (t + 1) / 4)^3 with 27/64, 1/8, 1/64 of 800; the bias is dense for ever.
    assert [gmp.counts(t) for t in range(-1, 5)] == [
        [1000, 10], [537, 10], [300, 10], [212, 10], [200, 10], [200, 10],
    ]  # fmt: skip
    assert gmp.changes(-1, 0) and gmp.changes(0, 7) and not gmp.changes(3, 7)
    assert gmp.describe(1) == {"planned_density": 310 / 1010}
    half = replace(gmp, initial_sparsity=0.5, scope="global")
    half.fit(ParameterSpace(("w", "b"), ((10, 100), (10,))), (200, 10), 8)
    assert half.counts(-1) == [500, 10] and half.counts(0) == 210 + 126  # 300 x 27/64 = 126.6


def test_gmp_drops_the_smallest_of_each_tensor_or_of_all():
    weights = torch.tensor([8.0, -7, 6, 5, -4, 3, 2, 1, 0.1, 0.2, -0.3, 0.4, 0, 0])
    gmp = GMP(name="gmp", anneal_rounds=2, end=1.0)
    found = search(torch.ones(14), weights, None, space=TWO)
    # 2 + 6/8 and 1 + 3/8 after the first of two rounds.
    assert where(fitted(gmp, (2, 1, 2), TWO).next_mask(found)) == {0, 1, 11, 12, 13}
    shared = fitted(GMP(name="gmp", anneal_rounds=2, end=1.0, scope="global"), (2, 1, 2), TWO)
    assert where(shared.next_mask(found)) == {0, 1, 2, 12, 13}  # as many in all
    late = replace(found, round=5, mask=ones(0, 1, 2, 12, 13), counts=(3, 0, 2))
    assert shared.next_mask(late) is late.mask


def test_granet_prunes_and_then_exchanges_by_gradient_from_zero():
    weights = torch.tensor([8.0, -7, 6, 5, -4, 3, 2, 1, 0.1, 0.2, -0.3, 0.4, 1, 1])
    gradient = torch.tensor([0.0, 0, 0, 0, 0, 1, 2, 3, 9, 0, 0, 0, 9, 9])
    granet = fitted(GraNet(name="granet", anneal_rounds=4, end=0.5, alpha=0.5), (4, 2, 2), TWO)
    assert [granet.exchanging(t) for t in range(3)] == [True, True, False]
    # 4 + 4/8, 2 + 2/8 and 2 of 14 after the first of two rounds: 8 in all, the six largest and the biases.
    found = search(torch.ones(14), weights, gradient, space=TWO)
    after = granet.next_mask(found)
    # Half of them go: 3 of the six (5, -4, 3) for 7, 6, 5, of largest gradient; the biases are dense.
    assert where(after) == {0, 1, 2, 5, 6, 7, 12, 13}
    assert not granet.remember(found, after)[GROWN].active  # all of them were active before
    over = replace(found, gradient=None, round=2, mask=after, counts=(6, 0, 2))
    assert granet.next_mask(over) is after


# Counts that move ----------------------------------------------------------------------------------------


def test_snfs_grows_where_the_momentum_is_largest():
    mask = ones(0, 1, 2, 3, 8, 9, 12, 13)
    weights = mask * torch.tensor([8.0, -7, 0.6, 0.5, 0, 0, 0, 0, 0.1, 3, 0, 0, 1, 1])
    gradient = torch.tensor([1.0, 1, 1, 1, 5, 4, 0, 0, 6, 2, 0, 1, 9, 9])
    snfs = fitted(SNFS(name="snfs", alpha=0.5, decay=0.75), (4, 2, 2), TWO)
    found = search(mask, weights, gradient, space=TWO)
    # 2 of the first tensor go (2, 3) and 1 of the second (8); the bias is dense. Three grow: the mean gradient of the
    # active is 1 and 4, so 0.6 of them belong to the first tensor and 2.4 to the second: 1 and 2, of largest gradient.
    after = snfs.next_mask(found)
    assert where(after) == {0, 1, 4, 8, 9, 11, 12, 13}
    memory = snfs.remember(found, after)
    assert where(memory[GROWN].unpack(like=mask)) == {4, 11}  # 8 was dropped and grown at once
    assert torch.equal(memory[MOMENTUM], gradient / 4)
    later = snfs.remember(replace(found, memory=memory), after)[MOMENTUM]
    assert torch.equal(later, gradient / 4 + 0.75 * gradient / 4)
    still = replace(found, gradient=None, round=7, memory=memory)
    assert snfs.next_mask(still) is mask and set(snfs.remember(still, mask)) == {MOMENTUM}


def test_dsr_drops_below_one_threshold_and_grows_in_proportion_to_what_is_left():
    mask = ones(0, 1, 2, 3, 8, 9, 12, 13)
    weights = mask * torch.tensor([8.0, -7, 6, 0.5, 0, 0, 0, 0, -0.4, 0.1, 0, 0, 0.1, 0.1])
    dsr = fitted(DSR(name="dsr", threshold=0.45, share=0.5), (4, 2, 2), TWO)
    found = search(mask, weights, None, space=TWO)
    # Below 0.45 lie 8 and 9, but a tensor keeps its largest weight: 9 goes, and 4 and 1 are left. One grows, 0.8 of it
    # in the first tensor.
    after = dsr.next_mask(found)
    assert TWO.count(after) == (5, 1, 2) and {0, 1, 2, 3, 8, 12, 13} < where(after)
    # 1 was dropped where half of 6 were wanted.
    assert dsr.remember(found, after)[THRESHOLD].tolist() == [0.9]
    higher = replace(found, memory={THRESHOLD: torch.tensor([0.9])})
    again = dsr.next_mask(higher)  # 3 and 9 go: 3 and 1 are left of 2 to grow, 1.5 and 0.5
    assert TWO.count(again) == (5, 1, 2) and not where(again) & {3, 9}
    assert dsr.remember(higher, again)[THRESHOLD].item() == pytest.approx(1.8)  # 2 of 3 wanted
    many = fitted(DSR(name="dsr", threshold=7.5, share=0.1), (4, 2, 2), TWO)
    assert many.remember(found, many.next_mask(found))[THRESHOLD].tolist() == [3.75]  # 4 of 0.6


@relaxed
@given(st.data(), st.integers(0, 7))
def test_moving_counts_keep_their_total_and_leave_dense_tensors_alone(data, round):
    mask = ones(*data.draw(st.sets(st.integers(0, 11), min_size=6, max_size=6)), 12, 13)
    weights, gradient = mask * data.draw(vectors(14)), data.draw(vectors(14))
    for searcher in (SNFS(name="snfs", anneal_rounds=8), DSR(name="dsr", threshold=0.7)):
        after = fitted(searcher, (4, 2, 2), TWO).next_mask(search(mask, weights, gradient, round, TWO))
        assert after.sum() == 8 and after[12:].tolist() == [1, 1]


# DeepR and N:M -------------------------------------------------------------------------------------------


def test_deepr_drops_what_changed_its_sign():
    mask = ones(0, 1, 2, 8, 9, 12, 13)
    start = mask * torch.tensor([1.0, -1, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, -1, 1])
    weights = mask * torch.tensor([2.0, 1, -1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1])
    found = search(mask, weights, None, space=TWO, start=start)
    deepr = fitted(DeepR(name="deepr"), (3, 2, 2), TWO)
    after = deepr.next_mask(
        found
    )  # 1 goes; what started at 0 had no sign. The bias that flipped comes back: it is dense
    assert TWO.count(after) == (3, 2, 2) and {0, 2, 8, 9, 12, 13} < where(after)
    assert where(deepr.remember(found, after)[GROWN].unpack(like=mask)) == where(after) - where(mask)


def test_nm_drops_and_grows_inside_groups():
    space = ParameterSpace(("conv", "odd", "bias"), ((2, 4, 1, 2), (1, 3), (2,)))
    nm = NM(name="nm", n=2, m=4, alpha=0.5)
    nm.fit(space, (8, 2, 1), 8)
    assert nm.counts(0) == (8, 3, 2)  # 2 of every 4; three inputs and a bias stay dense
    # By output, input and the two places of the kernel. The groups are the columns of each output.
    weights = torch.tensor([1.0, 8, 2, 7, 3, 6, 4, 5, 0.1, 9, 9, 9, 9, 0.2, 0.3, 0.4] + [0.0] * 5)
    found = search(torch.ones(21), weights, None, space=space)
    first = nm.first_mask(found)
    assert where(first) == {4, 6, 1, 3, 10, 12, 9, 11} | set(range(16, 21))
    gradient = torch.zeros(21)
    gradient[[0, 5, 8, 15]] = torch.tensor([1.0, 2, 3, 4])
    # Half of the four groups exchange a weight: those whose smallest active ones are 3 (at 4) and 7 (at 3).
    after = nm.next_mask(search(first, first * weights, gradient, space=space))
    assert where(after) == where(first) - {4, 3} | {0, 5}


def test_nm_needs_the_sparsity_that_it_has(plan):
    plan("mask=nm", "layer_sparsity=uniform", "sparsity=0.5")
    for words in (("layer_sparsity=uniform", "sparsity=0.8"), ("sparsity=0.5",)):
        with pytest.raises(UserError, match="mask=nm keeps 2 of every 4 weights.*use layer_sparsity=uniform"):
            plan("mask=nm", *words)


# The interval --------------------------------------------------------------------------------------------


def test_with_an_interval_masks_stay_in_between():
    for searcher in (DST(name="dst", interval=3), SNFS(name="snfs", interval=3), GMP(name="gmp", interval=3)):
        assert [searcher.searching(t) for t in range(5)] == [True, False, False, True, False]
