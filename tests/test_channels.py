"""Channel masks: what is coupled, that a small network computes what the masked one does, and whole runs."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federations import engine, pixels, random_images, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fedspa.communication.wire import Envelope, Message, decode, encode
from fedspa.core.client import Proximal
from fedspa.core.errors import UserError
from fedspa.core.packed_mask import PackedMask
from fedspa.core.settings import TrainingSettings
from fedspa.core.weights import ParameterSpace, flat_tensors, keep_personal
from fedspa.costs.network import NetworkCosts
from fedspa.export.formats import as_onnx
from fedspa.export.stored_run import StoredRun
from fedspa.masks.channels import ChannelDST, widths
from fedspa.masks.initial import random_mask
from fedspa.models.channels import set_channels
from fedspa.models.initialise import seeded
from fedspa.models.lenet5 import LeNet5
from fedspa.models.mlp import MLP
from fedspa.models.narrowing import narrowed
from fedspa.models.resnet18 import ResNet18
from fedspa.models.small_cnn import SmallCNN
from fedspa.models.vgg11 import VGG11
from fedspa.planning.cost_report import CostReport
from fedspa.runs.assembly import build
from fedspa.runs.experiment import run
from fedspa.training.base import LocalTask
from fedspa.training.eager import EagerEngine
from fedspa.training.narrow import NarrowEngine


class Own(nn.Module):
    """A user's network: BatchNorm, a depthwise convolution, a gate, a concatenation, a residual sum, sigmoids."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point = nn.Conv2d(8, 8, 1)
        self.gate = nn.Linear(8, 8)
        self.beside = nn.Conv2d(8, 6, 1)
        self.last = nn.Conv2d(14, 10, 1)
        self.fc = nn.Linear(40, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sigmoid(self.norm(self.stem(x)))
        x = x + self.point(self.depthwise(x))
        x = x * self.gate(x.mean((2, 3)))[:, :, None, None].sigmoid()
        x = F.gelu(self.last(torch.cat([x, self.beside(x)], 1)))
        return self.fc(F.adaptive_avg_pool2d(x, 2).flatten(1))


NETWORKS: dict[str, Any] = {
    "lenet5": lambda: LeNet5(3, 32, 5),
    "vgg11": lambda: VGG11(3, 32, 5),
    "resnet18": lambda: ResNet18(3, 32, 5),
    "small_cnn": lambda: SmallCNN(3, 32, 5),
    "mlp": lambda: MLP((3, 32, 32), 5),
    "own": Own,
}
IMAGES = random_images(count=12, side=32, classes=5, seed=0, channels=3)


def made(name: str) -> nn.Module:
    network = seeded(NETWORKS[name], seed=0).double()
    set_channels(network, torch.zeros(2, 3, 32, 32, dtype=torch.float64))
    return network


def half(network: nn.Module) -> tuple[ParameterSpace, tuple[int, ...], torch.Tensor]:
    """The space, the widths of half of the parameters, and random units with them."""
    space = ParameterSpace.of(network)
    assert space.channels is not None
    chosen = widths(space.channels, space.parameters, space.trained // 2)
    source = torch.Generator().manual_seed(1)
    pairs = zip(space.channels.groups, chosen, strict=True)
    return space, chosen, torch.cat([torch.randperm(n, generator=source) < width for n, width in pairs])


def engines(name: str, **options: Any) -> tuple[ParameterSpace, torch.Tensor, EagerEngine, NarrowEngine]:
    """The space, units with half of the parameters, and two engines with equal weights. `options`: of the training."""
    network = made(name)
    space, chosen, units = half(network)
    settings = TrainingSettings(batch_size=4, **options)
    whole = engine(copy.deepcopy(network), pixels(IMAGES), settings)
    narrow = NarrowEngine(whole.fabric, network, settings, whole.examples, widths=chosen)
    return space, units, whole, narrow


@pytest.mark.parametrize("name", NETWORKS)
def test_a_small_network_trains_as_the_masked_one(name):
    space, units, whole, narrow = engines(name, momentum=0.9, weight_decay=0.01, clip_scope="active")
    mask = space.mask_of(units).double()
    sums = torch.Generator().manual_seed(2)
    task = LocalTask(
        weights=mask * whole.weights,
        rows=torch.arange(10),
        epochs=2,
        learning_rate=0.05,
        generator=torch.Generator(),
        mask=mask,
        proximal=Proximal(mask * torch.randn(space.total, generator=sums).double(), 0.1),
        correction=0.01 * torch.randn(space.total, generator=sums).double(),
        trainable=(torch.rand(space.total, generator=sums) < 0.9).double(),
    )
    results = []
    for each in (whole, narrow):
        task.generator.manual_seed(3)
        results.append(each.train(task))
    wanted, found = results
    assert wanted.steps == found.steps == 6 and wanted.samples == found.samples
    torch.testing.assert_close(found.loss, wanted.loss)
    ours, theirs = (result.weights[: space.trained] for result in results)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    active = mask[: space.trained] > 0
    trained = narrow.small.weights[: narrow.small.space.trained]
    assert torch.equal(trained, theirs[active])  # so it was the small network that trained
    assert not theirs[~active].any()


def one_epoch(engine: EagerEngine, mask: torch.Tensor) -> torch.Tensor:
    """The weights [total] after an epoch under a mask."""
    return train(
        engine,
        mask * engine.weights,
        torch.arange(8),
        epochs=1,
        learning_rate=0.05,
        generator=torch.Generator().manual_seed(1),
        mask=mask,
    ).weights


def test_statistics_of_absent_channels_stay_as_they_are():
    space, units, _, narrow = engines("own")
    after = dict(space.items(one_epoch(narrow, space.mask_of(units).double())))
    active = dict(space.items(space.channels.mask(space.tensors, units)))["norm.running_var"]
    assert 0 < active.sum() < 8
    assert ((after["norm.running_var"] != 1) == active).all()


def test_a_mask_of_single_weights_trains_the_whole_network():
    """It has as many active weights in each tensor as a mask of channels, but not those of a small network."""
    space, units, whole, narrow = engines("lenet5")
    mask = torch.cat([piece.sort().values for piece in space.split(space.mask_of(units).double())])
    assert torch.equal(one_epoch(narrow, mask), one_epoch(whole, mask))


def test_the_values_of_a_mask_are_read_at_once():
    """A GPU waits for each value that is read alone."""
    space, units, _, narrow = engines("vgg11")
    mask, read = space.mask_of(units).double(), []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            read.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Watched():
        places = narrow._places(mask)
    assert torch.equal(places, mask.nonzero().squeeze(1))
    assert not {"aten::_local_scalar_dense", "aten::equal"} & set(read)


def test_channels_that_must_agree_are_one_unit():
    channels = ParameterSpace.of(made("own")).channels
    # The residual stream and its gate, the other branch, and the last convolution, whose 10 channels are flattened.
    assert sorted(channels.groups) == [6, 8, 10]
    stem = channels.axes["stem.weight"][0]
    for name in ("norm.bias", "norm.running_mean", "depthwise.weight", "point.bias", "gate.weight"):
        assert torch.equal(channels.axes[name][0], stem)
    assert torch.equal(channels.axes["last.weight"][1][:8], stem)
    assert torch.equal(channels.axes["fc.weight"][1], channels.axes["last.bias"][0].repeat_interleave(4))
    assert (channels.axes["stem.weight"][1] == channels.total).all()  # the colours stay


@pytest.mark.parametrize(
    ("name", "groups"), [("lenet5", 3), ("vgg11", 8), ("resnet18", 12), ("small_cnn", 3)]
)
def test_whole_groups_of_groupnorm_are_units(name, groups):
    network = made(name)
    channels = ParameterSpace.of(network).channels
    assert len(channels.groups) == groups
    norms = {path: layer for path, layer in network.named_modules() if isinstance(layer, nn.GroupNorm)}
    for path, layer in norms.items():
        units = channels.axes[f"{path}.weight"][0].view(layer.num_groups, -1)
        assert (units == units[:, :1]).all() and len(units[:, 0].unique()) == layer.num_groups
    assert "fc.bias" not in channels.axes  # the outputs stay


def test_layers_that_are_not_known_stay_whole():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs = nn.Linear(4, 8)
            self.norm = nn.LayerNorm(8)
            self.hidden = nn.Linear(8, 16)
            self.outputs = nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.inputs(x))
            return self.outputs(self.hidden(x).relu())

    network = Attention()
    set_channels(network, torch.zeros(2, 4))
    channels = ParameterSpace.of(network).channels
    assert channels.groups == (16,) and set(channels.axes) == {
        "hidden.weight",
        "hidden.bias",
        "outputs.weight",
    }


def test_personal_layers_stay_whole():
    network = LeNet5(3, 32, 5)
    keep_personal(network, ["fc4.weight", "fc4.bias"])
    set_channels(network, torch.zeros(2, 3, 32, 32))
    assert ParameterSpace.of(network).channels.groups == (20, 50)


class Fixed(nn.Module):
    """A network whose forward pass has a number of features written in it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 8, 1), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(x).relu().view(-1, 32))


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (Fixed(), "cannot make the model narrower"),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), "finds no channels"),
        (
            nn.Sequential(
                nn.Conv2d(1, 6, 1), nn.Flatten(), nn.Unflatten(1, (3, 8)), nn.Flatten(), nn.Linear(24, 3)
            ),
            "",
        ),
    ],
    ids=["fixed", "nothing", "numbers"],
)
def test_a_network_that_cannot_be_narrower_is_refused(network, said):
    with pytest.raises(UserError, match=f"mask=channels .*{said}"):
        set_channels(network, torch.zeros(2, 1, 2, 2))


@pytest.mark.parametrize("name", NETWORKS)
def test_every_choice_has_the_counts_of_the_plan(name):
    network = made(name)
    space, chosen, _ = half(network)
    searcher = ChannelDST(name="channels")
    searcher.fit(space.parameters, [space.trained // 2], 10)
    assert searcher.widths == chosen and sum(searcher.target) <= space.trained // 2
    for seed in range(3):
        mask = random_mask(space, searcher.widths, torch.Generator().manual_seed(seed))
        assert space.parameters.count(mask[: space.trained]) == searcher.target
        assert (mask[space.trained :] == 1).all()
        assert torch.equal(space.mask_of(space.mask_bits(mask.bool())), mask.bool())


@pytest.mark.parametrize("name", ["lenet5", "vgg11", "resnet18", "small_cnn"])
@pytest.mark.parametrize("density", [0.5, 0.25])
def test_widths_come_close_to_the_budget(name, density):
    network = made(name)
    space = ParameterSpace.of(network)
    budget = int(density * space.trained)
    found = sum(space.channels.counts(space.tensors, widths(space.channels, space, budget)))
    assert (0.8 if name == "small_cnn" else 0.97) * budget < found <= budget


@pytest.mark.parametrize("name", NETWORKS)
def test_costs_are_those_of_the_small_network(name):
    network = made(name)
    space, chosen, units = half(network)
    costs = NetworkCosts.of(network, (3, 32, 32))
    active = space.count(space.mask_of(units))
    small = narrowed(network, units)
    biases = sum(  # torch does not count the sums of biases
        costs.flops_per_active[i] * active[i] for i, name in enumerate(space.names) if name.endswith("bias")
    )
    with FlopCounterMode(display=False) as counter:
        small.eval()(torch.zeros(1, 3, 32, 32, dtype=torch.float64))
    assert costs.forward_flops(active) - biases == counter.get_total_flops()
    measured = NetworkCosts.of(small, (3, 32, 32))
    assert measured.forward_flops() == costs.forward_flops(active)
    whole_statistics = costs.value_bytes(active) - measured.value_bytes()
    assert whole_statistics == 4 * (space.total - space.trained) - 4 * (measured.statistics)
    assert costs.mask_bytes(active) == -(-space.channels.total // 8)


def test_a_small_network_has_the_weights_of_the_mask():
    network = made("lenet5")
    space, _, units = half(network)
    flat = torch.cat([tensor.detach().flatten() for tensor in flat_tensors(network).values()])
    small = narrowed(network, units)
    found = torch.cat([tensor.detach().flatten() for tensor in flat_tensors(small).values()])
    assert torch.equal(found, flat[space.mask_of(units)])
    inputs = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    for (_, parameter), (_, flags) in zip(
        network.named_parameters(), space.items(space.mask_of(units)), strict=True
    ):
        parameter.data.mul_(flags)
    torch.testing.assert_close(small(inputs), network(inputs))


# Whole runs ---------------------------------------------------------------------------------------------

DIGITS = (
    *("mask=channels", "dataset=digits", "partition=iid", "federation.rounds=4", "federation.clients=6"),
    *("federation.clients_per_round=3", "logger=none", "hardware.workers=1"),
)


def run_of(plan, *overrides):
    """The cost report of a run of the digits, and its federation after all rounds."""
    made = plan(*DIGITS, *overrides)
    federation = build(made)
    list(federation.loop.rounds())
    return CostReport.of(made), federation


@pytest.mark.parametrize(
    "overrides",
    [
        "sparsity=0.5",
        "sparsity=0.75 mask.regrow=random mask.drop=taylor mask.initial=different",
        "sparsity=0.5 mask.regrow=gradient mask.interval=2 federation.wire=fp32",
        "sparsity=0.5 personal_layers=head federation.wire=fp32",
        "sparsity=0.5 method=dispfl method.neighbours=2",
    ],
)
def test_costs_of_a_run_are_those_told_before(plan, overrides):
    report, federation = run_of(plan, *overrides.split())
    told, counted = report.total, federation.loop.state.costs
    assert replace(counted, encoded_bytes=0) == replace(told, encoded_bytes=0)
    if "wire" in overrides:
        assert (
            0 < counted.encoded_bytes <= told.encoded_bytes
        )  # a group of channels may have stayed as it was


def test_a_new_mask_is_a_bit_a_channel_on_the_wire(plan):
    _, federation = run_of(plan, "sparsity=0.5", "federation.wire=fp32")
    space, source = federation.space, torch.Generator()
    searcher = federation.runner.method.searcher
    before, after = (
        PackedMask.pack(random_mask(space, searcher.widths, source.manual_seed(i))) for i in (1, 2)
    )
    envelope, vector = Envelope("update", 3, 5), torch.randn(space.total)
    same, changed = (
        encode(Message(envelope, vector, before, next_mask), space, before) for next_mask in (before, after)
    )
    assert len(changed) - len(same) == 3
    arrived = decode(changed, space, before, envelope)
    assert arrived.next_mask == after and torch.equal(arrived.vector, vector * before.unpack(like=vector))


@pytest.mark.parametrize("wire", [None, "fp32"])
def test_all_channels_are_fedavg_bit_for_bit(plan, wire):
    options = [*DIGITS[1:], "method.weighting=samples", *([f"federation.wire={wire}"] if wire else [])]
    ours, theirs = (
        build(plan(*options, *more)) for more in (["mask=channels", "sparsity=0"], ["method=fedavg"])
    )
    for one, other in zip(ours.loop.rounds(), theirs.loop.rounds(), strict=True):
        assert one.loss == other.loss and one.scores["global"] == other.scores["global"]
    assert torch.equal(ours.loop.state.weights, theirs.loop.state.weights)


def test_clients_keep_the_counts_and_choose_other_channels(plan):
    report, federation = run_of(plan, "sparsity=0.5", "mask.initial=different")
    masks = [state.mask for _, state in federation.loop.state.clients.items()]
    assert len(masks) > 2 and any(mask != masks[0] for mask in masks)
    for mask in masks:
        assert federation.space.count(mask.unpack(like=torch.empty(0))) == report.active


@pytest.mark.parametrize("kind", ["personal", "local"])
def test_an_exported_model_is_physically_small(plan, kind, tmp_path):
    made = plan(*DIGITS, "sparsity=0.5", "save.local=true")
    run(made, tmp_path)
    stored = StoredRun(tmp_path)
    trained = next(client for client in range(6) if stored._updates(client))
    model = stored.model(kind, trained)
    small, network = model.module.network, stored._network
    assert small.conv2.out_channels < network.conv2.out_channels and small.norm2.num_groups < 8
    assert model.parameters == model.active_parameters <= ParameterSpace.of(network).total / 2
    weights, _ = stored._local(trained) if kind == "local" else stored._made(trained, kind)
    inputs = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        wanted = stored._with(weights).eval()(inputs)
        torch.testing.assert_close(small(inputs), wanted, rtol=1e-4, atol=1e-5)
    assert "differ by at most" in as_onnx(model).remark
    assert stored.model("global", None).parameters == ParameterSpace.of(network).total


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("method=feddst mask=channels", "method=feddst chooses weights one by one"),
        ("method=dispfl method.neighbours=2 mask.regrow=gradient", "method=dispfl has no server with dense"),
        ("mask.drop=random", "mask.drop=random is not known"),
        ("mask.regrow=zero", "mask.regrow=zero is not known"),
    ],
)
def test_impossible_combinations_are_refused(plan, overrides, said):
    with pytest.raises(UserError, match=said):
        plan(*DIGITS, *overrides.split())


def test_more_sparsity_than_one_channel_a_layer_is_refused(plan):
    with pytest.raises(UserError, match=r"leaves 750 of the .* use sparsity=0\.971 at most"):
        build(plan(*DIGITS, "sparsity=0.99"))


def test_the_compiled_engine_is_refused(plan):
    with pytest.raises(UserError, match="engine=compiled cannot train the small networks"):
        build(plan(*DIGITS, "engine=compiled", "sparsity=0.5"))


def test_personal_norms_leave_nothing_to_cut(plan):
    with pytest.raises(UserError, match="finds no channels"):
        build(plan(*DIGITS, "personal_layers=norm", "sparsity=0.5"))
