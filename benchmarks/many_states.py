"""What a federation costs once very many clients have taken part: `python benchmarks/many_states.py`.

Masks of density one half, as client updates leave them, are put in place for 20,000 of 1,000,000 clients with LeNet5
and for 1,000 of 10,000 with ResNet18 (whose states beyond 50 MB lie in a file). Nothing is trained for that. Prints,
for each, a round before and after that, the copies of the state that a round begins and ends with, a checkpoint, the
files of masks and clients at the end, and the peak memory. Seconds are CPU seconds, so that a busy machine measures
the same.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from bench import Row, cpu_seconds, federation, report
from many_clients import LENET, LITTLE, RESNET

from fedspa.checkpoints.archive import write
from fedspa.core.client_state import ClientState
from fedspa.core.packed_mask import PackedMask
from fedspa.core.tensor_file import save_tensors
from fedspa.federated.scores import ClientScores
from fedspa.federated.state import FederationState
from fedspa.tracking.client_table import client_table, last_masks

CASES = {
    "lenet5": (1_000_000, 20_000, 10, LENET, 4.0),
    "resnet18": (10_000, 1_000, 2, RESNET, 0.05),
}
"""Clients, how many of them have taken part, participants a round, images and model, and GB of states in memory."""
ROUNDS = 5


def rows() -> Iterator[Row]:
    for name in CASES:
        done = subprocess.run([sys.executable, __file__, name], stdout=subprocess.PIPE, text=True, check=True)
        yield json.loads(done.stdout.splitlines()[-1])


def fill(state: FederationState, clients: Sequence[int]) -> None:
    """Change the state to one in which each of these clients has completed an update."""
    length, random = len(state.weights), np.random.default_rng(0)
    for client in clients:
        bits = torch.from_numpy(random.integers(0, 256, (length + 7) // 8, np.uint8))
        bits[-1] = 0
        state.clients[client] = ClientState(mask=PackedMask(bits, length))
        state.updates[client] = 1
    state.scores["local"]["accuracy"] = ClientScores().updated(clients, random.uniform(0, 100, len(clients)))


def measure(name: str) -> Row:
    """In a process of its own."""
    clients, took_part, participants, images, memory = CASES[name]
    made = federation(
        *images, *LITTLE, "training.epochs=1", "training.batch_size=10", "hardware.workers=1", "eval.every=1",
        "eval.clients=10", f"federation.clients={clients}", f"federation.clients_per_round={participants}",
        f"hardware.state_memory_gb={memory}",
    )  # fmt: skip
    loop = made.loop
    run = loop.rounds()

    def rounds() -> float:
        return median(cpu_seconds(partial(next, run)) for _ in range(ROUNDS))

    def draft() -> float:
        return median(cpu_seconds(lambda: (loop.state.draft(), loop.state_dict())) for _ in range(ROUNDS))

    next(run)
    before = rounds(), draft()
    fill(loop.state, range(0, clients, clients // took_part))
    after = rounds(), draft()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        with checkpoint.open("wb") as file:
            saving = cpu_seconds(lambda: write(made.state_dict(), file))
        size = checkpoint.stat().st_size
        checkpoint.unlink()

        def end() -> None:
            save_tensors(Path(folder) / "masks", last_masks(loop), "hash")
            client_table(loop, made.rows, {})

        ending = cpu_seconds(end)
    return {
        "model": name,
        "clients": clients,
        "took_part": len(loop.state.updates),
        "in_file_GB": loop.state.clients.bytes_in_file / 1e9,
        "first_rounds_s": before[0],
        "rounds_s": after[0],
        "copies_ms": 1000 * after[1],
        "checkpoint_s": saving,
        "checkpoint_GB": size / 1e9,
        "end_s": ending,
        "peak_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print("\n" + json.dumps(measure(sys.argv[1])))
    else:
        report(rows())
