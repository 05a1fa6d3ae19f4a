"""Too little disk and too little memory: a clear end, and nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from archives import unpack

from fedspa.checkpoints.checkpoint import Checkpoints
from fedspa.config.plan import Plan
from fedspa.core.errors import UserError
from fedspa.core.files import write_whole
from fedspa.core.out_of_memory import ran_out
from fedspa.runs.out_of_memory import explains_memory

TRAIN = Path(__file__).parents[1] / "src/train.py"


# ---- the disk


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_whole(file, "before")
    write_whole(file, b"now")
    assert file.read_bytes() == b"now"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as failure:
        write_whole(file, b"never")
    assert str(failure.value) == f"[Errno {errno.ENOSPC}] No space left on device: '{file}'"
    assert file.read_bytes() == b"now" and list(tmp_path.iterdir()) == [file]


def test_a_run_without_room_ends_in_one_sentence_and_leaves_no_half_file(tmp_path: Path) -> None:
    room = 40_000  # bytes a file may have: the CSV files fit, weights.safetensors does not
    done = subprocess.run(
        [
            sys.executable,
            str(TRAIN),
            "logger=none",
            "federation.rounds=1",
            "training.epochs=1",
            "checkpoint.keep=0",
            "hydra.run.dir=run",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
        env={name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")},
    )  # fmt: skip (what measures coverage would have no room either)
    weights = tmp_path / "run/weights.safetensors"
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1
    assert f"{weights.relative_to(tmp_path)} cannot be written (File too large)" in done.stderr
    left = {file.name for file in (tmp_path / "run").iterdir()}
    assert {"config.yaml", "rounds.csv", "clients.csv"} <= left
    assert not [name for name in left if "safetensors" in name or name == "summary.json"]
    assert (tmp_path / "run/rounds.csv").read_text().count("\n") == 2


def test_a_checkpoint_without_room_leaves_the_one_before(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, every=1)
    checkpoints.write(1, {"weights": torch.zeros(1000)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        with pytest.raises(OSError) as failure:
            checkpoints.write(2, {"weights": torch.ones(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (failure.value.errno, failure.value.filename) == (errno.EFBIG, str(tmp_path / "round-000002.ckpt"))
    assert [file.name for file in tmp_path.iterdir()] == ["round-000001.ckpt"]
    newest = checkpoints.newest()
    assert newest and torch.equal(unpack(newest.read_bytes())["weights"], torch.zeros(1000))


# ---- memory


def real(allocate: Callable[[], Any]) -> Exception:
    """The error of an allocation that no machine can do."""
    with pytest.raises((MemoryError, RuntimeError)) as failure:
        allocate()
    return failure.value


CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB."


def test_every_way_to_run_out_is_known() -> None:
    assert ran_out(real(lambda: torch.empty(1 << 50)))
    assert ran_out(real(lambda: np.empty(1 << 50)))
    assert ran_out(torch.OutOfMemoryError(CUDA))
    assert ran_out(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not ran_out(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not ran_out(OSError(errno.ENOSPC, "No space left on device"))


ON_GPU = f"The GPU has too little memory ({CUDA[:-1]}): lower training.batch_size=32, eval.batch_size=500"


@pytest.mark.parametrize(
    ("error", "words", "lanes", "sentence"),
    [
        (
            torch.OutOfMemoryError(CUDA),
            [],
            4,
            f"{ON_GPU}, or use engine.lanes=1, or use hardware.precision=bf16-mixed instead of 32-true.",
        ),
        (torch.OutOfMemoryError(CUDA), ["engine=eager", "hardware.precision=bf16-mixed"], 0, f"{ON_GPU}."),
        (torch.OutOfMemoryError(CUDA), ["engine.lanes=2", "hardware.precision=bf16-mixed"], 0, f"{ON_GPU}."),
        (
            torch.OutOfMemoryError(CUDA),
            ["engine.lanes=1", "hardware.precision=bf16-mixed"],
            None,
            f"{ON_GPU}.",
        ),
        (
            torch.OutOfMemoryError(CUDA),
            ["engine.lanes=2", "hardware.precision=bf16-mixed"],
            None,
            f"{ON_GPU}, or use engine.lanes=1.",
        ),
        (
            MemoryError(),
            [],
            0,
            "There is too little memory (MemoryError): lower training.batch_size=32, eval.batch_size=500 or "
            "hardware.workers=3.",
        ),
    ],
)
def test_it_is_said_what_to_lower(
    plan: Callable[..., Plan], error: Exception, words: list[str], lanes: int | None, sentence: str
) -> None:
    asked = plan("logger=none", "hardware.workers=3", "training.batch_size=32", *words)
    with pytest.raises(UserError) as told, explains_memory(asked, lanes):
        raise error
    assert str(told.value) == sentence


def test_other_errors_pass(plan: Callable[..., Plan]) -> None:
    with pytest.raises(ValueError), explains_memory(plan("logger=none")):
        json.loads("{")
