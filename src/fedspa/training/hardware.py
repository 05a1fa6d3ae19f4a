"""What a run computes on: the hardware group of the config, and the Lightning Fabric it makes."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedspa.core.errors import UserError, check_choice, check_range
from fedspa.core.launch import ALONE, Launch, environment_of

if TYPE_CHECKING:
    import torch
    from lightning.fabric import Fabric


NO_MPS = "Apple's GPUs (MPS) cannot compute in float64, which a run needs; use hardware=cpu"


@dataclass(kw_only=True)
class Hardware:
    """What one process computes on; under torchrun or SLURM each of the run's processes has one device.

    Raises `UserError` for a value that cannot be.
    """

    name: str
    accelerator: str = "auto"
    """gpu is a GPU by CUDA; auto takes one where there is one, else the CPU. Apple's GPUs (MPS) have no float64, in
    which losses are summed."""
    precision: str = "32-true"
    """32-true, 64-true (for sharp comparisons), tf32 (float32 whose products CUDA rounds to 10 bits of mantissa;
    elsewhere the same as 32-true), or bf16-mixed."""
    deterministic: bool = True
    """false lets cuDNN race its algorithms for the fastest: reruns on a GPU then differ in rounding."""
    threads: int | None = 1
    """Threads inside one operation on the CPU; null leaves it to torch. One gives the same bytes on every machine
    of a kind, and several fare badly where another process is busy."""

    state_memory_gb: float = 4.0
    """What the visited clients' masks and personal weights may take of the memory; those that come later lie in a
    file in the folder for temporary files (TMPDIR)."""

    cores: int | None = None
    """CPU cores for this run; null: all that the process may use. A sweep that runs several jobs side by side on one
    machine shares them out by this."""
    workers: int | None = None
    """Processes among which a round's clients are shared out on the CPU; null: one for each of the cores."""

    def __post_init__(self) -> None:
        if self.accelerator == "mps":
            raise UserError(f"hardware.accelerator=mps does not work: {NO_MPS}.")
        check_choice("hardware.accelerator", self.accelerator, ("auto", "cpu", "gpu"))
        check_choice("hardware.precision", self.precision, ("32-true", "64-true", "tf32", "bf16-mixed"))
        if self.threads is not None:
            check_range("hardware.threads", self.threads, low=1)
        check_range("hardware.state_memory_gb", self.state_memory_gb, low=0)
        if self.cores is not None:
            check_range("hardware.cores", self.cores, low=1)
        if self.workers is not None:
            check_range("hardware.workers", self.workers, low=1)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and images."""
        import torch

        return torch.float64 if self.precision == "64-true" else torch.float32

    @property
    def _fabric_precision(self) -> Any:
        return "32-true" if self.precision == "tf32" else self.precision

    def fabric(self, launch: Launch = ALONE) -> Fabric:
        """Lightning Fabric on this hardware; of a launch with several ranks, which have `joined` before.

        Raises `UserError` if it needs a GPU and there is none, or fewer than ranks.
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
        # 32-true means it: left alone, cuDNN rounds the operands of convolutions to TF32.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
        torch.backends.cudnn.deterministic = self.deterministic
        torch.backends.cudnn.benchmark = not self.deterministic
        if launch.size > 1:
            return self._of_several(launch, on_gpu)
        # Named, since Fabric would take whatever has reserved several tasks for their launcher.
        alone = LightningEnvironment()
        return Fabric(
            accelerator="cuda" if on_gpu else "cpu",
            devices=1,
            precision=self._fabric_precision,
            plugins=[alone],
        )

    def _of_several(self, launch: Launch, on_gpu: bool) -> Fabric:
        """Fabric as one rank of several. Its strategy finds the group made, and never wraps a network."""
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
        logging.disable(logging.INFO)  # else a page of lines from every rank
        fabric.launch()
        logging.disable(logging.NOTSET)
        return fabric


def gpus_of_ranks(launch: Launch) -> list[int]:
    """The GPU of each rank on this machine, by the number that it has in this process.

    SLURM may show each task the one GPU that is bound to it (--gpus-per-task=1): that is number 0 in every task.
    Raises `UserError` where there are fewer GPUs than ranks.
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
