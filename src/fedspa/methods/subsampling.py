"""Subsampling (Konecny et al., 2016): FedAvg whose clients send a random part of their update.

The mask is drawn anew for every uplink and travels as its seed; the downlink is dense.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspa.core.client import Client, ClientUpdate
from fedspa.core.limits import limited
from fedspa.core.randomness import uniform
from fedspa.core.server import ServerState
from fedspa.masks.select import smallest
from fedspa.methods.base import Method


@dataclass(kw_only=True)
class Subsampling(Method):
    """Compresses the uplink, and trains the dense model."""

    keep_rate: float = limited(0.5, low=0, high=1, low_open=True)
    """The share of the update's coordinates that are sent."""
    rescale: bool = False
    """True to divide the sent part by keep_rate, which makes it unbiased. Without it the server's steps
    are shorter, as the published slowdown suggests."""

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        trained = client.train(client.weights)
        mask = self._mask(client)
        update = mask * (client.weights - trained.weights)
        if self.rescale:
            update[: client.space.trained] /= self.keep_rate
        return ClientUpdate(update=update, mask=mask, local=trained.weights)

    def _mask(self, client: Client) -> torch.Tensor:
        """Exactly round(keep_rate x trained) random parameters, so that every uplink has the same length.

        Running statistics are sent whole. A part of them would give wrong averages, or negative variances.
        """
        trained = client.space.trained
        draws = uniform(trained, client.generator("uplink_mask"), like=client.weights)
        kept = smallest(draws, round(self.keep_rate * trained))
        statistics = kept.new_ones(client.space.total - trained)
        return torch.cat([kept, statistics]).to(client.weights.dtype)
