"""Examples on a device, and the one place where batches of them are drawn: without a data loader."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedspa.core.errors import UserError
from fedspa.core.transfers import sent

IGNORED = -100
"""The class of an example that only fills up a batch; torch's cross-entropy leaves it out. Where targets are numbers,
NaN takes its place."""


@dataclass(frozen=True)
class Batch:
    """inputs: [B, ...], floats or int64 tokens. targets: classes, int64 [B], or numbers, float [B, K]. rows: int64 [B]
    in training by the eager engine, else None."""

    inputs: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor | None = None


class Examples(ABC):
    """A set of examples that are numbered by rows. An epoch is a plan first: rows in random order, and draws of the
    augmentation where there is one."""

    in_memory: ClassVar[bool] = True
    """True if the examples lie on the device, so that a captured graph can gather batches."""
    draws = 0
    """Columns of the augmentation's draws in a plan."""

    def __init__(self, targets: torch.Tensor, device: torch.device | str, dtype: torch.dtype) -> None:
        """
        Args:
            targets: classes, int64 [N], or numbers, float [N] or [N, K]. They decide which loss trains a network.
            dtype: of all floats on the device.
        """
        self.device, self.dtype = torch.device(device), dtype
        if targets.is_floating_point():
            targets = targets.to(dtype).view(len(targets), -1)
        self._own_targets, self.targets = targets.cpu(), targets.to(self.device)

    @property
    def of_numbers(self) -> bool:
        """True if the targets are numbers (a regression), not classes."""
        return self.targets.is_floating_point()

    @abstractmethod
    def batch(self, rows: torch.Tensor, draws: torch.Tensor | None) -> Batch:
        """The examples of `rows` int64 [B]; `draws` int64 [B, draws] as of `draw` augments them, None does not."""

    @abstractmethod
    def empty_inputs(self, count: int) -> torch.Tensor:
        """Zeros with shape [count, ...], dtype and memory layout of a batch's inputs."""

    def targets_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The targets [n] or [n, K] of rows int64 [n], both on the CPU."""
        return self._own_targets[rows]

    def accuracy(self, predicted: torch.Tensor, rows: torch.Tensor) -> float:
        """The share in [0, 1] of rows (int64 [n] on the CPU) whose predicted class (int64 [n]) is right.

        Raises `UserError` where targets are numbers.
        """
        if self.of_numbers:
            raise UserError(
                "The method asks for an accuracy, but the targets of this data set are numbers: use another method."
            )
        return float((predicted.cpu() == self.targets_of(rows)).double().mean())

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor | None:
        """Augmentation draws of `count` examples, int64 [count, draws] on the CPU; None without augmentation."""
        return None

    def epoch(
        self, rows: torch.Tensor, batch_size: int, generator: torch.Generator, drop_last: bool = False
    ) -> Iterator[Batch]:
        """Every row of `rows` (int64 [n] on the CPU) once, in random order, augmented.

        The order, then all draws of the epoch come from the generator and go to the device in one transfer.
        The last batch may be a partial one; `drop_last` leaves it out, even where it is the only one.
        """
        for part in self.plan(rows, generator).to(self.device, non_blocking=True).split(batch_size):
            if not (drop_last and len(part) < batch_size):
                yield self.planned(part)

    def plan(self, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """An epoch over `rows` (int64 [n] on the CPU) before it is cut into batches: int64 [n, 1 + draws] on the CPU.

        The first column are the rows in their order, the others the augmentation's draws where there is one.
        """
        order = rows[torch.randperm(len(rows), generator=generator)]
        draws = self.draw(len(rows), generator)
        return order[:, None] if draws is None else torch.cat([order[:, None], draws], 1)

    def planned(self, part: torch.Tensor) -> Batch:
        """The examples of a part of a plan, int64 [B, 1 + draws] on the device."""
        batch = self.batch(part[:, 0], part[:, 1:] if part.shape[1] > 1 else None)
        return Batch(batch.inputs, batch.targets, part[:, 0])

    def filled_up(self, part: torch.Tensor) -> Batch:
        """The examples of a part. Rows of -1 only fill it up: with any inputs, and targets `IGNORED` or NaN."""
        batch = self.planned(part.clamp(min=0))
        fills = (part[:, 0] < 0).view(-1, *(1 for _ in batch.targets.shape[1:]))
        return Batch(batch.inputs, batch.targets.masked_fill(fills, math.nan if self.of_numbers else IGNORED))

    def in_order(self, rows: torch.Tensor, batch_size: int) -> Iterator[Batch]:
        """The rows (int64 [n]) as they come, without augmentation: for evaluation."""
        for part in sent(rows, self.device).split(batch_size):
            yield self.batch(part, None)


class Arrays(Examples):
    """Examples that are used as they are: inputs float [N, ...], or tokens int [N, L]."""

    def __init__(
        self, inputs: torch.Tensor, targets: torch.Tensor, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__(targets, device, dtype)
        self._inputs = inputs.to(self.device, dtype if inputs.is_floating_point() else torch.int64)

    def batch(self, rows: torch.Tensor, draws: torch.Tensor | None) -> Batch:
        return Batch(self._inputs.index_select(0, rows), self.targets.index_select(0, rows))

    def empty_inputs(self, count: int) -> torch.Tensor:
        return self._inputs.new_zeros(count, *self._inputs.shape[1:])
