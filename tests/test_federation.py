"""The loop: reproducible to the byte, blind to all but its seed, frugal with memory, clear when it fails."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
import pytest
import torch
from federations import Federation, federation, random_clients, small, two_workers
from torch import nn

from fedspa.core.errors import UserError
from fedspa.core.records import RoundRecord
from fedspa.core.settings import TrainingSettings
from fedspa.masks.dst import DST
from fedspa.masks.rsm import RSM
from fedspa.masks.search_input import SearchInput
from fedspa.methods.ditto import Ditto
from fedspa.methods.fedavg import FedAvg
from fedspa.methods.fedspa import FedSpa
from fedspa.methods.local import Local
from fedspa.methods.subfedavg import SubFedAvg
from fedspa.methods.subsampling import Subsampling

FEDSPA, FEDAVG = FedSpa(name="fedspa"), FedAvg(name="fedavg")
DIFFERENT = DST(name="dst", initial="different")
METHODS = {
    "fedspa+dst": (FEDSPA, DIFFERENT),
    "fedspa+set": (FEDSPA, DST(name="dst", regrow="random")),
    "fedspa+rsm": (FEDSPA, RSM(name="rsm")),
    "fedavg": (FEDAVG, None),
    "ditto": (Ditto(name="ditto", shared_epochs=1, personal_epochs=1), None),
    "local": (Local(name="local"), None),
    "subfedavg": (SubFedAvg(name="subfedavg", accuracy_threshold=0.3), None),
    "subsampling": (Subsampling(name="subsampling"), None),
}


def told(records: list[RoundRecord]) -> list[RoundRecord]:
    """What the rounds said, but for the wall clock."""
    return [replace(record, seconds={}) for record in records]


def assert_same_bytes(one: Federation, other: Federation) -> None:
    ours, theirs = one.loop.state, other.loop.state
    assert torch.equal(ours.weights, theirs.weights)
    assert ours.clients.keys() == theirs.clients.keys()
    for client, state in ours.clients.items():
        assert state == theirs.clients[client]
    for (client, update), (same_client, same_update) in zip(one.updates, other.updates, strict=True):
        assert client == same_client and torch.equal(update.local, same_update.local)


@pytest.mark.parametrize(("method", "searcher"), METHODS.values(), ids=METHODS)
def test_the_same_seed_gives_the_same_bytes_whatever_else_happens(method, searcher):
    one = small(method, searcher)
    records = one.run()

    torch.manual_seed(12345)  # the second time, others draw and train in between
    torch.rand(7)
    stranger, other = small(FEDSPA, RSM(name="rsm"), seed=5).loop.rounds(), small(method, searcher)
    records_again = []
    for record in other.loop.rounds():
        records_again.append(record)
        next(stranger)
        torch.rand(3)
        np.random.rand(3)
    assert told(records) == told(records_again)
    assert_same_bytes(one, other)
    assert small(method, searcher, seed=1).run()[-1].loss != records[-1].loss


@pytest.mark.parametrize(("method", "searcher"), METHODS.values(), ids=METHODS)
def test_worker_processes_and_the_fp32_wire_change_no_byte(method, searcher):
    plain, wired = small(method, searcher), small(method, searcher, wire="fp32")
    records, over_the_wire = plain.run(), wired.run()
    assert_same_bytes(plain, wired)
    assert [replace(record.costs, encoded_bytes=0) for record in over_the_wire] == [r.costs for r in records]

    shared_out = small(method, searcher, executor=two_workers)
    try:
        assert told(shared_out.run()) == told(records)
    finally:
        shared_out.close()
    assert_same_bytes(plain, shared_out)


def test_looking_more_often_changes_nothing():
    often, seldom = small(FEDSPA, DIFFERENT), small(FEDSPA, DIFFERENT, eval_every=3)
    records, fewer = often.run(), seldom.run()
    assert torch.equal(often.weights, seldom.weights)
    assert [bool(record.scores) for record in fewer] == [False, False, True]
    assert records[-1].scores == fewer[-1].scores
    assert (
        small(FEDSPA, DIFFERENT, eval_every=2).run()[2].scores == records[2].scores
    )  # the last round always


def test_who_takes_part_depends_on_the_seed_alone():
    def participants(method, searcher, seed):
        run = small(method, searcher, rounds=5, eval_every=99, seed=seed)
        chosen = [record.participants for record in run.loop.rounds()]
        assert [client for client, _ in run.updates] == [client for round in chosen for client in round]
        assert all(len(set(round)) == 2 and list(round) == sorted(round) for round in chosen)
        return chosen

    assert participants(FEDSPA, DIFFERENT, seed=0) == participants(FEDAVG, None, seed=0)
    assert participants(FEDAVG, None, seed=0) != participants(FEDAVG, None, seed=1)


@pytest.mark.parametrize(("method", "searcher"), METHODS.values(), ids=METHODS)
def test_a_client_without_an_update_holds_no_state(method, searcher):
    run = small(method, searcher, rounds=3, eval_every=99)
    record = next(run.loop.rounds())
    assert set(run.loop.state.clients) == set(run.loop.state.updates) == set(record.participants)
    assert len(record.participants) == 2


def test_clients_that_share_a_first_state_share_its_memory():
    for method, searcher in [METHODS["fedspa+rsm"], METHODS["ditto"], METHODS["local"], METHODS["subfedavg"]]:
        loop = small(method, searcher).loop
        assert len({loop.state.client_state(client).identity for client in range(4)}) == 1
    run = small(FEDSPA, RSM(name="rsm"))
    run.run()
    assert len({state.identity for state in run.loop.state.clients.values()}) == 1  # and an update keeps it


def test_a_client_keeps_its_state_until_its_next_update():
    run = small(FEDSPA, DIFFERENT, rounds=8, eval_every=99)
    kept = {client: run.loop.state.client_state(client) for client in range(4)}
    for record in run.loop.rounds():
        for client, state in run.loop.state.clients.items():
            assert client in record.participants or state.identity == kept[client].identity
        kept = dict(run.loop.state.clients)
    for client in range(4):
        own = [update for trained, update in run.updates if trained == client]
        for earlier, later in zip(own, own[1:], strict=False):
            assert torch.equal(
                earlier.state.mask.unpack(later.mask), later.mask
            )  # trained with what was found
    assert run.loop.state.density(0) == pytest.approx(run.updates[0][1].mask.mean().item())


def test_local_scores_stay_from_the_last_update_and_count_only_the_trained():
    run, latest = small(FEDAVG, rounds=6), {}
    for record in run.loop.rounds():
        scores = run.loop.state.scores["local"]["accuracy"].dense(4)
        for client in record.participants:
            latest[client] = scores[client]
        assert {client: scores[client] for client in latest} == latest
        assert np.isnan(scores).sum() == 4 - len(latest)
        assert record.scores["local"]["accuracy"].clients == len(latest)
        assert record.scores["global"]["accuracy"].clients == 4
        assert record.scores["local"]["accuracy"].mean == pytest.approx(np.mean(list(latest.values())))


def test_the_learning_rate_decays_from_the_first_round_on():
    run = federation(
        FEDAVG,
        nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
        random_clients(5, 5),
        TrainingSettings(epochs=1, lr=0.2, lr_decay=0.5),
        rounds=3,
    )
    assert [record.learning_rate for record in run.loop.rounds()] == [0.2, 0.1, 0.05]


def test_finetuning_trains_a_copy_of_the_global_model_for_every_client():
    run = small(FEDSPA, DIFFERENT, rounds=2)
    run.run()
    weights, states = run.weights.clone(), dict(run.loop.state.clients)
    untrained = run.loop.tests.finetune(run.loop.state, epochs=0)["accuracy"].values
    assert untrained.tolist() == run.loop.state.scores["global"]["accuracy"].values.tolist()
    trained = run.loop.tests.finetune(run.loop.state, epochs=3)["accuracy"].values
    assert (
        len(trained) == 4
        and trained.tolist() == run.loop.tests.finetune(run.loop.state, epochs=3)["accuracy"].values.tolist()
    )
    assert trained.mean() > untrained.mean()
    assert torch.equal(run.weights, weights)
    assert dict(run.loop.state.clients) == states


def test_divergence_is_told_in_a_sentence():
    run = federation(
        FEDAVG,
        nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
        random_clients(5, 5),
        TrainingSettings(epochs=5, lr=1e200, clip_norm=None, weight_decay=1.0),
    )
    with pytest.raises(
        UserError, match=r"client 0 in round 1 diverged: its weights .* not finite; lower training.lr=1e\+200"
    ):
        run.run()


def test_personal_weights_that_diverge_are_told_too():
    ditto = Ditto(name="ditto", shared_epochs=1, personal_epochs=30, proximal=1e6)
    with pytest.raises(UserError, match=r"in round 1 .*diverged"):
        small(ditto).run()


@dataclass(kw_only=True)
class Looks(RSM):
    """Takes note of the gradients that it is given."""

    needs_gradient: bool = True
    seen: list[torch.Tensor | None] = field(default_factory=list)

    def searching(self, round: int) -> bool:
        return True

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        self.seen.append(search.gradient)
        return search.mask


def test_a_searcher_gets_a_gradient_where_it_needs_one():
    looks, blind = Looks(name="looks"), Looks(name="blind", needs_gradient=False)
    for searcher in (looks, blind):
        small(FEDSPA, searcher).run()
    assert len(looks.seen) == 6 and blind.seen == [None] * 6
    assert not any(torch.equal(one, other) for one, other in combinations(looks.seen, 2))
