"""Whether a network can take the data set's images."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fedspa.core.errors import UserError, brief


def check_image_size(model: str, image_size: int, smallest: int, reason: str) -> None:
    """Raise `UserError` for images (side in pixels) smaller than the network can take; `reason` says why."""
    if image_size < smallest:
        raise UserError(
            f"model={model} cannot take images of {image_size} x {image_size} pixels "
            f"(dataset.image_size={image_size}) because {reason}: the smallest that work are "
            f"{smallest} x {smallest}."
        )


def check_forward(model: str, network: nn.Module, channels: int, image_size: int, classes: int) -> None:
    """Raise `UserError` unless the network makes logits [2, classes] of two black images, in evaluation."""
    training = network.training
    network.eval()
    what = f"model={model} cannot take images of {channels} x {image_size} x {image_size}"
    try:
        with torch.no_grad():
            logits = network(torch.zeros(2, channels, image_size, image_size))
    except Exception as error:  # whatever a network's own code makes of such images
        raise UserError(
            f"{what} ({brief(error)}): use another model, or a data set of larger images."
        ) from error
    finally:
        network.train(training)
    shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if shape != (2, classes):
        raise UserError(
            f"{what}: of two it makes {shape}, which must be logits (2, {classes}), one for each of the classes."
        )


def single_image_fault(network: nn.Module, channels: int, image_size: int) -> str:
    """Why the network cannot train on a batch of one image; "" where it can. The network itself is left as it is.

    BatchNorm has no variance to take where its maps are 1 x 1 and the batch is one image.
    """
    like = next(network.parameters())
    try:
        with torch.no_grad():
            copy.deepcopy(network).train()(like.new_zeros(1, channels, image_size, image_size))
    except Exception as error:  # whatever a network's own code makes of it
        return brief(error)
    return ""
