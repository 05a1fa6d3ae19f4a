"""Code in C is built once a machine, and done without where it cannot be built."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from federations import losses
from kernel_runs import ROOT, SOURCE, WORK, kernel_of, lenet_engine, needs_kernel, stock
from torch import nn

from fedspa.kernels import building
from fedspa.kernels.building import CannotBuild
from fedspa.kernels.conv_pool import ConvPoolKernel
from fedspa.runs import experiment
from fedspa.training.choice import Auto


def build_elsewhere() -> None:
    """In a process of its own."""
    code = f"from pathlib import Path; from fedspa.kernels.building import library; library(Path({str(SOURCE)!r}))"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@needs_kernel
def test_it_is_built_once(afresh):
    ConvPoolKernel()
    (file,) = afresh.iterdir()
    begun = file.stat().st_mtime_ns
    building.library.cache_clear()  # as in another process
    ConvPoolKernel()
    assert [*afresh.iterdir()] == [file] and file.stat().st_mtime_ns == begun
    assert afresh.stat().st_mode & 0o077 == 0


@needs_kernel
def test_without_a_cache_it_is_built_for_the_process(afresh, monkeypatch, tmp_path):
    afresh.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    convolution, images = nn.Conv2d(1, 2, 3), torch.ones(1, 1, 6, 6)
    torch.testing.assert_close(ConvPoolKernel()(convolution, images), stock(convolution, images))
    assert [*tmp_path.iterdir()] == [afresh]


def test_a_compiler_that_hangs_is_ended(afresh, monkeypatch, tmp_path):
    compiler = tmp_path / "slow"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(building, "TIMEOUT_S", 1)
    with pytest.raises(CannotBuild, match="slow took more than 1 seconds"):
        ConvPoolKernel()
    assert not afresh.exists()


@needs_kernel
def test_processes_may_build_it_at_once(afresh):
    with ThreadPoolExecutor() as pool:
        assert len([*pool.map(lambda _: build_elsewhere(), range(3))]) == 3
    assert len([*afresh.iterdir()]) == 1


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/nowhere/cc", "there is no C compiler (/nowhere/cc)"),
        ("false", "false says: nothing"),
        ("true", "No such file"),
        ('"cc', "No closing quotation"),
        (b"nothing that starts", "Exec format error"),
        (b"#!/nowhere/sh\n", "No such file or directory"),
        (b"#!/bin/sh\nprintf 'error: \\351t\\351\\n' >&2; exit 1\n", "error: \ufffdt\ufffd"),
        pytest.param("cc -Dvec=int", "error", marks=needs_kernel),
        pytest.param("cc -mno-avx", "this processor has no AVX2", marks=needs_kernel),
    ],
)
def test_where_it_cannot_be_built_torch_computes(afresh, monkeypatch, caplog, tmp_path, compiler, reason):
    if isinstance(compiler, bytes):
        (tmp_path / "odd").write_bytes(compiler)
        (tmp_path / "odd").chmod(0o755)
    monkeypatch.setenv("CC", compiler if isinstance(compiler, str) else str(tmp_path / "odd"))
    runner = Auto(name="auto").build(lenet_engine(), WORK)
    assert kernel_of(runner) is None
    (warning,) = caplog.messages
    assert warning.startswith("The model's convolutions are computed by torch alone, which may be slower: ")
    assert reason in warning
    assert not afresh.exists()


# Whole commands

LENET = (
    *(
        "dataset=synthetic",
        "model=lenet5",
        "dataset.image_size=16",
        "dataset.classes=3",
        "dataset.train_size=90",
    ),
    *("dataset.test_size=30", "dataset.client_test_images=5", "federation.clients=4", "partition=iid"),
    *("federation.clients_per_round=3", "federation.rounds=3", "training.batch_size=8", "logger=none"),
    *("training.epochs=2", "hardware=cpu", "mask=dst"),
)


@needs_kernel
def test_runs_with_and_without_it(tmp_path, plan):
    """Workers give the same bytes. Without it results are the same experiment's; a missing compiler is told."""
    for name, word in (
        ("one", "hardware.workers=1"),
        ("two", "hardware.workers=2"),
        ("torch", "engine.kernels=torch"),
    ):
        (tmp_path / name).mkdir()
        experiment.run(plan(*LENET, word), tmp_path / name)
    without = subprocess.run(
        [sys.executable, str(ROOT / "src/train.py"), *LENET, f"hydra.run.dir={tmp_path}/without"],
        env=os.environ | {"CC": "/nowhere/cc"}, capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    sentence = "computed by torch alone, which may be slower: there is no C compiler (/nowhere/cc)"
    assert sentence in without.stdout + without.stderr

    def bytes_of(run: str) -> bytes:
        return (tmp_path / run / "weights.safetensors").read_bytes()

    assert bytes_of("one") == bytes_of("two")
    assert bytes_of("without") == bytes_of("torch") != bytes_of("one")
    with_it, torchs = (json.loads((tmp_path / run / "summary.json").read_text()) for run in ("one", "torch"))
    for same in ("config_hash", "cost/flops", "cost/traffic_bytes"):
        assert with_it[same] == torchs[same]
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "torch"), rel=1e-3)
