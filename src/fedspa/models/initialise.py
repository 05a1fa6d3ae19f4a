"""Initial weights as a pure function of the seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from fedspa.core.randomness import generator

Network = TypeVar("Network", bound=nn.Module)


def seeded(factory: Callable[[], Network], seed: int) -> Network:
    """The network that `factory` builds on the CPU, a pure function of the seed.

    Layers draw their weights from torch's global generator when they are built. During the call it has the state of
    `generator(seed, "initial_weights")`. Its own state is restored afterwards, also if `factory` raises an error.

    >>> network = seeded(lambda: LeNet5(channels=1, image_size=28, classes=26), seed=0)
    """
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator(seed, "initial_weights").get_state())
        return factory()
