"""Methods that are presets of existing parts: each is the parts that it is made of, to the byte."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from fedspa.core.errors import UserError
from fedspa.runs.experiment import run

SMALL = (
    *("dataset=digits", "federation.rounds=2", "federation.clients=4", "federation.clients_per_round=2"),
    *("training.epochs=1", "logger=none", "hardware.workers=1", "hardware=cpu", "engine=eager"),
    "engine.kernels=torch",
)
PRESETS = {
    "fedprox": ("method=fedavg", "training.proximal=0.01"),
    "fedper": ("method=fedavg", "personal_layers=head"),
    "lgfedavg": ("method=fedavg", "personal_layers=body"),
    "fedbn": ("method=fedavg", "personal_layers=norm"),
    "fedavgm": ("method=fedavg", "server_optimizer=momentum"),
    "fedadam": ("method=fedavg", "server_optimizer=adam"),
    "fedyogi": ("method=fedavg", "server_optimizer=yogi"),
    "fedadagrad": ("method=fedavg", "server_optimizer=adagrad"),
    "fedspa_head": ("method=fedspa", "personal_layers=head"),
    "fedspa_plus": (
        *("method=fedspa", "personal_layers=head", "method.weighting=samples"),
        *("method.normaliser=holders", "server_optimizer.momentum=0.5"),
    ),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_parts(plan, tmp_path, preset):
    made, parts = plan(f"method={preset}", *SMALL), plan(*PRESETS[preset], *SMALL)
    assert made.names["method"] == preset
    summary, same = run(made, tmp_path / "preset"), run(parts, tmp_path / "parts")
    weights, others = (load_file(tmp_path / name / "weights.safetensors") for name in ("preset", "parts"))
    assert weights.keys() == others.keys() and all(torch.equal(weights[k], others[k]) for k in weights)
    results = [name for name in same if name.startswith(("final/accuracy/", "cost/"))]
    assert len(results) > 10 and all(summary[name] == same[name] for name in results)
    plain = run(plan("method=fedavg", *SMALL), tmp_path / "plain")
    if preset.startswith("fedspa_"):
        return
    fedavg = load_file(tmp_path / "plain" / "weights.safetensors")
    assert any(name not in weights or not torch.equal(weights[name], fedavg[name]) for name in fedavg)
    travels = sum(tensor.numel() for tensor in weights.values()) / sum(t.numel() for t in fedavg.values())
    assert summary["cost/traffic_bytes"] == round(travels * plain["cost/traffic_bytes"])


def test_a_part_of_a_preset_can_be_changed(plan):
    made = plan("method=fedper", "personal_layers=body", "training.proximal=0.5", "server_optimizer=adam")
    assert made.settings.personal_layers == "body" and made.settings.training.proximal == 0.5
    assert made.names["server_optimizer"] == "adam"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("method=fedper", "model=vgg11", "theory.every=2"), ["theory.every=2"]),
        (("method=fedper", "personal_layers=[head,nosuch.*]"), ["personal_layers=nosuch.*", "conv1.weight"]),
    ],
)
def test_what_cannot_be_combined_is_refused_before_training(plan, tmp_path, words, parts):
    with pytest.raises(UserError) as mistake:
        run(plan(*SMALL, *words), tmp_path)
    assert all(part in str(mistake.value) for part in parts)
