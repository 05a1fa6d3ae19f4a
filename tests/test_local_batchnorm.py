"""personal_layers=norm: every client keeps its own BatchNorm layers, as in FedBN, whatever the method."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from archives import pack, unpack
from batchnorm_runs import CLIENTS, METHODS, TRAINING, network, run
from federations import Federation, pixels, train, two_workers

from fedspa.core.randomness import generator
from fedspa.core.settings import FaultSettings
from fedspa.core.weights import ParameterSpace, flat_tensors
from fedspa.costs.network import NetworkCosts
from fedspa.federated.own_layers import PERSONAL_MODEL, SHARED_MODEL
from fedspa.metrics.accuracy import Accuracy
from fedspa.training.compiled import CompiledEngine
from fedspa.training.workload import Workload

SHARED = 36 + 216 + 6 + 18 + 3
"""Of the network's values: all but the two BatchNorm layers, of 4 and 6 channels with four values each."""
OWN = 4 * (4 + 6)


def own(federation: Federation, client: int, name: str = SHARED_MODEL) -> torch.Tensor:
    return federation.loop.state.client_state(client).tensor(name)


def test_the_own_layers_lie_behind_the_shared_ones():
    whole = ParameterSpace.of(network("norm"))
    assert (whole.total, whole.shared.total, whole.shared.statistics) == (SHARED + OWN, SHARED, 0)
    assert whole.trained == SHARED + 2 * (4 + 6) and whole.names[: -whole.kept] == whole.shared.names
    assert sorted(whole.names) == sorted(ParameterSpace.of(network("average")).names)
    assert [name for name in whole.names[-whole.kept :]] == [
        *("1.weight", "1.bias", "5.weight", "5.bias"),
        *("1.running_mean", "1.running_var", "5.running_mean", "5.running_var"),
    ]


def fedbn(rounds: int) -> tuple[dict[str, torch.Tensor], list[torch.nn.Module]]:
    """FedBN (Li et al. 2021, Algorithm 1) in plain PyTorch: a network a client, its BatchNorm never replaced."""
    images = pixels(CLIENTS.train)
    clients = [network().double() for _ in CLIENTS.train_rows]
    norms = ("1.", "5.")
    names = [name for name, _ in clients[0].named_parameters() if not name.startswith(norms)]
    shared = {name: clients[0].get_parameter(name).detach().clone() for name in names}
    sizes = torch.tensor([float(len(rows)) for rows in CLIENTS.train_rows]).double()
    for t in range(rounds):
        for k, client in enumerate(clients):
            client.load_state_dict(shared, strict=False)
            rows, source = torch.from_numpy(CLIENTS.train_rows[k]), generator(0, "batches", t, k)
            sgd = torch.optim.SGD(client.parameters(), TRAINING.lr_at(t), momentum=0.5, weight_decay=0.1)
            client.train()
            for _ in range(TRAINING.epochs):
                for batch in images.epoch(rows, TRAINING.batch_size, source):
                    sgd.zero_grad()
                    torch.nn.functional.cross_entropy(client(batch.inputs), batch.targets).backward()
                    torch.nn.utils.clip_grad_norm_(client.parameters(), 0.5)
                    sgd.step()
        shares = sizes / sizes.sum()
        shared = {
            name: sum(
                share * client.get_parameter(name).detach()
                for share, client in zip(shares, clients, strict=True)
            )
            for name in names
        }
    for client in clients:
        client.load_state_dict(shared, strict=False)
    return shared, clients


def test_fedavg_is_fedbn_in_plain_pytorch():
    """The shared part is the average, each client's BatchNorm is its own, and its global model is tested with it."""
    done = run("fedavg", "norm", rounds=3)
    records = done.run()
    shared, clients = fedbn(3)
    for name, tensor in done.space.items(done.weights):
        torch.testing.assert_close(tensor, shared[name], rtol=1e-9, atol=1e-12)
    test, accuracy, scores = pixels(CLIENTS.test), Accuracy(name="accuracy"), []
    for k, client in enumerate(clients):
        tensors = list(flat_tensors(client).items())
        kept = [tensor.detach().flatten() for name, tensor in tensors if name.startswith(("1.", "5."))]
        torch.testing.assert_close(own(done, k), torch.cat(kept), rtol=1e-9, atol=1e-12)
        (batch,) = test.in_order(torch.from_numpy(CLIENTS.test_rows[k]), 8)
        predicted = client.eval()(batch.inputs).argmax(1)
        scores.append(float(accuracy(predicted[None], batch.targets[None], 3)))
    assert len({own(done, k).sum().item() for k in range(4)}) == 4
    found = done.loop.state.scores["global"]["accuracy"].values
    assert found.tolist() == scores
    traffic = 4 * 4 * SHARED  # of four clients, four bytes a value
    assert all(record.costs.down_bytes == record.costs.up_bytes == traffic for record in records)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_leaves_the_own_layers_to_the_clients(name):
    done = run(name, "norm", clients_per_round=2)
    initial = own(done, 0)
    assert all(own(done, client) is initial for client in range(4))
    for number, record in enumerate(done.loop.rounds(), start=1):
        for client, update in done.updates[2 * (number - 1) :]:
            assert update.update is None or len(update.update) == SHARED
            assert update.mask is None or len(update.mask) == SHARED
            assert len(update.local) == SHARED + OWN
            assert torch.equal(own(done, client), update.local[SHARED:])
        assert len(done.weights) == SHARED
        assert record.costs.down_bytes <= 2 * 4 * SHARED and record.costs.up_bytes <= 2 * 4 * SHARED
    trained = sorted(done.loop.state.updates)
    layers = [own(done, client) for client in trained]
    assert all(
        not torch.equal(one, other) for one, other in zip(layers, [initial, *layers[:-1]], strict=True)
    )
    assert all(own(done, client) is initial for client in set(range(4)) - set(trained))
    assert (PERSONAL_MODEL in done.loop.state.client_state(trained[0])) == (name == "ditto")


def test_models_of_ditto_have_layers_of_their_own():
    """Without a pull its personal model is trained as that of a client on its own, layers included."""
    ditto, _ = METHODS["ditto"]
    alone = run("local", "norm")
    both = run("ditto", "norm", method=replace(ditto, proximal=0.0))
    alone.run(), both.run()
    for client in range(4):
        state = both.loop.state.client_state(client)
        assert torch.equal(state.tensor("weights"), alone.loop.state.client_state(client).tensor("weights"))
        assert torch.equal(own(both, client, PERSONAL_MODEL), own(alone, client))
        assert not torch.equal(own(both, client, PERSONAL_MODEL), own(both, client))
    personal, local = both.loop.state.scores["personal"], alone.loop.state.scores["local"]
    assert personal["accuracy"].values.tolist() == local["accuracy"].values.tolist()


def test_a_pull_is_towards_the_model_that_the_client_was_sent_with_its_layers():
    """So strong a pull leaves of every step only where it is pulled to; statistics are nobody's to pull."""
    ditto, _ = METHODS["ditto"]
    done = run("ditto", "norm", method=replace(ditto, proximal=1 / TRAINING.lr), rounds=1)
    initial = own(done, 0)
    done.run()
    for client in range(4):
        assert torch.equal(done.loop.state.client_state(client).tensor("weights"), done.initial)
        layers = own(done, client, PERSONAL_MODEL)
        assert torch.equal(layers[:20], initial[:20]) and not torch.equal(layers[20:], initial[20:])


@pytest.mark.parametrize("name", ["fedspa-dst", "fedspa-snip", "ditto"])
def test_compiled_rounds_are_those_of_the_eager_engine(name):
    eager = run(name, "norm")
    other = run(
        name, "norm", engine_of=lambda one: CompiledEngine(one, Workload(14, steps=100), compiler=None)
    )
    for reference, record in zip(eager.run(), other.run(), strict=True):
        assert record.loss == pytest.approx(reference.loss, rel=1e-10) and record.scores == reference.scores
    torch.testing.assert_close(other.weights, eager.weights, rtol=1e-9, atol=1e-12)
    for client in range(4):
        torch.testing.assert_close(own(other, client), own(eager, client), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["fedspa-dst", "ditto", "local"])
def test_two_workers_and_a_resumed_run_leave_the_same_bytes(name):
    options = {"policy": "norm", "dtype": torch.float32, "clients_per_round": 2, "rounds": 4}
    alone, shared = run(name, **options), run(name, executor=two_workers, **options)
    records = alone.run()
    try:
        assert [record.scores for record in shared.run()] == [record.scores for record in records]
    finally:
        shared.close()
    broken, resumed = run(name, **options), run(name, **options)
    rounds = broken.loop.rounds()
    next(rounds), next(rounds)
    resumed.loop.load_state_dict(unpack(pack(broken.loop.state_dict())))
    assert [record.scores for record in resumed.run()] == [record.scores for record in records[2:]]
    for other in (shared, resumed):
        assert torch.equal(other.weights, alone.weights)
        for client in range(4):
            assert other.loop.state.client_state(client) == alone.loop.state.client_state(client)


def test_clients_without_an_update_still_share_the_initial_layers_in_a_resumed_run():
    broken, resumed = (run("fedavg", "norm", clients_per_round=1, rounds=2) for _ in range(2))
    next(broken.loop.rounds())
    resumed.loop.load_state_dict(unpack(pack(broken.loop.state_dict())))
    never = [client for client in range(4) if client not in resumed.loop.state.updates]
    assert len(never) == 3 and len({id(own(resumed, client)) for client in never}) == 1


def test_a_lost_update_leaves_the_layers_as_they_were():
    whole, lossy = (
        run("fedavg", "norm", rounds=3, faults=FaultSettings(loss=loss), wire="fp32") for loss in (0.0, 0.5)
    )
    whole.run()
    before = {client: own(lossy, client) for client in range(4)}
    lost = 0
    for record in lossy.loop.rounds():
        missed = {event.client for event in record.events}
        for client in record.participants:
            after = own(lossy, client)
            assert (after is before[client]) == (client in missed)
            before[client] = after
        lost += len(missed)
    assert 0 < lost < 12


@pytest.mark.parametrize("name", ["fedavg", "fedspa-rsm", "fedspa-holders", "subfedavg", "subsampling"])
def test_over_the_wire_goes_what_is_shared(name):
    """In float32 the run is the same, and no message has room for the layers."""
    plain, wired = (run(name, "norm", dtype=torch.float32, wire=wire) for wire in (None, "fp32"))
    for reference, record in zip(plain.run(), wired.run(), strict=True):
        assert record.scores == reference.scores
        costs, frames = (
            record.costs,
            4 * 2 * (40 + 8 + 8 + 2),
        )  # header, checksum, seed, changes of seven tensors
        assert costs.encoded_bytes <= costs.down_bytes + costs.up_bytes + costs.mask_bytes + frames
    assert torch.equal(plain.weights, wired.weights)
    assert all(torch.equal(own(plain, client), own(wired, client)) for client in range(4))


def test_finetuning_starts_from_the_clients_own_layers():
    done = run("fedavg", "norm")
    done.run()
    tuned_scores = done.loop.tests.finetune(done.loop.state, epochs=1)
    scores, engine = tuned_scores["accuracy"].values, done.loop._setup.engine
    for client in range(4):
        tuned = train(
            engine,
            torch.cat([done.weights, own(done, client)]),
            torch.from_numpy(CLIENTS.train_rows[client]),
            epochs=1,
            learning_rate=TRAINING.lr_at(2),
            generator=generator(0, "finetune", 2, client),
        )
        rows = torch.from_numpy(CLIENTS.test_rows[client])
        predicted = engine.predict(tuned.weights, pixels(CLIENTS.test), rows, 8)
        share = float((predicted == CLIENTS.test.targets[rows]).double().mean())
        assert scores[client] == pytest.approx(100 * share)


def test_costs_are_those_of_what_travels():
    costs = NetworkCosts.of(network("norm"), (1, 8, 8))
    assert costs.parameters == SHARED and costs.statistics == 0 and costs.value_bytes() == 4 * SHARED
    assert costs.forward_flops() == NetworkCosts.of(network("average"), (1, 8, 8)).forward_flops()
