"""The messages between the server and one client: their content, their costs, and simulated damage on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from fedspa.communication.link import Link
from fedspa.communication.wire import Envelope, WireError
from fedspa.core.client import ClientUpdate
from fedspa.core.client_state import MASK
from fedspa.core.packed_mask import PackedMask
from fedspa.core.randomness import numpy_generator
from fedspa.core.records import Costs
from fedspa.core.server import ServerState
from fedspa.costs.charges import down_costs, up_costs
from fedspa.costs.network import NetworkCosts
from fedspa.federated.client import LocalClient
from fedspa.federated.faults import Fault, damage
from fedspa.federated.jobs import UpdateFailed


@dataclass(frozen=True)
class Messages:
    """Carries the server's state to a client, and the client's update to the server."""

    network: NetworkCosts
    seed: int
    link: Link | None = None
    """Encodes all messages in the wire format; None passes them on unchanged."""

    def down(
        self, client: LocalClient, server: ServerState, dense: bool = False, weights: bool = True
    ) -> ServerState:
        """The server's state as the client receives it. The client is charged for the message.

        The weights travel under the mask that both sides know, or under the server's mask, which the client then uses.
        `dense`: all weights travel, for any mask. `weights`: False if only further tensors travel.
        """
        known, shared = client.state.mask, server.mask
        received, encoded = server, 0
        if self.link is not None:
            envelope = Envelope("model", client.round, client.id)
            mask = None if dense else known
            received, encoded = self.link.down(server, mask, envelope, first=client.first, weights=weights)
        new_mask = shared is not None and shared != known
        if new_mask:
            assert received.mask is not None
            client.state |= {MASK: received.mask}
        active = None if dense or client.state.mask is None else client.count(client.mask)
        if not weights:
            active = (0,) * len(client.space.names)
        costs = down_costs(self.network, active, client.first, _values(server.further), new_mask)
        if server.neighbours is not None and active is not None:  # all masks have the same number of ones
            masks = self.network.mask_bytes(active)
            costs = replace(costs, mask_bytes=masks) * server.neighbours
            encoded = (encoded + masks) * server.neighbours if encoded else 0
        client.costs += replace(costs, encoded_bytes=encoded)
        return received

    def up(
        self, client: LocalClient, update: ClientUpdate, known: PackedMask | None, fault: Fault | None
    ) -> ClientUpdate:
        """The update as the server reads it. The client is charged for the message.

        Args:
            known: the mask that both sides knew before; None for a dense model.
            fault: a simulated fault of the message.

        Raises `UpdateFailed` if the message does not arrive, comes too late, or cannot be read.
        """
        if update.update is None and not update.tensors:
            return update
        client.costs += self._up_costs(client, update, known)
        if self.link is not None:
            envelope = Envelope("update", client.round, client.id)
            messages = self.link.encode_update(update, known, envelope)
            client.costs += Costs(encoded_bytes=sum(map(len, messages)))
            if fault is Fault.CORRUPT:
                source = numpy_generator(self.seed, "faults/flips", client.round, client.id)
                damaged = 0 if messages[0] else 1
                messages[damaged] = damage(messages[damaged], source)
            try:
                update = self.link.decode_update(messages, update, known, envelope)
            except WireError as error:
                detail = f"The update of {client.title} was refused: {error}"
                raise UpdateFailed(Fault.CORRUPT, detail) from error
        if fault is Fault.LATE:
            raise UpdateFailed(fault, f"The update of {client.title} came after the deadline.")
        if fault is Fault.LOST:
            raise UpdateFailed(fault, f"The update of {client.title} never arrived.")
        return update

    def _up_costs(self, client: LocalClient, update: ClientUpdate, known: PackedMask | None) -> Costs:
        """The costs of the update's message. A mask travels if it changed, or if only the client knows it."""
        assert update.state is not None
        sent, next_mask = update.mask, update.state.mask
        next_active = None
        if next_mask is not None and next_mask is not known:
            next_active = client.space.count(next_mask.flags)
        drawn = sent is not None and not client.has_mask(sent) and PackedMask.pack(sent) != next_mask
        active = None if sent is None else client.count(sent)
        if update.update is None:
            active = (0,) * len(client.space.names)
        return up_costs(self.network, active, next_active, drawn, _values(update.tensors))


def _values(tensors: Mapping[str, torch.Tensor]) -> int:
    """The number of values in the tensors."""
    return sum(tensor.numel() for tensor in tensors.values())
