"""The hardware of a run: the config's group `hardware`, and the Lightning Fabric for it."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fedspa.core.errors import UserError
from fedspa.core.launch import ALONE, Launch, environment_of
from fedspa.core.limits import Component, limited

if TYPE_CHECKING:
    import torch
    from lightning.fabric import Fabric


NO_MPS = "Apple's GPUs (MPS) cannot compute in float64, which a run needs; use hardware=cpu"


@dataclass(kw_only=True)
class Hardware(Component):
    """The hardware of one process. Under torchrun or SLURM each of the run's processes has one device.

    Raises `UserError` for an impossible value.
    """

    section: ClassVar[str] = "hardware"
    accelerator: str = limited("auto", choices=("auto", "cpu", "gpu"))
    """gpu is a GPU with CUDA; auto uses a GPU if there is one, else the CPU. Apple's GPUs (MPS) cannot be used: they
    have no float64, in which losses are summed."""
    precision: str = limited("32-true", choices=("32-true", "64-true", "tf32", "bf16-mixed"))
    """32-true, 64-true (for sharp comparisons), tf32 (float32 whose products CUDA rounds to 10 bits of mantissa;
    elsewhere the same as 32-true), or bf16-mixed."""
    deterministic: bool = True
    """false lets cuDNN and the compiler choose their fastest algorithms by trial. Reruns on a GPU then differ in
    rounding."""
    threads: int | None = limited(1, low=1)
    """The number of threads inside one operation on the CPU; null leaves it to torch. One thread gives the same bytes
    on every machine of a kind. Several threads are slow if another process is busy."""

    state_memory_gb: float = limited(4.0, low=0)
    """The memory for masks and personal weights of trained clients. Later ones are stored in a
    file in the folder for temporary files (TMPDIR)."""

    cores: int | None = limited(None, low=1)
    """The number of CPU cores for this run; null: all that the process may use. A sweep with several jobs on one
    machine divides the cores by this setting."""
    workers: int | None = limited(None, low=1)
    """The number of processes that share a round's clients on the CPU; null: one for each core."""

    def __post_init__(self) -> None:
        if self.accelerator == "mps":
            raise UserError(f"hardware.accelerator=mps does not work: {NO_MPS}.")
        super().__post_init__()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and images."""
        import torch

        return torch.float64 if self.precision == "64-true" else torch.float32

    def remark(self, kind: str) -> str | None:
        """A sentence if a device of this kind (cuda or cpu) is slow in this precision, or does not have it."""
        if self.precision == "tf32" and kind != "cuda":
            return "hardware.precision=tf32 computes as 32-true here: only CUDA has TF32"
        if self.precision == "32-true" and kind == "cuda":
            return (
                "hardware.precision=32-true takes about four times as long on a GPU (computed, not measured) as "
                "hardware=gpu, which is bf16-mixed and deterministic=false"
            )
        return None

    @property
    def _fabric_precision(self) -> Any:
        return "32-true" if self.precision == "tf32" else self.precision

    def fabric(self, launch: Launch = ALONE) -> Fabric:
        """Lightning Fabric on this hardware. A launch with several ranks must have `joined` before.

        Raises `UserError` if a GPU is required and there is none, or if there are fewer GPUs than ranks.
        """
        import torch
        from lightning.fabric import Fabric
        from lightning.fabric.plugins.environments import LightningEnvironment

        on_gpu = self.accelerator != "cpu" and torch.cuda.is_available()
        if self.accelerator == "gpu" and not on_gpu:
            if torch.backends.mps.is_available():
                raise UserError(f"hardware.accelerator=gpu finds no GPU with CUDA here: {NO_MPS}.")
            raise UserError("hardware.accelerator=gpu, but torch sees no GPU here: use hardware=auto or cpu.")
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        # cuDNN would round the operands of convolutions to TF32 by default.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
        torch.backends.cudnn.deterministic = self.deterministic
        torch.backends.cudnn.benchmark = not self.deterministic
        if on_gpu and self.deterministic:  # needed for repeatable cuBLAS in several streams
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if launch.size > 1:
            return self._of_several(launch, on_gpu)
        # Named explicitly, because Fabric would choose a launcher by itself when several tasks are reserved.
        single = LightningEnvironment()
        return Fabric(
            accelerator="cuda" if on_gpu else "cpu",
            devices=1,
            precision=self._fabric_precision,
            plugins=[single],
        )

    def _of_several(self, launch: Launch, on_gpu: bool) -> Fabric:
        """Fabric for one rank of several. Its strategy uses the existing process group, and never wraps a network."""
        import torch
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import DDPStrategy

        gpus = gpus_of_ranks(launch) if on_gpu else None
        fabric = Fabric(
            accelerator="cuda" if on_gpu else "cpu",
            devices=sorted(set(gpus)) if gpus else launch.local_size,
            num_nodes=launch.machines,
            precision=self._fabric_precision,
            strategy=DDPStrategy(
                parallel_devices=[torch.device("cuda", gpu) for gpu in gpus] if gpus else None,
                process_group_backend="gloo",
            ),
            plugins=[environment_of(launch)],
        )
        logging.disable(logging.INFO)  # every rank would print a page of lines
        fabric.launch()
        logging.disable(logging.NOTSET)
        return fabric


def gpus_of_ranks(launch: Launch) -> list[int]:
    """The GPU of each rank on this machine, by its number in this process.

    SLURM may show each task only the one GPU that is bound to it (--gpus-per-task=1). It is number 0 in every task.
    Raises `UserError` if there are fewer GPUs than ranks.
    """
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 1 and launch.launcher == "slurm":
        return [0] * launch.local_size
    if gpus < launch.local_size:
        raise UserError(
            f"{launch.launcher} started {launch.local_size} processes on {socket.gethostname()}, where torch sees "
            f"{gpus} GPUs: it must be one process a GPU, or hardware=cpu."
        )
    return list(range(launch.local_size))
