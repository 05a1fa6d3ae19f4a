"""The code in C as this machine builds it, and LeNet5 on an engine, for the tests of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from federations import engine, pixels, random_images
from torch import nn

from fedspa.core.settings import TrainingSettings
from fedspa.kernels.building import CannotBuild
from fedspa.kernels.conv_pool import ConvPoolKernel
from fedspa.models.initialise import seeded
from fedspa.models.lenet5 import LeNet5
from fedspa.training.eager import EagerEngine
from fedspa.training.workload import Workload

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/fedspa/kernels/conv_pool.c"


def built() -> ConvPoolKernel | None:
    try:
        return ConvPoolKernel()
    except CannotBuild:
        return None


KERNEL = built()
needs_kernel = pytest.mark.skipif(KERNEL is None, reason="no C compiler, or a processor without AVX2")


def stock(convolution: nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
    return F.relu(F.max_pool2d(convolution(images), 2))


PIXELS = pixels(random_images(40, side=16, classes=5, seed=0), torch.float32)
WORK = Workload(largest=40, steps=10)


def lenet_engine() -> EagerEngine:
    return engine(seeded(lambda: LeNet5(1, 16, 5), seed=0), PIXELS, TrainingSettings(batch_size=16))


def kernel_of(chosen) -> object:
    """What trains the convolutions of an engine."""
    eager = getattr(chosen, "_eager", chosen)
    return eager.module.network.pooled.kernel
