"""Refuses code that writes into a tensor which others use too: results would depend on the number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fedspa.core.client_state import Item
from fedspa.core.errors import UserError
from fedspa.core.packed_mask import PackedMask


@contextmanager
def read_only(who: str, given: Mapping[str, Item | Mapping[str, Item]]) -> Iterator[None]:
    """Raise `UserError` if the block writes into a tensor or mask of `given`, or of a mapping in it.

    No values are read. `who` names the code in the message.
    """
    items: dict[str, Item] = {}
    for name, value in given.items():
        if isinstance(value, Mapping):
            items |= {f"{name}[{key!r}]": item for key, item in value.items()}
        else:
            items[name] = value
    tensors = {name: item.bits if isinstance(item, PackedMask) else item for name, item in items.items()}
    before = {name: tensor._version for name, tensor in tensors.items()}  # torch counts the writes
    yield
    for name, tensor in tensors.items():
        if tensor._version != before[name]:
            raise UserError(
                f"{who} wrote into {name}, which is read only: change a copy of it, {name}.clone()."
            )
