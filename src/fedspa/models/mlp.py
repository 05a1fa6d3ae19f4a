"""A multi-layer perceptron for inputs of any shape: features, small images."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn


class MLP(nn.Sequential):
    """Linear layers with ReLU between them, on the flattened inputs. PyTorch's default initial weights."""

    def __init__(self, input_shape: tuple[int, ...], outputs: int, hidden: int = 64, layers: int = 2) -> None:
        """`hidden`: the width of each hidden layer. `layers`: the number of linear layers."""
        super().__init__(nn.Flatten())
        widths = [math.prod(input_shape), *[hidden] * (layers - 1), outputs]
        for number, (inputs, width) in enumerate(pairwise(widths), start=1):
            self.add_module(f"fc{number}", nn.Linear(inputs, width))
            if number < layers:
                self.add_module(f"relu{number}", nn.ReLU(inplace=True))
