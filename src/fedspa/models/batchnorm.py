"""BatchNorm under federated training: the setting `model.batchnorm`.

`average`: the running statistics travel and are averaged as the weights are. `groupnorm`: GroupNorm, which has no
statistics, replaces BatchNorm. (Hsieh et al. 2020, "The non-IID data quagmire of decentralized machine learning",
compares the two.) The setting `personal_layers=norm` makes BatchNorm layers stay with each client.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedspa.core.errors import UserError

GROUPS = 32
"""The largest number of groups. There are fewer if these do not divide the channels."""


def with_batchnorm(network: nn.Module, policy: str | None) -> nn.Module:
    """The network; with the policy groupnorm its BatchNorm layers are replaced."""
    if policy != "groupnorm":
        return network
    for path, layer in batchnorm_layers(network).items():
        if not path:
            return _group_norm(path, layer)
        parent, _, name = path.rpartition(".")
        setattr(network.get_submodule(parent), name, _group_norm(path, layer))
    return network


def batchnorm_layers(network: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers by their paths."""
    return {path: layer for path, layer in network.named_modules() if isinstance(layer, _BatchNorm)}


def _group_norm(path: str, layer: _BatchNorm) -> nn.Module:
    """GroupNorm with the layer's scales and shifts, followed by the further parts of timm's BatchNorm."""
    channels = layer.num_features
    groups = max(count for count in range(1, min(GROUPS, channels) + 1) if channels % count == 0)
    norm = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        norm.weight, norm.bias = layer.weight, layer.bias
    further = [layer.get_submodule(name) for name in ("drop", "act") if name in dict(layer.named_children())]
    if len(further) != len(list(layer.children())):
        raise UserError(
            f"model.batchnorm=groupnorm cannot replace the layer {path} ({type(layer).__name__}): use average."
        )
    return nn.Sequential(norm, *further) if further else norm
