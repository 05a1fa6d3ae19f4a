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


def uniform(count: int, source: torch.Generator, like: torch.Tensor) -> torch.Tensor:
    """Random numbers [count] in [0, 1), in the dtype and on the device of `like`. They depend on the source alone.

    A CPU draws one after another. Another device hashes their indices (SplitMix64; Steele et al., OOPSLA 2014) with a
    key from the source. So a CPU's numbers differ from those of all other devices.
    """
    if like.device.type == "cpu":
        return torch.rand(count, generator=source).to(like.dtype)
    key = int(torch.randint(1 << 62, (), generator=source))
    return hashed(key, count, like.device).to(like.dtype)


def hashed(key: int, count: int, device: torch.device) -> torch.Tensor:
    """Multiples of 2^-24 in [0, 1), float32 [count]: the hashes of 0 to count - 1 under a key, the same anywhere."""
    mixed = torch.arange(count, device=device) * -0x61C8864680B583EB + key
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return _shifted(mixed ^ _shifted(mixed, 31), 40) * 2.0**-24


def _shifted(values: torch.Tensor, places: int) -> torch.Tensor:
    """int64 values shifted to the right, with zeros from the left."""
    return (values >> places) & ((1 << (64 - places)) - 1)


def seed_layers(source: torch.Generator, device: torch.device) -> None:
    """Seed the device's own generator from a generator's seed. Layers that draw by themselves, such as dropout, use
    only the device's generator."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(source.initial_seed())
    else:
        torch.manual_seed(source.initial_seed())  # seeds all devices, so it is slower than the line above
