"""Archives and checkpoints: what goes in comes out, shared things stay shared, and damage is found, not believed."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from archives import pack, unpack
from federations import small
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from fedspa.checkpoints import checkpoint
from fedspa.checkpoints.archive import ArchiveError, read, write
from fedspa.checkpoints.checkpoint import BEST, SHARE, Checkpoints, checkpoint_files
from fedspa.checkpoints.resuming import LAST
from fedspa.core.client_state import ClientState
from fedspa.core.packed_mask import PackedMask
from fedspa.federated.client_states import ClientStates
from fedspa.methods.fedavg import FedAvg

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    return (100 * torch.rand(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


tensors = st.builds(
    tensor, st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 99)
)
masks = st.lists(st.booleans(), min_size=1, max_size=40).map(lambda bits: PackedMask.pack(torch.tensor(bits)))
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
keys = st.text(max_size=3).filter(lambda key: key != "$")
trees = st.recursive(
    plain | tensors | masks,
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
    assert len(pack(state)) < 10_000 + 2 * 4000 + 700
    again = unpack(pack(state))
    clients = again["clients"]
    assert again["first"] is clients["0"] is clients["2"] and clients["1"] is clients["3"]
    assert clients["4"] is not clients["1"] and torch.equal(clients["4"], clients["1"])


def test_any_program_can_look_into_an_archive(tmp_path):
    with (tmp_path / "archive").open("wb") as file:
        write({"a": torch.ones(2), "b": {3: torch.zeros(2)}, "mask": PackedMask.pack(torch.ones(9))}, file)
    tensors = load_file(tmp_path / "archive")
    assert tensors["torch.float32[2]"].tolist() == [[1, 1], [0, 0]]
    assert tensors["torch.uint8[2]"].tolist() == [[255, 128]]
    assert bytes(tensors["plain"]) == (
        b'{"format":3,"tree":{"a":{"$":["torch.float32[2]",0]},"b":{"3":{"$":["torch.float32[2]",1]}},'
        b'"mask":{"$":["torch.uint8[2]",0,9]}}}'
    )


def test_states_in_a_file_are_written_as_if_they_were_in_memory():
    states = {client: ClientState(weights=tensor(torch.float32, [50], client)) for client in range(4)}
    states[4] = ClientState(mask=PackedMask.pack(torch.ones(77)))
    spilled = ClientStates(memory=405)
    spilled.update(states)
    assert spilled.bytes_in_file == 410
    snapshot = spilled.copy()
    for client in states:  # a later round, which must not reach the snapshot
        spilled[client] = ClientState(weights=torch.zeros(50))
    assert pack(snapshot) == pack(states)
    for client, state in unpack(pack(snapshot)).items():
        assert ClientState(state) == states[int(client)]


def test_states_are_read_in_bounded_memory(tmp_path, monkeypatch):
    """128 MiB of states, of which 8 may be in memory."""
    each, loop = 1 << 18, small(FedAvg(name="fedavg"), None, rounds=1).loop
    state = loop.state_dict()
    state["clients"] = {client: {"weights": torch.full((each,), float(client))} for client in range(128)}
    with (tmp_path / "archive").open("wb") as file:
        write(state, file)
    del state["clients"]
    seen, put = [], ClientStates.__setitem__

    def watched(self, *item):
        put(self, *item)
        status = Path("/proc/self/status").read_text()
        seen.append(int(re.search(r"RssAnon:\s*(\d+)", status)[1]) >> 10)

    monkeypatch.setattr(ClientStates, "__setitem__", watched)
    for memory, least, most in ((8 << 20, 0, 40), (float("inf"), 110, 200)):
        loop.state.clients = ClientStates(memory)
        seen.clear()
        ctypes.CDLL(None).malloc_trim(0)  # what earlier tests left free would be taken unseen
        loaded = loop.state.loaded(read(tmp_path / "archive")).clients
        assert [float(loaded[client]["weights"][-1]) for client in range(128)] == list(range(128))
        assert least <= max(seen) - seen[0] <= most
        del loaded


@pytest.mark.parametrize("alien", [object(), {1, 2}, {(1, 2): 3}, b"bytes", [lambda: 0], np.arange(3)])
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
    with pytest.raises(ArchiveError, match="cut short"):
        unpack(WHOLE[:length])


@pytest.mark.parametrize("data", [b"", b"PK" + bytes(100), WHOLE + b"x", bytes(32), bytes(200)])
def test_other_files_are_refused(data):
    with pytest.raises(ArchiveError, match="damaged, cut short, or no checkpoint of fedspa"):
        unpack(data)


def sealed(body: bytes) -> bytes:
    return body + hashlib.blake2b(body, digest_size=32).digest()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((b'"format":3', b'"format":4'), "of format 4, where this version of fedspa reads format 3"),
        ((b'"format"', b'"former"'), "not written by this version of fedspa"),
        ((b'"shape":[1,50]', b'"shape":[9,50]'), "not written by this version of fedspa"),
        ((b'"shape":[1,50]', b'"shape":[-1,9]'), "not written by this version of fedspa"),
        ((b'"dtype":"F32"', b'"dtype":"C64"'), "not written by this version of fedspa"),
        ((b'torch.float32[50]",0', b'torch.float32[50]",7'), "not written by this version of fedspa"),
        ((b'torch.float32[50]",0', b'torch.float32[51]",0'), "not written by this version of fedspa"),
        ((WHOLE[:8], b"FSPA-ARC"), "not written by this version of fedspa"),
        ((WHOLE[:8], (1 << 62).to_bytes(8, "little")), "not written by this version of fedspa"),
    ],
)
def test_what_another_program_wrote_under_a_right_checksum_is_refused(change, reason):
    assert change[0] in WHOLE
    with pytest.raises(ArchiveError, match=reason):
        unpack(sealed(WHOLE[:-32].replace(*change)))


# Checkpoints


def saved(folder: Path, keep: int = 2, every: int | None = 1) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", keep, every)


def newest(checkpoints: Checkpoints) -> object:
    """What the newest checkpoint holds."""
    path = checkpoints.newest()
    assert path
    return read(path)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_newest_stay(tmp_path):
    checkpoints = saved(tmp_path)
    assert checkpoints.newest() is None
    for round in range(12):
        checkpoints.write(round, {"round": round})
    assert names(tmp_path) == ["round-000010.ckpt", "round-000011.ckpt"]
    assert newest(saved(tmp_path)) == {"round": 11}
    checkpoints.finish()
    assert names(tmp_path) == [LAST]


def test_the_best_stays_too(tmp_path):
    checkpoints = saved(tmp_path, keep=1)
    for round in range(5):
        checkpoints.write(round, {"round": round}, best=round in (1, 3))
    assert names(tmp_path) == ["best.ckpt", "round-000004.ckpt"]
    checkpoints.finish()
    assert names(tmp_path) == [BEST, LAST]
    assert read(tmp_path / "checkpoints" / BEST) == {"round": 3}


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
    assert "round-000006.ckpt is left out (damaged, cut short, or no checkpoint" in caplog.text
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
    assert not checkpoints.due(1)
    checkpoints.write(1, {})
    checkpoints.finish()
    assert list(tmp_path.iterdir()) == []


def test_so_many_rounds_lie_between_two(tmp_path):
    checkpoints = saved(tmp_path, every=3)
    assert [round for round in range(1, 10) if checkpoints.due(round)] == [3, 6, 9]


@pytest.mark.parametrize("growth", [0, 40])
def test_writing_takes_two_percent_of_the_time(tmp_path, monkeypatch, growth):
    """A clock by hand: a round takes 0.3 s, a byte takes 10 microseconds and a checkpoint 5 ms."""
    now = 0.0

    def write(tree, file):
        nonlocal now
        now += 0.005 + 1e-5 * tree["weights"].nbytes

    monkeypatch.setattr(checkpoint, "write", write)
    checkpoints = Checkpoints(tmp_path, keep=2, every=None, clock=lambda: now)
    spent, written = 0.0, []
    for round in range(500):
        now += 0.3 if round else 0.0
        state = {"weights": torch.zeros(1000 + growth * round, dtype=torch.uint8)}
        if round == 0 or checkpoints.due(round):
            begin = now
            checkpoints.write(round, state)
            spent += now - begin
            written.append(round)
    assert spent <= 1.01 * SHARE * now  # a checkpoint may be larger than the one before
    assert spent > 0.8 * SHARE * now and len(written) > 5
