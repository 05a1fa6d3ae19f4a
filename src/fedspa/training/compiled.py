"""The compiled engine: one local step, compiled once for one shape, serves every client and round.

On CUDA the whole step (gather and augment the batch, forward, backward, clip, mask, update, proximal term) is also
recorded as a CUDA graph, with several steps in a launch. The lanes take clients in turn. Each lane has its own stream,
static tensors and graphs, so that kernels of several clients overlap. A client's kernels are the same in any lane.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import cycle
from math import ceil
from typing import NamedTuple, TypeVar

import torch

from fedspa.core.client import Mixture, Trained
from fedspa.core.weights import ParameterSpace
from fedspa.data.examples import Examples
from fedspa.training.base import LocalTask
from fedspa.training.capture import Captures
from fedspa.training.compiling import compiling_afresh
from fedspa.training.eager import EagerEngine
from fedspa.training.flat import first_batch, plan_batches
from fedspa.training.forward import Forward
from fedspa.training.step import LocalStep, StepFunctions
from fedspa.training.workload import Workload

log = logging.getLogger(__name__)
T = TypeVar("T")

MOST_LANES = 8
"""The largest number of lanes, unless `engine.lanes` sets more. By default CUDA has eight connections to a GPU."""
LANES_SHARE = 0.5
"""The largest share of the memory left by the first lane that the other lanes take, unless `engine.lanes` is set."""


class Lane(NamedTuple):
    """A lane trains its clients one after another, at the same time as other lanes."""

    stream: torch.cuda.Stream | None
    """None without CUDA."""
    step: LocalStep
    forward: Forward


class CompiledEngine:
    """Draws each client's batches as the eager engine does, and takes the same steps. Only sums differ, by rounding.

    Layers that draw random numbers, such as dropout, use the compiler's own generator with the same seed. So runs
    repeat, but their draws differ from the eager engine's. Such a network has one lane, since the generator belongs to
    the device.
    """

    name = "compiled"
    forks = False

    def __init__(
        self, eager: EagerEngine, workload: Workload, compiler: str | None, lanes: int | None = None
    ) -> None:
        """
        Args:
            eager: has the network, and computes results that a run needs only once.
            workload: it sizes the batches, and says which functions to compile now.
            compiler: a backend of torch.compile; None runs the same functions uncompiled.
            lanes: None: on CUDA as many as memory allows, elsewhere none.
        """
        self._eager, self._workload = eager, workload
        self._used: torch.cuda.Event | None = None
        """The end of the queued work of the eager engine."""
        self.instead_of: dict[str, str] = {}
        begin, free = time.perf_counter(), _free(eager.device)
        with compiling_afresh() if compiler else nullcontext():
            batch_size = min(eager.settings.batch_size, workload.largest)
            self._functions = StepFunctions(eager, batch_size, compiler)
            draws = _random_state(eager.device)
            self._lane = self._made_lane()
            random = not torch.equal(draws, _random_state(eager.device))
            count = self._affordable(free - _free(eager.device)) if lanes is None else lanes
            if random and count > 1:
                count = 1
                log.warning(
                    "The model's layers draw random numbers, such as dropout: it is trained in one lane."
                )
            self._lanes = [self._lane, *(self._made_lane() for _ in range(count - 1))]
        self.lanes = 0 if lanes is None and eager.device.type == "cpu" else count
        self.compile_seconds = time.perf_counter() - begin

    def _made_lane(self) -> Lane:
        eager, workload = self._eager, self._workload
        stream = torch.cuda.Stream(eager.device) if eager.device.type == "cuda" else None
        captures = Captures(eager.device, stream)
        steps = max(1, ceil(workload.largest / self._functions.batch_size) * eager.settings.epochs)
        terms = ["mask"] * workload.masked + ["anchor"] * bool(eager.settings.proximal)
        step = LocalStep(self._functions, steps, captures, terms)
        if workload.gradients:
            _ = step.take_gradient  # record it now, not in the first round
        return Lane(stream, step, Forward(self._functions, workload.test_batches, captures))

    def _affordable(self, taken: int) -> int:
        """The number of lanes that fit into memory, if the first one has taken so many bytes."""
        most = min(MOST_LANES, self._workload.participants)
        return max(1, min(most, 1 + int(LANES_SHARE * _free(self.device)) // max(taken, 1)))

    def in_lanes(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """The results of functions, which run in the lanes in turn. See `Engine.in_lanes`."""
        results = []
        with self._apart():
            for lane, work in zip(cycle(self._lanes), works, strict=False):
                self._lane = lane
                with torch.cuda.stream(lane.stream):
                    results.append(work())
        return results

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Let all lanes begin after the work queued so far, and let later work wait for all of them.

        So a stream never uses memory that another one has freed before that one's work is done.
        """
        streams = [lane.stream for lane in self._lanes if lane.stream is not None]
        if not streams:
            yield
            return
        main = torch.cuda.current_stream(self.device)
        for stream in streams:
            stream.wait_stream(main)
        try:
            yield
        finally:
            for stream in streams:
                main.wait_stream(stream)

    @contextmanager
    def _eager_alone(self) -> Iterator[EagerEngine]:
        """The eager engine. All lanes share its network, so a lane first waits until another one's work with it is
        done."""
        stream = self._lane.stream
        if stream is None:
            yield self._eager
            return
        if self._used is not None:
            stream.wait_event(self._used)
        yield self._eager
        self._used = stream.record_event()

    @property
    def space(self) -> ParameterSpace:
        return self._eager.space

    @property
    def device(self) -> torch.device:
        return self._eager.device

    @property
    def weights(self) -> torch.Tensor:
        return self._eager.weights

    def train(self, task: LocalTask) -> Trained:
        """Train a client without waiting for the device."""
        step = self._lane.step
        plan = plan_batches(self._eager.examples, task, self._eager.settings)
        samples = int((plan[:, :, 0] >= 0).sum())
        step.start(task)
        step.take(plan[:, : len(step.part)])
        return Trained(step.end, step.tensors.loss_sum[0] / samples, samples, len(plan))

    def gradient(self, weights: torch.Tensor, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The dense, unclipped gradient [total] of the mean loss of one mini-batch of `rows` (int64 [n])."""
        step = self._lane.step
        size = len(step.part)
        if self.space.statistics:  # filler rows would change them
            size = min(size, len(rows))
        part = first_batch(self._eager.examples, rows, generator, size)
        return step.gradient(weights, part, generator)

    def accuracy(self, weights: torch.Tensor, rows: torch.Tensor) -> float:
        """The accuracy in [0, 1] of `weights` [total] on training rows (int64 [n]), without augmentation."""
        examples = self._eager.examples
        return examples.accuracy(self.predict(weights, examples, rows, self._eager.settings.batch_size), rows)

    def outputs(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        with self._eager_alone() as eager:
            return eager.outputs(weights, rows)

    def predict(
        self, weights: torch.Tensor | Mixture, examples: Examples, rows: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        """The prediction for each example, [n] or [n, K], on the device; see `Engine.predict`."""
        if isinstance(weights, Mixture):
            with self._eager_alone() as eager:
                return eager.predict(weights, examples, rows, batch_size)
        return self._lane.forward.predict(weights, examples, rows, batch_size)

    def full_gradient(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        with self._eager_alone() as eager:
            return eager.full_gradient(weights, rows)


def _free(device: torch.device) -> int:
    """Free bytes of a GPU's memory; 0 on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _random_state(device: torch.device) -> torch.Tensor:
    """The state of the generator that a device's layers draw from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
