"""Every method that fedspa ships, as its config says: costs before the run are those after it, a resumed run goes on to
the byte, and messages travel as bytes. How each method computes, test_methods_by_hand.py and others work out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from archives import pack, unpack

from fedspa.core.errors import UserError
from fedspa.core.paths import config_dir
from fedspa.planning.cost_report import CostReport
from fedspa.runs.assembly import build

torch.set_num_threads(1)

METHODS = sorted(path.stem for path in (config_dir() / "method").glob("*.yaml"))
SMALL = (
    *("dataset=synthetic", "model=small_cnn", "partition=iid", "logger=none", "hardware=cpu", "engine=eager"),
    *("federation.clients=4", "federation.clients_per_round=2", "federation.rounds=3", "hardware.workers=1"),
    *("training.epochs=2", "training.batch_size=16", "dataset.train_size=96", "dataset.test_size=200"),
    "dataset.client_test_images=5",
)
OPTIONS = {
    "dispfl": ("method.neighbours=2",),
    "ditto": ("method.shared_epochs=1", "method.personal_epochs=1"),
    # With scope=global the counts of each tensor are only known in a run.
    "ssfl": ("mask.scope=tensor",),
    # No client prunes or personalises: what that saves is only known in a run.
    "fedselect": ("method.every=9",),
    "lotteryfl": ("method.accuracy_threshold=1",),
    "subfedavg": ("method.distance_threshold=1",),
}


@pytest.mark.parametrize("method", METHODS)
def test_costs_and_checkpoints_of_every_method(plan, method):
    made = plan(f"method={method}", *SMALL, *OPTIONS.get(method, ()), "federation.wire=fp32")
    straight, resumed = build(made), build(made)
    rounds = straight.loop.rounds()
    next(rounds)
    resumed.load_state_dict(unpack(pack(straight.state_dict())))
    for record, again in zip(rounds, resumed.loop.rounds(), strict=True):
        assert replace(record, seconds={}) == replace(again, seconds={})
    one, other = straight.loop.state, resumed.loop.state
    assert torch.equal(one.weights, other.weights)
    for part in ("tensors", "kept"):
        first, second = getattr(one.server, part), getattr(other.server, part)
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert all(one.client_state(client) == other.client_state(client) for client in range(4))
    report = CostReport.of(made)
    assert record.total_costs == report.total
    assert record.dense_costs == report.dense_total


def test_a_shared_mask_that_nobody_searches_travels_once(plan):
    made = plan("method=feddst", "mask=rsm", "method.every=1", *SMALL, "federation.wire=fp32")
    *_, record = build(made).loop.rounds()
    assert record.total_costs == CostReport.of(made).total


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            "method=local server_optimizer=adam",
            ["server_optimizer=adam", "method=local", "no server's model"],
        ),
        ("method=feddyn server_optimizer=adam", ["server_optimizer=adam", "method=feddyn", "=sgd"]),
        ("method=local personal_layers=head", ["personal_layers", "method=local"]),
        ("method=apfl personal_layers=head", ["personal_layers", "method=apfl"]),
        ("method=fedrep personal_layers=none", ["personal_layers=none", "method=fedrep", "=head"]),
        ("method=fedrep training.epochs=1", ["training.epochs=1", "method.body_epochs=1"]),
        ("method=scaffold training.momentum=0.9", ["training.momentum=0.9", "method=scaffold"]),
        ("method=scaffold training.optimizer=adamw", ["training.optimizer=adamw", "method=scaffold"]),
        ("method=feddyn training.proximal=0.1", ["training.proximal=0.1", "method.alpha"]),
        ("method=pfedme training.proximal=0.1", ["training.proximal=0.1", "method.strength"]),
        ("method=apfl method.mixes=both", ["method.mixes=both", "outputs", "weights"]),
        ("method=dispfl mask=snip", ["method=dispfl", "mask=dst"]),
        ("method=dispfl server_optimizer=adam", ["server_optimizer=adam", "method=dispfl"]),
        ("method=ssfl mask=dst", ["mask=dst", "method=ssfl", "mask=snip"]),
        ("method=ssfl mask=topkast", ["mask=topkast", "method=ssfl", "mask=snip"]),
        (
            "method=dispfl federation.clients=1 federation.clients_per_round=1",
            ["method.neighbours=10", "federation.clients=2 at least"],
        ),
        ("method=feddst mask=snip", ["method=feddst", "mask=dst"]),
        ("method=feddst mask.initial=different", ["method=feddst", "mask.initial=same"]),
        ("method=mapper method.shares=[]", ["method.shares", "empty"]),
        ("method=ssfl theory.every=2", ["theory.every=2", "method=ssfl"]),
        ("method=apfl mask=dst", ["mask=dst", "method=apfl"]),
        ("method=fedmd dataset.public_fraction=0", ["method=fedmd", "dataset.public_fraction=0", "0.1"]),
        (
            "method=fedmd server_optimizer=adam",
            ["method=fedmd", "server_optimizer=adam", "no server's model"],
        ),
        ("method=fedmd personal_layers=head", ["method=fedmd", "personal_layers=none"]),
        ("method=fedmd theory.every=2", ["method=fedmd", "theory.every=2"]),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_run(plan, words, parts):
    with pytest.raises(UserError) as caught:
        plan(*words.split())
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_compiled_engine_refuses_a_step_of_a_methods_own(plan):
    made = plan("method=apfl", *SMALL, "engine=compiled", "engine.compiler=null")
    with pytest.raises(UserError, match="engine=compiled .*MixedTraining.*engine=eager"):
        build(made)
