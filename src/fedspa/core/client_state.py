"""What is remembered of a client between two visits: a record of named tensors and masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch

from fedspa.core.packed_mask import PackedMask

Item: TypeAlias = "PackedMask | torch.Tensor"
"""A packed mask, or a tensor of any shape and dtype."""

MASK = "mask"
"""The name of the mask that cuts out the client's model."""


class ClientState(Mapping[str, Item]):
    """Items by name, none where nothing is remembered. Replaced, never written into.

    Methods, mask searchers and whatever else has something to remember of a client choose names of their own; a
    dot sets their names apart ("search.grown"). Checkpoints, the file of states, worker processes and ranks take
    a record as it is. One name means something to all of them: `mask` is the mask of the client's model, which
    the server knows as well, so that values travel under it. All other items are the client's own.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Item] | None = None, /, **named: Item) -> None:
        self._items: dict[str, Item] = {**(items or {}), **named}

    def __getitem__(self, name: str) -> Item:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __or__(self, items: Mapping[str, Item]) -> ClientState:
        """This record with further items, or with others in place of some."""
        return ClientState(self._items | dict(items))

    def __eq__(self, other: object) -> bool:
        """Whether the names are the same and the items equal bit for bit."""
        if not isinstance(other, ClientState):
            return NotImplemented
        return self.keys() == other.keys() and all(_equal(item, other[name]) for name, item in self.items())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ClientState({self._items!r})"

    @property
    def mask(self) -> PackedMask | None:
        """The mask of the client's model; None where that is dense."""
        mask = self._items.get(MASK)
        assert mask is None or isinstance(mask, PackedMask)
        return mask

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name. Raises `KeyError` where there is none, `TypeError` for a mask."""
        item = self._items[name]
        if isinstance(item, PackedMask):
            raise TypeError(f"{name} is a mask")
        return item

    @property
    def density(self) -> float:
        """Share of the parameters that the mask keeps active; 1 where there is none."""
        return 1.0 if self.mask is None else self.mask.density

    @property
    def identity(self) -> tuple[tuple[str, int], ...]:
        """The same for two records of the very same objects, as those of clients that share a mask."""
        return tuple((name, id(item)) for name, item in self._items.items())

    def part(self, prefix: str) -> dict[str, Item]:
        """The items whose names begin with `prefix`, by what follows it."""
        return {
            name.removeprefix(prefix): item for name, item in self._items.items() if name.startswith(prefix)
        }

    def sharing(self, known: ClientState) -> ClientState:
        """This record made of the masks of `known` where they are equal, so that clients which share a mask go on
        sharing one object, also where another process made the visit."""
        items = {
            name: known[name] if isinstance(item, PackedMask) and item == known.get(name) else item
            for name, item in self._items.items()
        }
        own = ClientState(items)
        return known if own.identity == known.identity else own


def _equal(one: Item, other: Item) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return isinstance(one, PackedMask) and one == other


NOTHING = ClientState()
"""The state of a client of which nothing is remembered."""
