"""The folder of a finished run, from which the models of its clients are made again."""

from __future__ import annotations

import csv
import json
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fedspa.config.network import build_model, model_call
from fedspa.config.recorded import recorded_plan
from fedspa.core.client import Initial
from fedspa.core.client_state import MASK, ClientState
from fedspa.core.errors import UserError, brief
from fedspa.core.packed_mask import PackedMask
from fedspa.core.weights import ParameterSpace, flat_tensors
from fedspa.export.client_model import ClientModel, Normalise
from fedspa.federated.own_layers import OwnLayers
from fedspa.masks.base import MaskSearcher
from fedspa.masks.initial import InitialMasks
from fedspa.models.initialise import seeded
from fedspa.tracking.client_table import saved_items


class StoredRun:
    """The folder of a finished run, and the plan that its config describes."""

    def __init__(self, folder: Path) -> None:
        """Raises `UserError` for a config that cannot be read or that this version does not know."""
        self._folder = folder
        self._plan = recorded_plan(folder / "config.yaml")
        source = self._plan.dataset
        self._shape = (source.channels, source.image_size, source.image_size)
        self._network = seeded(
            lambda: build_model(self._plan, source.channels, source.image_size, source.classes),
            self._plan.settings.seed,
        ).to(self._plan.hardware.dtype)
        self._whole = ParameterSpace.of(self._network)
        self._space = self._whole.shared
        tensors = flat_tensors(self._network).values()
        self._initial = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        self._own_layers = OwnLayers(self._initial[self._space.total :], self._plan.method.trains_personal)

    def model(self, kind: str, client: int | None) -> ClientModel:
        """The personal, local or global model of a client. Raises `UserError` where the run has none."""
        plan = self._plan
        kinds, method = plan.method.kinds, plan.names["method"]
        if client is not None and client >= (clients := plan.settings.federation.clients):
            raise UserError(f"client={client} is out of range: the run has {clients}, 0 to {clients - 1}.")
        if kind not in kinds:
            raise UserError(
                f"method={method} has no {kind} model: model={' or '.join(kinds)} can be exported."
            )
        if kind == "global" and not self._whole.kept:
            return self._built(self._global(), self._space.sizes)
        if client is None:
            raise UserError(
                "With personal_layers every client has layers of its own: say whose by "
                "client=<number, from 0>."
            )
        return self._built(*(self._local(client) if kind == "local" else self._made(client, kind)))

    def _global(self) -> torch.Tensor:
        with _opened(self._folder / "weights.safetensors") as file:
            held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        shapes = dict(zip(self._space.names, self._space.shapes, strict=True))
        if shapes != {name: tuple(tensor.shape) for name, tensor in held.items()}:
            raise UserError(
                f"{self._folder / 'weights.safetensors'} holds other tensors than the run's model has."
            )
        return torch.cat([held[name].reshape(-1) for name in self._space.names])

    def _local(self, client: int) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Its active values are those that are not zero."""
        file_name = self._folder / "local_weights.safetensors"
        if not self._plan.settings.save.local:
            raise UserError(
                "The run kept no local models: train it with save.local=true to export one, or take another model."
            )
        if not self._visits(client) or not file_name.is_file():
            raise UserError(f"client={client} was never visited, so that it has no local model.")
        with _opened(file_name) as file:
            values, bits = (file.get_tensor(f"{client}.{part}") for part in ("values", "mask"))
        held = PackedMask(bits, self._whole.total).unpack(like=values)
        weights = torch.zeros_like(held)
        weights[held.bool()] = values
        return weights, self._whole.count(held)

    def _made(self, client: int, kind: str) -> tuple[torch.Tensor, tuple[int, ...]]:
        """A client's personal or global model, as the server's last state has it."""
        state, model, active = self._state(client), self._global(), self._space.sizes
        if kind == "personal":
            if state.mask is not None:
                active = self._space.count(state.mask.unpack(like=model))
            model = self._plan.method.personal(model, state)
        whole = self._own_layers.complete(model, state, personal=kind == "personal")
        return whole, (*active, *self._whole.sizes[len(active) :])

    def _state(self, client: int) -> ClientState:
        """What is remembered of a client. Raises `UserError` where the run's folder does not have all of it."""
        plan, space = self._plan, self._space
        active, full_mask = plan.active_counts(space), PackedMask.pack(torch.ones(space.total))
        draws = active and not plan.mask.searches_first
        masks = InitialMasks(
            space, active or (), shared=plan.mask.initial == "same", seed=plan.settings.seed
        ) if draws else lambda _: full_mask  # fmt: skip
        initial = Initial(self._initial[: space.total], masks, full_mask)
        first: ClientState = plan.method.client_init(client, initial)
        if not self._visits(client):
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
        if needed := [what for what, kept in beside.items() if kept]:
            raise UserError(
                f"{needed[0]} makes models of what clients keep beside their masks, which the run did not save: train "
                "it with save.personal=true to export one, or take another model."
            )
        return state

    def _remembered(self, client: int, at_least: set[str]) -> ClientState:
        """What is kept of a client beside its mask."""
        path, prefix = self._folder / "client_states.safetensors", f"{client}."
        with _opened(path) as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 (no mapping)
            items = saved_items({name.removeprefix(prefix): file.get_tensor(name) for name in names})
            if missing := at_least - set(items):
                raise SafetensorError(f"no {prefix}{min(missing)}")
        return items

    def _visits(self, client: int) -> int:
        table, arrays = (self._folder / f"clients.{kind}" for kind in ("csv", "safetensors"))
        if arrays.is_file():
            with _opened(arrays) as file:
                return int(file.get_tensor("visits")[client])
        with table.open(newline="") as rows:
            return next(int(row["visits"]) for row in csv.DictReader(rows) if int(row["client"]) == client)

    def _built(self, weights: torch.Tensor, active: tuple[int, ...]) -> ClientModel:
        """The network with these weights [total], in float32."""
        plan, source, space = self._plan, self._plan.dataset, self._whole
        network = self._network.float()
        with torch.no_grad():
            for target, (_, tensor) in zip(flat_tensors(network).values(), space.items(weights), strict=True):
                target.copy_(tensor)
        parts = OrderedDict(normalise=Normalise(source.mean, source.std), network=network)
        module = nn.Sequential(parts).eval().requires_grad_(False)
        _, arguments = model_call(plan, source.channels, source.image_size, source.classes)
        return ClientModel(
            module=module,
            space=space,
            active=active,
            make=plan.resolved["model"]["_target_"],
            arguments=arguments,
            batchnorm=plan.resolved["model"].get("batchnorm"),
            image_shape=self._shape,
            classes=source.classes,
            class_names=_class_names(self._folder),
            mean=list(source.mean),
            std=list(source.std),
        )


def _starts_from_memory(searcher: MaskSearcher | None) -> bool:
    """Whether a searcher remembers something of a client, and makes its model of it."""
    if searcher is None:
        return False
    kind = type(searcher)
    return kind.remember is not MaskSearcher.remember and kind.start is not MaskSearcher.start


def _class_names(folder: Path) -> tuple[str, ...]:
    try:
        with (folder / "partition.json").open() as file:
            head = file.readline().rstrip()  # its first line, before lists of rows
        return tuple(json.loads(head.removesuffix('"train_rows": [').rstrip(", ") + "}").get("classes", ()))
    except (OSError, ValueError):
        return ()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of tensors. Raises `UserError` where it cannot be read, or lacks what is asked for."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} does not hold what the run must have left there ({brief(error)})."
        ) from error
