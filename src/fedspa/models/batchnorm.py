"""What becomes of a network's BatchNorm under federated training: the setting `model.batchnorm`.

`average`: the running statistics travel and are merged as the weights are. `local`: every client keeps its own layers,
scales and shifts included (FedBN: Li et al. 2021, "Federated learning on non-IID features via local batch
normalization"). `groupnorm`: GroupNorm takes its place, which has no statistics. (Hsieh et al. 2020, "The non-IID data
quagmire of decentralized machine learning", compares it with averages.)
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedspa.errors import UserError
from fedspa.weights import keep_local

GROUPS = 32
"""At most; fewer where they would not divide the channels."""


def with_batchnorm(network: nn.Module, policy: str | None) -> nn.Module:
    """The network under a policy. Raises `UserError` for a network with BatchNorm and no policy."""
    layers = {path: layer for path, layer in network.named_modules() if isinstance(layer, _BatchNorm)}
    if layers and policy is None:
        raise UserError(
            f"The model has BatchNorm ({next(iter(layers))}), whose running statistics clients do not share by "
            "themselves: say what becomes of them by model.batchnorm=average, local or groupnorm."
        )
    if policy == "local":
        for layer in layers.values():
            keep_local(layer)
    if policy == "groupnorm":
        for path, layer in layers.items():
            if not path:
                return _group_norm(path, layer)
            parent, _, name = path.rpartition(".")
            setattr(network.get_submodule(parent), name, _group_norm(path, layer))
    return network


def _group_norm(path: str, layer: _BatchNorm) -> nn.Module:
    """GroupNorm with the layer's scales and shifts; behind it what timm's BatchNorm holds beside them."""
    channels = layer.num_features
    groups = max(count for count in range(1, min(GROUPS, channels) + 1) if channels % count == 0)
    norm = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        norm.weight, norm.bias = layer.weight, layer.bias
    behind = [layer.get_submodule(name) for name in ("drop", "act") if name in dict(layer.named_children())]
    if len(behind) != len(list(layer.children())):
        raise UserError(
            f"model.batchnorm=groupnorm cannot replace the layer {path} ({type(layer).__name__}): use average or local."
        )
    return nn.Sequential(norm, *behind) if behind else norm
