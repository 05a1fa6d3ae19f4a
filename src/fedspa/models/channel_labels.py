"""Follows the channels of a network through the graph of its operations that torch.export records.

Each operation is followed with labels in place of numbers: the label of an activation's element is its channel. A
convolution or linear layer makes new channels. Sums and GroupNorm join channels, which then are cut together. Layers
that this module does not know keep their channels whole. So do inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

MOVES = ("view", "reshape", "_unsafe_view", "flatten", "permute", "transpose", "squeeze", "unsqueeze", "cat")
"""Operations that only move elements, so that their labels move with them."""
KEEPS = ("dropout", "feature_dropout", "contiguous", "hardswish", "to", "detach", "alias")
"""Operations on each element alone, beside those that torch tags as pointwise."""
WINDOWS = tuple(f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_avg") for n in (1, 2, 3))
"""Operations on the positions of each channel alone."""
REDUCTIONS = ("mean", "sum", "amax", "amin")
WHOLE = 0
"""The label of what stays whole."""


@dataclass(frozen=True)
class Weight:
    """A parameter or a running statistic in the graph."""

    name: str
    size: int


class Labels(Interpreter):
    """Runs a graph on labels: int64 tensors in the shapes of the activations."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.parent = [WHOLE]
        """The label that each label was joined to; its own number if it was not."""
        self.axes: dict[str, list[torch.Tensor]] = {}
        """The labels along the first axes of the tensors of known layers."""
        self.whole_tensors: set[str] = set()
        """The tensors of other layers."""

    def run_node(self, node: Node) -> Any:
        if node.op == "placeholder":
            return torch.full(node.meta["val"].shape, WHOLE)
        if node.op == "get_attr":
            value = self.fetch_attr(str(node.target))
            return Weight(str(node.target), value.numel())
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if node.op == "output":
            self.keep_whole(args)
            return None
        name = getattr(node.target, "_opname", "").removesuffix("_")
        layer = self._layer(name)
        if (
            layer
            and isinstance(args[0], torch.Tensor)
            and not any(isinstance(a, torch.Tensor) for a in args[1:])
        ):
            return layer(node, *args, **kwargs)
        if layer or any(isinstance(leaf, Weight) and leaf.size > 1 for leaf in pytree.tree_leaves(args)):
            return self._unknown(node, args, kwargs)
        if name in MOVES:
            dense = pytree.tree_map(
                lambda leaf: leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf, args
            )
            return node.target(*dense, **kwargs)  # type: ignore[operator]
        if name in WINDOWS:
            return _spread(self._along(args[0], 1), node.meta["val"].shape)
        if name in REDUCTIONS and len(args) > 1:
            return self._reduction(*args)
        if name in KEEPS or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            return self._pointwise(node, args)
        return self._unknown(node, args, kwargs)

    def _layer(self, name: str) -> Callable[..., Any] | None:
        """The function for a layer with parameters."""
        if name in ("conv1d", "conv2d", "conv3d"):
            return self._convolution
        known: dict[str, Callable[..., Any]] = {
            "linear": self._linear,
            "group_norm": self._group_norm,
            "batch_norm": self._batch_norm,
        }
        return known.get(name)

    # Operations -----------------------------------------------------------------------------------------

    def _convolution(
        self,
        node: Node,
        inputs: torch.Tensor,
        weight: Weight,
        bias: Weight | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        before, shape = self._along(inputs, 1), node.meta["val"].shape
        if groups == len(before) == shape[1] > 1:  # each channel has a kernel of its own
            after = before
            self._name(weight, after)
        elif groups == 1:
            after = self._new(shape[1])
            self._name(weight, after, before)
        else:
            return self._unknown(node, (inputs, weight, bias), {})
        self._name(bias, after)
        return _spread(after, shape)

    def _linear(
        self, node: Node, inputs: torch.Tensor, weight: Weight, bias: Weight | None = None
    ) -> torch.Tensor:
        shape = node.meta["val"].shape
        after = self._new(shape[-1])
        self._name(weight, after, self._along(inputs, inputs.dim() - 1))
        self._name(bias, after)
        return after.expand(shape)

    def _group_norm(
        self,
        _node: Node,
        inputs: torch.Tensor,
        groups: int,
        weight: Weight | None = None,
        bias: Weight | None = None,
        *_: Any,
    ) -> torch.Tensor:
        channels = self._along(inputs, 1)
        grouped = channels.view(groups, -1)
        self._join(grouped, grouped[:, :1].expand_as(grouped))
        for tensor in (weight, bias):
            self._name(tensor, channels)
        return inputs

    def _batch_norm(self, _node: Node, inputs: torch.Tensor, *others: Any) -> torch.Tensor:
        channels = self._along(inputs, 1)
        for tensor in others:  # scales, shifts, running statistics, and settings
            if isinstance(tensor, Weight):
                self._name(tensor, channels)
        return inputs

    def _reduction(self, inputs: torch.Tensor, dims: Any, keepdim: bool = False) -> torch.Tensor:
        low, high = inputs.amin(dims, keepdim), inputs.amax(dims, keepdim)
        if not torch.equal(low, high):  # over channels
            self.keep_whole(inputs)
        return low

    def _pointwise(self, node: Node, args: Any) -> Any:
        labels = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if not labels:
            return self._unknown(node, args, {})
        first, *others = torch.broadcast_tensors(*labels)
        for other in others:
            self._join(first, other)
        return first

    def _unknown(self, node: Node, args: Any, kwargs: Any) -> Any:
        """The labels after an operation that this class does not know: all that it touches stays whole."""
        self.keep_whole((args, kwargs))
        return pytree.tree_map(
            lambda value: torch.full(value.shape, WHOLE) if isinstance(value, torch.Tensor) else value,
            node.meta.get("val"),
        )

    # Labels ---------------------------------------------------------------------------------------------

    def _new(self, count: int) -> torch.Tensor:
        """Labels of new channels [count]."""
        first = len(self.parent)
        self.parent += range(first, first + count)
        return torch.arange(first, first + count)

    def root(self, label: int) -> int:
        """The smallest of the labels that this one was joined with."""
        while self.parent[label] != label:
            self.parent[label] = label = self.parent[self.parent[label]]
        return label

    def _join(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Join the labels of two tensors of one shape, element by element."""
        for pair in torch.stack([one.reshape(-1), other.reshape(-1)], 1).unique(dim=0).tolist():
            low, high = sorted(map(self.root, pair))
            self.parent[high] = low

    def _along(self, inputs: torch.Tensor, axis: int) -> torch.Tensor:
        """The labels along an axis. If they differ across it, all stay whole."""
        lines = inputs.movedim(axis, 0).reshape(inputs.shape[axis], -1)
        labels = lines[:, 0]
        if not torch.equal(lines, labels[:, None].expand_as(lines)):
            self.keep_whole(inputs)
            return torch.full_like(labels, WHOLE)
        return labels

    def keep_whole(self, values: Any) -> None:
        """Make channels, and the tensors of layers, stay whole: all that are in nested values."""
        for value in pytree.tree_leaves(values):
            if isinstance(value, Weight):
                self.whole_tensors.add(value.name)
            elif isinstance(value, torch.Tensor):
                for label in value.unique().tolist():
                    self.parent[self.root(label)] = WHOLE

    def _name(self, weight: Weight | None, *labels: torch.Tensor) -> None:
        """Set the labels along the first axes of a layer's tensor. A tensor of two layers joins their channels."""
        if weight is None:
            return
        known = self.axes.setdefault(weight.name, list(labels))
        for one, other in zip(known, labels, strict=False):
            self._join(one, other)


def _spread(channels: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The labels of an activation of this shape [N, C, ...] from those of its channels [C]."""
    return channels.view(-1, *[1] * (len(shape) - 2)).expand(shape)
