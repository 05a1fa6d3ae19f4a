"""Two rounds of the shipped methods with steps or servers of their own, in NumPy, on the problem of by_hand.py."""

from __future__ import annotations

from dataclasses import replace
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
    logits,
    loss_and_gradient,
    seen,
    sgd,
)
from federations import Federation, pack
from test_rounds_by_hand import equal, tiny_federation

from fedspa.core.records import Costs
from fedspa.core.transfers import Reads
from fedspa.federated.own_layers import SHARED_MODEL
from fedspa.masks.dst import DST
from fedspa.masks.snip import SNIP
from fedspa.methods.apfl import APFL
from fedspa.methods.base import Method
from fedspa.methods.dispfl import DisPFL
from fedspa.methods.fedala import FedALA
from fedspa.methods.fedbabu import FedBABU
from fedspa.methods.feddst import FedDST
from fedspa.methods.feddyn import FedDyn
from fedspa.methods.fedmd import FedMD
from fedspa.methods.fedrep import FedRep
from fedspa.methods.fedselect import FedSelect
from fedspa.methods.l2gd import L2GD
from fedspa.methods.lotteryfl import LotteryFL
from fedspa.methods.mapper import MAPPER
from fedspa.methods.pfedme import PFedMe
from fedspa.methods.scaffold import Scaffold
from fedspa.methods.ssfl import SSFL

PLAIN = Costs(train_flops=3 * 27 * 2 * (3 + 5), down_bytes=2 * 60, up_bytes=2 * 60)
"""A round of FedAvg: two epochs of 3 and 5 pictures; 15 weights each way."""
TENTH = [0.1 * lr for lr in LRS]


def gradient(w: Vector, k: int) -> Vector:
    return loss_and_gradient(w, CLIENTS[k].x, CLIENTS[k].y)[1]


def state(run: Federation, k: int, name: str) -> torch.Tensor:
    return run.loop.state.clients[k].tensor(name)


def scored(run: Federation, kind: str, models: list[Any]) -> None:
    """The scores of a kind are those of these models."""
    expected = [
        100 * accuracy(w, client.test_x, client.test_y) for w, client in zip(models, CLIENTS, strict=True)
    ]
    assert run.loop.state.scores[kind]["accuracy"].values.tolist() == expected


def rounds(method: Method, **options: Any):
    """The federation before its first round, and its rounds, each with the learning rate."""
    run = tiny_federation(method, **options)
    return run, zip(LRS, run.loop.rounds(), strict=True)


def test_scaffold():
    run, records = rounds(Scaffold(name="scaffold"))
    w, c, own = W0, np.zeros(15), [np.zeros(15), np.zeros(15)]
    for lr, record in records:
        ends, changes = [], []
        for k in range(2):
            y = w
            for _ in range(2):
                y = y - lr * (gradient(y, k) - own[k] + c)
            changes.append((w - y) / (2 * lr) - c)  # c_k^+ - c_k = (x - y) / (K lr) - c
            own[k] = own[k] + changes[k]
            ends.append(y)
        w, c = np.mean(ends, axis=0), c + np.mean(changes, axis=0)
        equal(run.weights, w)
        equal(run.loop.state.server["control"], c)
        for k in range(2):
            equal(state(run, k, "control"), own[k])
        assert record.costs == PLAIN + Costs(down_bytes=2 * 60, up_bytes=2 * 60)  # twice the bytes
    assert abs(c).max() > 1e-2


@pytest.mark.parametrize("training", [{"drop_last": True}, {}], ids=str)
def test_scaffold_counts_the_steps_that_were_taken(training):
    """Batches of two: of 3 and 5 pictures 2 and 3 a pass, or 1 and 2 without the last. Then c_k is a mean gradient."""
    run = tiny_federation(Scaffold(name="scaffold"), batch_size=2, **training)
    next(run.loop.rounds())
    for k, (_, update) in enumerate(run.updates):
        steps = 2 * ([1, 2] if training else [2, 3])[k]
        equal(state(run, k, "control"), update.update.numpy() / (steps * LRS[0]))


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("mixes", ["outputs", "weights"])
def test_apfl(mixes, adaptive):
    """A linear model is the one for which both mixtures are the same."""
    run, records = rounds(APFL(name="apfl", alpha=0.7, mixes=mixes, adaptive=adaptive))
    w, v, alpha = W0, [W0, W0], [0.7, 0.7]
    for lr, record in records:
        ends = []
        for k in range(2):
            y = w
            for step in range(2):
                slope = gradient(alpha[k] * v[k] + (1 - alpha[k]) * y, k)
                next_v = v[k] - lr * alpha[k] * slope
                if adaptive and step == 0:
                    alpha[k] = min(max(alpha[k] - lr * slope @ (v[k] - y), 0), 1)
                y, v[k] = y - lr * gradient(y, k), next_v
            ends.append(y)
        w = np.mean(ends, axis=0)
        equal(run.weights, w)
        for k in range(2):
            equal(state(run, k, "personal"), v[k])
            equal(state(run, k, "alpha"), np.array([alpha[k]]))
        scored(run, "local", ends)
        scored(run, "personal", [a * own + (1 - a) * w for a, own in zip(alpha, v, strict=True)])
        assert record.costs == PLAIN + Costs(train_flops=PLAIN.train_flops)  # twice the compute
    assert (abs(np.array(alpha) - 0.7).max() > 1e-3) == adaptive


def test_a_mixture_of_outputs_is_tested_as_one():
    """Not the mean of what both models predict: with a network that is not linear, weights would be another model."""
    run = tiny_federation(APFL(name="apfl"))
    run.run()
    engine, rows = run.loop._setup.engine, torch.arange(5)
    w, v = run.weights, state(run, 1, "personal")
    found = engine.predict(run.loop._method.personal(w, run.loop.state.clients[1]), engine.examples, rows, 2)
    x = np.stack([example for client in CLIENTS for example in client.x])[:5]
    mixed = 0.5 * logits(v.numpy(), x) + 0.5 * logits(w.numpy(), x)
    assert found.tolist() == mixed.argmax(axis=1).tolist()


def split(w: Vector, k: int, lr: float, steps: int, head: bool) -> Vector:
    """Steps on the biases alone (head), or on the weights alone, with weight decay and momentum."""
    moves, velocity = np.repeat([float(not head), float(head)], [12, 3]), np.zeros(15)
    for _ in range(steps):
        velocity = 0.5 * velocity + moves * (gradient(w, k) + 0.1 * w)
        w = w - lr * velocity
    return w


TRAINING = {"momentum": 0.5, "weight_decay": 0.1}


def test_fedrep():
    """The biases are the head: two epochs of theirs, then one of the weights."""
    run, records = rounds(FedRep(name="fedrep"), personal=["1.bias"], epochs=3, **TRAINING)
    shared, heads = W0[:12], [W0[12:], W0[12:]]
    for lr, record in records:
        ends = []
        for k in range(2):
            tuned = split(np.concatenate([shared, heads[k]]), k, lr, 2, head=True)
            ends.append(split(tuned, k, lr, 1, head=False))
            heads[k] = ends[k][12:]
        shared = np.mean(ends, axis=0)[:12]
        equal(run.weights, shared)
        for k in range(2):
            equal(state(run, k, SHARED_MODEL), heads[k])
        scored(run, "local", ends)
        scored(run, "global", [np.concatenate([shared, head]) for head in heads])
        assert record.costs == Costs(train_flops=3 * 27 * 3 * (3 + 5), down_bytes=2 * 48, up_bytes=2 * 48)


def test_fedbabu_never_trains_the_head_before_fine_tuning():
    run, records = rounds(FedBABU(name="fedbabu", weighting="uniform"), personal=["1.bias"], **TRAINING)
    shared = W0[:12]
    for lr, record in records:
        ends = [split(np.concatenate([shared, W0[12:]]), k, lr, 2, head=False) for k in range(2)]
        shared = np.mean(ends, axis=0)[:12]
        equal(run.weights, shared)
        for k in range(2):
            equal(state(run, k, SHARED_MODEL), W0[12:])
        assert record.costs == Costs(train_flops=PLAIN.train_flops, down_bytes=2 * 48, up_bytes=2 * 48)
    client = run.loop._runner._client(2, 0, False, run.weights, run.loop.state.client_state(0), Reads())
    tuned = client.finetune(1).numpy()
    assert (tuned[12:] != W0[12:]).all() and (tuned[:12] != shared).all()


def test_feddyn():
    run, records = rounds(FedDyn(name="feddyn", alpha=0.3))
    w, h, own = W0, np.zeros(15), [np.zeros(15), np.zeros(15)]
    for lr, record in records:
        ends = []
        for k in range(2):
            v = w
            for _ in range(2):
                v = v - lr * (gradient(v, k) - own[k])
                v = v - lr * 0.3 * (v - w)
            own[k] = own[k] - 0.3 * (v - w)
            ends.append(v)
        h = h - 0.3 / 2 * sum(v - w for v in ends)
        w = np.mean(ends, axis=0) - h / 0.3
        equal(run.weights, w)
        equal(run.loop.state.server.kept["h"], h)
        for k in range(2):
            equal(state(run, k, "gradient"), own[k])
        assert record.costs == PLAIN  # nothing travels beside the weights


def test_pfedme():
    method = PFedMe(name="pfedme", steps=3, strength=0.8, outer_lr=0.5)
    run, records = rounds(method)
    w = W0
    for lr, record in records:
        outers, thetas = [], []
        for k in range(2):
            outer = theta = w
            for _ in range(2):  # batches, each of all pictures
                for _ in range(3):
                    theta = theta - lr * (gradient(theta, k) + 0.8 * (theta - outer))
                outer = outer - 0.5 * 0.8 * (outer - theta)
            outers.append(outer)
            thetas.append(theta)
        w = np.mean(outers, axis=0)
        equal(run.weights, w)
        for k in range(2):
            equal(state(run, k, "weights"), thetas[k])
        scored(run, "personal", thetas)  # theta, not w_k
        scored(run, "local", outers)
        assert record.costs == PLAIN + Costs(train_flops=2 * PLAIN.train_flops)  # three steps a batch


def test_l2gd():
    run, records = rounds(L2GD(name="l2gd", averaging=0.3))
    w, own = W0, [W0, W0]
    for lr, record in records:
        own = [sgd(x - 0.3 * (x - w), client, lr).end for x, client in zip(own, CLIENTS, strict=True)]
        w = np.mean(own, axis=0)
        equal(run.weights, w)
        for k in range(2):
            equal(state(run, k, "weights"), own[k])
        scored(run, "personal", own)
        assert record.costs == PLAIN


# Masks that all clients share -----------------------------------------------------------------------------------


def kept(scores: Vector, count: int) -> Vector:
    """Ones for the largest `count` scores."""
    return (np.argsort(np.argsort(-scores)) < count).astype(float)


@pytest.mark.parametrize("wire", [None, "fp32"])
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_ssfl(scope, wire):
    method = SSFL(name="ssfl")
    run, records = rounds(method, searcher=SNIP(name="snip", scope=scope), active=[6, 3], wire=wire)
    saliency = (3 * abs(gradient(W0, 0) * W0) + 5 * abs(gradient(W0, 1) * W0)) / 8
    mask = np.concatenate([kept(saliency[:12], 6), np.ones(3)])
    w = mask * W0
    for t, (lr, record) in enumerate(records):
        ends = [sgd(w, client, lr, mask=mask).end for client in CLIENTS]
        w = (3 * ends[0] + 5 * ends[1]) / 8
        np.testing.assert_allclose(run.weights.numpy(), w, rtol=0, atol=1e-6 if wire else 1e-12)
        assert run.loop.state.server.mask == run_mask(mask)
        # Before round 1 the dense weights travel to all clients, and 15 saliencies back, of one batch's gradient. The
        # mask travels once, as 12 bits: that of the biases is full.
        before = Costs(search_flops=3 * 27 * (3 + 5), down_bytes=2 * 60, up_bytes=2 * 60, mask_bytes=2 * 2)
        costs = Costs(train_flops=3 * 15 * 2 * (3 + 5), down_bytes=2 * 36, up_bytes=2 * 36)
        costs = costs + before if t == 0 else costs
        assert replace(record.costs, encoded_bytes=0) == costs
        scored(run, "global", [w, w])


def run_mask(mask: Vector):
    return pack(mask.tolist())


@pytest.mark.parametrize(("wire", "pull"), [(None, 0.0), ("fp32", 0.0), (None, 0.5)])
def test_feddst(wire, pull):
    """A horizon of 3 rounds: 3 of 6 weights and 1 of 2 biases are exchanged in round 1, and none in round 2.

    A proximal term pulls the second epoch toward the start of the first, but no dropped weight away from 0.
    """
    options = {"masks": [MASKS[0]] * 2, "active": [6, 2], "wire": wire, "proximal": pull}
    run, records = rounds(
        FedDST(name="feddst", every=2), searcher=DST(name="dst", anneal_rounds=3), **options
    )
    mask, w = MASKS[0], MASKS[0] * W0
    for t, (lr, record) in enumerate(records):
        ends, masks = [], []
        for k, client in enumerate(CLIENTS):
            own, end = mask, sgd(w, client, lr, steps=1, mask=mask, anchor=w, pull=pull).end
            if t == 0:
                slope = gradient(end, k)
                own = np.concatenate(
                    [
                        exchange(mask[:12], end[:12], slope[:12], 3),
                        exchange(mask[12:], end[12:], slope[12:], 1),
                    ]
                )
            ends.append(sgd(own * end, client, lr, steps=1, mask=own, anchor=own * w, pull=pull).end)
            masks.append(own)
        holders = 3 * masks[0] + 5 * masks[1]
        total = 3 * ends[0] + 5 * ends[1]
        w = np.divide(total, holders, out=np.zeros(15), where=holders > 0)
        scores = np.where(holders > 0, abs(w), -1)
        changed, mask = mask, np.concatenate([kept(scores[:12], 6), kept(scores[12:], 2)])
        w = mask * w
        np.testing.assert_allclose(run.weights.numpy(), w, rtol=0, atol=1e-6 if wire else 1e-12)
        assert run.loop.state.server.mask == run_mask(mask)
        assert (mask == changed).all() == (t == 1)
        costs = Costs(
            train_flops=3 * (2 * 6 + 2) * 2 * (3 + 5),
            search_flops=3 * 27 * (3 + 5) if t == 0 else 0,
            down_bytes=2 * 4 * 8,
            up_bytes=2 * 4 * 8,
            # Round 1: the seed of the first mask down, 15 bits up; round 2: the server's mask down.
            mask_bytes=2 * (8 + 2) if t == 0 else 2 * 2,
        )
        assert replace(record.costs, encoded_bytes=0) == costs
        scored(run, "global", [w, w])
        for (_, update), end in zip(run.updates[-2:], ends, strict=True):
            np.testing.assert_allclose(update.local.numpy(), end, rtol=0, atol=1e-6 if wire else 1e-12)
        scored(run, "local", ends)


# Masks of each client, and mixtures -----------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_lotteryfl(threshold):
    method = LotteryFL(name="lotteryfl", sparsity=0.4, prune_rate=0.25, accuracy_threshold=threshold)
    run, records = rounds(method)
    w, masks = W0, [np.ones(15), np.ones(15)]
    pruned = []
    for lr, record in records:
        ends, costs = [], Costs()
        for k, client in enumerate(CLIENTS):
            start, too_dense = masks[k] * w, masks[k][:12].mean() > 0.6
            flops = int(2 * masks[k][:12].sum() + 3)
            down = 4 * int(masks[k].sum())
            search = flops * len(client.y) if too_dense else 0
            prunes = too_dense and accuracy(start, client.x, client.y) > threshold
            if prunes:
                active = np.flatnonzero(masks[k][:12])
                # A quarter of 12, then of 9: 3 and 2, but never below 0.6 x 12 = 7.2, so 8.
                count = min(len(active) // 4, len(active) - 8)
                masks[k] = masks[k].copy()
                masks[k][active[np.argsort(abs(start[active]))[:count]]] = 0
                start = masks[k] * W0  # rewound
            pruned.append(prunes)
            ends.append(sgd(start, client, lr, mask=masks[k]).end)
            costs += Costs(
                train_flops=3 * int(2 * masks[k][:12].sum() + 3) * 2 * len(client.y),
                search_flops=search,
                down_bytes=down,
                up_bytes=4 * int(masks[k].sum()),
                mask_bytes=2 * prunes,
            )
        held = masks[0] + masks[1]
        w = np.where(held > 0, (ends[0] + ends[1]) / np.maximum(held, 1), w)
        equal(run.weights, w)
        for k in range(2):
            assert run.loop.state.clients[k].mask == run_mask(masks[k])
        scored(run, "personal", [mask * w for mask in masks])
        assert record.costs == costs
    assert len(set(pruned)) == (2 if threshold == 0.5 else 1) and pruned[0] == (threshold < 1)


def test_fedala():
    """The biases are the mixed head; a first update changes nothing, for all that is new is w_0."""
    run, records = rounds(FedALA(name="fedala", layers=1, rate=0.7, first_steps=2, steps=3))
    w, last, mixing = W0, [W0, W0], [np.ones(15), np.ones(15)]
    for t, (lr, record) in enumerate(records):
        steps = 3 if t else 2
        for k, client in enumerate(CLIENTS):
            for _ in range(steps):
                slope = gradient(last[k] + (w - last[k]) * mixing[k], k)
                learned = np.clip(mixing[k] - 0.7 * slope * (w - last[k]), 0, 1)
                mixing[k] = np.concatenate([np.ones(12), learned[12:]])
            last[k] = sgd(last[k] + (w - last[k]) * mixing[k], client, lr).end
        w = (3 * last[0] + 5 * last[1]) / 8
        equal(run.weights, w)
        for k in range(2):
            equal(state(run, k, "mixing"), mixing[k])
        scored(run, "local", last)
        scored(run, "personal", [old + (w - old) * a for old, a in zip(last, mixing, strict=True)])
        assert record.costs == PLAIN + Costs(search_flops=steps * 3 * 27 * (3 + 5))
    assert all((a[12:] < 1).any() and (a[12:] > 0).any() for a in mixing)


@pytest.mark.parametrize(("wire", "pull"), [(None, 0.0), ("fp32", 0.0), (None, 0.5)])
def test_fedselect(wire, pull):
    """In round 1 a quarter of the 12 weights become personal, and of the 3 biases none; in round 2 there is no room.

    A proximal term pulls every epoch toward the start of the first.
    """
    method = FedSelect(name="fedselect", every=1, rate=0.25, most=0.3)
    run, records = rounds(method, wire=wire, proximal=pull)
    w, own, shared = W0, [W0, W0], [np.ones(15), np.ones(15)]
    for t, (lr, record) in enumerate(records):
        changes, held = np.zeros(15), shared[0] + shared[1]
        costs = Costs()
        for k, client in enumerate(CLIENTS):
            start = end = np.where(shared[k] > 0, w, own[k])
            for _ in range(2):
                for part in [1 - shared[k], shared[k]] if t else [shared[k]]:
                    end = end - lr * part * gradient(end, k)
                    end = end - lr * pull * part * (end - start)
            changes += shared[k] * (start - end)
            own[k] = end
            values = 4 * int(shared[k].sum())
            if t == 0:
                moved = abs(end - start)[:12]
                shared[k] = shared[k] - np.concatenate([kept(moved, 3), np.zeros(3)])
            costs += Costs(
                train_flops=3 * 27 * 2 * (1 + t) * len(client.y),
                down_bytes=values,
                up_bytes=values,
                mask_bytes=2 * (t == 0),  # 12 bits: those of the biases are full
            )
        w = w - np.divide(changes, held, out=np.zeros(15), where=held > 0)
        np.testing.assert_allclose(run.weights.numpy(), w, rtol=0, atol=1e-6 if wire else 1e-12)
        for k in range(2):
            assert run.loop.state.clients[k].mask == run_mask(shared[k])
        scored(run, "personal", [np.where(s > 0, w, v) for s, v in zip(shared, own, strict=True)])
        assert replace(record.costs, encoded_bytes=0) == costs
        assert run.loop.state.densities() == [1, 1]


@pytest.mark.parametrize("wire", [None, "fp32"])
def test_dispfl(wire):
    """Of two clients each is the other's neighbour. A horizon of 3: 3, then 2 weights are exchanged, and 1 bias."""
    method, searcher = DisPFL(name="dispfl", neighbours=1), DST(name="dst", anneal_rounds=3)
    run, records = rounds(method, searcher=searcher, masks=MASKS, active=[6, 2], wire=wire)
    masks, own = list(MASKS), [mask * W0 for mask in MASKS]
    for t, (lr, record) in enumerate(records):
        mean = (own[0] + own[1]) / np.maximum(masks[0] + masks[1], 1)
        ends = [
            sgd(mask * mean, client, lr, mask=mask).end for mask, client in zip(masks, CLIENTS, strict=True)
        ]
        for k in range(2):
            slope = gradient(ends[k], k)
            parts = [
                exchange(masks[k][part], ends[k][part], slope[part], count)
                for part, count in ((slice(0, 12), 3 - t), (slice(12, 15), 1))
            ]
            masks[k] = np.concatenate(parts)
            own[k] = masks[k] * ends[k]
        for k in range(2):
            found = state(run, k, "weights").numpy()
            np.testing.assert_allclose(found, own[k], rtol=0, atol=1e-6 if wire else 1e-12)
            assert run.loop.state.clients[k].mask == run_mask(masks[k])
        scored(run, "personal", own)
        scored(run, "local", ends)
        # Eight values and 15 bits from the neighbour, nothing to a server.
        costs = Costs(
            train_flops=3 * 14 * 2 * 8, search_flops=3 * 27 * 8, down_bytes=2 * 32, mask_bytes=2 * 2
        )
        assert replace(record.costs, encoded_bytes=0) == costs
    assert torch.equal(run.weights, run.initial)


def test_mapper():
    """A linear model: the mixture of outputs is the model of the mixed weights."""
    run, records = rounds(MAPPER(name="mapper", shares=[0.3, 0.9], local_epochs=2))
    w, v = W0, [W0, W0]
    for lr, record in records:
        ends, shares = [], []
        for k, client in enumerate(CLIENTS):
            tried = []
            for share in (0.3, 0.9):
                end, losses = v[k], []
                for _ in range(2):
                    loss, slope = loss_and_gradient(share * end + (1 - share) * w, client.x, client.y)
                    end, losses = end - lr * share * slope, [*losses, loss]
                tried.append((np.mean(losses), share, end))
            _, share, v[k] = min(tried, key=lambda one: one[0])
            end = w
            for _ in range(2):
                end = end - lr * (1 - share) * gradient(share * v[k] + (1 - share) * end, k)
            ends.append(end)
            shares.append(share)
        w = np.mean(ends, axis=0)
        equal(run.weights, w)
        for k in range(2):
            equal(state(run, k, "personal"), v[k])
            equal(state(run, k, "share"), np.array([shares[k]]))
        scored(run, "personal", [s * own + (1 - s) * w for s, own in zip(shares, v, strict=True)])
        scored(run, "local", ends)
        # Two local trainings and one of the shared model, each with a forward pass of the other model.
        assert record.costs == PLAIN + Costs(train_flops=(3 * 4 - 3) * 27 * 2 * 8)


@pytest.mark.parametrize("wire", [None, "fp32"])
def test_fedmd(wire):
    """Three public pictures. A step of the digest moves each output by the sign of its distance from the consensus."""
    public = [9, 11, 13]
    x, y = seen(PICTURES[public]), LABELS[public]
    method = FedMD(name="fedmd", public_epochs=3, digest_epochs=2)
    run, records = rounds(method, public=public, wire=wire)
    own, consensus, tolerance = [W0, W0], np.zeros((3, 3)), 1e-6 if wire else 1e-12
    for t, (lr, record) in enumerate(records):
        for k, client in enumerate(CLIENTS):
            for _ in range(2 if t else 3):
                sign = np.sign(logits(own[k], x) - consensus) / 9
                towards = np.concatenate([(sign.T @ x).ravel(), sign.sum(axis=0)])
                own[k] = own[k] - lr * (towards if t else loss_and_gradient(own[k], x, y)[1])
            own[k] = sgd(own[k], client, lr).end
        consensus = (logits(own[0], x) + logits(own[1], x)) / 2
        found = run.loop.state.server["consensus"].numpy()
        np.testing.assert_allclose(found, consensus, rtol=0, atol=tolerance)
        for k in range(2):
            np.testing.assert_allclose(state(run, k, "weights").numpy(), own[k], rtol=0, atol=tolerance)
        scored(run, "personal", own)
        scored(run, "local", own)
        # Nine outputs each way. Two epochs of 3 and 5 pictures, and of the public ones; one look at these.
        passes = 3 * 2 * 8 + 2 * (3 * (2 if t else 3) * 3 + 3)
        costs = Costs(train_flops=27 * passes, down_bytes=2 * 36, up_bytes=2 * 36)
        assert replace(record.costs, encoded_bytes=0) == costs
    assert torch.equal(run.weights, run.initial)
