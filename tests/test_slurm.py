"""Ranks that srun starts: its environment variables set by hand, for two processes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).parents[1] / "src" / "train.py"
WORDS = (
    "hardware=cpu",
    "federation.rounds=2",
    "federation.clients=8",
    "federation.clients_per_round=4",
    "logger=csv",
)
STEP = {
    **{"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "fedspa", "SLURM_CPUS_PER_TASK": "1"},
    **{"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS_PER_NODE": "2"},
    **{"SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_NODEID": "0"},
    **dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"), "localhost"),
}


def start(folder: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(COMMAND), *WORDS, f"hydra.run.dir={folder}"]
    return subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_tasks_of_srun_are_one_run_with_the_files_of_one_process(tmp_path):
    ranks = [
        start(tmp_path / "ranks", **STEP, SLURM_PROCID=rank, SLURM_LOCALID=rank, TMPDIR=str(tmp_path))
        for rank in ("0", "1")
    ]
    told = [process.communicate(timeout=300)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    assert "Took" in told[0] and not told[1]  # one of them speaks
    alone = start(tmp_path / "alone")
    alone.communicate(timeout=300)
    for name in ("rounds.csv", "clients.csv", "weights.safetensors", "masks.safetensors"):
        assert (tmp_path / "ranks" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes(), name
