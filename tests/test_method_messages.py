"""Methods whose messages are unusual: a step before round 1, a message for each client, uploads without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from by_hand import CLIENTS, LRS, W0, loss_and_gradient, sgd
from federations import Federation, two_workers
from test_rounds_by_hand import tiny_federation

from fedspa.core.client import Client, ClientUpdate, Initial, Peers
from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError
from fedspa.core.server import Aggregate, ServerState
from fedspa.methods.fedavg import FedAvg
from fedspa.planning.counting import Update, UpdateCosts

EXECUTORS = {"one process": {}, "two workers": {"executor": two_workers}, "wire": {"wire": "fp32"}}


@dataclass(kw_only=True)
class Prepared(FedAvg):
    """Before round 1 all clients send their gradients' sizes; the server moves by a tenth of their mean."""

    def client_prepare(self, client: Client, server: ServerState) -> ClientUpdate:
        size = client.gradient(client.weights, "prepare").abs()
        return ClientUpdate(update=None, tensors={"size": size}, local=None)

    def server_prepare(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        assert aggregate.update is None and aggregate.participation == 1
        return ServerState(server.weights - 0.1 * aggregate.tensors["size"])


@pytest.mark.parametrize("where", EXECUTORS)
def test_a_step_before_round_one_by_hand(where):
    options = EXECUTORS[where]
    run = tiny_federation(Prepared(name="prepared"), **options)
    first, second = run.run()
    sizes = [abs(loss_and_gradient(W0, client.x, client.y)[1]) for client in CLIENTS]
    w = W0 - 0.1 * (3 * sizes[0] + 5 * sizes[1]) / 8
    for lr in LRS:
        ends = [sgd(w, client, lr).end for client in CLIENTS]
        w = w - (3 * (w - ends[0]) + 5 * (w - ends[1])) / 8
    tolerance = 1e-6 if where == "wire" else 1e-12
    np.testing.assert_allclose(run.weights.numpy(), w, rtol=0, atol=tolerance)
    # 15 weights down, 15 sizes up, and the gradient of one batch, once for each of the two clients.
    assert first.costs.down_bytes - second.costs.down_bytes == 2 * 60
    assert first.costs.up_bytes - second.costs.up_bytes == 2 * 60
    assert first.costs.search_flops == 3 * 27 * (3 + 5) and second.costs.search_flops == 0
    assert second.dense_costs == first.dense_costs * 2  # the dense rival prepares nothing

    setup = run.loop._setup
    counted = UpdateCosts(Prepared(name="prepared"), setup.space, setup.training)
    told = [counted(setup.network, Update(rows, first=True, round=0, prepares=True)) for rows in (3, 5)]
    assert sum(costs.traffic_bytes for costs in told) == 2 * 120
    assert sum(costs.search_flops for costs in told) == first.costs.search_flops


@dataclass(kw_only=True)
class Neighbours(FedAvg):
    """Nothing is shared: each client trains on from the mean of its own last model and its neighbour's."""

    kinds: ClassVar[tuple[str, ...]] = ("local",)

    def client_init(self, client: int, initial: Initial) -> ClientState:
        return ClientState(weights=initial.weights)

    def message(self, server: ServerState, client: int, peers: Peers) -> ServerState:
        models = [peers.state_of(other).tensor("weights") for other in range(2)]
        return ServerState((models[0] + models[1]) / 2 if client == 1 else models[0])

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        trained = client.train(client.weights)
        state = ClientState(weights=trained.weights)
        return ClientUpdate(update=torch.zeros_like(trained.weights), state=state, local=trained.weights)


@pytest.mark.parametrize("where", EXECUTORS)
def test_messages_that_differ_by_client_by_hand(where):
    run = tiny_federation(Neighbours(name="neighbours"), **EXECUTORS[where])
    run.run()
    models = [W0, W0]
    for lr in LRS:
        starts = [models[0], (models[0] + models[1]) / 2]
        models = [sgd(start, client, lr).end for start, client in zip(starts, CLIENTS, strict=True)]
    tolerance = 1e-6 if where == "wire" else 1e-12
    for k in range(2):
        found = run.loop.state.clients[k].tensor("weights").numpy()
        np.testing.assert_allclose(found, models[k], rtol=0, atol=tolerance)


@dataclass(kw_only=True)
class Predictions(FedAvg):
    """Clients send a mean of their weights, one number; the server adds what it receives to every weight."""

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        trained = client.train(client.weights)
        return ClientUpdate(
            update=None, tensors={"mean": trained.weights.mean().reshape(1)}, local=trained.weights
        )

    def server_update(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        return ServerState(server.weights + aggregate.tensors["mean"])


@pytest.mark.parametrize("where", EXECUTORS)
def test_uploads_without_weights_by_hand(where):
    run = tiny_federation(Predictions(name="predictions"), **EXECUTORS[where])
    records = run.run()
    w = W0
    for lr in LRS:
        means = [sgd(w, client, lr).end.mean() for client in CLIENTS]
        w = w + (3 * means[0] + 5 * means[1]) / 8
    tolerance = 1e-6 if where == "wire" else 1e-12
    np.testing.assert_allclose(run.weights.numpy(), w, rtol=0, atol=tolerance)
    assert all(record.costs.up_bytes == 2 * 4 and record.costs.down_bytes == 2 * 60 for record in records)
    if where == "wire":
        assert all(record.costs.encoded_bytes > 0 for record in records)


def test_a_prepared_run_goes_on_from_its_checkpoint():
    def federation(rounds: int) -> Federation:
        run = tiny_federation(Prepared(name="prepared"))
        run.loop._federation.rounds = rounds
        return run

    whole, broken, resumed = federation(2), federation(1), federation(2)
    whole.run()
    broken.run()
    resumed.loop.load_state_dict(broken.loop.state_dict())
    assert len(resumed.run()) == 1 and torch.equal(resumed.weights, whole.weights)
    assert resumed.loop.state.costs == whole.loop.state.costs


@dataclass(kw_only=True)
class SendsWeightsTooEarly(Prepared):
    def client_prepare(self, client: Client, server: ServerState) -> ClientUpdate:
        return ClientUpdate(update=client.weights, local=None)


def test_a_step_before_round_one_sends_no_weights():
    run = tiny_federation(SendsWeightsTooEarly(name="early"))
    with pytest.raises(UserError, match="method=early .*client_prepare"):
        run.run()
