"""Where two methods must be the same one, they are: bit for bit, in float32, over several rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from federations import (
    SMALL_CLIENTS,
    Federation,
    federation,
    pack,
    pixels,
    random_clients,
    small,
)
from torch import nn

from fedspa.core.client_state import ClientState
from fedspa.core.settings import TrainingSettings
from fedspa.masks.dst import DST
from fedspa.masks.rsm import RSM
from fedspa.methods.ditto import Ditto
from fedspa.methods.fedavg import FedAvg
from fedspa.methods.fedspa import FedSpa
from fedspa.methods.local import Local
from fedspa.methods.subfedavg import SubFedAvg
from fedspa.methods.subsampling import Subsampling
from fedspa.models.initialise import seeded


def assert_same(one: Federation, other: Federation, kinds: Sequence[str] = ("global", "local")) -> None:
    """Run both: round by round the same weights, losses, scores and updates."""
    for ours, theirs in zip(one.loop.rounds(), other.loop.rounds(), strict=True):
        assert torch.equal(one.weights, other.weights)
        assert (ours.participants, ours.loss, ours.samples) == (
            theirs.participants,
            theirs.loss,
            theirs.samples,
        )
        assert all(ours.scores[kind] == theirs.scores[kind] for kind in kinds)
    for (client, update), (same_client, same_update) in zip(one.updates, other.updates, strict=True):
        assert client == same_client and torch.equal(update.local, same_update.local)
    assert not torch.equal(one.updates[-1][1].local, one.initial)


# FedSpa --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("searcher", [DST(name="dst"), RSM(name="rsm")], ids=["dst", "rsm"])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_fedspa_with_full_masks_is_fedavg(searcher, weighting):
    fedspa = small(FedSpa(name="fedspa", weighting=weighting), searcher, sparsity="0")
    fedavg = small(FedAvg(name="fedavg", weighting=weighting))
    assert_same(fedspa, fedavg)
    assert torch.equal(fedspa.weights, fedavg.weights) and not torch.equal(fedspa.weights, fedspa.initial)
    assert fedspa.loop.state.scores["personal"]["accuracy"].values.tolist() == (
        fedspa.loop.state.scores["global"]["accuracy"].values.tolist()
    )


def test_dst_that_exchanges_nothing_is_rsm():
    dst = small(FedSpa(name="fedspa"), DST(name="dst", alpha0=0.0))
    assert_same(dst, small(FedSpa(name="fedspa"), RSM(name="rsm")), ("global", "personal", "local"))


@pytest.mark.parametrize("normaliser", ["participants", "holders"])
def test_what_no_client_ever_activated_keeps_its_initial_value(normaliser):
    method = FedSpa(name="fedspa", normaliser=normaliser)
    run = small(method, DST(name="dst", anneal_rounds=20, initial="different"), sparsity="0.8", rounds=6)
    run.run()
    held = torch.stack([update.mask for _, update in run.updates])
    never = held.sum(0) == 0
    assert 0 < never.sum() < len(never) / 2  # many were, some never
    assert torch.equal(run.weights[never], run.initial[never])
    assert (run.weights != run.initial)[~never].float().mean() > 0.9
    assert (held[0] != held[1]).any() and any((one != held[0]).any() for one in held[2:])


def test_counts_of_every_tensor_stay_over_a_whole_run():
    run = small(FedSpa(name="fedspa"), DST(name="dst"), sparsity="0.37", rounds=4)
    run.run()
    counts = {run.space.count(update.mask) for _, update in run.updates}
    assert len(counts) == 1
    assert len({update.mask.numpy().tobytes() for _, update in run.updates}) > 2


# The others ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("options", [{}, {"rescale": True}, {"normaliser": "holders"}], ids=str)
def test_subsampling_that_keeps_all_is_fedavg(weighting, options):
    kept = small(Subsampling(name="subsampling", keep_rate=1.0, weighting=weighting, **options))
    fedavg = small(FedAvg(name="fedavg", weighting=weighting))
    assert_same(kept, fedavg)
    assert kept.loop.state.costs == fedavg.loop.state.costs


def test_ditto_without_pull_and_shared_epochs_is_local():
    ditto = small(Ditto(name="ditto", proximal=0.0, shared_epochs=0, personal_epochs=5), eval_every=99)
    local = small(Local(name="local"), epochs=5, eval_every=99)
    for ours, theirs in zip(ditto.loop.rounds(), local.loop.rounds(), strict=True):
        assert (ours.loss, ours.samples) == (theirs.loss, theirs.samples)
        assert ours.costs.train_flops == theirs.costs.train_flops
    for client in local.loop.state.updates:
        own, same = ditto.loop.state.clients[client], local.loop.state.clients[client]
        assert own == same and not torch.equal(own.tensor("weights"), ditto.initial)
    assert torch.equal(ditto.weights, ditto.initial)  # nothing was trained on the shared branch
    personal = ditto.loop.state.scores["personal"]["accuracy"].dense(4)
    scores = local.loop.state.scores["local"]["accuracy"].dense(4)
    for client in local.loop.state.updates:
        assert personal[client] == scores[client]


def test_ditto_without_personal_epochs_costs_what_fedavg_costs_and_leaves_the_personal_models_alone():
    ditto = small(Ditto(name="ditto", shared_epochs=2, personal_epochs=0))
    fedavg = small(FedAvg(name="fedavg"))
    for ours, theirs in zip(ditto.loop.rounds(), fedavg.loop.rounds(), strict=True):
        assert ours.costs == theirs.costs
    assert all(
        ditto.loop.state.client_state(client) == ClientState(weights=ditto.initial) for client in range(4)
    )


def test_local_has_no_traffic_and_leaves_the_global_weights_alone():
    run = small(Local(name="local"))
    for record in run.loop.rounds():
        assert torch.equal(run.weights, run.initial)
        assert record.costs.traffic_bytes == 0 < record.costs.train_flops
        assert set(record.scores) == {"local"}


# Sub-FedAvg ----------------------------------------------------------------------------------------------


def test_subfedavg_that_prunes_nothing_is_fedavg():
    subfedavg, fedavg = (
        small(SubFedAvg(name="subfedavg", prune_rate=0.0)),
        small(FedAvg(name="fedavg", weighting="uniform")),
    )
    assert_same(subfedavg, fedavg)
    assert subfedavg.loop.state.costs == fedavg.loop.state.costs


def test_the_density_of_subfedavg_only_falls_and_ends_at_the_target():
    method = SubFedAvg(name="subfedavg", prune_rate=0.2, accuracy_threshold=0.0, sparsity=0.4)
    run = small(method, rounds=12, eval_every=99)
    run.run()
    weights = torch.cat(
        [torch.full((n,), len(s) > 1) for n, s in zip(run.space.sizes, run.space.shapes, strict=True)]
    )
    for client in range(4):
        masks = [update.mask for trained, update in run.updates if trained == client]
        assert len(masks) > 4
        for earlier, later in zip(masks, masks[1:], strict=False):
            assert (later <= earlier).all()  # what was pruned stays so
        density = [mask[weights].mean().item() for mask in masks]
        assert all((mask[~weights] == 1).all() for mask in masks)
        # An adoption keeps 4/5: 0.8 is above the target of 0.6, 0.64 too, and 0.512 is where it ends.
        assert density[-1] == pytest.approx(0.512, abs=0.002)


def test_the_gate_of_subfedavg_looks_at_training_data_only():
    worse = replace(SMALL_CLIENTS, test=replace(SMALL_CLIENTS.test, targets=2 - SMALL_CLIENTS.test.targets))
    method = SubFedAvg(name="subfedavg", accuracy_threshold=0.3)
    one, other = small(method, rounds=5), small(method, rounds=5, clients=worse)
    one.run(), other.run()
    assert torch.equal(one.weights, other.weights)
    states, same_states = one.loop.state.clients, other.loop.state.clients
    assert dict(states) == dict(same_states) and any(one.loop.state.density(client) < 1 for client in states)
    assert (
        one.loop.state.scores["local"]["accuracy"].values.tolist()
        != other.loop.state.scores["local"]["accuracy"].values.tolist()
    )


def linear_subfedavg(side: int, classes: int, mask: torch.Tensor, **options: Any) -> Federation:
    """One round of one client on a linear model whose weights start under `mask`."""
    network = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(side * side, classes)), seed=0)
    run = federation(
        SubFedAvg(name="subfedavg", **{"accuracy_threshold": 0.0, **options}),
        network,
        random_clients(20, side=side, classes=classes),
        TrainingSettings(epochs=3, batch_size=4),
    )
    run.loop.state.clients[0] = ClientState(mask=pack(torch.cat([mask, torch.ones(classes)])))
    run.run()
    return run


def test_the_gate_of_subfedavg_judges_the_pruned_model():
    options = {"mask": torch.ones(256), "prune_rate": 0.9, "sparsity": 0.95}
    adopted = linear_subfedavg(8, 4, **options)
    mask, trained = adopted.updates[0][1].mask, adopted.updates[0][1].local
    clients = random_clients(20, side=8, classes=4)
    batch = pixels(clients.train).batch(torch.arange(20), None)

    def accuracy(w: torch.Tensor) -> float:
        guess = (batch.inputs.flatten(1) @ w[:256].view(4, 64).T + w[256:]).argmax(1)
        return (guess == batch.targets).double().mean().item()

    assert mask.sum() == 256 - 230 + 4  # nine tenths of 256 weights, rounded down, are gone
    assert accuracy(mask * trained) < accuracy(trained)
    between = (accuracy(mask * trained) + accuracy(trained)) / 2
    refused = linear_subfedavg(8, 4, **options, accuracy_threshold=between)
    assert refused.loop.state.density(0) == 1 and torch.equal(refused.updates[0][1].local, trained)


@pytest.mark.parametrize(("active", "judged"), [(128, False), (129, True)])
def test_subfedavg_stops_exactly_at_its_target(active, judged):
    """128 of 640 weights are a sparsity of 0.8, though 1 - 0.8 is less than 0.2 in binary."""
    run = linear_subfedavg(8, 10, (torch.arange(640) < active).float(), sparsity=0.8, prune_rate=0.5)
    assert (run.loop.state.costs.search_flops > 0) == judged


def test_subfedavg_prunes_the_share_that_was_asked_for():
    """29 of 100 weights, though 0.29 * 100 is 28.999999999999996 in binary."""
    run = linear_subfedavg(5, 4, torch.ones(100), prune_rate=0.29)
    assert run.loop.state.costs.up_bytes == 4 * (71 + 4)
