"""The choice of the engine: the config's group `engine`.

This module does not import torch, so that a mistake in the config is reported before torch is loaded.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedspa.core.errors import UserError, brief
from fedspa.core.limits import Component, limited
from fedspa.core.out_of_memory import ran_out
from fedspa.training.workload import Workload

if TYPE_CHECKING:
    from fedspa.training.base import Engine
    from fedspa.training.eager import EagerEngine

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class EngineChoice(Component, ABC):
    """Makes an engine from the eager one, which has the network."""

    section: ClassVar[str] = "engine"

    @abstractmethod
    def build(self, eager: EagerEngine, workload: Workload) -> Engine:
        """Make the engine. Raises `UserError` if it cannot train the network."""


@dataclass(kw_only=True)
class Eager(EngineChoice):
    """Trains one client after another with autograd. The reference for other engines, and the fastest on a CPU."""

    kernels: str = limited("auto", choices=("auto", "torch"))
    """auto: on a CPU with AVX2 and a C compiler, fedspa's C code computes some layers (LeNet5's convolutions) in half
    the time; it sums in another order. torch: only torch's operations are used."""

    def build(self, eager: EagerEngine, workload: Workload) -> Engine:
        if self.kernels == "auto" and eager.device.type == "cpu":
            eager.use_kernels()
        return eager


@dataclass(kw_only=True)
class Compiled(EngineChoice):
    """Compiles one local step with torch.compile. On CUDA the step is a captured graph."""

    lanes: int | None = limited(None, low=1)
    """The number of clients trained side by side on a GPU; null: as many as its memory allows, at most 8. On a CPU the
    lanes run one after the other (for tests)."""
    compiler: str | None = limited("inductor", choices=("inductor", "aot_eager"))
    """The backend of torch.compile: inductor; or aot_eager, which needs no compiler and gains nothing (for tests). null
    compiles nothing; on CUDA the graph then has torch's own kernels."""

    def build(self, eager: EagerEngine, workload: Workload) -> Engine:
        from fedspa.training.compiled import CompiledEngine

        with _explained(self.name, eager):
            return CompiledEngine(eager, workload, self.compiler, self.lanes)


@contextmanager
def _explained(name: str, eager: EagerEngine) -> Iterator[None]:
    """Turn errors of dynamo, inductor or a capture into one sentence. Too little memory is passed on unchanged."""
    if not eager.examples.in_memory:
        raise UserError(
            f"engine={name} needs all examples on the device, but this data set makes them when a client needs them: "
            "use engine=eager."
        )
    if eager.space.channels is not None:
        raise UserError(
            f"engine={name} cannot train the small networks of masks that cut out channels: use engine=eager."
        )
    if eager.settings.optimizer != "sgd":
        raise UserError(
            f"engine={name} takes SGD only, not training.optimizer={eager.settings.optimizer}: use engine=eager."
        )
    if eager.module.own_step:
        raise UserError(
            f"engine={name} takes the steps of fedspa's own training, not those of {eager.module.own_step}: use "
            "engine=eager."
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
    """Chooses the compiled engine on CUDA if the run is long enough, else the eager one.

    Only the run's settings decide, so that reruns agree.
    """

    lanes: int | None = limited(None, low=1)
    """The lanes of the compiled engine."""
    least_steps: int = limited(20_000, low=0)
    """The number of local training steps from which compiling pays. A guess from a prototype on an H200: it takes about
    a minute, and saves 1.5 (LeNet5) to 13 (ResNet18) milliseconds of each step of 128 images."""

    def build(self, eager: EagerEngine, workload: Workload) -> Engine:
        if eager.device.type != "cuda" or workload.steps < self.least_steps or not eager.examples.in_memory:
            return super().build(eager, workload)
        try:
            return Compiled(name="compiled", lanes=self.lanes).build(eager, workload)
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
