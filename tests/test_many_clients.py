"""Federations of very many clients: images on demand, states in a file, a tested subset, arrays for rows of text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from archives import pack, unpack
from federations import small
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from fedspa.core.client_state import NOTHING, ClientState
from fedspa.core.errors import UserError
from fedspa.core.packed_mask import PackedMask
from fedspa.core.tensor_file import save_tensors
from fedspa.data.pixels import Augmentation, MadePixels, Pixels
from fedspa.data.synthetic_clients import SyntheticClients
from fedspa.federated.client_states import ClientStates
from fedspa.federated.sampling import sample_clients, sample_tested
from fedspa.masks.rsm import RSM
from fedspa.methods.ditto import Ditto
from fedspa.methods.fedspa import FedSpa
from fedspa.partition.clients import row_counts
from fedspa.runs.assembly import build
from fedspa.runs.experiment import run

AUGMENTATION = Augmentation(crop_padding=2, flip=True, cutout=3)


def source(clients: int = 5, **changes: object) -> SyntheticClients:
    facts = dict(
        name="made", classes=3, channels=2, image_size=8, train_size=4 * clients, test_size=2 * clients,
        client_train_images=4, client_test_images=2, mean=[0.5], std=[0.2],
    )  # fmt: skip
    return SyntheticClients(**(facts | changes))  # type: ignore[arg-type]


# Images on demand


@pytest.mark.parametrize("rows", [[4, 7, 5], [0, 19, 7, 7, 3]], ids=["one client", "several clients"])
def test_images_made_for_a_batch_are_those_of_the_whole_set(rows):
    made, whole = source().load().train, source().read("train")
    pixels = [
        kind(images, [0.5], [0.2], AUGMENTATION, "cpu", torch.float32)
        for kind, images in ((MadePixels, made), (Pixels, whole))
    ]
    wanted, draws = torch.tensor(rows), pixels[0].draw(len(rows), torch.Generator().manual_seed(0))
    for planned in (draws, None):
        lazy, eager = (one.batch(wanted, planned) for one in pixels)
        assert torch.equal(lazy.inputs, eager.inputs) and torch.equal(lazy.targets, eager.targets)
    assert torch.equal(*(one.targets_of(wanted) for one in pixels))


def test_a_clients_images_depend_on_its_number_and_the_seed_alone():
    few, many, other = source(5), source(1_000_000), source(5, data_seed=1)
    for split in ("train", "test"):
        assert torch.equal(few.images_of(split, 3).inputs, many.images_of(split, 3).inputs)
        assert not torch.equal(few.images_of(split, 3).inputs, few.images_of(split, 4).inputs)
        assert not torch.equal(few.images_of(split, 3).inputs, other.images_of(split, 3).inputs)


def test_sizes_that_are_no_number_of_clients_are_refused():
    with pytest.raises(UserError, match="leave them to the YAML file"):
        source(5, train_size=21)


def test_a_million_clients_are_no_list(plan):
    federation = build(plan("dataset=synthetic_clients", "federation.clients=1000000", "eval.clients=3"))
    rows = federation.rows
    assert len(rows.train) == len(rows.test) == 1_000_000
    assert rows.train[999_999].tolist() == list(range(49_999_950, 50_000_000))
    assert len(rows.val[0]) == 0
    with pytest.raises(IndexError):
        rows.train[1_000_000]


def test_validation_rows_are_held_out_of_each_clients_own(plan):
    few = ("dataset=synthetic_clients", "federation.clients=20", "federation.clients_per_round=2")
    rows = build(plan(*few, "dataset.val_fraction=0.2")).rows
    assert sorted([*rows.train[7], *rows.val[7]]) == list(range(350, 400))
    assert len(rows.val[7]) == 10
    for held in (rows.train, rows.val, rows.test):
        assert row_counts(held).tolist() == [len(own) for own in held]


def test_a_partition_cannot_deal_images_that_belong_to_clients(plan):
    with pytest.raises(UserError, match="it must be partition=blocks"):
        build(plan("dataset=synthetic_clients", "partition=iid"))


# Who is tested


def test_the_tested_clients_are_drawn_once_from_the_seed():
    assert sample_tested(0, 10, None) == sample_tested(0, 10, 10) == range(10)
    some = sample_tested(0, 1000, 20)
    assert list(some) == sorted(set(some)) and len(some) == 20 and max(some) < 1000
    assert some == sample_tested(0, 1000, 20) != sample_tested(1, 1000, 20)


def test_sampling_of_many_clients_holds_no_permutation_of_them():
    import tracemalloc

    tracemalloc.start()
    sample_clients(0, 0, 10**9, 1000)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


# States in a file


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.booleans()), max_size=30), st.integers(0, 60)
)
def test_states_read_back_as_what_they_were_set_to(changes, memory):
    states, expected = ClientStates(memory), {}
    for client, value, masked in changes:
        vector = torch.full((3,), float(value))
        mask = {"mask": PackedMask.pack(vector > 3)} if masked else {}
        states[client] = expected[client] = ClientState({"weights": vector} | mask if value else mask)
    kept = states.copy()
    for client in list(states)[1:]:
        del states[client]
    assert len(states) == min(len(expected), 1)
    assert list(kept) == list(expected)
    for client, state in expected.items():
        assert kept[client] == state


def weights(vector: torch.Tensor) -> ClientState:
    return ClientState(weights=vector)


def test_memory_is_bounded_and_shared_states_count_once():
    shared, states = torch.zeros(10), ClientStates(100)
    for client in range(50):
        states[client] = weights(shared)
    states[50], states[51] = weights(torch.ones(10)), weights(torch.ones(10))
    assert states.bytes_in_file == 40  # 40 bytes shared, 40 of client 50, and no room for 51
    assert states[3]["weights"] is shared and states[51] == weights(torch.ones(10))
    states[50] = NOTHING
    states[52] = weights(torch.ones(10))
    assert states.bytes_in_file == 40 and states[50] == NOTHING
    states[53] = weights(shared) | {"extra": torch.ones(1, 0), "mask": PackedMask.pack(torch.ones(200))}
    assert states.bytes_in_file == 65  # the rest of its record stays in memory
    assert (
        states[53]["weights"] is shared
        and states[53].mask.active == 200
        and states[53]["extra"].shape == (1, 0)
    )


def test_what_clients_share_lies_once_in_the_file_and_is_shared_again_after_a_checkpoint():
    shared, states = torch.zeros(10), ClientStates(0)
    mask = PackedMask.pack(torch.ones(80))
    for client in range(5):
        states[client] = weights(shared) | {"mask": mask}
    assert states.bytes_in_file == 50
    assert len({id(item) for state in states.values() for item in state.stored.values()}) == 2
    states[5] = states[0]
    states[6] = weights(torch.zeros(10))
    assert states.bytes_in_file == 90
    del shared, mask
    again = unpack(pack(states))
    assert len({id(item) for state in again.values() for item in state.values()}) == 3
    assert {client: ClientState(state) for client, state in again.items()} == {
        str(client): state for client, state in states.items()
    }


def test_places_in_the_file_are_used_again_when_nothing_refers_to_them():
    states = ClientStates(0)
    states[0] = weights(torch.zeros(10))
    before, column = states.copy(), states[0]["weights"].view(5, 2).numpy()[:, 1]
    states[0] = weights(torch.ones(10))
    assert before[0] == weights(torch.zeros(10)) and states.bytes_in_file == 80
    del before
    for value in range(10):
        states[0] = weights(torch.full((10,), float(value)))
        assert states.bytes_in_file == 40
    assert column.sum() == 0  # what was read is a copy
    states[1], states[2] = weights(torch.ones(10)), weights(torch.ones(11))
    for client, vector in enumerate((torch.full((10,), 9.0), torch.ones(10), torch.ones(11))):
        assert states[client] == weights(vector)
    assert states._shelf.file._end == 2 * 40 + 44  # the second place of 40 bytes is used again


@pytest.mark.parametrize("method", [FedSpa(name="fedspa"), Ditto(name="ditto")])
def test_a_federation_does_not_notice_where_its_states_lie(method):
    searcher = RSM(name="rsm") if method.uses_mask else None
    runs = [small(method, searcher, rounds=4) for _ in range(2)]
    runs[0].loop.state.clients = ClientStates(0)
    records = [federation.run() for federation in runs]
    assert records[0][-1].scores == records[1][-1].scores
    states = [federation.loop.state.clients for federation in runs]
    assert states[0].bytes_in_file > 0 and len(states[0]) > 2 and states[1].bytes_in_file == 0
    for client in states[1]:
        assert states[0][client] == states[1][client]


# Files

FEW = ("federation.rounds=2", "federation.clients_per_round=2", "logger=csv", "hardware.workers=1")
MADE = (
    "dataset=synthetic_clients",
    "federation.clients=12",
    "eval.clients=3",
    "dataset.client_train_images=10",
)


def test_of_many_clients_there_are_arrays(plan, tmp_path):
    made = (*FEW, *MADE, "finetune.epochs=1")
    run(plan(*made), tmp_path / "rows")
    summary = run(plan(*made, "save.client_files=11", "hardware.state_memory_gb=0"), tmp_path / "arrays")
    assert summary["clients"] == 12 and summary["final/accuracy/global/clients"] == 3
    assert summary["final/accuracy/finetuned/clients"] == 3
    rows, arrays = (tmp_path / name for name in ("rows", "arrays"))
    for same in ("rounds.csv", "masks.safetensors", "weights.safetensors"):
        assert (rows / same).read_bytes() == (arrays / same).read_bytes()
    assert not (arrays / "clients.csv").exists() and not (arrays / "partition.png").exists()
    by_row = np.genfromtxt(rows / "clients.csv", delimiter=",", names=True, deletechars="")
    by_array = load_file(arrays / "clients.safetensors")
    for name, column in by_array.items():
        np.testing.assert_array_equal(column, by_row[name])
    assert set(by_row.dtype.names) - set(by_array) == {"client", *(f"label_{label}" for label in range(10))}
    partition = [json.loads((folder / "partition.json").read_text()) for folder in (rows, arrays)]
    assert partition[0]["hash"] == partition[1]["hash"]
    assert (partition[1]["clients"], partition[1]["images"]) == (12, 120)


def test_the_rows_of_many_clients_that_a_partition_dealt_are_kept(plan, tmp_path):
    run(plan(*FEW, "save.client_files=0"), tmp_path)
    dealt, table = load_file(tmp_path / "partition.safetensors"), load_file(tmp_path / "clients.safetensors")
    assert sorted(dealt["rows"]) == list(range(1397))
    assert dealt["sizes"].tolist() == table["train_size"].tolist()
    assert table["client_updates"].sum() == 4


def test_tensor_files_read_back_and_are_aligned(tmp_path: Path):
    from safetensors.torch import load_file

    given = {
        "mask": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "view": torch.arange(6.0).view(2, 3)[:, 1:],
        "wide": torch.zeros(2, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(5),
    }
    save_tensors(tmp_path / "file", given, "c0ffee")
    found = load_file(tmp_path / "file")
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], given[name]) for name in given)
    assert all(found[name].dtype == given[name].dtype for name in given)
