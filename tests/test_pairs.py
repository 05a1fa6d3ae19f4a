"""Any two of a mask searcher, personal layers, a server optimizer and a proximal term run together."""

from __future__ import annotations

from dataclasses import asdict
from itertools import combinations, product

import pytest
import torch

from fedspa.core.errors import UserError
from fedspa.core.paths import config_dir
from fedspa.planning.cost_report import CostReport
from fedspa.runs.assembly import build

torch.set_num_threads(1)


def options(group: str) -> list[str]:
    return [f"{group}={path.stem}" for path in sorted((config_dir() / group).glob("*.yaml"))]


PARTS = {
    "mask": [word for word in options("mask") if word != "mask=none"],
    "personal_layers": ["personal_layers=head", "personal_layers=body", "personal_layers=norm"],
    "server_optimizer": options("server_optimizer"),
    "proximal": ["training.proximal=0.1"],
}
PAIRS = [pair for one, other in combinations(PARTS.values(), 2) for pair in product(one, other)]
WITHOUT_CHANNELS = [("mask=channels", "personal_layers=body"), ("mask=channels", "personal_layers=norm")]
"""Pairs that leave no channels of the model below to cut: personal layers stay whole."""
NEEDED = {
    "mask=nm": ("layer_sparsity=uniform",),
    "mask=snip": ("mask.scope=tensor",),
}
"""Settings without which a searcher runs with no other part either."""
TOY = (
    *("dataset=synthetic", "model=small_cnn", "partition=iid", "logger=none", "hardware=cpu", "engine=eager"),
    *("federation.clients=4", "federation.clients_per_round=2", "federation.rounds=2", "hardware.workers=1"),
    *("training.epochs=1", "training.batch_size=16", "dataset.train_size=96", "dataset.test_size=200"),
    *("dataset.client_test_images=5", "engine.kernels=torch", "federation.wire=fp32"),
)


@pytest.mark.parametrize("pair", WITHOUT_CHANNELS, ids="+".join)
def test_channels_that_are_all_personal_cannot_be_cut(plan, pair):
    with pytest.raises(UserError, match="no channels.*personal layers stay whole"):
        build(plan("method=fedspa", *pair, *TOY))


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in WITHOUT_CHANNELS], ids="+".join)
def test_two_parts_run_together(plan, pair):
    masked = any(word.startswith("mask=") for word in pair)
    needed = [word for part in pair for word in NEEDED.get(part, ())]
    words = ["method=fedspa" if masked else "method=fedavg", *pair, *needed, *TOY]
    made = plan(*words)
    federation = build(made)
    start = federation.loop.state.weights.clone()
    *_, record = federation.loop.rounds()
    end = federation.loop.state.weights
    assert end.isfinite().all() and not torch.equal(end, start)
    report = CostReport.of(made)
    assert record.dense_costs == report.dense_total
    costs, planned = asdict(record.total_costs), asdict(report.total)
    if made.mask is None or made.mask.keeps_tensors:
        assert costs == planned
    else:  # the run decides how many weights of each layer are active: the plan is a bound
        assert all(costs[name] <= planned[name] for name in planned)
        assert costs["down_bytes"] > 0 and costs["train_flops"] > 0
