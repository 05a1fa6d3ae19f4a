"""What a run computes on: the hardware group of the config, and the Lightning Fabric it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedspa.errors import UserError, check_choice, check_range

if TYPE_CHECKING:
    import torch
    from lightning.fabric import Fabric


@dataclass(kw_only=True)
class Hardware:
    """One process on one device.

    Raises `UserError` for a value that cannot be.
    """

    name: str
    accelerator: str = "auto"
    """auto takes a GPU where there is one."""
    precision: str = "32-true"
    """32-true, 64-true (for sharp comparisons), or bf16-mixed."""
    threads: int | None = 1
    """Threads inside one operation on the CPU; null leaves it to torch. One gives the same bytes on every machine
    of a kind, and several fare badly where another process is busy."""

    workers: int | None = None
    """Processes among which a round's clients are shared out on the CPU; null: one for each usable core."""

    def __post_init__(self) -> None:
        check_choice("hardware.accelerator", self.accelerator, ("auto", "cpu", "gpu"))
        check_choice("hardware.precision", self.precision, ("32-true", "64-true", "bf16-mixed"))
        if self.threads is not None:
            check_range("hardware.threads", self.threads, low=1)
        if self.workers is not None:
            check_range("hardware.workers", self.workers, low=1)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and images."""
        import torch

        return torch.float64 if self.precision == "64-true" else torch.float32

    def fabric(self) -> Fabric:
        """Lightning Fabric on this hardware. Raises `UserError` if it needs a GPU and there is none."""
        import torch
        from lightning.fabric import Fabric

        has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
        if self.accelerator == "gpu" and not has_gpu:
            raise UserError("hardware.accelerator=gpu, but torch sees no GPU here: use hardware=auto or cpu.")
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        # 32-true means it: left alone, cuDNN rounds the operands of convolutions to TF32, and picks its
        # algorithms by a race, so that a rerun would differ.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        return Fabric(accelerator=self.accelerator, devices=1, precision=self.precision)  # type: ignore[arg-type]
