"""Rebuilds the models of clients from the folder of a finished run."""

from __future__ import annotations

import copy
import csv
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fedspa.config.network import build_model, model_call
from fedspa.config.recorded import recorded_plan
from fedspa.core.client import Initial, Mixture
from fedspa.core.client_state import MASK, ClientState
from fedspa.core.errors import UserError, brief, listed
from fedspa.core.packed_mask import PackedMask
from fedspa.core.weights import ParameterSpace, flat_tensors
from fedspa.export.client_model import ClientModel, Mixed, Normalise
from fedspa.federated.own_layers import OwnLayers
from fedspa.masks.base import MaskSearcher
from fedspa.masks.dynamic import DynamicSearcher
from fedspa.masks.initial import InitialMasks
from fedspa.models.initialise import seeded
from fedspa.models.narrowing import narrowed
from fedspa.tracking.client_table import saved_items

Item = TypeVar("Item")


@dataclass(frozen=True)
class NotSaved:
    """An item of a client's state that the run did not save. A model that needs it cannot be made."""

    user: str
    """The part of the config that makes models of the item: method=ditto."""

    def item(self) -> NoReturn:
        raise UserError(
            f"{self.user} makes models of what clients keep beside their masks, which the run did not save: train "
            "it with save.personal=true to export one, or take another model."
        )


class StoredRun:
    """The folder of a finished run, and the plan that its config describes."""

    def __init__(self, folder: Path, objects: Mapping[str, Any] | None = None) -> None:
        """`objects`: the user's own objects in the run, as for `fedspa.config.plan.check`.

        Raises `UserError` for a config that cannot be read or that this version does not know.
        """
        self._folder = folder
        self._plan = recorded_plan(folder / "config.yaml", objects)
        network = seeded(lambda: build_model(self._plan), self._plan.settings.seed)
        self._network = network.to(self._plan.hardware.dtype)
        self._whole = ParameterSpace.of(self._network)
        self._space = self._whole.shared
        tensors = flat_tensors(self._network).values()
        self._initial = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        self._own_layers = OwnLayers(self._initial[self._space.total :], self._plan.method.trains_personal)

    def model(self, kind: str, client: int | None) -> ClientModel:
        """The personal, local or global model of a client. Raises `UserError` if the run does not have it."""
        plan = self._plan
        kinds, method = plan.method.kinds, plan.names["method"]
        if client is not None and client not in range(clients := plan.settings.federation.clients):
            raise UserError(f"client={client} is out of range: the run has {clients}, 0 to {clients - 1}.")
        if kind not in kinds:
            raise UserError(f"method={method} has no {kind} model: a run of it has {listed(kinds)} models.")
        if kind == "global" and not self._whole.kept:
            weights = self._global()
            sparse = self._plan.method.shares_mask
            return self._built(weights, self._space.count(weights != 0) if sparse else self._space.sizes)
        if client is None:
            raise UserError(
                f"Every client has a {kind} model of its own: say whose by client=<number, from 0>."
            )
        return self._built(*(self._local(client) if kind == "local" else self._made(client, kind)))

    def _global(self) -> torch.Tensor:
        with _opened(self._folder / "weights.safetensors") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        shapes = dict(zip(self._space.names, self._space.shapes, strict=True))
        if shapes != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
            raise UserError(
                f"{self._folder / 'weights.safetensors'} holds other tensors than the run's model has."
            )
        return torch.cat([tensors[name].reshape(-1) for name in self._space.names])

    def _local(self, client: int) -> tuple[torch.Tensor, tuple[int, ...]]:
        """The local weights of a client, and its active values by tensor. They are the values that are not zero."""
        file_name = self._folder / "local_weights.safetensors"
        if not self._plan.settings.save.local:
            raise UserError(
                "The run kept no local models: train it with save.local=true to export one, or take another model."
            )
        if not self._updates(client) or not file_name.is_file():
            raise UserError(f"client={client} had no client update, so that it has no local model.")
        with _opened(file_name) as file:
            values, bits = (file.get_tensor(f"{client}.{part}") for part in ("values", "mask"))
        places = PackedMask(bits, self._whole.total).unpack(like=values)
        weights = torch.zeros_like(places)
        weights[places.bool()] = values
        return weights, self._whole.count(places)

    def _made(self, client: int, kind: str) -> tuple[torch.Tensor | Mixture, tuple[int, ...]]:
        """A client's personal or global model, made from the server's last state."""
        state, weights, active = self._state(client), self._global(), self._space.sizes
        model: torch.Tensor | Mixture = self._own_layers.complete(weights, state)
        if kind == "personal":
            personal, mask = self._plan.method.personal(weights, state), state.mask
            if mask is not None and self._plan.method.mask_prunes:
                active = self._space.count(self._active(personal, mask.unpack(like=weights)))
            model = self._own_layers.complete_personal(personal, state)
        return model, (*active, *self._whole.sizes[len(active) :])

    def _active(self, model: torch.Tensor | Mixture, mask: torch.Tensor) -> torch.Tensor:
        """The part of a client's mask [total] that is active in its model."""
        searcher, forward = self._plan.mask, None
        if searcher and isinstance(model, torch.Tensor):
            forward = searcher.forward_mask(model, mask)
        return mask if forward is None else forward

    def _state(self, client: int) -> ClientState:
        """The stored state of a client. Raises `UserError` if the run's folder lacks a part of it."""
        plan, space = self._plan, self._space
        active, full_mask = plan.active_counts(space), PackedMask.pack(torch.ones(space.total))
        masks: Callable[[int], PackedMask] = lambda _: full_mask  # noqa: E731
        if active and not plan.mask.searches_first:
            masks = InitialMasks.of(plan.mask, space, plan.settings.seed)
        initial = Initial(self._initial[: space.total], masks, full_mask)
        first: ClientState = plan.method.client_init(client, initial)
        if not self._updates(client):
            return first | self._own_layers.first
        state = ClientState()
        if MASK in first:
            with _opened(self._folder / "masks.safetensors") as file:
                state |= {MASK: PackedMask(file.get_tensor(str(client)), space.total)}
        if plan.settings.save.personal:
            return state | self._remembered(client, {*first, *self._own_layers.first} - {MASK})
        beside = {
            f"method={plan.names['method']}": set(first) - {MASK},
            f"mask={plan.names['mask']}": _starts_from_memory(plan.mask),
            "personal_layers": self._whole.kept,
        }
        for what, kept in beside.items():
            if kept:
                NotSaved(what).item()
        not_saved = NotSaved(f"method={plan.names['method']}")
        kept_by_clients = _listed(self._folder / "summary.json", "clients_keep")
        return state | ClientState(dict.fromkeys(kept_by_clients, not_saved))

    def _remembered(self, client: int, at_least: set[str]) -> ClientState:
        """The stored items of a client without its mask."""
        path, prefix = self._folder / "client_states.safetensors", f"{client}."
        with _opened(path) as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 (no mapping)
            items = saved_items({name.removeprefix(prefix): file.get_tensor(name) for name in names})
            if missing := at_least - set(items):
                raise SafetensorError(f"no {prefix}{min(missing)}")
        return items

    def _updates(self, client: int) -> int:
        table, arrays = (self._folder / f"clients.{kind}" for kind in ("csv", "safetensors"))
        if arrays.is_file():
            with _opened(arrays) as file:
                return int(file.get_tensor("client_updates")[client])
        with table.open(newline="") as rows:
            return next(
                int(row["client_updates"]) for row in csv.DictReader(rows) if int(row["client"]) == client
            )

    def _with(self, weights: torch.Tensor) -> nn.Module:
        """A copy of the network with these weights [total], in float32."""
        network = copy.deepcopy(self._network).float()
        with torch.no_grad():
            tensors = flat_tensors(network).values()
            for target, (_, tensor) in zip(tensors, self._whole.items(weights), strict=True):
                target.copy_(tensor)
        return network

    def _built(self, model: torch.Tensor | Mixture, active: tuple[int, ...]) -> ClientModel:
        """The network of a model [total] with its active values by tensor, or both networks of a mixture."""
        plan, source, space, alpha = self._plan, self._plan.dataset, self._whole, None
        if isinstance(model, Mixture):
            alpha = model.alpha
            network: nn.Module = Mixed(self._with(model.personal), self._with(model.shared), alpha)
            space, active = _twice(space), _in_order(active * 2, space)
        else:
            network = self._with(model)
            if space.channels is not None and sum(active) < space.total:
                # A channel with all weights 0 does nothing, so it may be left out too.
                network = narrowed(network, space.mask_bits(model != 0))
                space = ParameterSpace.of(network)
                active = space.sizes
        parts: OrderedDict[str, nn.Module] = OrderedDict(network=network)
        if values := source.normaliser():
            parts = OrderedDict(normalise=Normalise(**values), network=network)
        module = nn.Sequential(parts).eval().requires_grad_(False)
        _, arguments = (None, {}) if plan.make_model else model_call(plan)
        return ClientModel(
            module=module,
            space=space,
            active=active,
            make=plan.resolved["model"].get("_target_", ""),
            arguments=arguments,
            batchnorm=plan.resolved["model"].get("batchnorm"),
            source=source,
            class_names=_listed(self._folder / "partition.json", "classes"),
            alpha=alpha,
        )


def _twice(space: ParameterSpace) -> ParameterSpace:
    """The tensors of both networks of a mixture."""
    names = tuple(f"{part}.{name}" for part in ("personal", "shared") for name in space.names)
    shapes = _in_order(space.shapes * 2, space)
    return ParameterSpace(_in_order(names, space), shapes, 2 * space.statistics)


def _in_order(items: tuple[Item, ...], space: ParameterSpace) -> tuple[Item, ...]:
    """The items of the tensors of two such networks, in order; those of running statistics come last."""
    tensors, parameters = len(space.names), len(space.names) - space.statistics
    first = [i for i in range(2 * tensors) if i % tensors < parameters]
    last = [i for i in range(2 * tensors) if i % tensors >= parameters]
    return tuple(items[i] for i in (*first, *last))


def _starts_from_memory(searcher: MaskSearcher | None) -> bool:
    """True if a searcher stores items of a client, and makes its model from them."""
    if isinstance(searcher, DynamicSearcher) and not searcher.grows_from_zero:
        return type(searcher).start is not DynamicSearcher.start
    return searcher is not None and type(searcher).start is not MaskSearcher.start


def _listed(file: Path, key: str) -> tuple[str, ...]:
    """A list of names in a JSON file; empty if it is not there."""
    with suppress(OSError, ValueError):
        return tuple(json.loads(file.read_text()).get(key, ()))
    return ()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file of tensors. Raises `UserError` if it cannot be read, or lacks a tensor."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} does not hold what the run must have left there ({brief(error)})."
        ) from error
