"""Personal layers: the layers of a network that stay with each client (the setting `personal_layers`).

`head`: the last module with parameters, or the one that the network names by an attribute `head_name` (FedPer:
Arivazhagan et al., 2019). `body`: all others (LG-FedAvg: Liang et al., 2020). `norm`: the norm layers, BatchNorm's
running statistics included (FedBN: Li et al., 2021). A list contains any of these words, and patterns of tensor names,
such as `fc2.*`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedspa.core.errors import UserError, nearest
from fedspa.core.weights import flat_tensors, keep_personal, running_statistics
from fedspa.models.batchnorm import batchnorm_layers

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def set_personal_layers(network: nn.Module, setting: str | Sequence[str], batchnorm: str | None) -> None:
    """Mark the tensors that stay with each client.

    Args:
        setting: as `personal_layers` in the config.
        batchnorm: as `model.batchnorm` in the config.

    Raises `UserError` for a word or pattern that matches no tensor, for a network without shared layers, and if running
    statistics would be shared beside personal layers or without a setting that says so.
    """
    words = [setting] if isinstance(setting, str) else list(setting)
    written = setting if isinstance(setting, str) else f"[{','.join(words)}]"
    tensors = flat_tensors(network)
    names = {name for word in words if word != "none" for name in _matching(network, list(tensors), word)}
    if names and names >= {name for name, _ in network.named_parameters()}:
        raise UserError(f"personal_layers={written} leaves no layer to share: use method=local.")
    _check_statistics(network, names, written, batchnorm)
    keep_personal(network, names)


def _matching(network: nn.Module, tensors: list[str], word: str) -> list[str]:
    """The names of the tensors that a word or pattern matches."""
    if word in ("head", "body"):
        head = _head(network)
        return [name for name in tensors if (name.rpartition(".")[0] == head) == (word == "head")]
    if word == "norm":
        paths = {path for path, layer in network.named_modules() if isinstance(layer, NORMS)}
        found = [name for name in tensors if name.rpartition(".")[0] in paths]
        if not found:
            raise UserError("personal_layers=norm finds no norm layer in the model.")
        return found
    found = [name for name in tensors if fnmatchcase(name, word)]
    if not found:
        raise UserError(f"personal_layers={word} matches no tensor of the model: {nearest(word, tensors)}.")
    return found


def _head(network: nn.Module) -> str:
    """The path of the head."""
    with_parameters = [
        path for path, layer in network.named_modules() if list(layer.parameters(recurse=False))
    ]
    return str(getattr(network, "head_name", with_parameters[-1]))


def _check_statistics(network: nn.Module, personal: set[str], setting: str, batchnorm: str | None) -> None:
    """Raise `UserError` if the treatment of BatchNorm's running statistics is unclear or impossible."""
    statistics = set(running_statistics(network))
    shared = statistics - personal
    if shared and batchnorm is None:
        raise UserError(
            f"The model has BatchNorm ({next(iter(batchnorm_layers(network)))}), whose running statistics clients do "
            "not share by themselves: say what becomes of them by model.batchnorm=average or groupnorm, or by "
            "personal_layers=norm."
        )
    if shared and personal:
        raise UserError(
            f"personal_layers={setting} leaves running statistics of BatchNorm ({min(shared)}) to the server, which "
            "is possible without personal layers only: use model.batchnorm=groupnorm, or add norm to personal_layers."
        )
    if statistics and not shared and batchnorm == "average":
        raise UserError(
            f"personal_layers={setting} keeps BatchNorm with the clients, but model.batchnorm=average averages it: set "
            "model.batchnorm=null."
        )
