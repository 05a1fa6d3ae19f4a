"""Which engine a run computes with: the config's group `engine`.

Light on purpose (no torch): a mistake in the config is answered before it is loaded.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from fedspa.errors import UserError, brief, check_choice, check_range
from fedspa.running.out_of_memory import ran_out

if TYPE_CHECKING:
    from fedspa.engines.base import Engine
    from fedspa.engines.eager import EagerEngine

log = logging.getLogger(__name__)

SMALL_BATCH = 3_000_000_000
"""FLOPs of a batch's forward pass up to which one client leaves a GPU idle. On an H200 ten stacked clients train LeNet5
(0.6 GFLOPs a batch of 128) 1.5 times as fast as one after another, and VGG11 (39) no faster."""

LEAST_EVENNESS = 0.75
"""The steps that lanes wait for their largest client should not eat up what the stack gains."""


@dataclass(frozen=True)
class Workload:
    """What an engine may be chosen by."""

    largest: int
    """Training rows of the largest client."""
    steps: int
    """Steps of local training in the whole run, about."""
    gradients: bool = False
    """Whether visits will ask for gradients of a batch."""
    test_batch: int = 128
    """Images that a model is shown at a time when it is tested."""
    clients: int = 10
    """Clients of a round, of those that this process visits."""
    batch_flops: int = 0
    """FLOPs of a forward pass of the dense network over one training batch; 0: not known."""
    evenness: float = 1.0
    """Steps of a client of mean size, as a share of those of the largest one."""


@dataclass(kw_only=True)
class EngineChoice(ABC):
    """Makes an engine out of the eager one, which holds the network."""

    name: str

    @abstractmethod
    def build(self, eager: EagerEngine, workload: Workload) -> Engine:
        """The engine. Raises `UserError` where it cannot train the network."""


@dataclass(kw_only=True)
class Eager(EngineChoice):
    """One client after another by autograd: the reference for the others, and the fastest on a CPU."""

    kernels: str = "auto"
    """auto: on a CPU with AVX2 and a C compiler, layers that fedspa has code for (LeNet5's convolutions) are computed
    by that, in half the time; it sums in another order. torch: by torch's operations alone."""

    def __post_init__(self) -> None:
        check_choice("engine.kernels", self.kernels, ("auto", "torch"))

    def build(self, eager: EagerEngine, workload: Workload) -> Engine:
        if self.kernels == "auto" and eager.device.type == "cpu":
            eager.use_kernels()
        return eager


@dataclass(kw_only=True)
class Compiled(EngineChoice):
    """One local step compiled by torch.compile, which takes a minute or so; on CUDA a captured graph of it."""

    compiler: str | None = "inductor"
    """Backend of torch.compile: inductor, or aot_eager, which needs no compiler and gains nothing (for tests); null
    compiles nothing, so that on CUDA the graph is one of torch's own kernels."""

    def __post_init__(self) -> None:
        if self.compiler is not None:
            check_choice("engine.compiler", self.compiler, ("inductor", "aot_eager"))

    def build(self, eager: EagerEngine, workload: Workload) -> Engine:
        from fedspa.engines.compiled import CompiledEngine

        with _explained(self.name, eager):
            return CompiledEngine(eager, workload, self.compiler)


@dataclass(kw_only=True)
class Stacked(Compiled):
    """The same for clients that advance in lockstep by torch.func.vmap. On a CPU it is not worth compiling."""

    compiler: str | None = None
    clients: int = 10
    """How many at a time at most; the memory for their activations grows with them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("engine.clients", self.clients, low=2)

    def build(self, eager: EagerEngine, workload: Workload) -> Engine:
        from fedspa.engines.stacked import StackedEngine

        with _explained(self.name, eager):
            return StackedEngine(eager, workload, self.lanes(workload), self.compiler)

    def lanes(self, workload: Workload) -> int:
        """As many turns as there must be, with as many clients in each: 12 of at most 10 go in two turns of 6."""
        turns = ceil(workload.clients / self.clients)
        return ceil(workload.clients / turns)


@contextmanager
def _explained(name: str, eager: EagerEngine) -> Iterator[None]:
    """Turns what dynamo, inductor or a capture raise into a sentence; too little memory goes on as it is."""
    if not eager.pixels.in_memory:
        raise UserError(
            f"engine={name} needs all images on the device, but this data set makes them when a client needs them: "
            "use engine=eager."
        )
    try:
        yield
    except RuntimeError as error:
        if ran_out(error):
            raise
        raise UserError(
            f"engine={name} cannot compile this model's training here ({brief(error)}); use engine=eager."
        ) from error


@dataclass(kw_only=True)
class Auto(Eager):
    """On CUDA, where the run is long enough, stacked for small networks and compiled for others; else eager.

    It is decided by the run's settings alone, so that reruns agree.
    """

    least_steps: int = 20_000
    """Steps of local training from which on compiling pays: it takes about a minute, and saves 1.5 (LeNet5) to 13
    (ResNet18) milliseconds of each step of 128 images on an H200."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("engine.least_steps", self.least_steps, low=0)

    def build(self, eager: EagerEngine, workload: Workload) -> Engine:
        if eager.device.type != "cuda" or workload.steps < self.least_steps or not eager.pixels.in_memory:
            return super().build(eager, workload)
        choices: list[EngineChoice] = [Compiled(name="compiled")]
        if workload.clients > 1 and self._fits_a_stack(workload):
            choices.insert(0, Stacked(name="stacked"))
        refused: dict[str, str] = {}
        for choice in choices:
            try:
                engine = choice.build(eager, workload)
                break
            except UserError as error:
                refused[choice.name] = brief(error.__cause__ or error)
            except RuntimeError as error:
                if not ran_out(error):
                    raise
                refused[choice.name] = f"too little memory: {brief(error)}"
            log.warning("engine=auto goes on without %s (%s).", choice.name, refused[choice.name])
        else:
            engine = super().build(eager, workload)
        if refused:
            engine.instead_of = refused
        return engine

    @staticmethod
    def _fits_a_stack(workload: Workload) -> bool:
        return 0 < workload.batch_flops <= SMALL_BATCH and workload.evenness >= LEAST_EVENNESS
