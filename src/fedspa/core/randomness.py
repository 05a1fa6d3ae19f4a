"""The random draws of a run, keyed by their purpose.

No global generator is used: a draw is a pure function of (seed, purpose, round, client). So neither the order of
the clients, nor the number of workers, nor an earlier draw can change it.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def _key(seed: int, purpose: str, round: int, client: int) -> int:
    """A key of 64 bits that depends on all four. SHA-256 keeps neighbouring keys unrelated."""
    text = f"{seed}/{purpose}/{round}/{client}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def generator(seed: int, purpose: str, round: int = -1, client: int = -1) -> torch.Generator:
    """A fresh CPU generator for one purpose; -1 stands for a draw without a round or a client.

    Torch's Mersenne Twister takes the lower 32 of the key's 64 bits, so two given streams are equal with a
    probability of 2^-32.
    """
    source = torch.Generator(device="cpu")
    source.manual_seed(_key(seed, purpose, round, client))
    return source


def numpy_generator(seed: int, purpose: str, round: int = -1, client: int = -1) -> np.random.Generator:
    """A fresh NumPy generator for one purpose (partitions, test sets), independent of the key's torch generator."""
    return np.random.Generator(np.random.PCG64(_key(seed, purpose, round, client)))


def seed_layers(source: torch.Generator, device: torch.device) -> None:
    """Seed the device's own generator from a generator's seed. Layers that draw by themselves, such as dropout, use
    only the device's generator."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(source.initial_seed())
    else:
        torch.manual_seed(source.initial_seed())  # seeds all devices, so it is slower than the line above
