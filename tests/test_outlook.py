"""What `dry_run=true` says of a single run before its costs."""

from __future__ import annotations

import sys

import pytest

from fedspa.planning import dry_run
from fedspa.planning.outlook import outlook
from train import train


def test_a_run_is_told_in_a_screen(plan):
    told = outlook(plan("partition=iid", "logger=csv", "hardware.cores=3"))
    lines = dict(line.split(maxsplit=1) for line in told.splitlines())
    assert lines["data"] == "digits: 1,397 training images of 1 x 8 x 8 in 10 classes, 89.4 kB"
    assert lines["clients"] == "20 by partition=iid, 69 to 70 training images each"
    assert " of which 20 are a client's first" in lines["rounds"]
    assert "mask=dst; tested: global, personal, local models" in lines["method"]
    assert lines["computes"] == "engine=auto, hardware=auto with 3 CPU cores"
    assert lines["results"] == "pictures"
    # 1,797 images of 64 pixels; 26,090 weights, 4 vectors of 4 bytes each; 20 masks of a bit a weight
    assert lines["memory"].startswith("115.0 kB images; 417.4 kB vectors of weights in each process")
    assert "at most 65.2 kB of clients' states" in lines["memory"]
    assert max(map(len, told.splitlines())) <= 160


def test_the_command_tells_it_before_the_costs_and_runs_nothing(plan, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "_speed", lambda plan: 1e9)
    monkeypatch.setattr("fedspa.training.eager.EagerEngine._step", None)
    train(plan("dry_run=true"), tmp_path)
    told = capsys.readouterr().out
    assert told.index("partition=") < told.index("FLOPs")
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_only_a_run_knows_are_means(plan):
    assert "about 69 to 70 training images each" in outlook(plan("experiment=digits_study"))


def test_memory_of_states_is_that_of_the_method(plan):
    assert "at most 0 B of clients' states" in outlook(plan("method=fedavg"))
    assert f"at most {20 * 26_090 * 4 / 1e6:.1f} MB of clients' states" in outlook(plan("method=local"))
    mask = (26_090 + 7) // 8
    assert f"at most {20 * mask / 1e3:.1f} kB of clients' states" in outlook(plan("mask=dst"))
    assert f"at most {20 * 2 * mask / 1e3:.1f} kB of clients' states" in outlook(plan("mask=rigl"))
    capped = outlook(plan("method=local", "hardware.state_memory_gb=0.001"))
    assert "at most 1.0 MB of clients' states" in capped


def test_memory_of_images_is_that_of_the_loaded_ones(plan):
    crops = "dataset.augmentation.crop_padding=1"
    assert f"{(1_397 * 2 + 400) * 64 / 1e3:.1f} kB images" in outlook(plan(crops))
    assert " 0 B images" in outlook(plan("dataset=synthetic_clients", "federation.clients=1000"))


MODEL = ("model=dotted", "model.path=normed.net", "trusted_packages=[normed]")
PARAMETERS = 5 * 9 + 5 + 2 * 5 + 5 * 10 + 10


@pytest.fixture
def normed(tmp_path, monkeypatch):
    """A network with BatchNorm of five channels."""
    (tmp_path / "normed.py").write_text(
        "from torch import nn\n"
        "def net(channels, classes):\n"
        "    norm = nn.Conv2d(channels, 5, 3), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1)\n"
        "    return nn.Sequential(*norm, nn.Flatten(), nn.Linear(5, classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("normed", None)


@pytest.mark.parametrize(
    "words", [["model.batchnorm=average"], ["personal_layers=norm", "model.batchnorm=null"]]
)
def test_running_statistics_are_no_parameters(plan, normed, words):
    told = outlook(plan(*MODEL, "method=fedavg", *words))
    assert f": {PARAMETERS} parameters (" in told and f" {PARAMETERS} of them active" in told


@pytest.mark.parametrize(("method", "models"), [("fedavg", 1), ("ditto", 2)])
def test_layers_that_clients_keep_count_as_their_states(plan, normed, method, models):
    """Four values a channel, of each model; Ditto remembers the shared parameters too."""
    told = outlook(plan(*MODEL, "personal_layers=norm", "model.batchnorm=null", f"method={method}"))
    values = models * 4 * 5 + (PARAMETERS - 2 * 5) * (method == "ditto")
    assert f"at most {20 * 4 * values / 1e3:.1f} kB of clients' states" in told
