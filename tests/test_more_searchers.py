"""SNIP and RigL: by hand, as properties, and in whole federations with all that a searcher may use."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from by_hand import CLIENTS, MASKS, W0, loss_and_gradient, sgd
from federations import small, two_workers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_masks import SPACE, masks, vectors, where
from test_rounds_by_hand import tiny_federation

from fedspa.checkpoints.archive import read, write
from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError
from fedspa.core.packed_mask import PackedMask
from fedspa.core.weights import ParameterSpace
from fedspa.federated.exploration import EXPLORED
from fedspa.masks.deepr import DeepR
from fedspa.masks.dsr import DSR
from fedspa.masks.dynamic import GROWN
from fedspa.masks.gmp import GMP
from fedspa.masks.granet import GraNet
from fedspa.masks.nm import NM
from fedspa.masks.rigl import RigL
from fedspa.masks.search_input import SearchInput
from fedspa.masks.snfs import SNFS
from fedspa.masks.snip import SNIP
from fedspa.masks.topkast import TopKAST
from fedspa.methods.fedspa import FedSpa
from fedspa.planning.cost_report import CostReport
from fedspa.planning.counting import Update
from fedspa.runs.assembly import build

relaxed = settings(deadline=None, max_examples=50)
FEDSPA = FedSpa(name="fedspa")
SEARCHERS = {
    searcher.name: searcher
    for searcher in (
        SNIP(name="snip"),
        RigL(name="rigl", anneal_rounds=4),
        TopKAST(name="topkast", interval=2),
        GMP(name="gmp", anneal_rounds=4),
        GraNet(name="granet", anneal_rounds=4),
        SNFS(name="snfs", anneal_rounds=6),
        DSR(name="dsr", threshold=0.01),
        DeepR(name="deepr"),
        NM(name="nm", anneal_rounds=6),
    )
}
TINY = ParameterSpace(("fc", "bias"), ((2, 3), (2,)))


def search(mask, weights, gradient, round=0, space=TINY, **options) -> SearchInput:
    counts = space.count(mask)
    return SearchInput(space, mask, weights, gradient, round, torch.Generator(), counts, **options)


def fitted(searcher, target, space=TINY, horizon=8):
    """The searcher for a network whose layer sparsity asks for these counts."""
    searcher.fit(space, target, horizon)
    return searcher


# SNIP ----------------------------------------------------------------------------------------------------


def test_snip_keeps_the_largest_products_of_all_tensors_together_or_of_each():
    weights = torch.tensor([1.0, -2, 3, 0.5, 0, 4, 1, -1])
    gradient = torch.tensor([2.0, 2, -1, 9, 100, 0.5, 5, -0.1])
    # |g w| = 2, 4, 3, 4.5, 0, 2 | 5, 0.1: a large gradient at a weight of 0 counts for nothing.
    found = search(torch.ones(8), weights, gradient)
    assert where(fitted(SNIP(name="snip"), (3, 1)).first_mask(found)) == {1, 2, 3, 6}
    # The bias takes a place of the weights.
    assert where(fitted(SNIP(name="snip"), (3, 0)).first_mask(found)) == {1, 3, 6}
    assert where(fitted(SNIP(name="snip", scope="tensor"), (3, 0)).first_mask(found)) == {1, 2, 3}


@relaxed
@given(st.data(), st.sampled_from(["global", "tensor"]))
def test_snip_has_exactly_the_density_asked_for(data, scope):
    weights, gradient = data.draw(vectors(SPACE.total)), data.draw(vectors(SPACE.total))
    active = [data.draw(st.integers(0, size)) for size in SPACE.sizes]
    found = search(torch.ones(SPACE.total), weights, gradient, space=SPACE)
    mask = fitted(SNIP(name="snip", scope=scope), active, SPACE).first_mask(found)
    assert set(mask.tolist()) <= {0.0, 1.0} and mask.sum() == sum(active)
    if scope == "tensor":
        assert list(SPACE.count(mask)) == active


def test_a_round_of_snip_by_hand():
    """Softmax regression: the client's whole data is its batch, so the gradient at w_0 is known in closed form."""
    run = tiny_federation(FEDSPA, SNIP(name="snip"), active=(6, 2))
    next(run.loop.rounds())
    for k, client in enumerate(CLIENTS):
        sensitivity = abs(W0 * loss_and_gradient(W0, client.x, client.y)[1])
        mask = (sensitivity >= sorted(sensitivity)[-8]).astype(float)
        path = sgd(mask * W0, client, lr=0.5, mask=mask)
        torch.testing.assert_close(run.updates[k][1].local, torch.from_numpy(path.end), rtol=0, atol=1e-12)
        assert run.loop.state.clients[k] == ClientState(mask=PackedMask.pack(torch.from_numpy(mask)))
    torch.testing.assert_close(
        run.weights, run.initial - (run.updates[0][1].update + run.updates[1][1].update) / 2
    )


def test_a_client_is_dense_until_snip_has_seen_it_and_keeps_its_mask_from_then_on():
    run = small(FEDSPA, SNIP(name="snip"), rounds=6)
    wanted = sum(run.loop._method.searcher.target)
    assert [run.loop.state.density(client) for client in range(4)] == [1.0] * 4
    own: dict[int, PackedMask] = {}
    for record in run.loop.rounds():
        for client in record.participants:
            mask = run.loop.state.client_state(client).mask
            assert mask.active == wanted and own.setdefault(client, mask) == mask
    assert len({mask.bits.numpy().tobytes() for mask in own.values()}) > 1  # their data differ
    for _, update in run.updates:
        assert not (update.update * (1 - update.mask)).any() and not (update.local * (1 - update.mask)).any()


# RigL ----------------------------------------------------------------------------------------------------


def test_rigl_exchanges_and_remembers_what_is_new():
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0, 1, 1])
    weights, gradient = torch.tensor([0.1, 5, -0.2, 3, 0, 0, 1, 2]), torch.tensor([9.0, 0, 1, 0, 0, -4, 3, 3])
    rigl = RigL(name="rigl", alpha=0.5)
    found = search(mask, weights, gradient)
    after = rigl.next_mask(found)
    # Of 4 active weights 2 are dropped, 0 and 2; 0 is grown at once (9), 5 is new (4). The bias is dense.
    assert after.tolist() == [1, 1, 0, 1, 0, 1, 1, 1]
    memory = rigl.remember(found, after)
    assert where(memory[GROWN].unpack(like=mask)) == {5}
    served = torch.arange(1.0, 9)
    assert rigl.start(served, after, memory).tolist() == [1, 2, 0, 4, 0, 0, 7, 8]
    assert rigl.start(served, after, {}).tolist() == [1, 2, 0, 4, 0, 6, 7, 8]


@pytest.mark.parametrize(("fraction", "exchanged"), [(0.29, 29), (0.295, 29), (0.004, 0), (1.0, 100)])
def test_rigl_rounds_down(fraction, exchanged):
    space, index = ParameterSpace(("fc",), ((10, 20),)), torch.arange(200.0)
    mask = (index < 100).float()
    after = RigL(name="rigl", alpha=fraction).next_mask(
        search(mask, (index + 1) * mask, 1 - mask, space=space)
    )
    assert where(after) == set(range(exchanged, 100 + exchanged))


def test_the_drop_fraction_of_rigl_falls_along_a_cosine_and_ends():
    rigl = RigL(name="rigl", alpha=0.4, anneal_rounds=8, end=0.75)  # T_end = 6
    expected = [0.4, 0.2 + 0.1 * math.sqrt(3), 0.3, 0.2, 0.1, 0.2 - 0.1 * math.sqrt(3), 0, 0, 0]
    assert [rigl.drop_fraction(t) for t in range(9)] == pytest.approx(expected, abs=1e-15)
    assert [rigl.searching(t) for t in range(9)] == [True] * 6 + [False] * 3
    mask = torch.ones(8)
    still = search(mask, mask, None, round=6)
    assert rigl.next_mask(still) is mask and rigl.remember(still, mask) == {}


@relaxed
@given(st.data(), st.floats(0, 1), st.integers(0, 8))
def test_rigl_never_changes_the_count_of_a_tensor_and_starts_within_the_mask(data, alpha, round):
    mask, gradient = data.draw(masks(SPACE.total)), data.draw(vectors(SPACE.total))
    weights = data.draw(vectors(SPACE.total)) * mask
    rigl = RigL(name="rigl", alpha=alpha, anneal_rounds=8)
    found = search(mask, weights, gradient, round, SPACE)
    after = rigl.next_mask(found)
    assert SPACE.count(after) == SPACE.count(mask) and set(after.tolist()) <= {0.0, 1.0}
    start = rigl.start(torch.ones(SPACE.total), after, rigl.remember(found, after))
    assert torch.equal(start, after * mask if round < 6 else after)


def test_a_second_update_of_rigl_starts_at_zero_where_the_mask_grew():
    run = tiny_federation(FEDSPA, RigL(name="rigl", alpha=0.5, anneal_rounds=10), MASKS)
    loop = run.loop.rounds()
    next(loop)
    states, served = dict(run.loop.state.clients), run.weights.clone()
    assert set(states[0]) == {"mask", GROWN, EXPLORED}
    starts = []
    for state in states.values():
        grown, mask = (state[name].unpack(like=served) for name in (GROWN, "mask"))
        assert grown.any() and torch.equal(grown * mask, grown)
        starts.append(mask * served * (1 - grown))
        assert torch.equal(run.loop._method.personal(served, state), starts[-1])
    next(loop)
    for start, (_, update) in zip(starts, run.updates[2:], strict=True):
        torch.testing.assert_close(update.update + update.local, start, rtol=0, atol=1e-12)


# In federations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEARCHERS)
@pytest.mark.parametrize("way", ["workers", "wire", "resumed"])
def test_the_bytes_are_those_of_one_process(name, way, tmp_path):
    plain = small(FEDSPA, SEARCHERS[name], rounds=5)
    told = plain.run()
    options = {"wire": {"wire": "fp32"}, "workers": {"executor": two_workers}}
    other = small(FEDSPA, SEARCHERS[name], rounds=5, **options.get(way, {}))
    if way == "resumed":
        begun = small(FEDSPA, SEARCHERS[name], rounds=5)
        rounds = begun.loop.rounds()
        for _ in range(3):
            next(rounds)
        with (tmp_path / "checkpoint").open("wb") as file:
            write(begun.loop.state_dict(), file)
        other.loop.load_state_dict(read(tmp_path / "checkpoint"))
    again = other.run()
    other.close()
    assert torch.equal(plain.weights, other.weights)
    assert dict(plain.loop.state.clients) == dict(other.loop.state.clients)
    assert told[-1].scores == again[-1].scores


class HalfForward(GMP):
    """GMP whose forward pass uses every second active parameter of a tensor, rounded up."""

    def forward_mask(self, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.cat([piece * (piece.cumsum(0) % 2) for piece in mask.split(list(self.sizes))])


def costs_before_and_after(plan, *overrides):
    """A report, and the costs of the run that it is of."""
    made = plan(
        "dataset=synthetic", "partition=iid", "federation.clients=4", "federation.clients_per_round=2",
        "federation.rounds=4", "training.epochs=1", "logger=none", "hardware.workers=1", *overrides,
    )  # fmt: skip
    federation = build(made)
    list(federation.loop.rounds())
    return CostReport.of(made), federation.loop.state.costs


@pytest.mark.parametrize(
    "overrides",
    [
        "mask=snip mask.scope=tensor",
        "mask=rigl mask.end=0.5 federation.wire=fp32",
        "mask=topkast mask.interval=3",
        "mask=gmp mask.initial_sparsity=0.2",
        "mask=gmp mask._target_=test_more_searchers.HalfForward trusted_packages=[test_more_searchers]",
        "mask=granet mask.scope=tensor mask.interval=2",
        "mask=deepr",
        "mask=nm layer_sparsity=uniform sparsity=0.75 mask.n=1",
    ],
)
def test_costs_of_a_run_are_those_told_before(plan, overrides):
    report, counted = costs_before_and_after(plan, *overrides.split())
    assert replace(counted, encoded_bytes=0) == replace(report.total, encoded_bytes=0)


@pytest.mark.parametrize("overrides", ["mask=snip", "mask=granet", "mask=snfs", "mask=dsr"])
def test_where_only_a_run_can_tell_the_costs_before_are_bounds(plan, overrides):
    report, counted = costs_before_and_after(plan, *overrides.split())
    told = report.total
    assert told.train_flops >= counted.train_flops and told.mask_bytes >= counted.mask_bytes
    # The total is planned, and with it the values that travel and the searches.
    for name in ("search_flops", "down_bytes", "up_bytes"):
        assert getattr(told, name) == getattr(counted, name) > 0 or overrides == "mask=dsr"
    assert any("upper bounds" in note for note in report.notes)


def test_what_a_first_and_a_later_update_cost(plan):
    for overrides in (("mask=snip", "mask.scope=tensor"), ("mask=rigl",)):
        made = plan("dataset=synthetic", "partition=iid", "federation.rounds=4", *overrides)
        report = CostReport.of(made)
        rows = report.client_sizes[0]
        gradient = report.network.search_flops(min(rows, made.settings.training.batch_size))
        kinds = (Update(rows, True, 0), Update(rows, False, 0), Update(rows, False, 3))
        changing = (kind._replace(changes=made.mask.changes(-1, kind.round)) for kind in kinds)
        first, later, still = map(report.update, changing)
        if overrides == ("mask=rigl",):
            assert (first.search_flops, later.search_flops, still.search_flops) == (gradient, gradient, 0)
            assert later.mask_bytes > still.mask_bytes == 0
            continue
        # One dense gradient and the dense weights at the first update, and nothing later.
        assert (first.search_flops, later.search_flops, later.mask_bytes) == (gradient, 0, 0)
        assert first.down_bytes == 4 * report.space.total > later.down_bytes == first.up_bytes
        assert first.mask_bytes == report.network.mask_bytes(report.active)


def test_wrong_options_are_told(plan):
    for option, value in {"scope": "layer"}.items():
        with pytest.raises(UserError, match=f"mask.{option}={value} is not known"):
            plan("mask=snip", f"mask.{option}={value}")
    for option, value in {"alpha": 2.0, "end": 0.0, "anneal_rounds": 0}.items():
        with pytest.raises(UserError, match=f"mask.{option}={value} is out of range"):
            plan("mask=rigl", f"mask.{option}={value}")
    with pytest.raises(UserError, match="initial is not a setting"):
        plan("mask=snip", "mask.initial=same")
