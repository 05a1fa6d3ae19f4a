"""Checks that a network can take the examples of a data set."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fedspa.core.errors import UserError, brief
from fedspa.data.source import Source, sides


def side_lengths(
    model: str, image_size: int | tuple[int, int], smallest: int, reason: str
) -> tuple[int, int]:
    """The height and width in pixels. Raises `UserError` for images that are too small for the network."""
    height, width = sides(image_size)
    if min(height, width) < smallest:
        raise UserError(
            f"model={model} cannot take images of {height} x {width} pixels (dataset.image_size={image_size}) because "
            f"{reason}: the smallest that work are {smallest} x {smallest}."
        )
    return height, width


def check_forward(model: str, network: nn.Module, source: Source) -> None:
    """Raise `UserError` unless the network returns [2, outputs] for two blank examples, in evaluation mode."""
    training = network.training
    network.eval()
    what, wanted = f"model={model} cannot take {source.shape_text}", (2, source.outputs)
    try:
        with torch.no_grad():
            made = network(source.blank(2, next(network.parameters()).dtype))
    except Exception as error:  # any error of a network's own code
        larger = f", or a data set of larger {source.things}" if source.things == "images" else ""
        raise UserError(f"{what} ({brief(error)}): use another model{larger}.") from error
    finally:
        network.train(training)
    shape = tuple(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
    if shape != wanted:
        each = "number for each target" if source.is_regression else "logit for each of the classes"
        raise UserError(f"{what}: of two it makes {shape}, which must be {wanted}, one {each}.")


def single_example_fault(network: nn.Module, source: Source) -> str:
    """The reason why the network cannot train on a batch of one example; "" if it can. The network does not change.

    BatchNorm has no variance if its maps are 1 x 1 and the batch is one example.
    """
    like = next(network.parameters())
    try:
        with torch.no_grad():
            copy.deepcopy(network).train()(source.blank(1, like.dtype).to(like.device))
    except Exception as error:  # any error of a network's own code
        return brief(error)
    return ""
