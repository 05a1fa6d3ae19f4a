"""Every random draw of a run, keyed by what it is for.

No global generator decides anything: a draw is a pure function of (seed, purpose, round, client), so that
neither the order of the clients, nor the number of workers, nor an earlier draw can change it.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def _key(seed: int, purpose: str, round: int, client: int) -> int:
    """64 bits that depend on all four: SHA-256 keeps neighbouring keys unrelated."""
    text = f"{seed}/{purpose}/{round}/{client}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def generator(seed: int, purpose: str, round: int = -1, client: int = -1) -> torch.Generator:
    """A fresh CPU generator for one purpose; -1 stands for draws that belong to no round or no client.

    Torch's Mersenne Twister takes the lower 32 of the key's 64 bits: two given streams are the same with a
    chance of 2^-32.
    """
    source = torch.Generator(device="cpu")
    source.manual_seed(_key(seed, purpose, round, client))
    return source


def numpy_generator(seed: int, purpose: str, round: int = -1, client: int = -1) -> np.random.Generator:
    """The same for NumPy (partitions and test sets), independent of the torch generator of that key."""
    return np.random.Generator(np.random.PCG64(_key(seed, purpose, round, client)))


def seed_layers(source: torch.Generator, device: torch.device) -> None:
    """Have layers that draw for themselves, such as dropout, draw what follows from the seed of a generator: they know
    only the device's own one."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(source.initial_seed())
    else:
        torch.manual_seed(source.initial_seed())  # of every kind of device: longer than many a step on a CPU
