"""Convolution, max-pooling by 2 and ReLU in one, and its gradient: conv_pool.c for torch's autograd."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from fedspa.kernels.building import library


class _Shape(ctypes.Structure):
    """As in conv_pool.c."""

    _fields_ = [  # noqa: RUF012 - read by ctypes
        (name, ctypes.c_int64) for name in ("images", "height", "width", "channels", "kernel", "outputs")
    ]


class ConvPoolKernel:
    """Computes relu(max_pool2d(convolution(images), 2)) on one thread, in single precision.

    The gradient takes a quarter of a convolution's products, or less: of the values that a pooling window looks at only
    the largest has one, and none where ReLU gives zero. Sums are taken in another order than torch takes them. The
    gradient itself has none.
    """

    def __init__(self) -> None:
        """Raises `CannotBuild` where the machine cannot compile it."""
        self._library = library(Path(__file__).with_name("conv_pool.c"))
        self._library.conv_pool_lanes.restype = self._library.conv_pool_scratch.restype = ctypes.c_int64
        self._library.conv_pool_forward.restype = self._library.conv_pool_backward.restype = None
        self._lanes = int(self._library.conv_pool_lanes())

    def __reduce__(self) -> tuple[type[ConvPoolKernel], tuple[()]]:
        """Copies of a network, also those in another process, find the library themselves."""
        return ConvPoolKernel, ()

    @staticmethod
    def serves(convolution: nn.Conv2d, images: torch.Tensor) -> bool:
        """Whether it can take the place of these layers unseen. Several threads share an operation's work in torch
        alone."""
        side, _ = convolution.kernel_size
        settings = (convolution.kernel_size, convolution.stride, convolution.padding, convolution.dilation)
        bias = convolution.bias
        return (
            settings == ((side, side), (1, 1), (0, 0), (1, 1))
            and convolution.groups == 1
            and bias is not None
            and images.dim() == 4
            and images.shape[1] == convolution.in_channels
            and min(images.shape[2:]) > side
            and all(map(_plain, (images, convolution.weight, bias)))
            and type(convolution) is nn.Conv2d
            and not _watched(convolution)
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
            and torch.get_num_threads() == 1
        )

    def __call__(self, convolution: nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
        """Of images [B, C, H, W]: [B, outputs, (H - side + 1) // 2, (W - side + 1) // 2], in channels-last memory."""
        return _ConvPool.apply(self, images, convolution.weight, convolution.bias)

    def forward(
        self, images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pooled values [B, h, w, outputs], and which of its four sums each is (uint8, as long).

        images: [B, H, W, C]; weight: [outputs, C, side, side]; bias: [outputs].
        """
        shape = self._shape(images, weight)
        filled = self._filled_up(weight.permute(2, 3, 1, 0))
        pooled = images.new_empty(
            shape.images,
            (shape.height - shape.kernel + 1) // 2,
            (shape.width - shape.kernel + 1) // 2,
            shape.outputs,
        )
        winner = torch.empty_like(pooled, dtype=torch.uint8)
        biases = self._filled_up(bias)
        _call(self._library.conv_pool_forward, shape, images, filled, biases, pooled, winner)
        return pooled, winner

    def backward(
        self, images: torch.Tensor, weight: torch.Tensor, winner: torch.Tensor, gradient: torch.Tensor,
        of_images: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:  # fmt: skip
        """The gradients of images (None unless `of_images`), weight and bias; the shapes are those of `forward`."""
        shape = self._shape(images, weight)
        outputs, channels, side, _ = weight.shape
        for_images = torch.empty_like(images) if of_images else None
        for_weight = weight.new_zeros(outputs, side, self._up(side * channels))
        for_bias = weight.new_zeros(outputs)
        lines = (
            self._filled_up(weight.permute(2, 0, 3, 1).reshape(side, outputs, side * channels))
            if of_images
            else None
        )
        scratch = torch.empty(self._library.conv_pool_scratch(ctypes.byref(shape)), dtype=torch.uint8)
        _call(
            self._library.conv_pool_backward, shape,
            images, gradient, winner, lines, scratch, for_images, for_weight, for_bias,
        )  # fmt: skip
        lines_of_weight = for_weight[..., : side * channels].reshape(outputs, side, side, channels)
        return for_images, lines_of_weight.permute(0, 3, 1, 2), for_bias

    @staticmethod
    def _shape(images: torch.Tensor, weight: torch.Tensor) -> _Shape:
        return _Shape(*images.shape, weight.shape[2], weight.shape[0])

    def _up(self, count: int) -> int:
        """The next multiple of the vectors' length."""
        return -(-count // self._lanes) * self._lanes

    def _filled_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy whose last dimension is filled up with zeros to whole vectors."""
        size = tensor.shape[-1]
        filled = tensor.new_zeros(*tensor.shape[:-1], self._up(size))
        filled[..., :size] = tensor
        return filled


def _plain(tensor: torch.Tensor) -> bool:
    """Whether its values lie in this process's memory, as C reads them."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.dtype is torch.float32
    )


def _watched(layer: nn.Module) -> bool:
    """Whether somebody waits for the layer to be called."""
    return bool(
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    )


class _ConvPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: ConvPoolKernel, images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        lines = images.permute(0, 2, 3, 1).contiguous()
        pooled, winner = kernel.forward(lines, weight, bias)
        ctx.kernel = kernel
        ctx.save_for_backward(lines, weight, winner)
        return pooled.permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[None, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        lines, weight, winner = ctx.saved_tensors
        found = gradient.permute(0, 2, 3, 1).contiguous()
        images, weights, bias = ctx.kernel.backward(lines, weight, winner, found, ctx.needs_input_grad[1])
        return None, images if images is None else images.permute(0, 3, 1, 2), weights, bias


def _call(function: Any, shape: _Shape, *tensors: torch.Tensor | None) -> None:
    """Call a function with the addresses of tensors, which live as long as it runs."""
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    function(ctypes.byref(shape), *map(ctypes.c_void_p, addresses))
