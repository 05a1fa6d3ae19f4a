"""Faults of a federation: who is missing by hand, what is charged, what stays as it was, and when a run ends."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import Federation, federation, random_clients, two_workers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedspa.core import names
from fedspa.core.client import Client, ClientUpdate
from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError
from fedspa.core.packed_mask import PackedMask
from fedspa.core.records import Costs, RoundRecord
from fedspa.core.server import ServerState
from fedspa.core.settings import FaultSettings, TrainingSettings
from fedspa.federated.exploration import EXPLORED
from fedspa.federated.faults import MOST_FLIPPED, Fault, FaultModel, damage
from fedspa.federated.sampling import sample_clients
from fedspa.masks.dst import DST
from fedspa.masks.rsm import RSM
from fedspa.methods.ditto import Ditto
from fedspa.methods.fedavg import FedAvg
from fedspa.methods.fedspa import FedSpa
from fedspa.methods.local import Local
from fedspa.methods.subfedavg import SubFedAvg
from fedspa.methods.subsampling import Subsampling
from fedspa.models.initialise import seeded

ROOT = Path(__file__).resolve().parents[1]
SIZES = (6, 10, 14, 10)
CLIENTS = random_clients(*SIZES)
TRAINING = TrainingSettings(epochs=2, batch_size=4)
FEDAVG, DST_MASKS = FedAvg(name="fedavg"), DST(name="dst", initial="different")
METHODS = {
    "fedspa+dst": (FedSpa(name="fedspa"), DST_MASKS),
    "fedspa+rsm": (FedSpa(name="fedspa"), RSM(name="rsm")),
    "fedavg": (FEDAVG, None),
    "ditto": (Ditto(name="ditto", shared_epochs=1, personal_epochs=1), None),
    "local": (Local(name="local"), None),
    "subfedavg": (SubFedAvg(name="subfedavg", accuracy_threshold=0.3), None),
    "subsampling": (Subsampling(name="subsampling"), None),
}
SOME = FaultSettings(dropout=0.3, straggler_spread=0.5, deadline=1.5, loss=0.2, corruption=0.2)
EXPECTED = {  # by seed: what happens to whom in three rounds of all four clients
    5: [
        {1: "lost", 2: "dropout", 3: "late"},
        {0: "dropout", 1: "lost", 2: "late"},
        {0: "corrupt", 1: "dropout", 2: "dropout", 3: "dropout"},
    ],
    8: [
        {0: "dropout", 1: "lost", 2: "late"},
        {1: "lost", 2: "late", 3: "lost"},
        {2: "dropout", 3: "lost"},
    ],
}
FORWARD, BYTES = 2 * 192 + 3, 4 * 195
"""FLOPs of a sample, and bytes of the dense weights: one layer of 64 x 3 weights and 3 biases."""
MESSAGE = 40 + 1 + BYTES + 8
"""Bytes of a dense message in fp32."""


@cache
def half_masks(client: int) -> PackedMask:
    """Every second weight; of clients 1 and 3 the others."""
    return PackedMask.pack((torch.arange(195) + client) % 2)


def linear(method=FEDAVG, searcher=None, faults: FaultSettings = SOME, **options: Any) -> Federation:
    """Four clients, all of them in every round, and softmax regression in float32."""
    network = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), seed=0)
    given: dict[str, Any] = {"rounds": 3, "dtype": torch.float32, "wire": "fp32", "training": TRAINING}
    given |= options
    training = given.pop("training")
    masks = half_masks if searcher else None
    return federation(
        method, network, CLIENTS, training, searcher=searcher, initial_mask=masks, faults=faults, **given
    )


def missing(record: RoundRecord) -> dict[int, str]:
    return {event.client: event.kind for event in record.events if event.client is not None}


def told(records: list[RoundRecord]) -> list[RoundRecord]:
    return [replace(record, seconds={}) for record in records]


# Who is missing


@pytest.mark.parametrize("seed", EXPECTED)
def test_exactly_these_are_missing_and_the_others_are_averaged(seed):
    run = linear(seed=seed)
    before = run.initial
    for record, lost in zip(run.loop.rounds(), EXPECTED[seed], strict=True):
        here = [client for client in range(4) if client not in lost]
        assert missing(record) == lost
        assert record.participants == (0, 1, 2, 3)
        assert [client for client, _ in run.updates] == here
        assert record.samples == 2 * sum(SIZES[client] for client in here)
        if here:
            shares = [SIZES[client] / sum(SIZES[client] for client in here) for client in here]
            step = sum(share * update.update for share, (_, update) in zip(shares, run.updates, strict=True))
            torch.testing.assert_close(run.weights, before - step)
            losses = [SIZES[client] * loss for client, loss in run.losses]
            assert record.loss == pytest.approx(sum(losses) / sum(SIZES[client] for client in here))
        before = run.weights
        run.updates.clear()
        run.losses.clear()


def test_a_round_of_which_nothing_is_left_keeps_the_weights_and_says_so():
    run = linear(seed=5)
    records = run.loop.rounds()
    next(records), next(records)
    before = run.weights.clone()
    third = next(records)
    assert torch.equal(run.weights, before)
    assert (third.loss, third.samples) == (None, 0)
    last = third.events[-1]
    assert (last.round, last.client, last.kind, last.action) == (3, None, "empty_round", "weights kept")
    assert third.total_events == {"dropout": 5, "lost": 2, "late": 2, "corrupt": 1, "empty_round": 1}
    assert third.scores["global"]  # it is tested as any other


def test_with_nobody_left_in_any_round_nothing_ever_changes():
    for method, searcher in METHODS.values():
        run = linear(method, searcher, FaultSettings(dropout=1.0), wire=None)
        records = run.run()
        assert torch.equal(run.weights, run.initial)
        assert not run.loop.state.clients and run.updates == []
        assert [len(record.events) for record in records] == [5, 5, 5]
        assert set(records[-1].scores) == set(method.kinds) - {"local"}


def test_no_fault_is_drawn_unless_asked_for():
    assert FaultModel(FaultSettings(), seed=0, samples=len).draw(0, range(100)) == {}
    assert not any(record.events for record in linear(faults=FaultSettings()).run())


@given(
    st.integers(0, 99),
    st.integers(0, 9),
    st.lists(st.integers(0, 50), min_size=1, unique=True),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_a_fault_is_a_function_of_seed_round_and_client_and_grows_with_its_chance(
    seed, round, clients, low, high
):
    low, high = sorted((low, high))

    def dropped(chance: float, clients: list[int]) -> set[int]:
        return set(FaultModel(FaultSettings(dropout=chance), seed, lambda client: 1).draw(round, clients))

    assert dropped(low, clients) <= dropped(high, clients)
    assert dropped(low, clients) == set().union(*(dropped(low, [client]) for client in clients))
    assert dropped(low, clients[::-1]) == dropped(low, clients)
    assert dropped(0, clients) == set() and dropped(1, clients) == set(clients)


@given(st.integers(0, 99), st.floats(0, 3), st.floats(0.1, 4), st.lists(st.integers(1, 90), min_size=1))
def test_late_is_who_takes_longer_than_the_deadline_times_the_mean(seed, spread, deadline, sizes):
    settings = FaultSettings(straggler_spread=spread, deadline=deadline)
    model = FaultModel(settings, seed, lambda client: sizes[client])
    durations = np.array([model.duration(2, client) for client in range(len(sizes))])
    late = np.flatnonzero(durations > deadline * durations.mean())
    assert model.draw(2, range(len(sizes))) == dict.fromkeys(late, Fault.LATE)
    if deadline >= 1:
        assert len(late) < len(sizes)  # not all can be above their mean


def test_without_a_spread_the_largest_clients_are_the_slowest():
    model = FaultModel(FaultSettings(deadline=1.2), 0, lambda client: SIZES[client])
    assert model.draw(0, range(4)) == {2: Fault.LATE}  # the mean is 10
    assert [model.duration(0, client) for client in range(4)] == list(SIZES)


def test_the_spread_is_that_of_a_log_normal():
    model = FaultModel(FaultSettings(straggler_spread=0.5, deadline=9), 0, lambda client: 1)
    logs = [math.log(model.duration(0, client)) for client in range(4000)]
    assert np.mean(logs) == pytest.approx(0, abs=0.03) and np.std(logs) == pytest.approx(0.5, abs=0.03)


def test_chances_are_those_asked_for_and_one_fault_excludes_the_next():
    model = FaultModel(FaultSettings(dropout=0.2, loss=0.25, corruption=0.5), 0, lambda client: 1)
    drawn = list(model.draw(0, range(4000)).values())
    shares = [drawn.count(fault) / 4000 for fault in (Fault.DROPOUT, Fault.LOST, Fault.CORRUPT)]
    assert shares == pytest.approx([0.2, 0.8 * 0.25, 0.8 * 0.75 * 0.5], abs=0.03)


@given(st.binary(min_size=20, max_size=60), st.integers(0, 99))
def test_damage_flips_a_few_bits_and_no_more(message, seed):
    damaged = damage(message, np.random.default_rng(seed))
    assert len(damaged) == len(message)
    changed = np.frombuffer(damaged, np.uint8) ^ np.frombuffer(message, np.uint8)
    assert 1 <= np.bitwise_count(changed).sum() <= MOST_FLIPPED


# What is charged and what stays


def test_costs_by_hand():
    """Whoever is sampled is sent the weights; all but drop-outs train, and send what nobody reads."""
    records = linear(seed=5).run()
    for record, trained in zip(records, ([0, 1, 3], [1, 2, 3], [0]), strict=True):
        assert record.costs == Costs(
            train_flops=3 * FORWARD * 2 * sum(SIZES[client] for client in trained),
            down_bytes=4 * BYTES,
            up_bytes=len(trained) * BYTES,
            encoded_bytes=(4 + len(trained)) * MESSAGE,
        )
    assert records[-1].dense_costs == replace(records[-1].total_costs, encoded_bytes=0)


def test_a_first_mask_is_sent_until_an_update_has_come():
    """Its seed of 8 bytes: to all four clients; then to those that were not heard of, 1, 2 and 3; then to 1 and 2."""
    records = linear(METHODS["fedspa+rsm"][0], RSM(name="rsm"), seed=5).run()
    assert [record.costs.mask_bytes for record in records] == [4 * 8, 3 * 8, 2 * 8]
    active = [97, 98, 97, 98]  # of 195
    assert records[0].costs.down_bytes == 4 * sum(active)
    assert records[0].costs.up_bytes == 4 * (sum(active) - active[2])


@pytest.mark.parametrize(("method", "searcher"), METHODS.values(), ids=METHODS)
def test_a_client_update_that_leaves_nothing_leaves_the_clients_state_as_it_was(method, searcher):
    run = linear(method, searcher, seed=8, rounds=6)
    loop, before = run.loop, [run.loop.state.client_state(client) for client in range(4)]
    scores = np.full(4, np.nan)
    for record in loop.rounds():
        lost, seen = missing(record), dict(run.updates)
        if method.kinds == ("local",):  # it sends nothing that could be late, lost or damaged
            assert set(lost.values()) <= {"dropout"}
        assert set(seen) == set(range(4)) - set(lost)
        local = loop.state.scores["local"]["accuracy"].dense(4)
        for client in range(4):
            updates = sum(trained == client for trained, _ in run.updates)
            now = loop.state.client_state(client)
            if client in lost:
                assert now.identity == before[client].identity
                assert np.array_equal(local[client], scores[client], equal_nan=True)
            else:
                assert loop.state.updates[client] > 0 and updates == 1
                if searcher:
                    assert torch.equal(seen[client].mask, before[client].mask.unpack(like=seen[client].mask))
            before[client] = now
        scores = local.copy()
        run.updates.clear()


def test_fedspa_goes_on_from_the_mask_that_both_sides_know():
    """Client 3 is heard in round 1, lost in rounds 2 and 3: its mask is the one that came with its only update."""
    run = linear(*METHODS["fedspa+dst"], seed=8)
    run.run()
    (sent,) = [update.state for client, update in run.updates if client == 3]
    assert run.loop.state.updates == {3: 1, 0: 2, 1: 1}
    known = {name: item for name, item in run.loop.state.client_state(3).items() if name != EXPLORED}
    assert ClientState(known) == sent and sent.mask != half_masks(3)
    assert run.loop.state.client_state(2).mask == half_masks(2)  # never heard of


@pytest.mark.parametrize(("method", "searcher"), METHODS.values(), ids=METHODS)
def test_two_workers_give_the_bytes_of_one_with_every_fault(method, searcher):
    faults = replace(SOME, norm_bound=1.5, policy="skip")
    alone, shared = (
        linear(method, searcher, faults, seed=8, **more) for more in ({}, {"executor": two_workers})
    )
    try:
        assert told(alone.run()) == told(shared.run())
    finally:
        shared.close()
    assert torch.equal(alone.weights, shared.weights)
    assert alone.loop.state.updates == shared.loop.state.updates


def test_the_counts_of_events_are_part_of_the_state():
    run, other = linear(seed=5), linear(seed=5)
    *_, third = run.run()
    records = other.loop.rounds()
    next(records), next(records)
    resumed = linear(seed=5)
    resumed.loop.load_state_dict(other.loop.state_dict())
    assert told(list(resumed.loop.rounds())) == told([third])
    assert torch.equal(resumed.weights, run.weights)


# Corruption


def test_a_damaged_update_is_refused_by_its_checksum_and_the_rounds_go_on():
    run = linear(faults=FaultSettings(corruption=1.0))
    records = run.run()
    assert [record.total_events["corrupt"] for record in records] == [4, 8, 12]
    assert torch.equal(run.weights, run.initial)
    details = [event.detail for record in records for event in record.events if event.client is not None]
    assert (
        sum("checksum does not agree" in detail for detail in details) > 8
    )  # else the magic, or the version
    assert all(detail.startswith("The update of client ") for detail in details)
    assert records[0].costs.encoded_bytes == 8 * MESSAGE


# Divergence


def exploding(method, client: int = 1):
    """The method, but one client takes steps that no float can hold."""

    class Exploding(type(method)):
        def client_update(self, chosen: Client, server: ServerState) -> ClientUpdate:
            if chosen.id == client:
                chosen.training = replace(chosen.training, lr=3e38)  # type: ignore[misc]
            return super().client_update(chosen, server)

    return Exploding(**vars(method))


@pytest.mark.parametrize(("method", "searcher"), METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("wire", [None, "fp32"])
def test_whoever_diverges_ends_the_run_or_is_left_out(method, searcher, wire):
    ended = linear(exploding(method), searcher, FaultSettings(), wire=wire)
    with pytest.raises(
        UserError, match=r"client 1 in round 1 diverged: .* not finite; lower training.lr=0.1"
    ):
        ended.run()
    assert torch.equal(ended.weights, ended.initial) and ended.loop.state.round == 0

    run = linear(exploding(method), searcher, FaultSettings(policy="skip"), wire=wire)
    records = run.run()
    assert [missing(record) for record in records] == [{1: "diverged"}] * 3
    assert torch.isfinite(run.weights).all() and 1 not in run.loop.state.clients
    assert {client for client, _ in run.updates} == {0, 2, 3}
    healthy = linear(method, searcher, FaultSettings(), wire=wire)
    next(healthy.loop.rounds())
    sound = [update for client, update in healthy.updates if client != 1]
    for (_, update), same in zip(run.updates[:3], sound, strict=True):
        assert torch.equal(update.local, same.local)  # nobody else notices


def test_a_client_that_diverges_is_charged_for_what_it_was_sent_and_trained():
    run = linear(exploding(FEDAVG), None, FaultSettings(policy="skip"), rounds=1)
    (record,) = run.run()
    assert record.costs == Costs(
        train_flops=3 * FORWARD * 2 * sum(SIZES),
        down_bytes=4 * BYTES,
        up_bytes=3 * BYTES,
        encoded_bytes=7 * MESSAGE,
    )


@dataclass(kw_only=True)
class Looks(FedAvg):
    """Client 2 takes a gradient where no logit is finite; client 3 sends an update that is not."""

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        if client.id == 2:
            client.gradient(3e38 * client.weights.sign(), "x")
        update = super().client_update(client, server)
        return replace(update, update=update.update * math.nan) if client.id == 3 else update


def test_gradients_and_updates_are_looked_at_too():
    run = linear(Looks(name="looks"), None, FaultSettings(policy="skip"), rounds=1)
    (record,) = run.run()
    assert [(event.client, event.kind, event.action) for event in record.events] == [
        (2, "diverged", "left out"),
        (3, "diverged", "left out"),
    ]
    assert "its gradient is not finite" in record.events[0].detail
    assert "its update is not finite" in record.events[1].detail


@dataclass(kw_only=True)
class Huge(FedAvg):
    """Sends updates that are finite, and whose sum is not."""

    weighting: str = "uniform"

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        update = super().client_update(client, server)
        return replace(update, update=torch.full_like(update.update, 2e38))


def test_finite_updates_whose_sum_is_not_end_the_run():
    run = linear(Huge(name="huge"), None, FaultSettings(policy="skip"))
    with pytest.raises(UserError, match="weights of round 1 are not finite.*faults.norm_bound"):
        run.run()
    assert torch.equal(run.weights, run.initial)


@pytest.mark.parametrize(("bound", "rounds"), [(None, 3), (3, 3), (2, 2), (0, 0)])
def test_no_more_than_so_many_may_be_refused(bound, rounds):
    run = linear(
        exploding(FEDAVG), None, FaultSettings(policy="skip", max_skipped=bound, dropout=0.3), seed=8
    )
    expected = pytest.raises(UserError, match=rf"{rounds + 1} updates were refused.*max_skipped={bound};")
    done = []
    if rounds == 3:
        done = run.run()
    else:
        with expected:
            for record in run.loop.rounds():
                done.append(record)
    assert len(done) == run.loop.state.round == rounds  # drop-outs do not count


# The norm bound


def norms(run: Federation) -> list[float]:
    return [float(update.update.norm()) for _, update in run.updates]


def test_updates_beyond_the_norm_bound_are_rejected_or_clipped():
    free = linear(faults=FaultSettings(), rounds=1)
    free.run()
    free_norms = norms(free)
    bound = sorted(free_norms)[1] * 1.0001  # two are within it, two beyond
    beyond = [client for client in range(4) if free_norms[client] > bound]
    assert len(beyond) == 2

    rejected = linear(faults=FaultSettings(norm_bound=bound), rounds=1)
    (record,) = rejected.run()
    assert [(e.client, e.kind, e.action) for e in record.events] == [
        (client, "norm_bound", "left out") for client in beyond
    ]
    assert f"has norm {free_norms[beyond[0]]:.5g}"[:12] in record.events[0].detail
    assert [client for client, _ in rejected.updates] == [
        client for client in range(4) if client not in beyond
    ]

    clipped = linear(faults=FaultSettings(norm_bound=bound, norm_action="clip"), rounds=1)
    (record,) = clipped.run()
    assert [(e.client, e.kind, e.action) for e in record.events] == [
        (client, "norm_bound", "clipped") for client in beyond
    ]
    assert norms(clipped) == pytest.approx([min(norm, bound) for norm in free_norms])
    step = sum(
        size / sum(SIZES) * min(1, bound / norm) * update.update
        for size, norm, (_, update) in zip(SIZES, free_norms, free.updates, strict=True)
    )
    torch.testing.assert_close(clipped.weights, clipped.initial - step)
    assert record.costs == free.loop.state.costs


def test_rejected_updates_count_towards_the_bound_and_clipped_ones_do_not():
    faults = FaultSettings(norm_bound=1e-9, max_skipped=3)
    with pytest.raises(UserError, match="4 updates were refused.*client 3 in round 1 has norm"):
        linear(faults=faults).run()
    records = linear(faults=replace(faults, norm_action="clip")).run()
    assert records[-1].total_events == {"norm_bound": 12}


# Settings


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("faults.dropout=1.5", r"faults.dropout=1.5 is out of range: it must be in \[0, 1\]"),
        ("faults.loss=-1", r"faults.loss=-1.0 is out of range"),
        ("faults.corruption=0.1", r"faults.corruption=0.1 needs messages .* federation.wire=fp32"),
        ("faults.straggler_spread=0.5", r"straggler_spread=0.5 has no effect without faults.deadline"),
        ("faults.deadline=0", r"faults.deadline=0.0 is out of range: it must be more than 0"),
        ("faults.norm_bound=0", r"faults.norm_bound=0.0 is out of range"),
        ("faults.norm_action=drop", r"faults.norm_action=drop is not known: .*valid"),
        ("faults.policy=ignore", r"faults.policy=ignore is not known"),
        ("faults.max_skipped=-1", r"faults.max_skipped=-1 is out of range"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_training(plan: Callable[..., Any], words, sentence):
    with pytest.raises(UserError, match=sentence):
        plan(words)


def test_faults_are_part_of_what_decides_the_results(plan: Callable[..., Any]):
    assert plan("faults.dropout=0.1").config_hash != plan().config_hash


# The whole command


def test_a_whole_run_leaves_every_event_in_its_folder_and_in_mlflow(tmp_path):
    from mlflow import MlflowClient

    store, folder = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "run"
    words = [
        *("dataset=digits", "dataset.train_rows=200", "dataset.test_rows=100", "partition=iid"),
        *(
            "federation.clients=4",
            "federation.clients_per_round=2",
            "federation.rounds=5",
            "federation.wire=fp16",
        ),
        *("training.epochs=1", "faults.dropout=0.4", "faults.loss=0.3", "faults.corruption=0.4"),
        *(f"loggers.mlflow.tracking_uri={store}", f"hydra.run.dir={folder}", "seed=3", "hardware.workers=1"),
    ]
    done = subprocess.run([sys.executable, ROOT / "src/train.py", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    with (folder / "events.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    model = FaultModel(FaultSettings(dropout=0.4, loss=0.3, corruption=0.4), 3, lambda client: 1)
    expected = {}
    for round in range(5):
        for client, fault in model.draw(round, sample_clients(3, round, 4, 2)).items():
            expected[str(round + 1), str(client)] = str(fault)
    clients = [row for row in rows if row["client"]]
    assert {(row["round"], row["client"]): row["kind"] for row in clients} == expected
    assert {row["action"] for row in clients} == {"left out"}
    empty = {row["round"] for row in rows if row["kind"] == "empty_round"}
    with (folder / "rounds.csv").open(newline="") as file:
        assert {row["round"] for row in csv.DictReader(file) if not row["train/loss"]} == empty != set()

    counts = Counter(row["kind"] for row in rows)
    assert set(counts) == {"dropout", "lost", "corrupt", "empty_round"}
    assert names.group("faults", json.loads((folder / "summary.json").read_text())) == counts
    assert f"{counts['corrupt']} corrupt" in done.stdout and "No answer from client" in done.stdout
    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("fedspa").experiment_id])
    told = {name: value for name, value in run.data.metrics.items() if name.startswith("faults/")}
    assert told == {f"faults/{kind}": count for kind, count in counts.items()}
    assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 5 - len(empty)
