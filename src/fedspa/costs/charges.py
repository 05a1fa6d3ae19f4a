"""What one client's update is charged: messages in closed form, and FLOPs by the convention.

Values travel under a mask that both sides know. A mask travels as its bits where a search changed it, and as its
seed where it was drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedspa.core.records import SEED_BYTES, Costs
from fedspa.costs.network import VALUE_BYTES, NetworkCosts


def down_costs(network: NetworkCosts, active: Sequence[int] | None, first: bool, further: int = 0) -> Costs:
    """The server's weights on their way to a client.

    Args:
        active: active parameters of each tensor under the client's mask; None for a dense model.
        first: whether the client has not completed any update yet: a random mask then comes along as its seed.
        further: values of further tensors that travel.
    """
    drawn = first and active is not None and network.mask_bytes(active) > 0
    return Costs(
        down_bytes=network.value_bytes(active) + VALUE_BYTES * further, mask_bytes=SEED_BYTES if drawn else 0
    )


def up_costs(
    network: NetworkCosts,
    sent: Sequence[int] | None,
    next_active: Sequence[int] | None = None,
    drawn: bool = False,
    further: int = 0,
) -> Costs:
    """A client's update on its way to the server.

    Args:
        sent: values of each tensor that travel; None: all.
        next_active: active parameters of each tensor under the client's next mask, where a search changed it.
        drawn: whether the values lie under a random mask that only the client knows.
        further: values of further tensors that travel.
    """
    masks = 0 if next_active is None else network.mask_bytes(next_active)
    if drawn and sent is not None and network.mask_bytes(sent) > 0:
        masks += SEED_BYTES
    return Costs(up_bytes=network.value_bytes(sent) + VALUE_BYTES * further, mask_bytes=masks)


def computed_costs(network: NetworkCosts, computed: Costs, batch_size: int, masked: bool) -> Costs:
    """The FLOPs of an update as the convention charges them.

    The paper's tables charge one mask search over a full batch to every update of a method with masks (`masked`),
    also where nothing was searched.
    """
    if network.convention == "paper" and masked:
        return replace(computed, search_flops=network.search_flops(batch_size))
    return computed


def dense_costs(network: NetworkCosts, samples: int, answered: bool = True) -> Costs:
    """An update of FedAvg that trains on so many samples, to compare with.

    `answered`: false for a client that drops out after it received the weights.
    """
    down = down_costs(network, None, first=False)
    if not answered:
        return down
    return down + up_costs(network, None) + Costs(train_flops=network.training_flops(None, samples))
