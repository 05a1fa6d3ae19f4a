"""Trains clients under masks of channels as the small networks of their active channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

from fedspa.core.client import Proximal, Trained
from fedspa.core.weights import ParameterSpace
from fedspa.models.narrowing import narrowed
from fedspa.training.base import LocalTask
from fedspa.training.eager import EagerEngine


class NarrowEngine(EagerEngine):
    """An eager engine with a second, small network, which serves the training of every client.

    The small network's flat weights are the client's weights at the coordinates of its mask, and its steps are those
    under the mask: they differ by rounding, and running statistics of absent channels stay as they are. The whole
    network computes everything else.
    """

    def __init__(self, fabric: Fabric, network: nn.Module, *others: Any, widths: Sequence[int]) -> None:
        """`others`: as for `EagerEngine`. `widths`: the active units of each group of channels."""
        channels = ParameterSpace.of(network).channels
        assert channels is not None
        self.small = EagerEngine(fabric, narrowed(network, channels.first(widths)), *others)
        self._widths = list(widths)
        super().__init__(fabric, network, *others)

    def use_kernels(self) -> None:
        super().use_kernels()
        if not self.instead_of:  # else the same warning would come twice
            self.small.use_kernels()

    def train(self, task: LocalTask) -> Trained:
        """Train a client as its small network; with the whole network if the task asks for more than a mask."""
        if task.mask is None or task.forward is not None or task.others:
            return super().train(task)
        if (places := self._places(task.mask)) is None:
            return super().train(task)

        def cut(vector: torch.Tensor | None) -> torch.Tensor | None:
            return None if vector is None else vector[places]

        proximal = task.proximal
        small = replace(
            task,
            weights=task.weights[places],
            mask=None,
            proximal=proximal and Proximal(proximal.anchor[places], proximal.strength),
            correction=cut(task.correction),
            trainable=cut(task.trainable),
        )
        trained = self.small.train(small)
        return replace(trained, weights=task.weights.index_copy(0, places, trained.weights))

    def _places(self, mask: torch.Tensor) -> torch.Tensor | None:
        """The coordinates of the small network's flat weights under a mask: int64, rising.

        None if the mask is not of whole channels, as many in each group as the small network has.
        """
        space, trained, flags = self.space, self.space.trained, mask.bool()
        assert space.channels is not None
        units = space.mask_bits(flags)
        active = space.channels.mask(space.tensors, units)
        widths = [group.sum() for group in space.channels.split(units)]
        facts = torch.stack([*widths, (active[:trained] == flags[:trained]).all()])  # read at once
        if facts.tolist() != [*self._widths, True]:
            return None
        return active.nonzero().squeeze(1)
