"""The examples of docs/extending/, followed to the letter in a copy of the project."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from doc_pages import copy_project
from safetensors.torch import load_file

from fedspa.core.paths import project_root

DOCS = project_root() / "docs"
FILE = re.compile(r"`((?:src|conf)/\S+\.(?:py|yaml))`:\n\n```(?:python|yaml)\n(.*?)```", re.DOTALL)
SMALL = ["federation.rounds=2", "training.epochs=1", "logger=none", "hardware.workers=1", "hydra.run.dir=run"]


def files(page: str) -> dict[str, str]:
    """What a page says to write, by path."""
    return dict(FILE.findall((DOCS / "extending" / f"{page}.md").read_text()))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project's code and config, with the files of all pages in it."""
    clone = copy_project(tmp_path_factory.mktemp("clone"))
    for page in ("mask_searcher", "method", "data_set", "model", "metric"):
        written = files(page)
        assert [Path(path).suffix for path in written] == [".py", ".yaml"] * (len(written) // 2)
        for path, content in written.items():
            (clone / path).write_text(content)
    return clone


def train(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "src/train.py", *arguments, *SMALL]
    return subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300)


def summary(copy: Path) -> dict:
    return json.loads((copy / "run" / "summary.json").read_text())


def refused(copy: Path, sentence: str, *arguments: str) -> None:
    """The command ends with that sentence."""
    ended = train(copy, *arguments)
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)
    assert sentence in ended.stderr + ended.stdout


@pytest.fixture(autouse=True)
def fresh(copy: Path) -> None:
    shutil.rmtree(copy / "run", ignore_errors=True)


def test_two_files_make_a_mask_searcher(copy: Path) -> None:
    ended = train(copy, "mask=lottery", "mask.share=0.2")
    assert ended.returncode == 0, ended.stderr
    assert summary(copy)["mask"] == "lottery"
    assert summary(copy)["cost/flops_search"] == 0
    assert summary(copy)["cost/traffic_mask_bytes"] > 0
    refused(copy, "mask.share=2.0 is out of range", "mask=lottery", "mask.share=2")


def test_two_files_make_a_metric(copy: Path) -> None:
    ended = train(copy, "metric=[accuracy,balanced_accuracy]")
    assert ended.returncode == 0, ended.stderr
    assert 0 < summary(copy)["final/balanced_accuracy/personal"] <= 100


def test_two_files_make_a_method_and_two_a_model(copy: Path) -> None:
    ended = train(copy, "method=noisy", "method.bound=0.5", "model=two_layers", "model.hidden=8")
    assert ended.returncode == 0, ended.stderr
    assert summary(copy)["method"] == "noisy"
    refused(copy, "method.bound=-1.0 is out of range", "method=noisy", "method.bound=-1")


@pytest.mark.parametrize("participants", [1, 3])
def test_a_method_may_keep_state_on_the_server(copy: Path, participants: int) -> None:
    """Where all clients take part, the mean of their latest updates is that of FedAvg; else it is not."""
    weights = {}
    sizes = ["federation.clients=3", f"federation.clients_per_round={participants}"]
    for words in (["method=mifa"], ["method=fedavg", "method.weighting=uniform"]):
        shutil.rmtree(copy / "run", ignore_errors=True)
        ended = train(copy, *words, *sizes)
        assert ended.returncode == 0, ended.stderr
        costs = summary(copy)
        assert costs["cost/traffic_bytes"] == costs["cost/traffic_dense_bytes"]
        weights[words[0]] = load_file(copy / "run" / "weights.safetensors")
    others = weights["method=fedavg"]
    near = [
        torch.allclose(tensor, others[name], atol=1e-5) for name, tensor in weights["method=mifa"].items()
    ]
    assert all(near) if participants == 3 else not any(near)


def test_two_files_make_a_data_set(copy: Path) -> None:
    source = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 120), ("test", 60)):
        labels = np.arange(count) % 3
        arrays[f"{split}_images"] = source.integers(0, 64, (count, 1, 8, 8), np.uint8) + np.uint8(
            60
        ) * labels[:, None, None, None].astype(np.uint8)
        arrays[f"{split}_labels"] = labels
    np.savez(copy / "images.npz", **arrays)
    ended = train(copy, "dataset=npz", "dataset.path=images.npz", "partition=iid")
    assert ended.returncode == 0, ended.stderr
    assert json.loads((copy / "run" / "partition.json").read_text())

    np.savez(copy / "other.npz", **{name: array for name, array in arrays.items() if name != "test_labels"})
    refused(copy, "with the arrays test_images and test_labels", "dataset=npz", "dataset.path=other.npz")


def test_the_template_of_a_plugin_is_what_the_pages_say() -> None:
    template = project_root() / "examples" / "plugin"
    (entry_point,) = re.findall(r"```toml\n(.*?)```", (DOCS / "extending.md").read_text(), re.DOTALL)
    assert entry_point in (template / "pyproject.toml").read_text()
    code, option = files("mask_searcher").values()
    assert (template / "fedspa_example" / "lottery.py").read_text() == code
    there = (template / "fedspa_example" / "conf" / "mask" / "lottery.yaml").read_text()
    assert there == option.replace("fedspa.masks.lottery", "fedspa_example.lottery")
