"""Which engine a run computes with: the config's group `engine`.

Light on purpose (no torch): a mistake in the config is answered before it is loaded.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedspa.core.errors import UserError, brief, check_choice, check_range
from fedspa.core.out_of_memory import ran_out
from fedspa.training.workload import Workload

if TYPE_CHECKING:
    from fedspa.training.base import Engine
    from fedspa.training.eager import EagerEngine

log = logging.getLogger(__name__)


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
        from fedspa.training.compiled import CompiledEngine

        with _explained(self.name, eager):
            return CompiledEngine(eager, workload, self.compiler)


@contextmanager
def _explained(name: str, eager: EagerEngine) -> Iterator[None]:
    """Turns what dynamo, inductor or a capture raise into a sentence; too little memory goes on as it is."""
    if not eager.examples.in_memory:
        raise UserError(
            f"engine={name} needs all examples on the device, but this data set makes them when a client needs them: "
            "use engine=eager."
        )
    if eager.settings.optimizer != "sgd":
        raise UserError(
            f"engine={name} takes SGD only, not training.optimizer={eager.settings.optimizer}: use engine=eager."
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
    """On CUDA, where the run is long enough, compiled; else eager.

    It is decided by the run's settings alone, so that reruns agree.
    """

    least_steps: int = 20_000
    """Steps of local training from which on compiling pays: it takes about a minute, and saves 1.5 (LeNet5) to 13
    (ResNet18) milliseconds of each step of 128 images on an H200."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("engine.least_steps", self.least_steps, low=0)

    def build(self, eager: EagerEngine, workload: Workload) -> Engine:
        if eager.device.type != "cuda" or workload.steps < self.least_steps or not eager.examples.in_memory:
            return super().build(eager, workload)
        try:
            return Compiled(name="compiled").build(eager, workload)
        except UserError as error:
            reason = brief(error.__cause__ or error)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            reason = f"too little memory: {brief(error)}"
        log.warning("engine=auto goes on without compiled (%s).", reason)
        engine = super().build(eager, workload)
        engine.instead_of = {"compiled": reason}
        return engine
