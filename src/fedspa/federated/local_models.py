"""The local weights for `save.local`: those of every trained client after its last update, packed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fedspa.core.packed_mask import PackedMask
from fedspa.federated.jobs import CompletedUpdate, UpdateJob


class LocalModel(NamedTuple):
    """Packed weights: the values that are not zero, and their places."""

    values: torch.Tensor
    places: PackedMask

    @classmethod
    def pack(cls, weights: torch.Tensor) -> LocalModel:
        """Pack weights [total] without loss."""
        return cls(weights[weights != 0].cpu(), PackedMask.pack(weights != 0).on_cpu())


class LocalModels:
    """The last local model of each client."""

    def __init__(self) -> None:
        self._models: dict[int, LocalModel] = {}

    def remember(self, job: UpdateJob, weights: torch.Tensor, result: CompletedUpdate) -> None:
        """Store the local model of an update."""
        assert result.update.local is not None
        self._models[job.client] = LocalModel.pack(result.update.local)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of each client: `<client>.values`, and `<client>.mask`, the bits (uint8) of their places."""
        return {
            f"{client}.{part}": tensor
            for client, model in sorted(self._models.items())
            for part, tensor in (("values", model.values), ("mask", model.places.bits))
        }

    def state_dict(self) -> dict[str, Any]:
        return {"models": {client: list(model) for client, model in self._models.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._models = {
            int(client): LocalModel(values.clone(), mask.clone())
            for client, (values, mask) in state["models"].items()
        }
