"""What `save.local` keeps: the weights of every visited client after its last visit, packed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fedspa.core.packed_mask import PackedMask
from fedspa.core.saved import Saved
from fedspa.federated.jobs import CompletedUpdate, UpdateJob


class LocalModel(NamedTuple):
    """Weights at rest: the values of those that are not zero, and where they are."""

    values: torch.Tensor
    held: PackedMask

    @classmethod
    def pack(cls, weights: torch.Tensor) -> LocalModel:
        """Pack weights [total] without loss."""
        return cls(weights[weights != 0].cpu(), PackedMask.pack(weights != 0))


class LocalModels:
    """The last local model of each client."""

    def __init__(self, clients: int, total: int, dtype: torch.dtype) -> None:
        """`total` and `dtype`: of the flat weights."""
        self._clients, self._total, self._dtype = clients, total, dtype
        self._models: dict[int, LocalModel] = {}

    def remember(self, job: UpdateJob, weights: torch.Tensor, result: CompletedUpdate) -> None:
        """Keep the local model of an update."""
        assert result.update.local is not None
        self._models[job.client] = LocalModel.pack(result.update.local)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By client: `<client>.values`, and `<client>.mask`, uint8, which of the flat weights they are."""
        return {
            f"{client}.{part}": tensor
            for client, model in sorted(self._models.items())
            for part, tensor in (("values", model.values), ("mask", model.held.bits))
        }

    def state_dict(self) -> dict[str, Any]:
        return {"models": {client: list(model) for client, model in self._models.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `Misfit` for what cannot be of these clients; nothing has changed then."""
        models = Saved(state, "local_models")["models"]
        self._models = {
            client.integer(high=self._clients - 1): self._saved(*model.sequence(2))
            for client, model in models.items()
        }

    def _saved(self, values: Saved, held: Saved) -> LocalModel:
        mask = held.mask(self._total)
        return LocalModel(values.tensor(self._dtype, [mask.active]), mask)
