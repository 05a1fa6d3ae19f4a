"""Whether anything can flow through a network under a first mask: tried on a few images before training."""

from __future__ import annotations

import torch

from fedspa.config.plan import Plan
from fedspa.core.errors import UserError
from fedspa.core.packed_mask import PackedMask
from fedspa.training.eager import EagerEngine

SEEN = 64
"""Images by which a sparse network is tried before training."""


def check_flow(plan: Plan, eager: EagerEngine, mask: PackedMask, rows: torch.Tensor) -> None:
    """Raise `UserError` where a first mask leaves no path through the initial network: it tells no image from another.

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
    """Whether the network with these weights [total] gives different answers for some of the inputs."""
    module, kept = eager.module, eager.weights
    module.load(weights)
    module.eval()
    with eager.fabric.autocast():
        answers = module.network(inputs)
    module.load(kept)
    return bool((answers != answers[0]).any())
