"""Archives and checkpoints: what goes in comes out, shared things stay shared, and damage is found, not believed."""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedspa.checkpoints import checkpoint
from fedspa.checkpoints.archive import VERSION, ArchiveError, data_size, pack, read, unpack, write
from fedspa.checkpoints.checkpoint import BEST, SHARE, Checkpoints, checkpoint_files
from fedspa.core.client_state import ClientState
from fedspa.core.packed_mask import PackedMask
from fedspa.core.saved import Saved
from fedspa.federated.client_states import ClientStates, StatesAtRest, Stored, saved_states

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    return (100 * torch.rand(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


tensors = st.builds(
    tensor, st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 99)
)
arrays = tensors.filter(lambda t: t.dtype != torch.bfloat16).map(lambda t: t.numpy())
masks = st.lists(st.booleans(), min_size=1, max_size=40).map(lambda bits: PackedMask.pack(torch.tensor(bits)))
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
keys = st.text(max_size=3) | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["$", "$items"])
trees = st.recursive(
    plain | tensors | arrays | masks,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=12,
)


def same(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return type(one) is type(other) and one == other


# Archives


@given(trees)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_goes_in_comes_out(tree):
    assert same(unpack(pack(tree)), tree)


def test_floats_keep_every_bit():
    values = [0.1, -0.0, 1e-320, float("inf"), np.float64(1) / 3]
    assert struct.pack("5d", *unpack(pack(values))) == struct.pack("5d", *values)
    assert np.isnan(unpack(pack(float("nan"))))
    column = torch.arange(6.0).view(2, 3).T  # a view, not contiguous
    assert torch.equal(unpack(pack(column)), column)


def test_what_is_shared_is_stored_once_and_shared_again():
    mask, weights = PackedMask.pack(torch.ones(80_000)), torch.rand(1000)
    state = {"first": mask, "clients": {0: mask, 1: weights, 2: mask, 3: weights, 4: weights.clone()}}
    assert data_size(state) == 10_000 + 2 * 4000
    assert len(pack(state)) < 10_000 + 2 * 4000 + 500
    again = unpack(pack(state))
    clients = again["clients"]
    assert again["first"] is clients[0] is clients[2] and clients[1] is clients[3]
    assert clients[4] is not clients[1] and torch.equal(clients[4], clients[1])


def test_states_in_a_file_are_written_as_if_they_were_in_memory():
    states = {client: ClientState(weights=tensor(torch.float32, [50], client)) for client in range(4)}
    states[4] = ClientState(mask=PackedMask.pack(torch.ones(77)))
    spilled = ClientStates(memory=405)
    spilled.update(states)
    assert spilled.in_file == 3
    snapshot = spilled.at_rest()
    for client in states:  # a later round, which must not reach the snapshot
        spilled[client] = ClientState(weights=torch.zeros(50))
    packed = pack(snapshot)
    assert packed == pack(StatesAtRest({client: dict(state) for client, state in states.items()}))
    again = unpack(packed)
    assert all(isinstance(item, Stored) for record in again.values() for item in record.values())
    for client, state in states.items():
        assert ClientState({name: item.read() for name, item in again[client].items()}) == state
    assert pack(again) == packed


def megabytes_taken(work: Callable[[], None]) -> int:
    """By how much a fork of this process grows at most while it works."""

    def status(field: str) -> int:
        return int(re.search(rf"{field}:\s*(\d+)", Path("/proc/self/status").read_text())[1]) >> 10

    if (child := os.fork()) == 0:
        taken = 255
        try:
            ctypes.CDLL(None).malloc_trim(0)  # what earlier tests left free would be taken unseen
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
            before = status("VmRSS")
            work()
            taken = min(status("VmHWM") - before, 254)
        finally:
            os._exit(taken)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_states_are_read_in_bounded_memory(tmp_path):
    """128 MiB of states, of which 8 may be in memory."""
    each = 1 << 18
    first = ClientState(weights=torch.zeros(each))
    states = {128: first}
    states |= {client: ClientState(weights=torch.full((each,), float(client))) for client in range(128)}
    with (tmp_path / "archive").open("wb") as file:
        clients = StatesAtRest({client: dict(state) for client, state in states.items()})
        write({"first": dict(first), "clients": clients}, file)
    del states, clients

    def load(memory):
        with (tmp_path / "archive").open("rb") as file:
            loaded = saved_states(Saved(read(file), "state"), first, first["weights"], memory)
        assert [float(loaded[client]["weights"][-1]) for client in range(128)] == list(range(128))
        assert loaded[128]["weights"] is first["weights"]

    assert megabytes_taken(lambda: load(8 << 20)) < 40
    assert 120 < megabytes_taken(lambda: load(float("inf"))) < 200


@pytest.mark.parametrize("alien", [object(), {1, 2}, {(1, 2): 3}, b"bytes", [lambda: 0]])
def test_only_what_can_be_read_back_is_written(alien):
    with pytest.raises(TypeError):
        pack(alien)


WHOLE = pack(
    {"weights": torch.arange(50.0), "mask": PackedMask.pack(torch.ones(20)), "round": 3, "name": "x"}
)


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
@settings(max_examples=150, deadline=None)
def test_no_changed_byte_goes_unnoticed(place, change):
    damaged = bytearray(WHOLE)
    damaged[place] ^= change
    with pytest.raises(ArchiveError):
        unpack(bytes(damaged))


@given(st.integers(0, len(WHOLE) - 1))
@settings(max_examples=50, deadline=None)
def test_no_missing_byte_goes_unnoticed(length):
    with pytest.raises(ArchiveError, match="truncated"):
        unpack(WHOLE[:length])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated: 0 bytes"),
        (b"PK" + bytes(100), "no checkpoint of fedspa"),
        (WHOLE[:8] + (7).to_bytes(4, "little") + WHOLE[12:], "of format 7"),
        (WHOLE[:12] + (1 << 62).to_bytes(8, "little") + WHOLE[20:], "truncated"),
        (WHOLE + b"x", "too long"),
    ],
)
def test_the_reason_is_told(data, reason):
    with pytest.raises(ArchiveError, match=reason):
        unpack(data)


@pytest.mark.parametrize(
    "index",
    [
        b'{"tree":null,"objects":[["tensor","float32",[1099511627776]]]}',
        b'{"tree":null,"objects":[["tensor","float32",[1099511627776,-1]]]}',
        b'{"tree":null,"objects":[["tensor","object",[1]]]}',
        b'{"tree":null,"objects":[["mask","uint8",[0],9]]}',
        b'{"tree":{"$":5},"objects":[]}',
        b'{"tree":{"$items":[[[],1]]},"objects":[]}',
        b"[" * 100_000,
        b"\xff\xfe",
        b"[]",
    ],
)
def test_an_index_that_claims_too_much_is_refused_before_memory_is_taken(index):
    header = struct.pack("<8sIQQ", b"FSPA-ARC", VERSION, len(index), 0)
    with pytest.raises(ArchiveError, match="damaged"):
        unpack(header + index + bytes(32))


# Checkpoints


def saved(folder: Path, keep: int = 2, every: int | None = 1) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", keep, every)


def newest(checkpoints: Checkpoints) -> object:
    """What the newest checkpoint holds."""
    path = checkpoints.newest()
    assert path
    with path.open("rb") as file:
        return read(file)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_newest_stay(tmp_path):
    checkpoints = saved(tmp_path)
    assert checkpoints.newest() is None
    for round in range(12):
        checkpoints.write(round, {"round": round})
    assert names(tmp_path) == ["round-000010.ckpt", "round-000011.ckpt"]
    assert newest(saved(tmp_path)) == {"round": 11}
    checkpoints.clear()
    assert not (tmp_path / "checkpoints").exists()


def test_the_best_stays_too(tmp_path):
    checkpoints = saved(tmp_path, keep=1)
    for round in range(5):
        checkpoints.write(round, {"round": round}, best=round in (1, 3))
    assert names(tmp_path) == ["best.ckpt", "round-000004.ckpt"]
    checkpoints.clear()
    assert names(tmp_path) == [BEST]
    with (tmp_path / "checkpoints" / BEST).open("rb") as file:
        assert read(file) == {"round": 3}


def test_no_links_no_harm(tmp_path, monkeypatch):
    def refuse(*paths):
        raise PermissionError("this file system has no links")

    monkeypatch.setattr(os, "link", refuse)
    saved(tmp_path).write(2, {"round": 2}, best=True)
    assert names(tmp_path) == ["best.ckpt", "round-000002.ckpt"]


def test_a_damaged_one_is_told_and_the_one_before_is_used(tmp_path, caplog):
    for round in (4, 5, 6):
        saved(tmp_path, keep=3).write(round, {"round": round})
    first, second, _ = checkpoint_files(tmp_path / "checkpoints")
    first.write_bytes(first.read_bytes()[:-1])
    second.write_bytes(b"")
    assert newest(saved(tmp_path)) == {"round": 4}
    assert [record.getMessage().count("\n") for record in caplog.records] == [0, 0]
    assert "round-000006.ckpt is left out (truncated: " in caplog.text
    saved(tmp_path, keep=1).write(5, {"round": 5})  # the run goes on from 4
    assert names(tmp_path) == ["round-000005.ckpt"]


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, keep=1)
    checkpoints.write(1, {"round": 1})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as raised:
        checkpoints.write(2, {"round": 2})
    assert "round-000002" in raised.value.filename
    assert names(tmp_path) == ["round-000001.ckpt"]
    assert newest(checkpoints) == {"round": 1}


def test_none_is_written_where_none_is_wanted(tmp_path):
    checkpoints = saved(tmp_path, keep=0)
    assert not checkpoints.due(1, {})
    checkpoints.write(1, {})
    assert list(tmp_path.iterdir()) == []


def test_so_many_rounds_lie_between_two(tmp_path):
    checkpoints = saved(tmp_path, every=3)
    assert [round for round in range(1, 10) if checkpoints.due(round, {})] == [3, 6, 9]


@pytest.mark.parametrize("growth", [0, 40])
def test_writing_takes_two_percent_of_the_time(tmp_path, monkeypatch, growth):
    """A clock by hand: a round takes 0.3 s, a byte takes 10 microseconds and a checkpoint 5 ms."""
    now = 0.0

    def write(tree, file):
        nonlocal now
        now += 0.005 + 1e-5 * data_size(tree)
        return data_size(tree)

    monkeypatch.setattr(checkpoint, "write", write)
    checkpoints = Checkpoints(tmp_path, keep=2, every=None, clock=lambda: now)
    spent, written = 0.0, []
    for round in range(500):
        now += 0.3 if round else 0.0
        state = {"weights": torch.zeros(1000 + growth * round, dtype=torch.uint8)}
        if round == 0 or checkpoints.due(round, state):
            begin = now
            checkpoints.write(round, state)
            spent += now - begin
            written.append(round)
    assert spent <= SHARE * now
    assert spent > 0.8 * SHARE * now and len(written) > 5
