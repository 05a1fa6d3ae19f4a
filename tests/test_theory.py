"""The curves of Theorem 1, against gradients worked out apart from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federations import engine, pack, pixels, random_images
from torch import nn

from fedspa.core.client import ClientUpdate
from fedspa.core.client_state import ClientState
from fedspa.core.packed_mask import PackedMask
from fedspa.core.records import Costs
from fedspa.core.settings import TrainingSettings
from fedspa.federated.jobs import CompletedUpdate, UpdateJob
from fedspa.federated.theory import TheoremCurves, distance
from fedspa.masks.dynamic import GROWN
from fedspa.masks.rigl import RigL
from fedspa.methods.fedspa import FedSpa

IMAGES = random_images(count=9, side=2, classes=3, seed=0)
PIXELS = pixels(IMAGES)
ROWS = [np.array([0, 3, 4, 8]), np.array([1, 2, 5, 6, 7])]
TOTAL = 4 * 3  # a linear layer without bias


def vector(seed: int) -> torch.Tensor:
    return torch.randn(TOTAL, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mask(seed: int) -> torch.Tensor:
    return (vector(seed) > 0).double()


def gradient(weights: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Of the mean cross-entropy of all rows at once, by autograd on a bare matrix product."""
    point = weights.clone().requires_grad_()
    images = (IMAGES.inputs[rows].double().flatten(1) / 255 - 0.5) / 0.25
    loss = nn.functional.cross_entropy(images @ point.view(3, 4).T, IMAGES.targets[rows])
    return torch.autograd.grad(loss, point)[0]


def completed(local: torch.Tensor, next_mask: torch.Tensor) -> CompletedUpdate:
    update = ClientUpdate(update=None, state=ClientState(mask=PackedMask.pack(next_mask)), local=local)
    return CompletedUpdate(update, torch.zeros(()), samples=1, costs=Costs(), seconds={}, local_scores={})


def masked(weights: torch.Tensor, state: ClientState) -> torch.Tensor:
    assert state.mask is not None
    return state.mask.unpack(like=weights) * weights


def test_distance_is_the_share_of_coordinates_that_differ() -> None:
    assert distance(pack([1, 1, 0, 0, 1]), pack([1, 0, 1, 0, 1])) == 2 / 5
    assert distance(pack([1] * 9), pack([0] * 9)) == 1.0


def test_the_curves_of_one_round() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False))
    runner = engine(
        network, PIXELS, TrainingSettings(batch_size=2)
    )  # the whole gradient takes several batches
    weights, local = vector(0), vector(1)
    before, after, final = mask(2), mask(3), [mask(4), mask(5)]
    curves = TheoremCurves(2, masked)
    curves.remember(
        UpdateJob(round=2, client=1, first=False, state=ClientState(mask=PackedMask.pack(before))),
        weights,
        completed(local, after),
    )
    curves.remember(
        UpdateJob(round=3, client=0, first=True, state=ClientState(mask=PackedMask.pack(before))),
        weights,
        completed(local, after),
    )
    (row,) = curves.rows(runner, ROWS, [PackedMask.pack(own) for own in final].__getitem__, range(2))

    assert row.round == 2  # round 3 is not a multiple of 2
    at_final = [gradient(own * weights, rows) for own, rows in zip(final, ROWS, strict=True)]
    objective = (final[0] * at_final[0] + final[1] * at_final[1]) / 2
    assert row.gradient_norm_sq == pytest.approx(float(objective @ objective), rel=1e-12)
    assert row.mask_step == float((before != after).double().mean())
    assert row.mask_to_final == float((before != final[1]).double().mean())

    def ratio(point: torch.Tensor) -> float:
        here, there = gradient(point, ROWS[1]), at_final[1]
        numerator = (before * here - final[1] * there).square().sum()
        return float(numerator / (here - there).square().sum())

    assert row.p == pytest.approx(max(ratio(before * weights), ratio(local)), rel=1e-12)


def test_p_of_a_searcher_that_grows_from_zero_is_taken_where_training_began() -> None:
    """RigL's grown coordinates start at 0, so that mask * w_t is a point that no training sees; a state saved and taken
    up again gives the same."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False))
    runner = engine(network, PIXELS, TrainingSettings(batch_size=9))
    weights, local = vector(0), vector(1)
    before = mask(2)
    grown = before * (torch.arange(TOTAL) % 2)
    state = ClientState({GROWN: PackedMask.pack(grown)}, mask=PackedMask.pack(before))
    method = FedSpa(name="fedspa")
    method.searcher = RigL(name="rigl")

    def curves() -> TheoremCurves:
        return TheoremCurves(1, method.personal)

    first, again, final = curves(), curves(), [mask(4), mask(5)]
    job = UpdateJob(round=0, client=1, first=False, state=state)
    first.remember(job, weights, completed(local, mask(3)))
    again.load_state_dict(first.state_dict())
    reference = gradient(final[1] * weights, ROWS[1])

    def ratio(point: torch.Tensor) -> float:
        here = gradient(point, ROWS[1])
        numerator = (before * here - final[1] * reference).square().sum()
        return float(numerator / (here - reference).square().sum())

    start = before * (1 - grown) * weights
    wanted, wrong = (max(ratio(point), ratio(local)) for point in (start, before * weights))
    assert wanted != pytest.approx(wrong, rel=1e-3)
    for one in (first, again):
        (row,) = one.rows(runner, ROWS, [PackedMask.pack(own) for own in final].__getitem__, range(2))
        assert row.p == pytest.approx(wanted, rel=1e-12)


def test_p_is_unknown_where_the_gradient_never_moves() -> None:
    """The mask is final already and training changed nothing: 0 / 0 is not a number worth printing."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False))
    runner = engine(network, PIXELS, TrainingSettings(batch_size=9))
    weights, only = vector(0), mask(2)
    state = PackedMask.pack(only)
    curves = TheoremCurves(1, masked)
    curves.remember(
        UpdateJob(round=0, client=0, first=True, state=ClientState(mask=state)),
        weights,
        completed(only * weights, only),
    )
    (row,) = curves.rows(runner, ROWS, lambda client: state, range(2))
    assert (row.p, row.mask_step, row.mask_to_final) == (None, 0.0, 0.0)
