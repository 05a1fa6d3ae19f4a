"""What models predict, on tensors that stay where they are: what is compiled, captured and played back for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch.func import vmap

from fedspa.engines.capture import Captures
from fedspa.engines.eager import EagerEngine
from fedspa.engines.flat import logits
from fedspa.rounds.requests import Predict


class Forward:
    """Shows images to a model, or to several side by side: then every tensor has a first dimension for its lanes.

    A batch always has the same shape. What is left over from an earlier one fills it up, for no image looks at another.
    A model that many images are shown to takes several lanes, or turns.
    """

    def __init__(
        self,
        eager: EagerEngine,
        batch_size: int,
        compiler: str | None,
        lanes: int | None,
        captures: Captures,
    ) -> None:
        """
        Args:
            eager: holds the network.
            batch_size: images of every batch.
            compiler: a backend of torch.compile; None runs the same functions uncompiled.
            lanes: models side by side; None for one alone.
            captures: records the forward pass.
        """
        self._eager, self._lanes, self._batch_size = eager, lanes or 1, batch_size
        shape, pixels = () if lanes is None else (lanes,), eager.pixels
        self._weights = eager.weights.expand(*shape, -1).clone()
        side, channels = pixels.side, pixels.channels
        memory = torch.zeros(
            (*shape, batch_size, side, side, channels), dtype=pixels.dtype, device=eager.device
        )
        self._images = memory.movedim(-1, -3)  # channels-last, as `Pixels` gives them
        self._classes = torch.zeros((*shape, batch_size), dtype=torch.int64, device=eager.device)
        scores = logits(eager.module, eager.space)
        scores = scores if lanes is None else vmap(scores)
        self._scores = scores if compiler is None else torch.compile(scores, backend=compiler, dynamic=False)
        eager.module.eval()
        self._show = captures(self._run)

    def predict(self, requests: Sequence[Predict]) -> list[torch.Tensor]:
        """The classes that each asks for."""
        self._eager.module.eval()
        pieces, predicted = self._pieces(requests), []
        total = self._weights.shape[-1]
        lanes = list(
            zip(self._weights.view(-1, total), self._images.view(-1, *self._images.shape[-4:]), strict=True)
        )
        held: list[torch.Tensor | None] = [None] * self._lanes
        while group := list(islice(pieces, self._lanes)):
            for lane, (weights, images) in enumerate(group):
                if weights is not held[lane]:
                    lanes[lane][0].copy_(weights)
                    held[lane] = weights
                lanes[lane][1][: len(images)].copy_(images)
            self._show()
            classes = self._classes.clone().view(self._lanes, -1)
            predicted += [classes[lane, : len(images)] for lane, (_, images) in enumerate(group)]
        return list(torch.cat(predicted).split([len(request.rows) for request in requests]))

    def _pieces(self, requests: Sequence[Predict]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Weights and as many images as fit into a batch, request after request."""
        for request in requests:
            for batch in request.pixels.in_order(request.rows, request.batch_size):
                for images in batch.images.split(self._batch_size):
                    yield request.weights, images

    @torch.no_grad()
    def _run(self) -> None:
        with self._eager.fabric.autocast():
            scores = self._scores(self._weights, self._images)
        self._classes.copy_(scores.argmax(-1))
