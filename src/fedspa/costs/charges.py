"""The costs of one client's update: messages in closed form, and FLOPs by the convention.

Values travel under a mask that both sides know. A mask travels as its bits if a search changed it, and as its
seed if it was drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedspa.core.records import SEED_BYTES, Costs
from fedspa.costs.network import VALUE_BYTES, NetworkCosts


def down_costs(
    network: NetworkCosts,
    active: Sequence[int] | None,
    first: bool,
    further: int = 0,
    new_mask: bool = False,
) -> Costs:
    """The costs of the server's message to a client.

    Args:
        active: active parameters of each tensor under the client's mask; None for a dense model.
        first: True if the client has not completed any update yet. A random mask then travels as its seed.
        further: the number of values in further tensors.
        new_mask: True if the mask is the server's, and the client has another one. Its bits then travel.
    """
    masks = 0 if active is None else network.mask_bytes(active)
    if masks and not new_mask:
        masks = SEED_BYTES if first else 0
    return Costs(down_bytes=network.value_bytes(active) + VALUE_BYTES * further, mask_bytes=masks)


def up_costs(
    network: NetworkCosts,
    sent: Sequence[int] | None,
    next_active: Sequence[int] | None = None,
    drawn: bool = False,
    further: int = 0,
) -> Costs:
    """The costs of a client's message to the server.

    Args:
        sent: the number of values of each tensor that travel; None: all.
        next_active: active parameters of each tensor under the client's next mask, if a search changed it.
        drawn: True if the values lie under a random mask that only the client knows.
        further: the number of values in further tensors.
    """
    masks = 0 if next_active is None else network.mask_bytes(next_active)
    if drawn and sent is not None and network.mask_bytes(sent) > 0:
        masks += SEED_BYTES
    return Costs(up_bytes=network.value_bytes(sent) + VALUE_BYTES * further, mask_bytes=masks)


def computed_costs(network: NetworkCosts, computed: Costs, batch_size: int, masked: bool) -> Costs:
    """The FLOPs of an update, by the convention.

    The paper's tables charge one mask search over a full batch to every update of a method with masks (`masked`),
    also if no mask was searched.
    """
    if network.convention == "paper" and masked:
        return replace(computed, search_flops=network.search_flops(batch_size))
    return computed


def dense_costs(network: NetworkCosts, samples: int, answered: bool = True) -> Costs:
    """The costs of an update of FedAvg on so many samples, for comparison.

    `answered`: False for a client that drops out after it received the weights.
    """
    down = down_costs(network, None, first=False)
    if not answered:
        return down
    return down + up_costs(network, None) + Costs(train_flops=network.training_flops(None, samples))
