"""What `dry_run=true` says of a single run before its costs."""

from __future__ import annotations

import sys

import pytest

from fedspa.planning import dry_run
from fedspa.planning.preview import preview
from train import train


def test_a_run_is_told_in_a_screen(plan):
    told = preview(plan("partition=iid", "logger=csv", "hardware.cores=3"))
    lines = dict(line.split(maxsplit=1) for line in told.splitlines())
    assert lines["data"] == "digits: 1,397 training images of 1 x 8 x 8 in 10 classes, 89.4 kB"
    assert lines["clients"] == "20 by partition=iid, 69 to 70 training images each"
    assert " of which 20 are a client's first" in lines["rounds"]
    assert "mask=dst; tested: global, personal, local models" in lines["method"]
    assert lines["computes"] == "engine=auto, hardware=auto with 3 CPU cores"
    assert lines["results"] == "pictures"
    # 1,797 images of 64 pixels; 26,090 weights, 4 vectors of 4 bytes each
    assert lines["memory"].startswith("115.0 kB images; 417.4 kB vectors of weights in each process")
    assert "at most 4 GB of clients' states" in lines["memory"]
    assert max(map(len, told.splitlines())) <= 160


def test_the_command_tells_it_before_the_costs_and_runs_nothing(plan, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "_speed", lambda plan: 1e9)
    monkeypatch.setattr("fedspa.training.eager.EagerEngine._step", None)
    train(plan("dry_run=true"), tmp_path)
    told = capsys.readouterr().out
    assert told.index("partition=") < told.index("FLOPs") and "all 1" not in told
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_only_a_run_knows_are_means(plan):
    assert "on average 70 training images each" in preview(plan("experiment=digits_study"))


def test_memory_of_images_is_that_of_the_loaded_ones(plan):
    crops = "dataset.augmentation.crop_padding=1"
    assert f"{(1_397 * 2 + 400) * 64 / 1e3:.1f} kB images" in preview(plan(crops))
    assert " 0 B images" in preview(plan("dataset=synthetic_clients", "federation.clients=1000"))


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
    told = preview(plan(*MODEL, "method=fedavg", *words))
    assert f": {PARAMETERS} parameters (" in told and f" {PARAMETERS} of them active" in told
