"""Checks before training, with a few images, that a signal can flow through a network under a first mask."""

from __future__ import annotations

import torch

from fedspa.config.plan import Plan
from fedspa.core.errors import UserError
from fedspa.core.packed_mask import PackedMask
from fedspa.training.eager import EagerEngine

SEEN = 64
"""The number of images for the check."""


def check_flow(plan: Plan, eager: EagerEngine, mask: PackedMask, rows: torch.Tensor) -> None:
    """Raise `UserError` if the initial network under a first mask has the same output for all images.

    `rows`: int64 [n], training images to try.
    """
    dense = eager.weights
    sparse = torch.cat([mask.unpack(like=dense) * dense[: mask.length], dense[mask.length :]])
    inputs = eager.examples.batch(rows.to(eager.device), None).inputs
    if _tells_apart(eager, dense, inputs) and not _tells_apart(eager, sparse, inputs):
        raise UserError(
            f"sparsity={plan.settings.sparsity} with layer_sparsity={plan.names['layer_sparsity']} leaves no path "
            f"through the network: under the first mask it gives the same answer for {len(rows)} images. Lower "
            "sparsity, or use another layer_sparsity."
        )


@torch.no_grad()
def _tells_apart(eager: EagerEngine, weights: torch.Tensor, inputs: torch.Tensor) -> bool:
    """True if the network with these weights [total] has different outputs for some of the inputs."""
    module, kept = eager.module, eager.weights
    module.load(weights)
    module.eval()
    with eager.fabric.autocast():
        answers = module.network(inputs)
    module.load(kept)
    return bool((answers != answers[0]).any())
