"""The wire format: what goes in comes out, what was touched is refused, and a run does not notice it."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspa.communication.wire import DTYPES, Envelope, Message, WireError, decode, encode, update_bytes
from fedspa.core.packed_mask import PackedMask
from fedspa.core.weights import ParameterSpace
from fedspa.planning.cost_report import CostReport
from fedspa.runs.assembly import build

torch.set_num_threads(1)

UPDATE = Envelope("update", round=7, client=3)


def space_of(*sizes: int) -> ParameterSpace:
    return ParameterSpace(tuple(f"tensor{i}" for i in range(len(sizes))), tuple((size,) for size in sizes))


def mask_of(*flags: int) -> PackedMask:
    return PackedMask.pack(torch.tensor(flags))


@st.composite
def conversations(draw) -> tuple[Message, ParameterSpace, PackedMask]:
    """A message of any shape, the network's space and the mask that the receiver knows."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    space = replace(space_of(*sizes), statistics=draw(st.integers(0, len(sizes) - 1)))

    def mask() -> PackedMask:
        density = draw(st.sampled_from((0.0, 0.3, 0.7, 1.0)))
        pieces = [rng.random(size) < draw(st.sampled_from((density, 0.0, 1.0))) for size in space.sizes]
        pieces = pieces[: len(sizes) - space.statistics] + [
            np.ones(size, dtype=bool) for size in space.running.sizes
        ]
        return PackedMask.pack(torch.from_numpy(np.concatenate(pieces)))

    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    known = mask()
    next_mask = draw(st.sampled_from((None, known, mask(), mask())))
    under = draw(st.sampled_from(("known", "next", "seed")))
    seed = draw(st.integers(0, 2**64 - 1)) if under == "seed" else None
    of_values = mask() if under == "seed" else next_mask if under == "next" and next_mask else known
    bits = rng.integers(
        0, 2**32, space.total, dtype=np.uint32
    )  # all floats there are, -0, inf and NaN as well
    message = Message(
        Envelope(draw(st.sampled_from(("model", "update"))), draw(st.integers(0, 2**32 - 1)), 3),
        torch.from_numpy(bits.view(np.float32)),
        of_values,
        next_mask,
        seed,
    )
    return message, space, known


def drawn(message: Message):
    return lambda seed: message.mask if seed == message.seed else pytest.fail("another seed")


@given(conversations(), st.sampled_from(list(DTYPES)))
def test_a_message_comes_out_as_it_went_in(conversation, dtype):
    message, space, known = conversation
    data = encode(message, space, known, dtype)
    read = decode(data, space, known, message.envelope, drawn(message))
    assert (read.envelope, read.mask, read.seed) == (message.envelope, message.mask, message.seed)
    assert (read.next_mask or known) == (message.next_mask or known)
    active = message.mask.unpack(like=torch.empty(0, dtype=torch.bool))
    sent, got = message.vector[active], read.vector[active]
    # Rounded as torch casts; in fp32, and in running statistics, bit for bit, whatever the bits are.
    rounded = len(sent) - sum(space.running.sizes)
    wanted = torch.cat([sent[:rounded].to(DTYPES[dtype]).float(), sent[rounded:]])
    assert torch.equal(got.view(torch.int32), wanted.view(torch.int32))
    assert not read.vector[~active].any()


@given(conversations(), st.data())
def test_any_flipped_bit_is_refused(conversation, data):
    message, space, known = conversation
    sound = bytearray(encode(message, space, known))
    bit = data.draw(st.integers(0, 8 * len(sound) - 1))
    sound[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        decode(bytes(sound), space, known, message.envelope, drawn(message))


@given(conversations(), st.data(), st.binary(min_size=1, max_size=9))
def test_truncated_and_extended_messages_are_refused(conversation, data, more):
    message, space, known = conversation
    sound = encode(message, space, known)
    cut = data.draw(st.integers(0, len(sound) - 1))
    for wrong in (sound[:cut], sound + more, more + sound, sound + sound):
        with pytest.raises(WireError):
            decode(wrong, space, known, message.envelope, drawn(message))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(data):
    for wrong in (data, b"FSPA" + data):
        with pytest.raises(WireError):
            decode(wrong, space_of(3), mask_of(1, 1, 1), UPDATE)


def test_the_layout_by_hand():
    """Two tensors; the mask of the second changes from 110 to 011."""
    message = Message(
        UPDATE, torch.tensor([1.0, 2.0, -3.0, 4.0, 9.0]), mask_of(1, 1, 1, 1, 0), mask_of(1, 1, 0, 1, 1)
    )
    data = encode(message, space_of(2, 3), mask_of(1, 1, 1, 1, 0))
    assert data[:24] == b"FSPA" + bytes([3, 1, 0, 0]) + struct.pack("<IIQ", 7, 3, 5)
    assert data[24:32] == struct.pack("<Q", 4)
    assert data[40] == 0b00_11_0000  # the first tensor as before, the second spelled out
    assert data[41] == 0b011_00000
    assert data[42:58] == struct.pack("<4f", 1, 2, -3, 4)
    assert data[58:] == hashlib.blake2b(data[:58], digest_size=8).digest()


SPACE, KNOWN = space_of(2, 3), mask_of(1, 1, 1, 1, 0)
SOUND = encode(Message(UPDATE, torch.arange(5.0), KNOWN), SPACE, KNOWN)


@pytest.mark.parametrize(
    ("space", "known", "envelope", "reason"),
    [
        (space_of(2, 4), mask_of(1, 1, 1, 1, 0, 0), UPDATE, "4 values for 5 parameters, the network has 6"),
        (space_of(3, 2), KNOWN, UPDATE, "another network or under another mask"),
        (SPACE, mask_of(1, 1, 1, 0, 1), UPDATE, "another network or under another mask"),
        (SPACE, mask_of(1, 1, 0, 0, 1), UPDATE, "another network or under another mask"),
        (SPACE, KNOWN, replace(UPDATE, client=4), "client 3 in round 7, not the update of client 4"),
        (SPACE, KNOWN, replace(UPDATE, round=8), "in round 7, not the update of client 3 in round 8"),
        (SPACE, KNOWN, replace(UPDATE, kind="model"), "is the update of client 3 in round 7, not the model"),
    ],
)
def test_a_message_for_somebody_else_is_refused(space, known, envelope, reason):
    with pytest.raises(WireError, match=reason):
        decode(SOUND, space, known, envelope)


@pytest.mark.parametrize(
    ("at", "field", "reason"),
    [
        (4, b"\x01", "version 1 of the wire format"),
        (5, b"\x09", "header is not valid: kind 9"),
        (6, b"\x03", "value type 3"),
        (7, b"\x03", "mask 3"),
        (7, b"\x02", "next mask, which it does not hold"),
        (16, struct.pack("<Q", 2**63), f"4 values for {2**63} parameters"),
        (24, struct.pack("<Q", 2**63), f"{2**63} values"),
        (24, struct.pack("<Q", 5), "has 65 bytes, by its header it must have 69"),
        (40, b"\xff", "by its header"),
    ],
)
def test_a_lie_with_a_sound_checksum_is_refused(at, field, reason):
    body = SOUND[:at] + field + SOUND[at + len(field) : -8]
    with pytest.raises(WireError, match=reason):
        decode(body + hashlib.blake2b(body, digest_size=8).digest(), SPACE, KNOWN, UPDATE)


def test_a_random_mask_that_the_receiver_cannot_draw_is_refused():
    data = encode(Message(UPDATE, torch.ones(5), mask_of(0, 0, 1, 1, 1), seed=11), SPACE, KNOWN)
    with pytest.raises(WireError, match="seed 11"):
        decode(data, SPACE, KNOWN, UPDATE)
    with pytest.raises(WireError, match="under another mask"):
        decode(data, SPACE, KNOWN, UPDATE, draw=lambda seed: KNOWN)


def test_values_under_a_mask_that_nobody_else_has_cannot_be_sent():
    with pytest.raises(ValueError, match="has, receives, or draws"):
        encode(Message(UPDATE, torch.ones(5), mask_of(0, 0, 1, 1, 1)), SPACE, KNOWN)


def test_running_statistics_travel_in_fp32_whatever_the_values():
    """Two statistics behind three parameters: 3 values of 2 bytes and 2 of 4, where all were rounded to 2."""
    space, known = replace(space_of(3, 2), statistics=1), mask_of(1, 0, 1, 1, 1)
    vector = torch.tensor([1 + 2**-12, 0.0, 3.0, 1 + 2**-12, 1e-30])
    data = encode(Message(UPDATE, vector, known), space, known, "fp16")
    assert len(data) == 40 + 1 + 2 * 2 + 2 * 4 + 8
    read = decode(data, space, known, UPDATE).vector
    assert read.tolist() == [1.0, 0.0, 3.0, *vector[3:].tolist()]
    for other, reason in (
        (space_of(3, 2), "by its header it must have 57"),
        (replace(space, statistics=2), "4 values"),
    ):
        with pytest.raises(WireError, match=reason):
            decode(data, other, known, UPDATE)
    with pytest.raises(ValueError, match="masks must be 1 there"):
        encode(Message(UPDATE, vector, mask_of(1, 1, 1, 1, 0)), space, known)


def test_only_the_tensors_whose_mask_changed_are_spelled_out():
    first_changed, full, as_before = mask_of(1, 0, 1, 1, 0), mask_of(1, 1, 1, 1, 1), KNOWN
    for next_mask, more in ((first_changed, 1), (full, 0), (as_before, 0)):
        data = encode(Message(UPDATE, torch.arange(5.0), KNOWN, next_mask), SPACE, KNOWN)
        assert len(data) == len(SOUND) + more


SMALL = (
    "logger=none",
    "hardware=cpu",
    "hardware.threads=1",
    "hardware.workers=1",
    "dataset.train_rows=200",
    "federation.clients=5",
    "federation.clients_per_round=3",
    "federation.rounds=2",
    "mask.anneal_rounds=9",
    "training.epochs=2",
    "eval.every=2",
)
METHODS = [
    ("mask=dst",),
    ("mask=rsm", "mask.initial=different", "method.normaliser=holders"),
    ("method=fedavg",),
    ("method=ditto", "method.shared_epochs=1", "method.personal_epochs=1"),
    ("method=local",),
    ("method=subfedavg", "method.accuracy_threshold=0"),
    ("method=subsampling",),
]


def small(overrides) -> list[str]:
    searches = overrides[0] == "mask=dst"
    return [*overrides, *(o for o in SMALL if searches or not o.startswith("mask."))]


@pytest.mark.parametrize("overrides", METHODS, ids=lambda o: o[0])
def test_a_run_through_the_wire_is_the_same_run(plan, overrides):
    plain, wired = (build(plan(*small(overrides), f"federation.wire={wire}")) for wire in ("null", "fp32"))
    for without, through in zip(plain.loop.rounds(), wired.loop.rounds(), strict=True):
        assert replace(through, seconds={}, costs=without.costs, total_costs=without.total_costs) == replace(
            without, seconds={}
        )
        assert replace(through.costs, encoded_bytes=0) == without.costs
    assert torch.equal(plain.loop.state.weights, wired.loop.state.weights)
    assert plain.loop.state.clients.keys() == wired.loop.state.clients.keys()
    assert all(plain.loop.state.density(client) == wired.loop.state.density(client) for client in range(5))


@pytest.mark.parametrize("overrides", METHODS, ids=lambda o: o[0])
def test_measured_bytes_are_those_of_the_closed_form(plan, overrides):
    run = build(plan(*small(overrides), "federation.wire=bf16", "federation.clients_per_round=1"))
    for record in run.loop.rounds():  # of one client update each
        assert record.costs.encoded_bytes == update_bytes(record.costs, len(run.space.sizes), "bf16")


def test_of_the_last_round_of_dst_no_mask_travels_and_none_is_charged(plan):
    """Nor is the gradient taken: the prune rate is 0. The dry run says the same to the byte."""
    made = plan(*small(("mask=dst",)), "mask.anneal_rounds=2", "partition=iid", "federation.wire=fp32")
    run = build(made)
    first, last = run.loop.rounds()
    new = sum(
        updates == 1 and client in last.participants for client, updates in run.loop.state.updates.items()
    )
    seeds = 8 * new
    assert last.costs.mask_bytes == seeds and last.costs.search_flops == 0
    assert first.costs.mask_bytes > 3 * 8 and first.costs.search_flops > 0
    assert last.total_costs == CostReport.of(made).total
