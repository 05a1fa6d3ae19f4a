"""Server optimizers: two rounds of each by hand, and as whole runs."""

from __future__ import annotations

import math

import pytest
import torch
from federations import small

from fedspa.core.errors import UserError
from fedspa.core.server import Aggregate, ServerState
from fedspa.core.weights import ParameterSpace
from fedspa.masks.dst import DST
from fedspa.methods.fedavg import FedAvg
from fedspa.methods.fedspa import FedSpa
from fedspa.server_optimizers.adaptive import ServerAdagrad, ServerAdam, ServerYogi
from fedspa.server_optimizers.base import ServerOptimizer
from fedspa.server_optimizers.sgd import ServerSGD

UPDATES = [(0.5, -0.2), (0.1, 0.4)]  # the mean updates of two rounds, of two parameters
W = (1.0, 2.0)


def steps(optimizer: ServerOptimizer, trained: int = 2) -> list[list[float]]:
    """The weights after each of the two rounds."""
    weights = torch.tensor(W, dtype=torch.float64)
    server, seen = ServerState(weights, kept=optimizer.moments(weights)), []
    for update in UPDATES:
        space = ParameterSpace(("w", "mean"), ((trained,), (2 - trained,)), statistics=1)
        aggregate = Aggregate(torch.tensor(update, dtype=torch.float64), {}, space, participation=0.5)
        server = optimizer.step(server, aggregate)
        seen.append(server.weights.tolist())
    return seen


def test_plain_averaging_and_momentum():
    assert steps(ServerSGD(name="sgd")) == [[0.5, 2.2], [0.4, pytest.approx(1.8)]]
    assert steps(ServerSGD(name="sgd", lr=0.5)) == [[0.75, 2.1], [pytest.approx(0.7), pytest.approx(1.9)]]
    # v = u1, then 0.9 u1 + u2 = (0.55, 0.22).
    after = steps(ServerSGD(name="momentum", momentum=0.9))
    assert after == [[0.5, 2.2], [pytest.approx(-0.05), pytest.approx(1.98)]]


@pytest.mark.parametrize(
    ("optimizer", "second"),
    [
        (ServerAdagrad(name="adagrad", lr=0.1, beta1=0.9, tau=0.01), lambda v, s: v + s),
        (ServerAdam(name="adam", lr=0.1, tau=0.01), lambda v, s: 0.99 * v + 0.01 * s),
        (ServerYogi(name="yogi", lr=0.1, tau=0.01), lambda v, s: v - 0.01 * s * math.copysign(1, v - s)),
    ],
    ids=["adagrad", "adam", "yogi"],
)
def test_adaptive_optimizers(optimizer, second):
    seen = steps(optimizer)
    for coordinate in range(2):
        w, m, v = W[coordinate], 0.0, 0.01**2
        for round, update in enumerate(UPDATES):
            g = update[coordinate]
            m, v = 0.9 * m + 0.1 * g, second(v, g * g)
            w -= 0.1 * m / (math.sqrt(v) + 0.01)
            assert seen[round][coordinate] == pytest.approx(w, rel=1e-12)


def test_running_statistics_take_the_plain_mean():
    after = steps(ServerAdam(name="adam", lr=0.1), trained=1)
    assert [weights[1] for weights in after] == [2.2, pytest.approx(1.8)]
    assert after[0][0] != 0.5


@pytest.mark.parametrize(
    "optimizer", [ServerSGD(name="momentum", momentum=0.9), ServerYogi(name="yogi")], ids=["momentum", "yogi"]
)
@pytest.mark.parametrize(
    ("method", "searcher"),
    [(FedAvg, None), (FedSpa, DST(name="dst", anneal_rounds=3))],
    ids=["fedavg", "fedspa"],
)
def test_a_run_goes_on_with_the_moments_of_its_checkpoint(optimizer, method, searcher):
    def federation(rounds: int):
        made = method(name="method")
        made.server_optimizer = optimizer
        return small(made, searcher, rounds=rounds)

    whole, broken, resumed = federation(3), federation(1), federation(3)
    whole.run()
    broken.run()
    resumed.loop.load_state_dict(broken.loop.state_dict())
    resumed.run()
    assert torch.equal(resumed.weights, whole.weights) and whole.loop.state.server.kept
    for name, moment in whole.loop.state.server.kept.items():
        assert torch.equal(resumed.loop.state.server.kept[name], moment)
    plain = small(method(name="method"), searcher, rounds=3)
    plain.run()
    assert not torch.equal(plain.weights, whole.weights)
    assert plain.loop.state.costs == whole.loop.state.costs  # moments do not travel


@pytest.mark.parametrize("option", ["sgd", "momentum", "adam", "yogi", "adagrad"])
def test_options_of_the_config(plan, option):
    made = plan("method=fedavg", f"server_optimizer={option}")
    assert made.method.server_optimizer is made.server_optimizer and made.names["server_optimizer"] == option


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["server_optimizer=adamw"], ["adamw", "adam"]),
        (["server_optimizer.lr=0"], ["server_optimizer.lr=0"]),
        (["server_optimizer=adam", "server_optimizer.tau=-1"], ["server_optimizer.tau=-1"]),
        (["method=local", "server_optimizer=adam"], ["server_optimizer=adam", "method=local"]),
        (["method=local", "personal_layers=head"], ["personal_layers", "method=local"]),
        (["personal_layers=hed"], ["personal_layers=hed", "head"]),
        (["training.proximal=-1"], ["training.proximal=-1"]),
    ],
)
def test_mistakes_are_told(plan, words, parts):
    with pytest.raises(Exception) as mistake:
        plan(*words)
    if isinstance(mistake.value, UserError):
        assert all(part in str(mistake.value) for part in parts)
    else:  # Hydra's own, for an option that does not exist
        assert "adamw" in str(mistake.value)
