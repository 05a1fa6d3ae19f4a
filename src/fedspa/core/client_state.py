"""The state of a client between two updates: a record of named tensors and masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import torch

from fedspa.core.packed_mask import PackedMask

Item: TypeAlias = "PackedMask | torch.Tensor"
"""A packed mask, or a tensor of any shape and dtype."""


class StoredItem(Protocol):
    """An item that is stored outside this process's memory and read when it is used."""

    def item(self) -> Item: ...


MASK = "mask"
"""The name of the mask of the client's model."""


class ClientState(Mapping[str, Item]):
    """The tensors and masks of a client by name; empty for a client without a state. A state is never changed in place.

    Methods and mask searchers choose the names of their items. A prefix with a dot keeps them apart
    ("search.grown"). Checkpoints, the file of states, worker processes and ranks do not interpret the items.
    One name has a fixed meaning: `mask` is the mask of the client's model. The server knows it too, so values
    travel under it. All other items stay with the client.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Item | StoredItem] | None = None, /, **named: Item) -> None:
        given = items.stored if isinstance(items, ClientState) else items or {}
        self._items: dict[str, Item | StoredItem] = {**given, **named}

    def __getitem__(self, name: str) -> Item:
        item = self._items[name]
        return item if isinstance(item, torch.Tensor | PackedMask) else item.item()

    def __reduce__(self) -> tuple[Any, ...]:
        """The arguments of pickle, with every stored item read."""
        return ClientState, (dict(self),)

    @property
    def stored(self) -> Mapping[str, Item | StoredItem]:
        """The items as they are stored. Items outside memory are not read."""
        return self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __or__(self, items: Mapping[str, Item]) -> ClientState:
        """A new record with further items. They replace items of the same name."""
        return ClientState(self._items | dict(ClientState(items)._items))

    def __eq__(self, other: object) -> bool:
        """True if the names are the same and the items are equal bit for bit."""
        if not isinstance(other, ClientState):
            return NotImplemented
        return self.keys() == other.keys() and all(_equal(item, other[name]) for name, item in self.items())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ClientState({self._items!r})"

    @property
    def mask(self) -> PackedMask | None:
        """The mask of the client's model; None for a dense model."""
        mask = self.get(MASK)
        assert mask is None or isinstance(mask, PackedMask)
        return mask

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name. Raises `KeyError` if there is none, and `TypeError` for a mask."""
        item = self[name]
        if isinstance(item, PackedMask):
            raise TypeError(f"{name} is a mask")
        return item

    @property
    def identity(self) -> tuple[tuple[str, int], ...]:
        """A key that is equal for two records of the same objects, as those of clients that share a mask."""
        return tuple((name, id(item)) for name, item in self._items.items())

    def to(self, device: torch.device) -> ClientState:
        """This record with all items read and the tensors on a device; masks stay on the CPU.

        Returns this same object if nothing changes.
        """
        read = {
            name: item.to(device) if isinstance(item, torch.Tensor) else item for name, item in self.items()
        }
        return self if all(read[name] is item for name, item in self._items.items()) else ClientState(read)

    def sharing(self, known: ClientState) -> ClientState:
        """This record with the masks of `known` in place of equal ones.

        Clients that share a mask then go on sharing one object, also after another process made the update.
        """
        items = {
            name: known.stored[name]
            if isinstance(item, PackedMask) and item == known.get(name)
            else self.stored[name]
            for name, item in self.items()
        }
        merged = ClientState(items)
        return known if merged.identity == known.identity else merged


def _equal(one: Item, other: Item) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return isinstance(one, PackedMask) and one == other


NOTHING = ClientState()
"""The state of a client that has not stored anything."""
