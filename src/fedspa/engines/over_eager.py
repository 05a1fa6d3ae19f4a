"""What the compiled and the stacked engine share: a local step of fixed shape, over an eager engine for all else."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from fedspa.engines.capture import Captures
from fedspa.engines.choice import Workload
from fedspa.engines.eager import EagerEngine
from fedspa.engines.forward import Forward
from fedspa.engines.step import LocalStep
from fedspa.masks.checking import found_masks
from fedspa.rounds.requests import (
    Answer,
    Gradient,
    NextMask,
    Predict,
    Request,
    Train,
    Trained,
    TrainingAccuracy,
)
from fedspa.weights import ParameterSpace


class OverEager(ABC):
    """Prepares the step and the forward pass, and leaves to the eager engine what a run asks for once."""

    def __init__(
        self, eager: EagerEngine, workload: Workload, compiler: str | None, lanes: int | None
    ) -> None:
        """
        Args:
            eager: holds the network.
            workload: no batch is larger than the largest client; what it asks for is compiled here.
            compiler: a backend of torch.compile; None runs the same functions uncompiled.
            lanes: clients that a step trains side by side; None trains one, without that dimension.
        """
        self._eager = eager
        self.instead_of: dict[str, str] = {}
        begin, captures = time.perf_counter(), Captures(eager.device)
        batch_size = min(eager.settings.batch_size, workload.largest)
        with _compiling_afresh() if compiler else nullcontext():
            self._step = LocalStep(eager, batch_size, compiler, lanes, captures)
            if workload.gradients:
                _ = self._step.take_gradient  # recorded now, not in the first round
            self._forward = Forward(eager, workload.test_batch, compiler, lanes, captures)
        self.compile_seconds = time.perf_counter() - begin

    @property
    def space(self) -> ParameterSpace:
        return self._eager.space

    @property
    def device(self) -> torch.device:
        return self._eager.device

    @property
    def weights(self) -> torch.Tensor:
        return self._eager.weights

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """The answers to requests of one kind, in their order."""
        answers: dict[type, Callable[[Any], Sequence[Answer]]] = {
            Train: self._train,
            Gradient: self._gradients,
            NextMask: _next_masks,
            TrainingAccuracy: self._training_accuracies,
            Predict: self._forward.predict,
        }
        return list(answers[type(requests[0])](requests))

    @abstractmethod
    def _train(self, requests: Sequence[Train]) -> list[Trained]:
        """Local training."""

    @abstractmethod
    def _gradients(self, requests: Sequence[Gradient]) -> list[torch.Tensor]:
        """Dense gradients."""

    def _training_accuracies(self, requests: Sequence[TrainingAccuracy]) -> list[float]:
        """The answers to requests, whose predictions go side by side."""
        pixels, size = self._eager.pixels, self._eager.settings.batch_size
        predicted = self._forward.predict(
            [
                Predict(weights=request.weights, pixels=pixels, rows=request.rows, batch_size=size)
                for request in requests
            ]
        )
        return [
            self._eager.accuracy(request, classes)
            for request, classes in zip(requests, predicted, strict=True)
        ]

    def full_gradient(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._eager.full_gradient(weights, rows)


@contextmanager
def _compiling_afresh() -> Iterator[None]:
    """Compile what one engine needs, whatever the process has compiled before.

    torch keeps a few variants of a function in a process, and runs every further one uncompiled. So the variants of
    earlier engines are dropped here. Raises RuntimeError where this engine alone needs more.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    torch.compiler.reset()
    try:
        with config.patch(fail_on_recompile_limit_hit=True):
            yield
    except FailOnRecompileLimitHit as error:
        raise RuntimeError(
            f"it takes more than the {config.recompile_limit} variants of a function that torch.compile keeps"
        ) from error


def _next_masks(requests: Sequence[NextMask]) -> list[torch.Tensor]:
    return found_masks(requests[0].searcher, [request.search for request in requests])
