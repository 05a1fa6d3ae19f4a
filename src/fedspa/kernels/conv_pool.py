"""Convolution, max-pooling by 2 and ReLU in one operation, with its gradient: conv_pool.c for torch's autograd."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fedspa.kernels.building import library

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ConvPoolKernel:
    """Computes relu(max_pool2d(convolution(images), 2)) on one thread, in single precision.

    The gradient takes at most a quarter of a convolution's products. In each pooling window only the largest value
    has a gradient, and none if ReLU makes it zero. Sums are taken in another order than in torch. The gradient itself
    cannot be differentiated.
    """

    def __init__(self) -> None:
        """Raises `CannotBuild` if the machine cannot compile the C code."""
        self._library = library(Path(__file__).with_name("conv_pool.c"))
        self._library.conv_pool_lanes.restype = self._library.conv_pool_scratch.restype = ctypes.c_int64
        self._library.conv_pool_forward.restype = self._library.conv_pool_backward.restype = None
        self._lanes = int(self._library.conv_pool_lanes())

    def __reduce__(self) -> tuple[type[ConvPoolKernel], tuple[()]]:
        """The arguments of pickle. A copy of a network finds the library by itself, also in another process."""
        return ConvPoolKernel, ()

    @staticmethod
    def serves(convolution: nn.Conv2d, images: torch.Tensor) -> bool:
        """True if the kernel can compute these layers. With several threads torch is used, because only torch divides
        the work of an operation among threads."""
        side, _ = convolution.kernel_size
        settings = (convolution.kernel_size, convolution.stride, convolution.padding, convolution.dilation)
        return (
            settings == ((side, side), (1, 1), (0, 0), (1, 1))
            and convolution.groups == 1
            and images.dim() == 4
            and images.shape[1] == convolution.in_channels
            and min(images.shape[2:]) > side
            and all(map(_plain, (images, convolution.weight, convolution.bias)))
            and type(convolution) is nn.Conv2d
            and not any(getattr(convolution, hooks) for hooks in _HOOKS)
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
            and torch.get_num_threads() == 1
        )

    def __call__(self, convolution: nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
        """The result for images [B, C, H, W]: [B, outputs, (H - side + 1) // 2, (W - side + 1) // 2], channels-last."""
        return _ConvPool.apply(self, images, convolution.weight, convolution.bias)

    def call(self, function: str, sizes: Sequence[int], *tensors: torch.Tensor | None) -> Any:
        """Call a function of the library with the addresses of tensors. They must live until it returns.

        `sizes`: the struct Shape of conv_pool.c: images, height, width, channels, kernel, outputs.
        """
        addresses = (ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors)
        return getattr(self._library, f"conv_pool_{function}")((ctypes.c_int64 * 6)(*sizes), *addresses)

    def filled_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with its last dimension padded by zeros to whole vectors, as a copy."""
        return functional.pad(tensor, (0, -tensor.shape[-1] % self._lanes)).contiguous()


def _plain(tensor: torch.Tensor | None) -> bool:
    """True if the tensor's values are in this process's memory, as C reads them."""
    return (
        tensor is not None
        and type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.dtype is torch.float32
    )


class _ConvPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: ConvPoolKernel, images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        lines = images.permute(0, 2, 3, 1).contiguous()
        (count, height, width, _), (outputs, _, side, _) = lines.shape, weight.shape
        pooled = lines.new_empty(count, (height - side + 1) // 2, (width - side + 1) // 2, outputs)
        winner = torch.empty_like(pooled, dtype=torch.uint8)  # the place of a window's largest sum, 0 to 3
        filled = kernel.filled_up(weight.permute(2, 3, 1, 0)), kernel.filled_up(bias)
        kernel.call("forward", (*lines.shape, side, outputs), lines, *filled, pooled, winner)
        ctx.kernel = kernel
        ctx.save_for_backward(lines, weight, winner)
        return pooled.permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[None, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        kernel, (lines, weight, winner) = ctx.kernel, ctx.saved_tensors
        outputs, channels, side, _ = weight.shape
        sizes, found = (*lines.shape, side, outputs), gradient.permute(0, 2, 3, 1).contiguous()
        for_lines = for_images = weight_lines = None
        if ctx.needs_input_grad[1]:
            for_lines = torch.empty_like(lines)
            for_images = for_lines.permute(0, 3, 1, 2)
            weight_lines = weight.permute(2, 0, 3, 1).reshape(side, outputs, side * channels)
            weight_lines = kernel.filled_up(weight_lines)
        for_weight = kernel.filled_up(weight.new_zeros(outputs, side, side * channels))
        for_bias = weight.new_zeros(outputs)
        scratch = torch.empty(kernel.call("scratch", sizes), dtype=torch.uint8)
        made = for_lines, for_weight, for_bias
        kernel.call("backward", sizes, lines, found, winner, weight_lines, scratch, *made)
        in_order = for_weight[..., : side * channels].reshape(outputs, side, side, channels)
        return None, for_images, in_order.permute(0, 3, 1, 2), for_bias
