"""Two rounds of every method, worked out by hand in NumPy, equal what the loop makes of them.

The problem (15 parameters, two clients of 3 and 5 pictures) and the pieces stand in by_hand.py; here each
method is put together from them. Costs are written as the sums that they are:

    forward FLOPs of a picture = 2 x active weights + active biases (27 when dense); training = 3 x forward
    a parameter travels as 4 bytes (60 when dense), a mask as a bit a parameter or, when random, as a seed
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import (
    CLIENTS,
    LABELS,
    LRS,
    MASKS,
    PICTURES,
    W0,
    Vector,
    accuracy,
    exchange,
    loss_and_gradient,
    mean_loss,
    merge,
    sgd,
)
from federations import Clients, Federation, federation, pack
from torch import nn

from fedspa.core.client_state import ClientState
from fedspa.core.records import Costs
from fedspa.core.settings import TrainingSettings
from fedspa.core.weights import keep_personal
from fedspa.data.sets import ArraySet
from fedspa.federated.client_runner import ClientRunner
from fedspa.federated.executor import Executor, InProcess
from fedspa.federated.exploration import EXPLORED
from fedspa.masks.base import MaskSearcher
from fedspa.masks.dst import DST
from fedspa.masks.rsm import RSM
from fedspa.methods.base import Method
from fedspa.methods.ditto import Ditto
from fedspa.methods.fedavg import FedAvg
from fedspa.methods.fedspa import FedSpa
from fedspa.methods.local import Local
from fedspa.methods.subfedavg import SubFedAvg
from fedspa.methods.subsampling import Subsampling


@dataclass(frozen=True)
class Round:
    """What a round leaves, by hand."""

    weights: Vector  # of the server
    ends: list[Vector]  # each client's weights right after its local training
    loss: float
    costs: Costs
    states: list[Vector | None]  # what is remembered of each client: a mask, weights or nothing
    personal: list[Vector] | None = None  # each client's personal model
    samples: int = 2 * (3 + 5)  # pictures trained on


def assert_rounds(
    hand: list[Round],
    method: Method,
    searcher: MaskSearcher | None = None,
    masks: list[Vector] | None = None,
    **step: Any,
) -> None:
    """The loop's rounds are those by hand: weights, states, losses, costs and all accuracies."""
    run = tiny_federation(method, searcher, masks, **step)
    for t, (expected, record) in enumerate(zip(hand, run.loop.rounds(), strict=True)):
        equal(run.weights, expected.weights)
        assert record.loss == pytest.approx(expected.loss, rel=1e-12)
        assert record.learning_rate == LRS[t]
        assert record.costs == expected.costs
        assert record.samples == expected.samples
        fedavg = Costs(train_flops=3 * 27 * 2 * (3 + 5), down_bytes=2 * 60, up_bytes=2 * 60)
        assert record.dense_costs == (fedavg if t == 0 else fedavg + fedavg)
        models = {"global": [expected.weights] * 2, "personal": expected.personal, "local": expected.ends}
        assert set(record.scores) == set(method.kinds)
        for kind in method.kinds:
            by_client = [
                100 * accuracy(model, client.test_x, client.test_y)
                for model, client in zip(models[kind], CLIENTS, strict=True)
            ]
            assert run.loop.state.scores[kind]["accuracy"].values.tolist() == by_client, kind
            assert record.scores[kind]["accuracy"].mean == np.mean(by_client)
        for k in range(2):
            equal(run.updates[2 * t + k][1].local, expected.ends[k])
            equal_state(run.loop.state.clients[k], expected.states[k])
    assert run.loop.state.costs == hand[0].costs + hand[1].costs


def tiny_federation(
    method: Method,
    searcher: MaskSearcher | None = None,
    masks: list[Vector] | None = None,
    convention: str = "honest",
    active: Sequence[int] = (),
    public: Sequence[int] = (),
    personal: Collection[str] = (),
    wire: str | None = None,
    executor: Callable[[ClientRunner], Executor] = InProcess,
    **step: Any,
) -> Federation:
    """`personal`: the tensors that clients keep to themselves; `step`: settings of local training."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(W0), network.parameters())
    keep_personal(network, personal)
    images = torch.from_numpy(PICTURES.astype(np.uint8)).view(14, 1, 2, 2)
    data = ArraySet(images, torch.from_numpy(LABELS))
    rows = [np.arange(0, 3), np.arange(3, 8)], [np.arange(8, 12), np.arange(12, 14)]
    settings = {"epochs": 2, "batch_size": 8, "clip_norm": None, "weight_decay": 0.0} | step
    return federation(
        method,
        network,
        Clients(data, data, *rows, classes=3),
        TrainingSettings(lr=0.5, lr_decay=0.5, **settings),
        searcher=searcher,
        initial_mask=(lambda client: pack(masks[client])) if masks else None,
        active=active,
        public=public,
        rounds=2,
        convention=convention,
        wire=wire,
        executor=executor,
    )


def equal(actual: torch.Tensor, expected: Vector) -> None:
    np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=1e-12)


def equal_state(actual: ClientState, expected: Vector | None) -> None:
    if actual.mask:
        assert expected is not None and actual.mask == pack(expected)
        assert set(actual) <= {"mask", EXPLORED}
    elif expected is None:
        assert not actual
    else:
        assert list(actual) == ["weights"]
        equal(actual.tensor("weights"), expected)


STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip binds": {"clip_norm": 0.1},
    "clip binds among the active": {"clip_norm": 0.1, "clip_scope": "active"},
    "clip does not bind": {"clip_norm": 100.0},
    "weight decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "all together": {"clip_norm": 0.3, "weight_decay": 0.1, "momentum": 0.9},
}
MERGES = [
    {"weighting": weighting, "normaliser": normaliser}
    for weighting in ("uniform", "samples")
    for normaliser in ("participants", "holders")
]


def fedspa_by_hand(searches: bool, merging: dict[str, str], **step: Any) -> list[Round]:
    w, masks, rounds = W0, MASKS, []
    # alpha_t = 0.25 (1 + cos(pi t / 2)) = 0.5, 0.25 with a horizon of 3: ceil of that of 6 and of 2 active.
    exchanged = [(3, 1), (2, 1)]
    for t, lr in enumerate(LRS):
        starts = [mask * w for mask in masks]
        paths = [
            sgd(start, client, lr, mask=mask, **step)
            for start, client, mask in zip(starts, CLIENTS, masks, strict=True)
        ]
        w = merge(w, [s - p.end for s, p in zip(starts, paths, strict=True)], masks, **merging)
        if searches:
            gradients = [loss_and_gradient(p.end, c.x, c.y)[1] for p, c in zip(paths, CLIENTS, strict=True)]
            masks = [
                np.concatenate(
                    [
                        exchange(mask[:12], path.end[:12], gradient[:12], exchanged[t][0]),
                        exchange(mask[12:], path.end[12:], gradient[12:], exchanged[t][1]),
                    ]
                )
                for mask, path, gradient in zip(masks, paths, gradients, strict=True)
            ]
        costs = Costs(
            train_flops=3 * (2 * 6 + 2) * 2 * (3 + 5),  # two epochs of 3 and 5 pictures
            search_flops=3 * 27 * (3 + 5) if searches else 0,  # a dense gradient of one batch each
            down_bytes=2 * 4 * 8,
            up_bytes=2 * 4 * 8,
            # 15 bits are 2 bytes a mask; a first mask costs a seed of 8 bytes.
            mask_bytes=2 * (2 * searches + 8 * (t == 0)),
        )
        personal = [mask * w for mask in masks]
        rounds.append(Round(w, [p.end for p in paths], mean_loss(paths), costs, list(masks), personal))
    return rounds


@pytest.mark.parametrize("searcher", [DST(name="dst", anneal_rounds=3), RSM(name="rsm")], ids=["dst", "rsm"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_fedspa(searcher, step):
    hand = fedspa_by_hand(searcher.searching(0), MERGES[0], **step)
    assert_rounds(hand, FedSpa(name="fedspa"), searcher, MASKS, **step)


@pytest.mark.parametrize("merging", MERGES, ids=lambda merging: "-".join(merging.values()))
def test_fedspa_merges(merging):
    hand = fedspa_by_hand(True, merging)
    assert_rounds(hand, FedSpa(name="fedspa", **merging), DST(name="dst", anneal_rounds=3), MASKS)


def test_what_masks_have_explored():
    """The share of the 15 parameters that were ever active: of each client by mean, and of both together."""
    run = tiny_federation(FedSpa(name="fedspa"), DST(name="dst", anneal_rounds=3), MASKS)
    ever = [mask == 1 for mask in MASKS]
    for hand, record in zip(fedspa_by_hand(True, MERGES[0]), run.loop.rounds(), strict=True):
        ever = [one | (mask == 1) for one, mask in zip(ever, hand.states, strict=True)]
        assert record.extras["explored_by_client"] == pytest.approx(np.mean(ever))
        assert record.extras["explored_by_all"] == pytest.approx((ever[0] | ever[1]).mean())
    assert np.mean(ever) > 8 / 15
    assert [set(state) for state in run.loop.state.clients.values()] == [{"mask", EXPLORED}] * 2


def test_the_cases_above_are_different_cases():
    by_step = {name: fedspa_by_hand(True, MERGES[0], **step)[0].weights for name, step in STEPS.items()}
    assert np.array_equal(by_step.pop("clip does not bind"), by_step["plain"])
    by_merge = [fedspa_by_hand(True, merging)[0].weights for merging in MERGES[1:]]
    weights = [*by_step.values(), *by_merge]
    assert len({w.tobytes() for w in weights}) == len(weights)
    first, second = fedspa_by_hand(True, MERGES[0])
    for old, new, newer in zip(MASKS, first.states, second.states, strict=True):
        assert (old != new).any() and (new != newer).any()


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_fedavg(weighting, step):
    w, rounds = W0, []
    for lr in LRS:
        paths = [sgd(w, client, lr, **step) for client in CLIENTS]
        w = merge(w, [w - path.end for path in paths], [], weighting)
        costs = Costs(train_flops=3 * 27 * 2 * (3 + 5), down_bytes=2 * 60, up_bytes=2 * 60)
        rounds.append(Round(w, [path.end for path in paths], mean_loss(paths), costs, [None, None]))
    assert_rounds(rounds, FedAvg(name="fedavg", weighting=weighting), **step)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_ditto(step):
    w, own, rounds = W0, [W0, W0], []
    for lr in LRS:
        shared = [sgd(w, client, lr, steps=1, **step) for client in CLIENTS]
        personal = [
            sgd(v, client, lr, steps=2, anchor=w, pull=0.7, **step)
            for v, client in zip(own, CLIENTS, strict=True)
        ]
        w = merge(w, [w - path.end for path in shared], [], "samples")
        own = [path.end for path in personal]
        costs = Costs(train_flops=3 * 27 * (1 + 2) * (3 + 5), down_bytes=2 * 60, up_bytes=2 * 60)
        loss = mean_loss(shared + personal, CLIENTS + CLIENTS)
        rounds.append(Round(w, [path.end for path in shared], loss, costs, list(own), list(own), 3 * (3 + 5)))
    method = Ditto(name="ditto", shared_epochs=1, personal_epochs=2, proximal=0.7)
    assert_rounds(rounds, method, **step)


def test_local():
    own, rounds = [W0, W0], []
    for lr in LRS:
        paths = [sgd(v, client, lr) for v, client in zip(own, CLIENTS, strict=True)]
        own = [path.end for path in paths]
        costs = Costs(train_flops=3 * 27 * 2 * (3 + 5))
        rounds.append(Round(W0, list(own), mean_loss(paths), costs, list(own)))
    assert_rounds(rounds, Local(name="local"))


@pytest.mark.parametrize(
    "options", [{}, {"rescale": True}, {"normaliser": "holders", "weighting": "uniform"}], ids=str
)
def test_subsampling(options):
    method = Subsampling(name="subsampling", **options)
    rehearsal = tiny_federation(method)
    rehearsal.run()
    sent = [
        update.mask.numpy() for _, update in rehearsal.updates
    ]  # drawn at random: two rounds of two masks
    assert [mask.sum() for mask in sent] == [8, 8, 8, 8]  # half of 15, rounded to even
    assert len({mask.tobytes() for mask in sent}) == 4

    w, rounds = W0, []
    for t, lr in enumerate(LRS):
        masks = sent[2 * t : 2 * t + 2]
        paths = [sgd(w, client, lr) for client in CLIENTS]
        factor = 2 if method.rescale else 1
        updates = [factor * mask * (w - path.end) for mask, path in zip(masks, paths, strict=True)]
        w = merge(w, updates, masks, options.get("weighting", "samples"), method.normaliser)
        traffic = {"down_bytes": 2 * 60, "up_bytes": 2 * 4 * 8, "mask_bytes": 2 * 8}
        costs = Costs(train_flops=3 * 27 * 2 * (3 + 5), **traffic)
        rounds.append(Round(w, [path.end for path in paths], mean_loss(paths), costs, [None, None]))
    assert_rounds(rounds, method)


def pruned(mask: Vector, w: Vector) -> Vector:
    """Sub-FedAvg's candidate: without the smallest quarter of the active weights; biases are never pruned."""
    active = np.flatnonzero(mask[:12])
    drop = active[np.argsort(abs(w[active]))[: len(active) // 4]]
    return np.where(np.isin(np.arange(15), drop), 0, mask)


@pytest.mark.parametrize(
    ("gates", "adopting"),
    # Which of the two clients prune, in the first and in the second round.
    [
        ({}, [(True, False), (False, False)]),
        ({"accuracy_threshold": 0.0}, [(True, True), (False, True)]),
        ({"accuracy_threshold": 1.0}, [(False, False), (False, False)]),
        ({"distance_threshold": 0.5}, [(False, False), (False, False)]),
        ({"sparsity": 0.25, "accuracy_threshold": 0.0}, [(True, True), (False, False)]),
    ],
    ids=str,
)
def test_subfedavg(gates, adopting):
    distance_threshold, least = gates.get("distance_threshold", 1e-4), gates.get("accuracy_threshold", 0.5)
    w, masks, rounds = W0, [np.ones(15), np.ones(15)], []
    for t, lr in enumerate(LRS):
        next_masks, updates, paths, costs = [], [], [], Costs()
        for k, (client, mask) in enumerate(zip(CLIENTS, masks, strict=True)):
            path = sgd(mask * w, client, lr, mask=mask)
            start, first, last = path.weights
            late = pruned(mask, last)
            unsettled = (pruned(mask, first) != late).mean() > distance_threshold
            dense_enough = mask[:12].mean() > 1 - gates.get("sparsity", 0.5)
            good = accuracy(late * last, client.x, client.y) > least  # on *training* data
            adopts = unsettled and dense_enough and good
            assert adopts == adopting[t][k], (t, k, unsettled, dense_enough, good)
            sent = late if adopts else mask
            costs += Costs(
                train_flops=3 * int(2 * mask[:12].sum() + 3) * 2 * len(client.y),
                # The accuracy costs a forward pass of the candidate over the client's pictures.
                search_flops=(unsettled and dense_enough) * int(2 * late[:12].sum() + 3) * len(client.y),
                down_bytes=4 * int(mask.sum()),
                up_bytes=4 * int(sent.sum()),
                mask_bytes=2 if adopts else 0,  # 12 bits: the biases' part is full
            )
            next_masks.append(sent)
            updates.append(sent * (start - last))
            paths.append(path)
        masks = next_masks
        w = merge(w, updates, masks, normaliser="holders")
        personal = [mask * w for mask in masks]
        rounds.append(Round(w, [path.end for path in paths], mean_loss(paths), costs, list(masks), personal))
    assert_rounds(rounds, SubFedAvg(name="subfedavg", prune_rate=0.25, **gates))


@pytest.mark.parametrize(
    ("searcher", "convention", "search", "mask_bytes"),
    # The paper charges every searcher a whole batch (8) whatever a client holds (3 and 5), and leaves masks
    # out. Honestly, only a gradient that is taken costs, and the seeds and masks that travel do.
    [
        (DST(name="dst"), "paper", 3 * 27 * (8 + 8), 0),
        (RSM(name="rsm"), "paper", 3 * 27 * (8 + 8), 0),
        (DST(name="dst", regrow="random"), "honest", 0, 2 * (8 + 2)),
        (RSM(name="rsm"), "honest", 0, 2 * 8),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_a_mask_search_costs(searcher, convention, search, mask_bytes):
    first = next(tiny_federation(FedSpa(name="fedspa"), searcher, MASKS, convention).loop.rounds())
    assert (first.costs.search_flops, first.costs.mask_bytes) == (search, mask_bytes)


def test_a_mask_search_takes_one_batch():
    first = next(tiny_federation(FedSpa(name="fedspa"), DST(name="dst"), MASKS, batch_size=4).loop.rounds())
    assert first.costs.search_flops == 3 * 27 * (3 + 4)  # the clients hold 3 and 5 pictures


def test_subsampling_as_the_paper_counts_it():
    first = next(tiny_federation(Subsampling(name="subsampling"), convention="paper").loop.rounds())
    assert (first.costs.up_bytes, first.costs.mask_bytes) == (2 * 4 * 8, 0)
