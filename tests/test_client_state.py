"""A client's record: names, sharing, equality, and its way through files, processes and checkpoints."""

from __future__ import annotations

import pickle

import pytest
import torch
from archives import pack as packed_archive
from archives import unpack
from federations import pack

from fedspa.core.client_state import NOTHING, ClientState, Item
from fedspa.core.packed_mask import PackedMask
from fedspa.federated.client_states import ClientStates
from fedspa.runs import pickling

MASK, OTHER = pack([1, 0, 1, 1]), pack([1, 1, 1, 0])
RECORD = ClientState(
    {"search.seen": torch.tensor([3, 1]), "search.grown": OTHER}, mask=MASK, scale=torch.tensor(0.5)
)


def nbytes(item: Item) -> int:
    return (item.bits if isinstance(item, PackedMask) else item).nbytes


def test_a_record_is_a_mapping_that_is_replaced_and_not_written():
    changed = RECORD | {"mask": OTHER}
    assert (RECORD.mask, changed.mask, changed["scale"]) == (MASK, OTHER, torch.tensor(0.5))
    assert NOTHING.mask is None
    assert not NOTHING and RECORD
    with pytest.raises(TypeError):
        RECORD["mask"] = OTHER  # type: ignore[index]
    with pytest.raises(TypeError, match="mask is a mask"):
        RECORD.tensor("mask")


def test_equal_means_the_same_names_types_and_bits():
    again = ClientState(
        {name: item.clone() if isinstance(item, torch.Tensor) else item for name, item in RECORD.items()}
    )
    assert again == RECORD and again.identity != RECORD.identity
    for other in (
        NOTHING,
        RECORD | {"mask": OTHER},
        RECORD | {"mask": torch.ones(4)},
        RECORD | {"scale": torch.tensor(0.5, dtype=torch.float64)},
        RECORD | {"scale": torch.tensor(0.25)},
        RECORD | {"more": MASK},
    ):
        assert other != RECORD and other != RECORD


def test_equal_masks_become_one_object_and_a_record_that_holds_nothing_new_is_the_known_one():
    mask = pack([1, 0, 1, 1])
    own = ClientState(mask=mask, weights=torch.ones(4)).sharing(RECORD)
    assert own.mask is MASK and own["weights"].sum() == 4
    assert ClientState(mask=mask).sharing(ClientState(mask=MASK)).mask is MASK
    known = ClientState(mask=MASK)
    assert ClientState(mask=mask).sharing(known) is known
    assert ClientState(mask=OTHER).sharing(known).mask is OTHER
    assert ClientState(mask=mask).sharing(ClientState(mask=torch.ones(4))).mask is mask
    assert NOTHING.sharing(known) == NOTHING


@pytest.mark.parametrize("way", ["pickle", "process", "file", "checkpoint"])
def test_any_record_comes_through(way):
    if way == "pickle":
        again = pickle.loads(pickle.dumps(RECORD))
    elif way == "process":
        again = pickling.unpack(pickling.pack(RECORD))
    else:
        states = ClientStates(memory=0)
        states[7] = RECORD
        assert states.bytes_in_file == sum(map(nbytes, RECORD.values()))
        again = states[7] if way == "file" else ClientState(unpack(packed_archive(states))["7"])
    assert again == RECORD


def test_the_bits_on_a_device_stay_in_their_process():
    mask = PackedMask(MASK.bits, MASK.length, resident=MASK.bits.to("meta"))
    again = pickling.unpack(pickling.pack(mask))
    assert again == mask and again.resident is None
